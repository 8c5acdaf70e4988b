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

/// Drops attention weights with probability p, rounded to a multiple of 2^-15, and scales the others by 1 / (1 - p). Of
/// each weight 15 random bits decide: it is kept when they are at least p 2^15. Queries i and keys j count within the
/// sequence; `head` = batch index * heads_q + query head.
///
/// One call of Philox decides a cell: the eight weights of a block of 16 x 16 that one lane has in the operand A of
/// m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), in the order of its registers and their halves:
///
///   words    0: i0, j0 | j0 + 1    1: i0 + 8, j0 | j0 + 1    2: i0, j0 + 8 | j0 + 9    3: i0 + 8, j0 + 8 | j0 + 9
///
/// The key of Philox is 0, so that the keys of its rounds are constants. Seed and offset, mixed, go into the counter.
struct Dropout {
  static constexpr int kRounds = 7, kBits = 15;
  static constexpr uint32_t kOne = 1u << kBits;

  uint32_t threshold = 0;
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

  /// The counters of a cell: one for its columns, one for its rows.
  static constexpr uint32_t column_of_cell(uint32_t j) { return j / 16 * 4 + j % 8 / 2; }
  static constexpr uint32_t row_of_cell(uint32_t i) { return i / 16 * 8 + i % 8; }
  constexpr PhiloxWords cell(uint32_t head, uint32_t row, uint32_t column) const {
    return philox4x32<kRounds>(
        {(first_column + column) ^ start[0], (first_row + row) ^ start[1], head ^ start[2], start[3]},
        {0, 0});
  }
  /// Bits 15 and 31 of the result: whether the weights of the halves are kept. No carry leaves a half.
  constexpr uint32_t kept(uint32_t word) const {
    return (word & (kOne - 1) * 0x10001u) + (kOne - threshold) * 0x10001u;
  }
  /// As kept(), of query i and keys j and j + 1, j even.
  constexpr uint32_t kept_pair(uint32_t head, uint32_t i, uint32_t j) const {
    const PhiloxWords words = cell(head, row_of_cell(i), column_of_cell(j));
    const bool far_row = i / 8 % 2 != 0;
    const uint32_t near = far_row ? words[1] : words[0], far = far_row ? words[3] : words[2];
    return kept(j / 8 % 2 == 0 ? near : far);
  }
  constexpr bool keep(uint32_t head, uint32_t i, uint32_t j) const {
    return (kept_pair(head, i, j - j % 2) >> (j % 2 * 16 + 15) & 1) != 0;
  }
};

}  // namespace fovea::tile
