// Tensor maps: tensors as TMA copies them (cuTensorMapEncodeTiled).
#pragma once

#include <cuda.h>

#include <span>

#include "core/dtype.hpp"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// One dimension of a tensor and of the box that one instruction copies, in elements. The first dimension has stride 1.
struct TmaDimension {
  int64_t size, stride;
  int box;
};

/// The copy of a tensor as bf16x3: rows of `columns` elements, heads side by side. Its element type is kBF16.
tile::RowsView bf16x3_rows(char* data, int64_t heads, int64_t length, int columns);

/// A map of up to five dimensions, the innermost first. Boxes lie in shared memory in the swizzle of their rows, which have 128, 64 or 32
/// bytes; what is outside of the tensor reads as zeros. The second-level cache asks memory for pieces of `promotion`. Throws RequestError(kCudaError) in the name of `kernel` where the driver refuses.
CUtensorMap tensor_map(const void* data, DType dtype, std::span<const TmaDimension> dimensions,
                       const char* kernel,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

/// Rows of queries (q, o, d_o, dq), in boxes of `box_columns` x `box_rows`:
///   (columns, group, rows, heads / group, batch)
/// With `group` > 1 the heads of a group are a dimension of their own, so that a box holds rows of a packed tile.
/// Packed sequences: batch is 1, rows are all rows.
CUtensorMap map_of_queries(const tile::RowsView& rows, DType dtype, const tile::AttentionParams& p,
                           int columns, int group, int box_columns, int box_rows, const char* kernel);
/// Rows of keys (k, v, dk, dv): (columns, rows, heads_kv, batch), likewise.
CUtensorMap map_of_keys(const tile::RowsView& rows, DType dtype, const tile::AttentionParams& p, int columns,
                        int box_columns, int box_rows, const char* kernel,
                        CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

}  // namespace fovea::cuda
