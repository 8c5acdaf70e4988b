// The parameter of backward kernels that copy by TMA (TmaBackwardArgs): tensor maps of q, k, v and d_o.
#include <array>
#include <new>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/dbias_shape.hpp"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/tensor_maps.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {
namespace {

/// The gradient of a bias that kernels add dS to, before the first of them.
void clear_dbias(const LaunchInput<BackwardLayout>& launch, const DBiasShape& shape) {
  const size_t bytes =
      static_cast<size_t>(shape.elements()) * static_cast<size_t>(size_of(launch.kernel.dtype));
  set_words(launch.args.p.dbias.data, 0, bytes / 4, launch.stream);  // rows are multiples of 16 bytes
}

/// The gradient of a bias that the main kernel adds dS to: its map, and zeros.
void bind_dbias(const LaunchInput<BackwardLayout>& launch, CUtensorMap& map) {
  const Kernel& kernel = launch.kernel;
  const tile::AttentionParams& p = launch.args.p;
  const DBiasShape shape(p, kernel.tile_m, kernel.tile_n);
  map = tensor_map(p.dbias.data, kernel.dtype,
                   std::array<TmaDimension, 4>{{{shape.seqlen_k, 1, kTmaColumns},
                                                {shape.seqlen_q, p.dbias.row, kernel.tile_m},
                                                {shape.heads, p.dbias.head, 1},
                                                {shape.batch, p.dbias.batch, 1}}},
                   kernel.name);
  clear_dbias(launch, shape);
}

void bind_backward(const LaunchInput<BackwardLayout>& launch, void* to) {
  static_assert(sizeof(TmaBackwardArgs) <= kMaxArgsBytes);
  const tile::AttentionParams& p = launch.args.p;
  const Kernel& kernel = launch.kernel;
  auto& all = *new (to) TmaBackwardArgs;
  all.b = launch.args;
  DType dtype = kernel.dtype;
  tile::RowsView q = p.q, k = p.k, v = p.v, d_o = p.d_o;
  int columns = p.head_dim, columns_v = p.head_dim_v;
  if (all.b.bf16x3_columns > 0) {  // compact copies, the parts of a row side by side
    columns = columns_v = kBf16x3Parts * all.b.bf16x3_columns;
    dtype = DType::kBF16;
    q = bf16x3_rows(all.b.bf16x3_q, p.heads_q, p.seqlen_q, columns);
    d_o = bf16x3_rows(all.b.bf16x3_do, p.heads_q, p.seqlen_q, columns);
    k = bf16x3_rows(all.b.bf16x3_k, p.heads_kv, p.seqlen_k, columns);
    v = bf16x3_rows(all.b.bf16x3_v, p.heads_kv, p.seqlen_k, columns);
  }
  all.q = map_of_queries(q, dtype, p, columns, 1, kernel.box_columns, kernel.tile_m, kernel.name);
  all.d_o = map_of_queries(d_o, dtype, p, columns_v, 1, kernel.box_columns, kernel.tile_m, kernel.name);
  all.k = map_of_keys(k, dtype, p, columns, kernel.box_columns_k, kernel.tile_n, kernel.name);
  all.v = map_of_keys(v, dtype, p, columns_v, kernel.box_columns, kernel.tile_n, kernel.name);
  all.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * tile::kLog2e;
  if (p.softcap > 0) all.cap_scale_log2 = 2 * tile::kLog2e * p.scale / p.softcap;
  if (all.b.adds_dbias) bind_dbias(launch, all.dbias);
}

/// As map_of_keys, of queries: multicasts take no fifth dimension.
CUtensorMap wide_map_of_queries(const tile::RowsView& rows, const Kernel& kernel,
                                const tile::AttentionParams& p, int columns) {
  const bool packed = p.cu_seqlens_q != nullptr;
  return tensor_map(rows.data, kernel.dtype,
                    std::array<TmaDimension, 4>{{{columns, 1, kTmaColumns},
                                                 {packed ? p.total_q : p.seqlen_q, rows.row, kernel.tile_m},
                                                 {p.heads_q, rows.head, 1},
                                                 {packed ? 1 : p.batch, rows.batch, 1}}},
                    kernel.name);
}

void bind_wide_backward(const LaunchInput<BackwardLayout>& launch, void* to) {
  const tile::AttentionParams& p = launch.args.p;
  const Kernel& kernel = launch.kernel;
  auto& all = *new (to) TmaBackwardArgs;
  all.b = launch.args;
  all.q = wide_map_of_queries(p.q, kernel, p, p.head_dim);
  all.d_o = wide_map_of_queries(p.d_o, kernel, p, p.head_dim_v);
  all.k = map_of_keys(p.k, kernel.dtype, p, p.head_dim, kTmaColumns, kernel.tile_n, kernel.name);
  all.v = map_of_keys(p.v, kernel.dtype, p, p.head_dim_v, kTmaColumns, kernel.tile_n, kernel.name);
  all.scale_log2 = p.scale * tile::kLog2e;
  if (kernel.adds_dbias && all.b.adds_dbias) clear_dbias(launch, DBiasShape(p, kernel.tile_m, kernel.tile_n));
}

}  // namespace

extern const ArgsBinding tma_backward_args;
const ArgsBinding tma_backward_args = {.backward = bind_backward};
extern const ArgsBinding tma_wide_backward_args;
const ArgsBinding tma_wide_backward_args = {.backward = bind_wide_backward};

}  // namespace fovea::cuda
