// Arguments of kernels that copy by TMA: the problem, and its tensors as TMA finds them.
#pragma once

#include <cuda.h>

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

/// The first keys of each sequence, where they lie in tensors of their own and arrive while the kernel runs
/// (core/arriving_keys.hpp). k and v of `f.p` begin so many rows before those that lie there, of which nothing is read.
struct ArrivingKeysView {
  CUtensorMap k, v;               ///< as those of the others
  tile::RowsView k_rows, v_rows;  ///< their rows
  const uint32_t* words = nullptr;
  uint32_t number = 0;
  int heads = 1;        ///< key heads of a word
  int keys = 0;         ///< 0: none arrive
  int keys_a_part = 1;  ///< of a word
  int key_parts = 1;
};

/// Boxes are 64 columns wide, of 8 bits 128, so that their rows fill the 128-byte swizzle. There is no map of v of 8 bits, which
/// lies transposed in memory.
///   q      (D, group, rows, heads, batch): with pack_group the heads of a group are a dimension of their
///          own, and `heads` those of k, so that a box of kTmaRowsQ rows holds those of a packed tile; else
///          group is 1.
///   k, v   (D or Dv, rows, heads_kv, batch), boxes of `box_keys` rows: the kernel's tile_n, or where some keys arrive a divisor of it
///          and of their number, or where keys lie in pages one of it and of the page, and then (D or Dv, rows of a page, heads_kv,
///          pages).
/// Packed sequences: batch is 1, rows are all rows. bf16x3: the copies, kBf16x3Parts * bf16x3_columns wide.
struct TmaForwardArgs {
  ForwardArgs f;
  CUtensorMap q, k, v;
  CUtensorMap qv;  ///< as q with the columns of v, where queries meet values
  ArrivingKeysView arriving;
  /// Strips of columns of q and of k that stand before those of qv and of v in the products of a score; with no qv more than there are.
  int key_strips = 0;
  int box_keys = 0;
  /// Where values stand in keys (fwd_sm90_latent): the first column of q and of k that is none of values. Strips before it are taken from
  /// qv and v.
  int key_column = 0;
  /// What takes scores to exponents of 2: scale * log2(e); softcap * log2(e) of what tanh gives; log2(e) of an expression's
  /// scores. From here it is an operand of each instruction that needs it, and takes no register.
  float scale_log2 = 0;
  bool o_in_vectors = false;  ///< o, not parts of it, may be written in vectors of up to 16 bytes
  float cap_scale_log2 =
      0;  ///< with a softcap: 2 log2(e) scale / softcap, which takes products to what tanh is of
};

/// The backward (bwd_sm90): boxes of q and d_o have the kernel's tile_m rows of one head, those of k and v its tile_n.
struct TmaBackwardArgs {
  BackwardArgs b;
  CUtensorMap q, k, v, d_o;
  float scale_log2 = 0;      ///< scale * log2(e); with a softcap softcap * log2(e)
  float cap_scale_log2 = 0;  ///< with a softcap: 2 log2(e) scale / softcap
  CUtensorMap
      dbias;  ///< with b.adds_dbias: (seqlen_k, seqlen_q, heads or 1, batch or 1), boxes of 64 keys and tile_m queries
};

}  // namespace fovea::cuda
