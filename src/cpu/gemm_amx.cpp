// The products on AMX tiles. The rest of the table is that of AVX512-BF16, but for the forward step of attend_amx.cpp and panels_amx.cpp.
#include "cpu/amx_tiles.hpp"
#include "cpu/ops.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <cstring>

namespace fovea::cpu {
namespace {

template <int C>
FOVEA_AMX inline void column_strip(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c,
                                   int64_t ldc, bool from_zero) {
  int64_t r = 0;
  for (; r + 2 * kTile <= rows; r += 2 * kTile) {
    tile_block<2, C>(a.data + r * a.row_stride, a.row_stride, b, ldb, k, c + r * ldc, ldc, from_zero);
  }
  if (r < rows)
    tile_block<1, C>(a.data + r * a.row_stride, a.row_stride, b, ldb, k, c + r * ldc, ldc, from_zero);
}

FOVEA_AMX void product(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k,
                       float* c, int64_t ldc, bool from_zero) {
  _tile_loadconfig(&kTileConfig);
  int64_t col = 0;
  for (; col + 3 * kTile <= cols; col += 3 * kTile)
    column_strip<3>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  if (cols - col == 2 * kTile) column_strip<2>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  if (cols - col == kTile) column_strip<1>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  _tile_release();
}

// Ends of lanes are not looked at: the forward's diagonal is that of attend_amx.cpp, and few tiles of the backward's could be left out.

FOVEA_AMX void scores(Operand a, const float* b, int64_t rows, int64_t k, float* c, float* column_max,
                      const LaneEnds* /*ends*/) {
  product(a, b, kPanel, rows, kPanel, k, c, kPanel, true);
  if (column_max != nullptr) avx512_bf16_ops()->column_max(c, rows, column_max);
}

FOVEA_AMX void accumulate(Operand a, const float* b, int64_t rows, int64_t k, float* c, const float* alpha,
                          const LaneEnds* /*ends*/) {
  if (alpha != nullptr) {
    __m512 factor[kPanel / 16];
    bool same = true;
    for (int v = 0; v < kPanel / 16; ++v) {
      factor[v] = _mm512_loadu_ps(alpha + 16 * v);
      same = same && _mm512_cmp_ps_mask(factor[v], _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0;
    }
    if (!same) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int v = 0; v < kPanel / 16; ++v) {
          float* at = c + r * kPanel + 16 * v;
          _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), factor[v]));
        }
      }
    }
  }
  product(a, b, kPanel, rows, kPanel, k, c, kPanel, false);
}

FOVEA_AMX void update(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k, float* c,
                      int64_t ldc) {
  // A reduction over a panel is 24 words, one and a half tiles. The half is read from a zero-padded copy.
  const int64_t whole = k / kTile * kTile;
  if (whole > 0) product(a, b, ldb, rows, cols, whole, c, ldc, false);
  if (whole == k) return;
  alignas(64) float left[2 * kTile][kTile];
  alignas(64) float right[kTile][3 * kTile];
  for (int64_t r = 0; r < rows; r += 2 * kTile) {
    const int64_t block = std::min(2 * kTile, rows - r);
    std::memset(left, 0, sizeof(left));
    for (int64_t i = 0; i < block; ++i) {
      std::memcpy(left[i], a.data + (r + i) * a.row_stride + whole, static_cast<size_t>(k - whole) * 4);
    }
    for (int64_t col = 0; col < cols; col += 3 * kTile) {
      const int64_t width = std::min(3 * kTile, cols - col);
      std::memset(right, 0, sizeof(right));
      for (int64_t w = whole; w < k; ++w) {
        std::memcpy(right[w - whole], b + w * ldb + col, static_cast<size_t>(width) * 4);
      }
      product({&left[0][0], kTile, 1}, &right[0][0], 3 * kTile, block, width, kTile, c + r * ldc + col, ldc,
              false);
    }
  }
}

Ops of_parts(const char* name, int parts) {
  Ops ops = *avx512_ops();
  ops.name = name;
  ops.max_panels = 8;  // as that of bfloat16
  ops.attend = attend_amx;
  ops.attend_parts = parts;
  ops.split_rows = split_rows_amx;
  ops.split_lanes = split_lanes_amx;
  ops.pair_columns = pair_columns_amx;
  return ops;
}

}  // namespace

const Ops* amx_f16_ops() {
  static const Ops kOps = of_parts("amx_f16", 2);
  return &kOps;
}
const Ops* amx_f32_ops() {
  static const Ops kOps = of_parts("amx_f32", 3);
  return &kOps;
}

const Ops* amx_bf16_ops() {
  static const Ops kOps = [] {
    Ops ops = *avx512_bf16_ops();
    ops.name = "amx_bf16";
    ops.row_multiple = kTile;
    ops.k_multiple = kTile;
    ops.max_panels =
        8;  // as many bytes of Q and O in bfloat16 and float32 as elsewhere, and 2 MB of second-level cache
    ops.scores = scores;
    ops.scores_and_term = nullptr;  // its products are tiles
    // Few rows of any type that tiles do not take; VDPBF16PS is slower than multiply-adds there.
    ops.few_rows = kTileQueries;
    ops.row_lanes = avx512_ops()->row_lanes;
    ops.row_dots = avx512_ops()->row_dots;
    ops.row_sums = avx512_ops()->row_sums;
    ops.accumulate = accumulate;
    ops.update = update;
    ops.attend = attend_amx;
    ops.pair_columns = pair_columns_amx;
    ops.stage_lanes = stage_lanes_amx;
    ops.key_columns = key_columns_amx;
    ops.value_pairs = value_pairs_amx;
    ops.write_lanes = write_lanes_amx;
    ops.write_rows = write_rows_amx;
    ops.tile_start = tile_start_amx;
    ops.tile_stop = tile_stop_amx;
    ops.tile_awake = tile_awake_amx;
    ops.tile_queries = tile_queries_amx;
    ops.tile_dots = tile_dots_amx;
    ops.tile_scores = tile_scores_amx;
    ops.tile_weigh = tile_weigh_amx;
    ops.tile_weights = tile_weights_amx;
    ops.tile_sums = tile_sums_amx;
    ops.tile_columns = tile_columns_amx;
    ops.tile_second_row = tile_second_row_amx;
    return ops;
  }();
  return &kOps;
}

}  // namespace fovea::cpu

#elif defined(__x86_64__)

namespace fovea::cpu {
const Ops* amx_bf16_ops() {
  return nullptr;
}
const Ops* amx_f16_ops() {
  return nullptr;
}
const Ops* amx_f32_ops() {
  return nullptr;
}
}  // namespace fovea::cpu

#endif
