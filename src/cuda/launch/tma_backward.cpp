// The parameter of backward kernels that copy by TMA (TmaBackwardArgs): tensor maps of q, k, v and d_o.
#include <new>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/tensor_maps.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {
namespace {

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
  all.q = map_of_queries(q, dtype, p, columns, 1, kTmaColumns, kernel.tile_m, kernel.name);
  all.d_o = map_of_queries(d_o, dtype, p, columns_v, 1, kTmaColumns, kernel.tile_m, kernel.name);
  all.k = map_of_keys(k, dtype, p, columns, kTmaColumns, kernel.tile_n, kernel.name);
  all.v = map_of_keys(v, dtype, p, columns_v, kTmaColumns, kernel.tile_n, kernel.name);
  all.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * tile::kLog2e;
  if (p.softcap > 0) all.cap_scale = p.scale / p.softcap;
}

}  // namespace

extern const ArgsBinding tma_backward_args;
const ArgsBinding tma_backward_args = {.backward = bind_backward};

}  // namespace fovea::cuda
