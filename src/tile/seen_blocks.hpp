// Which blocks of a tile hold a pair that an expression lets see each other, and which of them need it asked pair by pair: two
// bits for each block, 32 blocks a word, which a launch before the main kernel's fills in (kernels/seen_blocks.cuh).
#pragma once

#include <cstdint>

namespace fovea::tile {

/// The position of the highest bit that is set; x is not 0.
constexpr int highest_bit(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(x));
#else
  return 31 - __builtin_clz(x);
#endif
}
constexpr int lowest_bit(uint32_t x) {
  return highest_bit(x & (0u - x));
}

/// The blocks of one tile. Null pointers: all blocks, pair by pair.
struct SeenBlocks {
  const uint32_t* any = nullptr;   ///< blocks with a pair that is seen
  const uint32_t* some = nullptr;  ///< blocks with a pair that is not

  /// The last block before `n` with a pair that is seen, from `begin` on; begin - 1 where there is none.
  constexpr int before(int n, int begin) const {
    if (any == nullptr) return n - 1;
    while (n > begin) {
      const int word = (n - 1) / 32, inside = n - 32 * word;  // 1 to 32 bits of it lie before n
      const uint32_t bits = any[word] & ~uint32_t{0} >> (32 - inside);
      n = bits != 0 ? 32 * word + highest_bit(bits) : 32 * word;
      if (bits != 0) return n < begin ? begin - 1 : n;
    }
    return begin - 1;
  }
  /// The first block from `n` on with a pair that is seen, before `end`; `end` where there is none.
  constexpr int from(int n, int end) const {
    if (any == nullptr) return n < end ? n : end;
    while (n < end) {
      const int word = n / 32;
      const uint32_t bits = any[word] >> (n % 32) << (n % 32);
      n = bits != 0 ? 32 * word + lowest_bit(bits) : 32 * (word + 1);
      if (bits != 0) break;
    }
    return n < end ? n : end;
  }
  /// How many of [begin, end) have a pair that is seen.
  constexpr int count(int begin, int end) const {
    if (any == nullptr) return begin < end ? end - begin : 0;
    int count = 0;
    for (int n = from(begin, end); n < end; n = from(n + 1, end)) ++count;
    return count;
  }
  constexpr bool is_partial(int n) const { return some == nullptr || (some[n / 32] >> (n % 32) & 1) != 0; }
};

/// Those of all tiles of a problem: (batch, heads or 1, tiles, words), `any` and behind them `some`.
struct SeenBlocksView {
  uint32_t* data = nullptr;  ///< null: nobody looks
  int heads = 1, tiles = 0, words = 0;
  int tile_rows = 0, block_rows = 0;  ///< of a tile, and of the blocks that it walks over

  constexpr int64_t size(int batch) const { return int64_t{batch} * heads * tiles * words; }
  constexpr int64_t offset(int b, int h, int tile) const {
    return ((int64_t{b} * heads + (heads == 1 ? 0 : h)) * tiles + tile) * words;
  }
  constexpr SeenBlocks at(int batch, int b, int h, int tile) const {
    if (data == nullptr) return {};
    const uint32_t* any = data + offset(b, h, tile);
    return {any, any + size(batch)};
  }
};

}  // namespace fovea::tile
