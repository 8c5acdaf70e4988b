#include "cuda/launch/tensor_maps.hpp"

#include <algorithm>
#include <array>

#include "cuda/launch/driver.hpp"
#include "cuda/launch/params.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {
namespace {

constexpr int64_t kElementBytes = 2;

struct Dimension {
  int64_t size, stride;  ///< in elements; the stride of the first is 1
  int box;
};

/// Strides that nobody steps along may be anything, but the driver looks at them.
cuuint64_t stride_bytes(const Dimension& d) {
  return d.size > 1 ? static_cast<cuuint64_t>(d.stride * kElementBytes) : 16;
}

template <size_t kRank>
CUtensorMap encode(const char* data, DType dtype, const std::array<Dimension, kRank>& dimensions,
                   const char* kernel) {
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kRank - 1> strides;
  std::array<cuuint32_t, kRank> box, steps;
  for (size_t i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(dimensions[i].size);
    if (i > 0) strides[i - 1] = stride_bytes(dimensions[i]);
    box[i] = static_cast<cuuint32_t>(dimensions[i].box);
    steps[i] = 1;
  }
  CUtensorMap map;
  const CUresult error = driver().tensor_map_encode_tiled(
      &map, dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      static_cast<cuuint32_t>(kRank), const_cast<char*>(data), sizes.data(), strides.data(), box.data(),
      steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) throw_cuda(std::string(kernel) + " (cuTensorMapEncodeTiled)", error);
  return map;
}

/// Rows of queries, whole heads or the heads of a group side by side.
CUtensorMap encode_rows(const tile::RowsView& rows, int columns, const ForwardArgs& args, int box_rows,
                        DType dtype, const char* kernel) {
  const tile::AttentionParams& p = args.p;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int group = args.pack_group ? p.group : 1, in_box = std::min(group, box_rows);
  return encode<5>(rows.data, dtype,
                   {{{columns, 1, kTmaColumns},
                     {group, rows.head, in_box},
                     {packed ? p.total_q : p.seqlen_q, rows.row, box_rows / in_box},
                     {p.heads_q / group, rows.head * group, 1},
                     {packed ? 1 : p.batch, rows.batch, 1}}},
                   kernel);
}
CUtensorMap encode_keys(const tile::RowsView& rows, int columns, const tile::AttentionParams& p, int box_rows,
                        DType dtype, const char* kernel) {
  const bool packed = p.cu_seqlens_k != nullptr;
  return encode<4>(rows.data, dtype,
                   {{{columns, 1, kTmaColumns},
                     {packed ? p.total_k : p.seqlen_k, rows.row, box_rows},
                     {p.heads_kv, rows.head, 1},
                     {packed ? 1 : p.batch, rows.batch, 1}}},
                   kernel);
}

}  // namespace

TmaForwardArgs with_tensor_maps(const ForwardArgs& args, DType dtype, int tile_n, const char* kernel) {
  const tile::AttentionParams& p = args.p;
  TmaForwardArgs all;
  all.f = args;
  tile::RowsView q = p.q, k = p.k, v = p.v;
  int columns = p.head_dim, columns_v = p.head_dim_v;
  if (args.split_columns > 0) {  // compact copies, the parts of a row side by side
    columns = columns_v = 3 * args.split_columns;
    dtype = DType::kBF16;
    const auto view = [&](char* data, int64_t heads, int64_t length) {
      return tile::RowsView{data, length * heads * columns, heads * columns, columns};
    };
    q = view(args.split_q, p.heads_q, p.seqlen_q);
    k = view(args.split_k, p.heads_kv, p.seqlen_k);
    v = view(args.split_v, p.heads_kv, p.seqlen_k);
  }
  all.q = encode_rows(q, columns, args, kTmaRowsQ, dtype, kernel);
  all.k = encode_keys(k, columns, p, tile_n, dtype, kernel);
  all.v = encode_keys(v, columns_v, p, tile_n, dtype, kernel);
  all.o_in_vectors = args.num_splits == 1 && !p.o_is_f32 && (p.aligned16 & tile::kAlignedO) != 0;
  all.scale_log2 = p.softcap > 0 ? tile::kLog2e : p.scale * tile::kLog2e;
  return all;
}

}  // namespace fovea::cuda
