// Which blocks of a tile hold a pair that an expression lets see each other, and which of them hold one that it does not: two
// bits for each block, 32 blocks a word; and, where memory allows, a bit for each pair. A launch before the main kernel's fills
// them in (kernels/seen_blocks.cuh).
#pragma once

#include <bit>
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

constexpr int count_bits(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __popc(x);
#else
  return std::popcount(x);
#endif
}

/// The last block before `n` whose bit is set, from `begin` on; begin - 1 where there is none. word(i) gives the bits of blocks
/// from 32 i on.
template <class Word>
constexpr int block_before(int n, int begin, Word&& word) {
  while (n > begin) {
    const int at = (n - 1) / 32, inside = n - 32 * at;  // 1 to 32 bits of it lie before n
    const uint32_t bits = word(at) & ~uint32_t{0} >> (32 - inside);
    n = bits != 0 ? 32 * at + highest_bit(bits) : 32 * at;
    if (bits != 0) return n < begin ? begin - 1 : n;
  }
  return begin - 1;
}

/// What one of those that share blocks has to do with them, the last first.
struct OwnBlocks {
  int begin, end;     ///< from its first to its last one; begin == end: it has none
  int before, after;  ///< how many of all come before its last one, and after its first
};
/// Of blocks [begin, end): word(i) gives the bits of all, own(i) those of one. Each is asked for once, since it comes from memory.
template <class Word, class Own>
constexpr OwnBlocks own_blocks(int begin, int end, Word&& word, Own&& own) {
  int first = begin, last = begin - 1, before = 0, after = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int n = end; n > begin;) {
    const int at = (n - 1) / 32, base = 32 * at;
    const uint32_t from_begin = ~uint32_t{0} << (begin > base ? begin - base : 0),
                   in_range = from_begin & ~uint32_t{0} >> (32 - (n - base));
    const uint32_t of_own = own(at) & in_range;
    uint32_t others = word(at) & in_range;  // after its first one, as far as that is known
    if (of_own != 0) {
      if (last < begin) {
        last = base + highest_bit(of_own);
        before += count_bits(others >> (last - base)) - 1;
      }
      first = base + lowest_bit(of_own);
      others &= (uint32_t{1} << (first - base)) - 1;
      after = 0;
    }
    const int count = count_bits(others);
    before += last < begin ? count : 0;
    after += last < begin ? 0 : count;
    n = base;
  }
  return {first, last + 1, before, after};
}

/// The blocks of one tile. Null pointers: all blocks, pair by pair.
struct SeenBlocks {
  const uint32_t* any = nullptr;   ///< blocks with a pair that is seen
  const uint32_t* some = nullptr;  ///< blocks with a pair that is not

  /// The last block before `n` with a pair that is seen, from `begin` on; begin - 1 where there is none.
  constexpr int before(int n, int begin) const {
    if (any == nullptr) return n - 1;
    return block_before(n, begin, [&](int at) { return any[at]; });
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

/// Of a tile of queries: those of one warpgroup of a forward kernel.
inline constexpr int kSeenQueries = 64;

/// Those of all tiles of a problem: (batches, heads, tiles, words), `any` and behind them `some`.
struct SeenBlocksView {
  uint32_t* data = nullptr;  ///< null: nobody looks
  /// (batches, pair_heads, tiles, blocks, tile_rows / 16, pair_words, 32 lanes): of 16 rows and a block the words of
  /// warp/pair_bits.cuh. Null: who needs them asks the expression.
  uint32_t* pairs = nullptr;
  int batches = 1, heads = 1, pair_heads = 1;  ///< 1 where the expression is the same for all
  int tiles = 0, blocks = 0;                   ///< blocks: that a tile walks over
  int tile_rows = 0, block_rows = 0;           ///< of each

  static constexpr int kPairRows = 16, kLanes = 32;
  constexpr int words() const { return blocks < 1 ? 1 : (blocks + 31) / 32; }
  constexpr int64_t size() const { return int64_t{batches} * heads * tiles * words(); }
  constexpr int64_t offset(int b, int h, int tile) const {
    return ((int64_t{batches == 1 ? 0 : b} * heads + (heads == 1 ? 0 : h)) * tiles + tile) * words();
  }
  constexpr SeenBlocks at(int b, int h, int tile) const {
    if (data == nullptr) return {};
    const uint32_t* any = data + offset(b, h, tile);
    return {any, any + size()};
  }

  constexpr int pair_words() const { return (block_rows + 63) / 64; }  ///< of a lane
  constexpr int words_of_rows() const { return pair_words() * kLanes; }
  constexpr int words_of_block() const { return tile_rows / kPairRows * words_of_rows(); }
  /// Of block 0 of a tile; `h` is the head of the queries.
  constexpr int64_t pairs_offset(int b, int h, int tile) const {
    const int64_t head = int64_t{batches == 1 ? 0 : b} * pair_heads + (pair_heads == 1 ? 0 : h);
    return (head * tiles + tile) * blocks * words_of_block();
  }
};

}  // namespace fovea::tile
