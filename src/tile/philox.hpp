// The random stream of dropout: Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// Counter-based: the decision for a (batch, head, query, key) is a pure function of its coordinates, so every backend,
// tile size and thread count keeps the same weights, and the backward repeats the forward.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea::tile {

using PhiloxWords = std::array<uint32_t, 4>;
// Scalars: nvcc lets device code read no array of constants, and compiles it to a trap.
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

/// Philox4x32 of `kRounds` rounds. The authors recommend ten; from seven on it passes BigCrush (their table 2).
template <int kRounds>
constexpr PhiloxWords philox4x32(PhiloxWords counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kPhiloxKeyStep0;
    key[1] += kPhiloxKeyStep1;
  }
  return counter;
}

/// Drops attention weights with probability p, rounded to a multiple of 2^-23, and scales the others by 1 / (1 - p). Queries
/// i and keys j count within the sequence; `head` = batch index * heads_q + query head.
///
/// One call of Philox decides a cell: 16 weights of a block of 16 x 16, those of rows i0 and i0 + 8 and of columns j0 to j0 + 3 and
/// j0 + 8 to j0 + 11. Two lanes have them in the operand A of m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), in words in
/// the order of its registers, in bytes in that of keys:
///
///   words    0: i0, j0 to j0 + 3    1: i0 + 8, j0 to j0 + 3    2: i0, j0 + 8 to j0 + 11    3: i0 + 8, j0 + 8 to j0 + 11
///
/// A weight is kept when the lowest seven bits of its byte are at least the threshold of its cell. Thresholds are p 2^7, rounded
/// up in as many cells as make their mean exact, and else down: a Weyl sequence over the cells chooses, so any few neighbours have nearly
/// the mean, too.
///
/// The key of Philox is 0, so that the keys of its rounds are constants. Seed and offset, mixed, go into the counter.
struct Dropout {
  static constexpr int kRounds = 7, kBits = 7, kFractionBits = 16;
  static constexpr uint32_t kOne = 1u << (kBits + kFractionBits);
  /// Of the Weyl sequence, modulo 2^16: powers of 0.8192, the inverse of the root of x^4 = x + 1, made odd.
  static constexpr uint32_t kColumnStep = 53685, kRowStep = 43977, kHeadStep = 36025;

  uint32_t threshold = 0;  ///< p kOne
  float keep_scale = 1;
  PhiloxWords start{};  ///< XORed into the counters
  /// Counters of the first cell: 0, but for a part of a larger problem, whose stream it shares.
  uint32_t first_row = 0, first_column = 0;

  constexpr Dropout() = default;
  constexpr Dropout(double p, uint64_t seed, uint64_t offset) : start(start_of(seed, offset)) {
    const auto rounded = static_cast<uint32_t>(p * kOne + 0.5);
    threshold = rounded < kOne ? rounded : kOne - 1;
    keep_scale = static_cast<float>(1.0 / (1.0 - static_cast<double>(threshold) / kOne));
  }

  static constexpr PhiloxWords start_of(uint64_t seed, uint64_t offset) {
    return philox4x32<10>({static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                           static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
                          {0, 0});
  }

  /// Makes the stream that of a part whose first pair is this one of the whole; multiples of 16.
  constexpr void begin_at(int64_t query, int64_t key) {
    first_row = row_of_cell(static_cast<uint32_t>(query));
    first_column = column_of_cell(static_cast<uint32_t>(key));
  }

  struct Cell {
    PhiloxWords words;
    uint32_t threshold;  ///< in each byte

    /// Bits 7, 15, 23 and 31: whether the weights of the word's bytes are kept. Nothing is borrowed from another byte.
    constexpr uint32_t kept(size_t word) const { return (words[word] | 0x80808080u) - threshold; }
  };

  /// The counters of a cell: one for its columns, one for its rows.
  static constexpr uint32_t column_of_cell(uint32_t j) { return j / 16 * 2 + j % 8 / 4; }
  static constexpr uint32_t row_of_cell(uint32_t i) { return i / 16 * 8 + i % 8; }
  constexpr Cell cell(uint32_t head, uint32_t row, uint32_t column) const {
    row += first_row;
    column += first_column;
    return {philox4x32<kRounds>({column ^ start[0], row ^ start[1], head ^ start[2], start[3]}, {0, 0}),
            threshold_of_cell(head, row, column)};
  }
  /// As Cell::kept(), of query i and keys j to j + 3, j a multiple of 4.
  constexpr uint32_t kept_four(uint32_t head, uint32_t i, uint32_t j) const {
    const Cell of = cell(head, row_of_cell(i), column_of_cell(j));
    // Selections: an index that is not known would keep the words in memory on GPUs.
    const bool far_row = i / 8 % 2 != 0;
    const uint32_t near = far_row ? of.kept(1) : of.kept(0), far = far_row ? of.kept(3) : of.kept(2);
    return j / 8 % 2 == 0 ? near : far;
  }
  constexpr bool keep(uint32_t head, uint32_t i, uint32_t j) const {
    return (kept_four(head, i, j - j % 4) >> (j % 4 * 8 + 7) & 1) != 0;
  }

 private:
  /// In each byte. The sequence modulo 2^16 is that of the high halves of words here.
  constexpr uint32_t threshold_of_cell(uint32_t head, uint32_t row, uint32_t column) const {
    const uint32_t place = (start[3] + column * kColumnStep + row * kRowStep + head * kHeadStep)
                           << (32 - kFractionBits);
    const uint32_t low = (threshold >> kFractionBits) * 0x01010101u;
    return place < threshold << (32 - kFractionBits) ? low + 0x01010101u : low;
  }
};

}  // namespace fovea::tile
