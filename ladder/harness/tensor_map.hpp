// What TMA is told of a matrix.
#pragma once

#include <cuda.h>

namespace ladder {

/// `batch` sequences of `rows` rows of `columns` elements of bfloat16, taken in boxes of `box_rows` rows of
/// one sequence by 64 columns, each row of a box swizzled by its number modulo 8 (hopper.cuh). Rows that a
/// sequence does not have are read as 0, and not written. Throws std::runtime_error when the driver refuses.
CUtensorMap tensor_map(const void* data, int batch, int rows, int columns, int box_rows);

}  // namespace ladder
