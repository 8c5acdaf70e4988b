// Descriptions of matrices for TMA.
#pragma once

#include <cuda.h>

namespace ladder {

/// `batch` sequences of `rows` rows of `columns` elements of bfloat16, taken in boxes of `box_rows` rows of
/// one sequence by 64 columns, each row of a box swizzled by its number modulo 8 (hopper.cuh). Rows behind
/// the end of a sequence are read as 0, and not written. Throws std::runtime_error when the driver refuses.
CUtensorMap tensor_map(const void* data, int batch, int rows, int columns, int box_rows);

}  // namespace ladder
