// AMX tiles (AMX-BF16, Intel Sapphire Rapids and later): the configuration, and one block of a product.
//
//   C[16][16] float32 += A[16][32] B[32][16] bfloat16
//
// B lies in pairs of rows, the layout that the pair operands already have.
#pragma once

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

// The instruction sets of every function that touches tiles: those of the processors that have them.
#define FOVEA_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")))

namespace fovea::cpu {

inline constexpr int64_t kTile = 16;  // rows of a tile; words (4 bytes) of a row

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

/// All eight tiles have 16 rows of 64 bytes. The configuration is a constant in memory because the intrinsic
/// declares 8 bytes of input only: the compiler may drop stores to the rest of a local one.
inline constexpr TileConfig kTileConfig = [] {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = kTile;
  }
  return config;
}();

/// C[R * 16][C * 16] over k words (a multiple of 16); the accumulators start from zero or from c. Tile numbers
/// must be literals, hence the macros.
///
/// Tiles: 0-5 accumulators (2 row blocks x 3 column blocks = one panel), 6 left operand, 7 right operand. A step of 32
/// elements runs 6 products (16 cycles each) on 7 loads (8 cycles each): the products are the limit.
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

}  // namespace fovea::cpu

#endif
