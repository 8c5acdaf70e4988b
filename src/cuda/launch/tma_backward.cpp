// The parameter of backward kernels that copy by TMA (TmaBackwardArgs): tensor maps of q, k, v and d_o.
#include <new>

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
  all.q = map_of_queries(p.q, kernel.dtype, p, p.head_dim, 1, kTmaColumns, kernel.tile_m, kernel.name);
  all.d_o = map_of_queries(p.d_o, kernel.dtype, p, p.head_dim_v, 1, kTmaColumns, kernel.tile_m, kernel.name);
  all.k = map_of_keys(p.k, kernel.dtype, p, p.head_dim, kTmaColumns, kernel.tile_n, kernel.name);
  all.v = map_of_keys(p.v, kernel.dtype, p, p.head_dim_v, kTmaColumns, kernel.tile_n, kernel.name);
  all.scale_log2 = (p.softcap > 0 ? p.softcap : p.scale) * tile::kLog2e;
  if (p.softcap > 0) all.cap_scale = p.scale / p.softcap;
}

}  // namespace

extern const ArgsBinding tma_backward_args;
const ArgsBinding tma_backward_args = {.backward = bind_backward};

}  // namespace fovea::cuda
