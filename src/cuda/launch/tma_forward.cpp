// The parameter of forward kernels that copy by TMA (TmaForwardArgs): tensor maps of q, k and v.
#include <array>
#include <limits>
#include <new>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/tensor_maps.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {
namespace {

/// All but the maps.
void set_arriving(ArrivingKeysView& view, const ArrivingKeys& given) {
  const auto rows = [](const void* data, const std::array<int64_t, 3>& stride) {
    return tile::RowsView{static_cast<char*>(const_cast<void*>(data)), stride[0], stride[1], stride[2]};
  };
  view.k_rows = rows(given.k, given.k_stride);
  view.v_rows = rows(given.v, given.v_stride);
  view.words = given.words;
  view.number = given.number;
}

void bind_forward(const LaunchInput<ForwardLayout>& launch, void* to) {
  static_assert(sizeof(TmaForwardArgs) <= kMaxArgsBytes);
  const ForwardArgs& args = launch.args;
  const char* kernel = launch.kernel.name;
  auto& all = *new (to) TmaForwardArgs;
  all.f = args;
  const int arriving = static_cast<int>(launch.layout.arriving_keys);
  if (arriving > 0) {
    for (tile::RowsView* rows : {&all.f.p.k, &all.f.p.v})
      rows->data -= arriving * rows->row * static_cast<int64_t>(size_of(launch.kernel.dtype));
  }
  const tile::AttentionParams& p = all.f.p;
  DType dtype = launch.kernel.dtype;
  tile::RowsView q = p.q, k = p.k, v = p.v;
  int columns = p.head_dim, columns_v = p.head_dim_v;
  if (args.bf16x3_columns > 0) {  // compact copies, the parts of a row side by side
    columns = columns_v = kBf16x3Parts * args.bf16x3_columns;
    dtype = DType::kBF16;
    q = bf16x3_rows(args.bf16x3_q, p.heads_q, p.seqlen_q, columns);
    k = bf16x3_rows(args.bf16x3_k, p.heads_kv, p.seqlen_k, columns);
    v = bf16x3_rows(args.bf16x3_v, p.heads_kv, p.seqlen_k, columns);
  }
  if (launch.kernel.e4m3_operands) dtype = DType::kE4M3;
  const int strip = kTmaRowBytes / static_cast<int>(size_of(dtype));
  const int group = args.pack_group ? p.group : 1;
  all.box_keys =
      tma_box_keys(launch.kernel.tile_n, p.page_table.data != nullptr ? p.cache_rows.value : arriving);
  all.q = map_of_queries(q, dtype, p, columns, group, strip, kTmaRowsQ, kernel);
  all.key_strips = std::numeric_limits<int>::max();
  if (p.qv.data != nullptr) {
    all.qv = map_of_queries(p.qv, dtype, p, columns_v, group, strip, kTmaRowsQ, kernel);
    all.key_strips = (columns + strip - 1) / strip;
  }
  if (launch.kernel.values_in_keys && p.qv.data == nullptr) {  // strips of values come from the same rows
    all.qv = all.q;
    all.key_column = p.head_dim_v;
  }
  // Keys that one tile reads, once: strips of 128 bytes. With pieces of 256 bytes the other strip is asked for twice,
  // and memory gives 4.1 TB/s in place of 4.6 (one query, 64 sequences of 8,192 keys, 8 heads of 128, H200).
  const bool once = int64_t{p.seqlen_q} * group <= launch.kernel.tile_m;
  const CUtensorMapL2promotion promotion =
      once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  all.k = map_of_keys(k, dtype, p, columns, strip, all.box_keys, kernel, promotion);
  if (!launch.kernel.e4m3_operands)
    all.v = map_of_keys(v, dtype, p, columns_v, strip, all.box_keys, kernel, promotion);
  all.arriving.keys = arriving;
  if (arriving > 0) {
    set_arriving(all.arriving, launch.arriving);
    all.arriving.heads = static_cast<int>(launch.layout.arriving_heads);
    all.arriving.key_parts = arriving_key_parts(arriving);
    all.arriving.keys_a_part = arriving / all.arriving.key_parts;
    tile::AttentionParams of_these = p;
    of_these.seqlen_k = arriving;
    const auto map = [&](const tile::RowsView& rows, int of_columns) {
      return map_of_keys(rows, dtype, of_these, of_columns, strip, all.box_keys, kernel, promotion);
    };
    all.arriving.k = map(all.arriving.k_rows, columns);
    all.arriving.v = map(all.arriving.v_rows, columns_v);
  }
  all.o_in_vectors = (args.num_splits == 1 || args.part_rows > 0) && (p.aligned16 & tile::kAlignedO) != 0;
  all.scale_log2 = (p.expression.has_score ? 1 : p.softcap > 0 ? p.softcap : p.scale) * tile::kLog2e;
  if (p.softcap > 0) all.cap_scale_log2 = 2 * tile::kLog2e * p.scale / p.softcap;
}

}  // namespace

extern const ArgsBinding tma_forward_args;
const ArgsBinding tma_forward_args = {.forward = bind_forward};

}  // namespace fovea::cuda
