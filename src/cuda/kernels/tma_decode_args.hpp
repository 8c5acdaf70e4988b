// Arguments of fwd_decode_e4m3: the problem, and keys and values of 8 bits as TMA finds them.
#pragma once

#include <cuda.h>

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

/// Maps: (D or Dv, rows, heads_kv, batch), or where keys lie in pages (D or Dv, rows of a page, heads_kv, pages); packed sequences: batch
/// is 1, rows are all rows. Boxes are as wide as a strip of the kernel's stages (tile::ByteStrips).
struct TmaDecodeArgs {
  ForwardArgs f;
  CUtensorMap k, v;
  int box_keys = 0;    ///< rows of a box: a block's, or with pages a divisor of it and of the page
  int log2_boxes = 0;  ///< of a block
};

}  // namespace fovea::cuda
