// The parameter of fwd_decode_e4m3 (TmaDecodeArgs): tensor maps of k and v of 8 bits.
#include <algorithm>
#include <bit>
#include <new>

#include "cuda/kernels/tma_decode_args.hpp"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/tensor_maps.hpp"

namespace fovea::cuda {
namespace {

void bind_decode(const LaunchInput<ForwardLayout>& launch, void* to) {
  static_assert(sizeof(TmaDecodeArgs) <= kMaxArgsBytes);
  const Kernel& kernel = launch.kernel;
  auto& all = *new (to) TmaDecodeArgs;
  all.f = launch.args;
  const tile::AttentionParams& p = all.f.p;
  all.box_keys = tma_box_keys(kernel.tile_n, p.page_table.data != nullptr ? p.cache_rows.value : 0);
  all.log2_boxes = std::countr_zero(static_cast<unsigned>(kernel.tile_n / all.box_keys));
  // Rows of one byte an element: shorter than 128 bytes at head size 64, and then in their own swizzle (tile::ByteStrips).
  const int strip = std::min(kernel.head_dim, kTmaRowBytes);
  const auto map = [&](const tile::RowsView& rows, int columns) {
    // Each strip is read once: pieces of 256 bytes would be asked for twice (tma_forward.cpp).
    return map_of_keys(rows, DType::kE4M3, p, columns, strip, all.box_keys, kernel.name,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  all.k = map(p.k, p.head_dim);
  all.v = map(p.v, p.head_dim_v);
}

}  // namespace

extern const ArgsBinding tma_decode_args;
const ArgsBinding tma_decode_args = {.forward = bind_decode};

}  // namespace fovea::cuda
