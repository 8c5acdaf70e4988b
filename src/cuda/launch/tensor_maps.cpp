// Encodes tensor maps through the driver.
#include "cuda/launch/tensor_maps.hpp"

#include <algorithm>
#include <array>

#include "cuda/launch/driver.hpp"
#include "tile/swizzle.hpp"

namespace fovea::cuda {
namespace {

constexpr size_t kMaxDimensions = 5;  // of a tensor map

CUtensorMapDataType element_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF64:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::kI64:
      return CU_TENSOR_MAP_DATA_TYPE_INT64;
    case DType::kI32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::kU8:
    case DType::kE4M3:  // bytes, to TMA
    case DType::kBool:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

CUtensorMapSwizzle swizzle_of(int64_t row_bytes) {
  switch (tile::swizzle_of_rows(static_cast<int>(row_bytes))) {
    case tile::SwizzleMode::k128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case tile::SwizzleMode::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case tile::SwizzleMode::k32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case tile::SwizzleMode::kNone:
      break;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

CUtensorMap tensor_map(const void* data, DType dtype, std::span<const TmaDimension> dimensions,
                       const char* kernel, CUtensorMapL2promotion promotion) {
  std::array<cuuint64_t, kMaxDimensions> sizes{};
  std::array<cuuint64_t, kMaxDimensions> strides{};  // without the first, which is 1
  std::array<cuuint32_t, kMaxDimensions> box{}, steps{};
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const TmaDimension& d = dimensions[i];
    sizes[i] = static_cast<cuuint64_t>(d.size);
    box[i] = static_cast<cuuint32_t>(d.box);
    steps[i] = 1;
    // Strides that nobody steps along may be anything, but the driver looks at them.
    if (i > 0) strides[i - 1] = d.size > 1 ? static_cast<cuuint64_t>(d.stride * size_of(dtype)) : 16;
  }
  CUtensorMap map;
  const CUresult error = driver().tensor_map_encode_tiled(
      &map, element_type(dtype), static_cast<cuuint32_t>(dimensions.size()), const_cast<void*>(data),
      sizes.data(), strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_of(dimensions[0].box * size_of(dtype)), promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) throw_cuda(std::string(kernel) + " (cuTensorMapEncodeTiled)", error);
  return map;
}

tile::RowsView bf16x3_rows(char* data, int64_t heads, int64_t length, int columns) {
  return {data, length * heads * columns, heads * columns, columns};
}

CUtensorMap map_of_queries(const tile::RowsView& rows, DType dtype, const tile::AttentionParams& p,
                           int columns, int group, int box_columns, int box_rows, const char* kernel) {
  const bool packed = p.cu_seqlens_q != nullptr;
  const int in_box = std::min(group, box_rows);
  return tensor_map(
      rows.data, dtype,
      std::array<TmaDimension, 5>{{{columns, 1, box_columns},
                                   {group, rows.head, in_box},
                                   {packed ? p.total_q : p.seqlen_q, rows.row, box_rows / in_box},
                                   {p.heads_q / group, rows.head * group, 1},
                                   {packed ? 1 : p.batch, rows.batch, 1}}},
      kernel);
}

CUtensorMap map_of_keys(const tile::RowsView& rows, DType dtype, const tile::AttentionParams& p, int columns,
                        int box_columns, int box_rows, const char* kernel, CUtensorMapL2promotion promotion) {
  const bool packed = p.cu_seqlens_k != nullptr, paged = p.page_table.data != nullptr;
  const int64_t length = packed ? p.total_k : (paged ? p.cache_rows.value : p.seqlen_k);
  const int64_t sequences = packed ? 1 : (paged || p.cache_batch != nullptr ? p.caches : p.batch);
  return tensor_map(rows.data, dtype,
                    std::array<TmaDimension, 4>{{{columns, 1, box_columns},
                                                 {length, rows.row, box_rows},
                                                 {p.heads_kv, rows.head, 1},
                                                 {sequences, rows.batch, 1}}},
                    kernel, promotion);
}

}  // namespace fovea::cuda
