// The products on AMX tiles (AMX-BF16, Intel Sapphire Rapids and later):
//
//   C[16][16] float32 += A[16][32] B[32][16] bfloat16
//
// B lies in pairs of rows, the layout that the pair operands already have. The rest of the table is that of
// AVX512-BF16.
//
// Tiles: 0-5 accumulators (2 row blocks x 3 column blocks = one panel), 6 left operand, 7 right operand. A step of 32
// elements runs 6 products (16 cycles each) on 7 loads (8 cycles each): the products are the limit.
#include "cpu/ops.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define FOVEA_AMX __attribute__((target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")))

namespace fovea::cpu {
namespace {

constexpr int64_t kTile = 16;  // rows of a tile; words (4 bytes) of a row

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

/// All eight tiles have 16 rows of 64 bytes. The configuration is a constant in memory because the intrinsic
/// declares 8 bytes of input only: the compiler may drop stores to the rest of a local one.
constexpr TileConfig kConfig = [] {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = kTile;
  }
  return config;
}();

/// C[R * 16][C * 16] over k words (a multiple of 16); the accumulators start from zero or from c. Tile numbers
/// must be literals, hence the macros.
template <int R, int C>
FOVEA_AMX inline void tile_block(const float* a, int64_t a_stride, const float* b, int64_t ldb, int64_t k,
                                 float* c, int64_t ldc, bool from_zero) {
  const auto c_bytes = static_cast<size_t>(ldc * 4), a_bytes = static_cast<size_t>(a_stride * 4),
             b_bytes = static_cast<size_t>(ldb * 4);
#define FOVEA_START(t, r, x)                                    \
  if constexpr ((r) < R && (x) < C) {                           \
    if (from_zero) {                                            \
      _tile_zero(t);                                            \
    } else {                                                    \
      _tile_loadd(t, c + (r)*kTile * ldc + (x)*kTile, c_bytes); \
    }                                                           \
  }
  FOVEA_START(0, 0, 0);
  FOVEA_START(1, 0, 1);
  FOVEA_START(2, 0, 2);
  FOVEA_START(3, 1, 0);
  FOVEA_START(4, 1, 1);
  FOVEA_START(5, 1, 2);
#undef FOVEA_START
  for (int64_t w = 0; w < k; w += kTile) {
    const float* right = b + w * ldb;
    _tile_loadd(6, a + w, a_bytes);
    _tile_loadd(7, right, b_bytes);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (C > 1) {
      _tile_loadd(7, right + kTile, b_bytes);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (C > 2) {
      _tile_loadd(7, right + 2 * kTile, b_bytes);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (R > 1) {
      // Goes back through the columns: the last right operand is still loaded.
      _tile_loadd(6, a + kTile * a_stride + w, a_bytes);
      if constexpr (C > 2) {
        _tile_dpbf16ps(5, 6, 7);
        _tile_loadd(7, right + kTile, b_bytes);
      }
      if constexpr (C > 1) {
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(7, right, b_bytes);
      }
      _tile_dpbf16ps(3, 6, 7);
    }
  }
#define FOVEA_STORE(t, r, x) \
  if constexpr ((r) < R && (x) < C) _tile_stored(t, c + (r)*kTile * ldc + (x)*kTile, c_bytes);
  FOVEA_STORE(0, 0, 0);
  FOVEA_STORE(1, 0, 1);
  FOVEA_STORE(2, 0, 2);
  FOVEA_STORE(3, 1, 0);
  FOVEA_STORE(4, 1, 1);
  FOVEA_STORE(5, 1, 2);
#undef FOVEA_STORE
}

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
  _tile_loadconfig(&kConfig);
  int64_t col = 0;
  for (; col + 3 * kTile <= cols; col += 3 * kTile)
    column_strip<3>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  if (cols - col == 2 * kTile) column_strip<2>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  if (cols - col == kTile) column_strip<1>(a, b + col, ldb, rows, k, c + col, ldc, from_zero);
  _tile_release();
}

FOVEA_AMX void scores(Operand a, const float* b, int64_t rows, int64_t k, float* c, float* column_max) {
  product(a, b, kPanel, rows, kPanel, k, c, kPanel, true);
  if (column_max != nullptr) avx512_bf16_ops()->column_max(c, rows, column_max);
}

FOVEA_AMX void accumulate(Operand a, const float* b, int64_t rows, int64_t k, float* c, const float* alpha) {
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

}  // namespace

const Ops* amx_bf16_ops() {
  static const Ops kOps = [] {
    Ops ops = *avx512_bf16_ops();
    ops.name = "amx_bf16";
    ops.row_multiple = kTile;
    ops.k_multiple = kTile;
    ops.values_by_row = true;
    ops.scores = scores;
    ops.accumulate = accumulate;
    ops.update = update;
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
}  // namespace fovea::cpu

#endif
