// Which weights of a tile dropout keeps, as bits: cells of tile/philox.hpp, a vector of them at a time.
//
// A cell is 7 rounds of two products. Of 16 rows that begin a cell and share a head, the first rounds are mostly not the cell's own:
//
//   round   product 0    product 1
//   1       column       head
//   2       row          column
//   3       column       the cell
//   4 to 7  the cell     the cell
//
// so a cell costs 9 products in place of 14. Words stand in the low halves of 64-bit lanes, where a product of 32 x 32 bits reads them and
// leaves the next ones; what the high halves hold never matters.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_DROPOUT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_DROPOUT_INL_HPP
#undef FOVEA_CPU_OPS_DROPOUT_INL_HPP
#else
#define FOVEA_CPU_OPS_DROPOUT_INL_HPP
#endif

#include <algorithm>

#include "cpu/ops_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
void dropout_bits(const tile::Dropout& dropout, const int32_t* query, const int32_t* head, int64_t j0,
                  int64_t n, uint8_t* kept) {
  std::fill_n(kept, (n + 1) / 2 * kKeptBytes, uint8_t{0});
  for (int64_t j = 0; j < n; ++j) {
    for (int x = 0; x < kPanel; ++x) {
      const bool keep = dropout.keep(static_cast<uint32_t>(head[x]), static_cast<uint32_t>(query[x]),
                                     static_cast<uint32_t>(j0 + j));
      const int64_t bit = 2 * x + j % 2;
      if (keep) kept[j / 2 * kKeptBytes + bit / 8] |= static_cast<uint8_t>(1 << bit % 8);
    }
  }
}

void multiply_kept(float* x, const uint8_t* kept, float scale, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t bit = 2 * lane + j % 2;
      const bool keep = (kept[j / 2 * kKeptBytes + bit / 8] >> bit % 8 & 1) != 0;
      x[j * kPanel + lane] = keep ? x[j * kPanel + lane] * scale : 0.0f;
    }
  }
}

void keep_pairs(uint32_t*, const uint8_t*, int64_t) {}  // this table has no pairs
#else
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;
using DU64 = hn::RepartitionToWide<DU>;
using VU64 = hn::Vec<DU64>;
using DI16 = hn::RepartitionToNarrow<DI>;
using DU16 = hn::RepartitionToNarrow<DU>;
using VU16 = hn::Vec<DU16>;

constexpr uint32_t round_key0(uint32_t round) {
  return round * tile::kPhiloxKeyStep0;
}
constexpr uint32_t round_key1(uint32_t round) {
  return round * tile::kPhiloxKeyStep1;
}

/// Of p: the largest random number of a weight that is dropped, in two bytes, in cells whose threshold is rounded down and up; and
/// where in the sequence of cells it is rounded up.
struct Thresholds {
  uint16_t low, high, share;

  explicit Thresholds(const tile::Dropout& dropout)
      : low(static_cast<uint16_t>((((dropout.threshold >> tile::Dropout::kFractionBits) - 1) & 0xff) *
                                  0x101)),
        high(static_cast<uint16_t>((dropout.threshold >> tile::Dropout::kFractionBits) * 0x101)),
        share(static_cast<uint16_t>(dropout.threshold)) {}

  HWY_INLINE VU16 of_cells(VU16 places) const {
    const DU16 d;
    return hn::IfThenElse(hn::Lt(places, hn::Set(d, share)), hn::Set(d, high), hn::Set(d, low));
  }
};

/// The keys of a tile, two a row of bits.
struct KeptRows {
  int64_t j0, rows;
  uint8_t* kept;

  /// The bits of lane x for the keys j and j + 1; NULL where they are not of the tile.
  uint8_t* at(int64_t j, int x) const {
    const int64_t row = (j - j0) / 2;
    return j < j0 || row >= rows ? nullptr : kept + row * kKeptBytes + x / 4;
  }
  /// Whether the tile has one of the keys of a cell that begins at key j.
  bool has_keys_of(int64_t j) const { return at(j, 0) || at(j + 2, 0) || at(j + 8, 0) || at(j + 10, 0); }
};

/// Stores the bits of lanes [x, x + kLanes): the bytes of words, a lane each, decide about the keys j to j + 3, those of `far_words`
/// about the keys 8 behind. `largest_dropped`: in two bytes, of all lanes, and again.
HWY_INLINE void store_kept(VU words, VU far_words, VU16 largest_dropped, int64_t j, int x,
                           const KeptRows& out) {
  const DU16 pairs;
  const hn::Repartition<int8_t, DU16> bytes;
  const auto random_bits = hn::Set(bytes, int8_t{0x7f});
  const VU16 near = hn::BitCast(pairs, words), far = hn::BitCast(pairs, far_words);
  for (int odd = 0; odd < 2; ++odd) {
    const VU16 random = odd == 0 ? hn::ConcatEven(pairs, far, near) : hn::ConcatOdd(pairs, far, near);
    uint8_t bits[std::max(8, kLanes / 2)];  // StoreMaskBits wants room for eight
    hn::StoreMaskBits(
        bytes, hn::Gt(hn::And(hn::BitCast(bytes, random), random_bits), hn::BitCast(bytes, largest_dropped)),
        bits);
    for (int behind = 0; behind < 2; ++behind) {
      uint8_t* const kept = out.at(j + 2 * odd + 8 * behind, x);
      if (kept != nullptr) std::copy_n(bits + behind * (kLanes / 4), kLanes / 4, kept);
    }
  }
}

// ---- 16 rows of one head, of which the first begins a cell

inline constexpr int kCellRows = 8, kGroupRows = 2 * kCellRows;
inline constexpr int kRowVectors = std::max(1, 2 * kCellRows / kLanes);  ///< of 64-bit lanes
inline constexpr int kMostColumns = 16;                                  ///< those of 128 keys
/// Places of cells in the sequence of thresholds, from that of the first row on: of lanes [kLanes r, kLanes (r + 1)), and again.
struct RowPlaces {
  alignas(64) uint16_t of[kRowVectors][2 * kLanes];
};
constexpr RowPlaces places_of_rows() {
  RowPlaces places{};
  for (int r = 0; r < kRowVectors; ++r) {
    for (int x = 0; x < 2 * kLanes; ++x) {
      const auto row = static_cast<uint32_t>((r * kLanes + x % kLanes) % kCellRows);
      places.of[r][x] = static_cast<uint16_t>(row * tile::Dropout::kRowStep);
    }
  }
  return places;
}
inline constexpr RowPlaces kRowPlaces = places_of_rows();

HWY_INLINE VU64 product_of(VU64 x, uint32_t factor) {
  return hn::MulEven(hn::BitCast(DU(), x), hn::Set(DU(), factor));
}
HWY_INLINE VU64 high_word(VU64 product) {
  return hn::ShiftRight<32>(product);
}

/// What columns of cells bring into the third round, together with the head. Constants of the other rounds lie beside it: operands that
/// are read from memory take no port of the products.
struct CellColumns {
  alignas(64) uint64_t factor[kMostColumns];  ///< of product 1, but for the row
  alignas(64) uint64_t word0[kMostColumns];   ///< of the next round, but for product 1
  alignas(64) uint64_t word2[kMostColumns];   ///< of the next round, but for the row
  alignas(64) uint64_t product0[kMostColumns];
  uint64_t key0[tile::Dropout::kRounds], key1[tile::Dropout::kRounds];

  /// Not inlined: where the compiler sees the constants, it makes each anew for every cell.
  HWY_NOINLINE void set(const tile::Dropout& dropout, uint64_t head_product, uint32_t first);
};

void CellColumns::set(const tile::Dropout& dropout, uint64_t head_product, uint32_t first) {
  const DU64 d;
  for (uint32_t round = 0; round < tile::Dropout::kRounds; ++round) {
    key0[round] = round_key0(round);
    key1[round] = round_key1(round);
  }
  for (int c = 0; c < kMostColumns; c += static_cast<int>(hn::Lanes(d))) {
    const VU64 column = hn::Xor(hn::Iota(d, first + static_cast<uint32_t>(c)), hn::Set(d, dropout.start[0]));
    const VU64 round1 = product_of(column, tile::kPhiloxMultiplier0);
    const VU64 round2 =
        product_of(hn::Xor(high_word(round1), hn::Set(d, dropout.start[3])), tile::kPhiloxMultiplier1);
    const VU64 head = hn::Set(d, head_product ^ round_key0(1));
    const VU64 round3 = product_of(hn::Xor(high_word(round2), head), tile::kPhiloxMultiplier0);
    hn::Store(hn::Xor(round1, hn::Set(d, round_key1(1))), d, factor + c);
    hn::Store(hn::Xor(round2, hn::Set(d, round_key0(2))), d, word0 + c);
    hn::Store(hn::Xor(high_word(round3), hn::Set(d, round_key1(2))), d, word2 + c);
    hn::Store(round3, d, product0 + c);
  }
}

/// Product 0 of the second round, of rows of cells from `row` on.
HWY_INLINE VU64 product_of_rows(const tile::Dropout& dropout, uint64_t head_product, uint32_t row) {
  const DU64 d;
  const auto others = static_cast<uint32_t>(head_product >> 32) ^ dropout.start[1];
  return product_of(hn::Xor(hn::Iota(d, row), hn::Set(d, others)), tile::kPhiloxMultiplier0);
}

struct CellWords {
  VU64 of[4];
};
template <int kRound>
HWY_INLINE void rounds_from(const CellColumns& columns, CellWords& w) {
  if constexpr (kRound < tile::Dropout::kRounds) {
    const DU64 d;
    const VU64 product0 = product_of(w.of[0], tile::kPhiloxMultiplier0);
    const VU64 product1 = product_of(w.of[2], tile::kPhiloxMultiplier1);
    w.of[0] = hn::Xor3(high_word(product1), w.of[1], hn::Set(d, columns.key0[kRound]));
    w.of[2] = hn::Xor3(high_word(product0), w.of[3], hn::Set(d, columns.key1[kRound]));
    w.of[1] = product1;
    w.of[3] = product0;
    rounds_from<kRound + 1>(columns, w);
  }
}
/// Dropout::cell of rows in a column.
HWY_INLINE CellWords cells_of(VU64 rows, const CellColumns& columns, int c) {
  const DU64 d;
  const VU64 product1 =
      product_of(hn::Xor(high_word(rows), hn::Set(d, columns.factor[c])), tile::kPhiloxMultiplier1);
  CellWords w{{hn::Xor(high_word(product1), hn::Set(d, columns.word0[c])), product1,
               hn::Xor(rows, hn::Set(d, columns.word2[c])), hn::Set(d, columns.product0[c])}};
  rounds_from<3>(columns, w);
  return w;
}

/// The low halves of 64-bit lanes: of rows, then of rows 8 behind. Vector i is of lanes [kLanes i, kLanes (i + 1)).
HWY_INLINE VU words_of_lanes(const VU64 (&rows)[kRowVectors], const VU64 (&far_rows)[kRowVectors], int i) {
  const DU d;
  const auto half = [&](int v) {
    return hn::BitCast(d, v < kRowVectors ? rows[v] : far_rows[v - kRowVectors]);
  };
  return hn::ConcatEven(d, half(2 * i + 1), half(2 * i));
}

/// The bits of lanes [x, x + kGroupRows) for the keys of `count` columns of cells, the first of which begins at the key `block` and
/// has the place `first_place` in its first row.
HWY_INLINE void group_bits(const Thresholds& thresholds, uint32_t first_place, const VU64* rows,
                           const CellColumns& columns, int count, int64_t block, int x, const KeptRows& out) {
  const DU16 d16;
  for (int c = 0; c < count; ++c) {
    VU64 words[4][kRowVectors];
    for (int r = 0; r < kRowVectors; ++r) {
      const CellWords cells = cells_of(rows[r], columns, c);
      for (int w = 0; w < 4; ++w) words[w][r] = cells.of[w];
    }
    const uint32_t place = first_place + static_cast<uint32_t>(c) * tile::Dropout::kColumnStep;
    for (int i = 0; i < kRowVectors; ++i) {
      const VU16 places =
          hn::Add(hn::Set(d16, static_cast<uint16_t>(place)), hn::Load(d16, kRowPlaces.of[i]));
      store_kept(words_of_lanes(words[0], words[1], i), words_of_lanes(words[2], words[3], i),
                 thresholds.of_cells(places), block + c / 2 * 16 + c % 2 * 4, x + i * kLanes, out);
    }
  }
}

// ---- any rows and heads

/// The halves of the products x * factor.
HWY_INLINE void multiply_wide(VU x, uint32_t factor, VU& low, VU& high) {
  const DU d;
  const DU64 wide;
  const VU factors = hn::Set(d, factor);
  const auto even = hn::MulEven(x, factors);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, x))), factors);
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
}

/// The bits of lanes [x, x + kLanes), each of its own query and head, for keys from `block` on: a cell of each lane at a time.
HWY_INLINE void lane_bits(const tile::Dropout& dropout, const int32_t* query, const int32_t* head,
                          int64_t block, int x, const KeptRows& out) {
  const DU d;
  const DU16 d16;
  const Thresholds thresholds(dropout);
  const VU i = hn::BitCast(d, hn::LoadU(DI(), query + x));
  const VU row = hn::Add(hn::Set(d, dropout.first_row),
                         hn::Add(hn::ShiftLeft<3>(hn::ShiftRight<4>(i)), hn::And(i, hn::Set(d, 7u))));
  const auto is_far = hn::Ne(hn::And(i, hn::Set(d, 8u)), hn::Zero(d));
  const VU of_head = hn::BitCast(d, hn::LoadU(DI(), head + x));
  const VU head_word = hn::Xor(of_head, hn::Set(d, dropout.start[2]));
  const VU places = hn::Add(hn::Mul(row, hn::Set(d, tile::Dropout::kRowStep)),
                            hn::Mul(of_head, hn::Set(d, tile::Dropout::kHeadStep)));
  for (int c = 0; c < 2; ++c) {
    const int64_t key = block + 4 * c;
    if (!out.has_keys_of(key)) continue;
    const uint32_t column = dropout.first_column + tile::Dropout::column_of_cell(static_cast<uint32_t>(key));
    VU c0 = hn::Set(d, column ^ dropout.start[0]);
    VU c1 = hn::Xor(row, hn::Set(d, dropout.start[1])), c2 = head_word, c3 = hn::Set(d, dropout.start[3]);
    for (uint32_t round = 0; round < tile::Dropout::kRounds; ++round) {
      VU low0, high0, low1, high1;
      multiply_wide(c0, tile::kPhiloxMultiplier0, low0, high0);
      multiply_wide(c2, tile::kPhiloxMultiplier1, low1, high1);
      c0 = hn::Xor3(high1, c1, hn::Set(d, round_key0(round)));
      c2 = hn::Xor3(high0, c3, hn::Set(d, round_key1(round)));
      c1 = low1;
      c3 = low0;
    }
    const VU16 place =
        hn::BitCast(d16, hn::Add(places, hn::Set(d, dropout.start[3] + column * tile::Dropout::kColumnStep)));
    store_kept(hn::IfThenElse(is_far, c1, c0), hn::IfThenElse(is_far, c3, c2),
               thresholds.of_cells(hn::ConcatEven(d16, place, place)), key, x, out);
  }
}

/// Whether 16 rows are neighbours of one head, of which the first begins a cell.
inline bool share_cells(const int32_t* query, const int32_t* head) {
  bool shared = query[0] % kGroupRows == 0;
  for (int x = 1; x < kGroupRows; ++x) shared = shared && query[x] == query[0] + x && head[x] == head[0];
  return shared;
}

void dropout_bits(const tile::Dropout& dropout, const int32_t* query, const int32_t* head, int64_t j0,
                  int64_t n, uint8_t* kept) {
  const KeptRows out{j0, (n + 1) / 2, kept};
  const Thresholds thresholds(dropout);
  CellColumns columns;
  for (int64_t block = j0 / 16 * 16; block < j0 + n; block += kMostColumns * 8) {
    const int64_t end = std::min(j0 + n, block + kMostColumns * 8);
    const uint32_t first_column =
        dropout.first_column + tile::Dropout::column_of_cell(static_cast<uint32_t>(block));
    int32_t head_of_columns = -1;
    for (int x = 0; x < kPanel; x += kGroupRows) {
      if (!share_cells(query + x, head + x)) {
        for (int64_t j = block; j < end; j += 16) {
          for (int lane = x; lane < x + kGroupRows; lane += kLanes)
            lane_bits(dropout, query, head, j, lane, out);
        }
        continue;
      }
      const uint64_t head_product =
          uint64_t{tile::kPhiloxMultiplier1} * (static_cast<uint32_t>(head[x]) ^ dropout.start[2]);
      if (head[x] != head_of_columns) {
        columns.set(dropout, head_product, first_column);
        head_of_columns = head[x];
      }
      const uint32_t first_row =
          dropout.first_row + tile::Dropout::row_of_cell(static_cast<uint32_t>(query[x]));
      VU64 rows[kRowVectors];
      for (int r = 0; r < kRowVectors; ++r)
        rows[r] = product_of_rows(dropout, head_product, first_row + static_cast<uint32_t>(r * kLanes / 2));
      const uint32_t place = dropout.start[3] + first_column * tile::Dropout::kColumnStep +
                             first_row * tile::Dropout::kRowStep +
                             static_cast<uint32_t>(head[x]) * tile::Dropout::kHeadStep;
      group_bits(thresholds, place, rows, columns, static_cast<int>((end - block + 15) / 16 * 2), block, x,
                 out);
    }
  }
}

/// Halves of 16 bits that are all ones where kept, of kLanes lanes and two keys.
HWY_INLINE hn::Vec<DI> kept_halves(const uint8_t* kept) {
  const DI16 d;
  return hn::BitCast(DI(), hn::VecFromMask(d, hn::LoadMaskBits(d, kept)));
}

void multiply_kept(float* x, const uint8_t* kept, float scale, int64_t n) {
  const D d;
  const V factor = hn::Set(d, scale);
  const auto multiply = [&](float* at, hn::Vec<DI> sign) {
    const V keep = hn::BitCast(d, hn::BroadcastSignBit(sign));
    hn::StoreU(hn::And(hn::Mul(hn::LoadU(d, at), factor), keep), d, at);
  };
  for (int64_t j = 0; j < n; j += 2, kept += kKeptBytes) {
    for (int v = 0; v < kVectors; ++v) {
      const auto halves = kept_halves(kept + v * kLanes / 4);
      float* at = x + j * kPanel + v * kLanes;
      multiply(at, hn::ShiftLeft<16>(halves));
      if (j + 1 < n) multiply(at + kPanel, halves);
    }
  }
}

void keep_pairs(uint32_t* pairs, const uint8_t* kept, int64_t n) {
  const DI16 d;
  for (int64_t j = 0; j < n; j += 2, kept += kKeptBytes, pairs += kPanel) {
    for (int v = 0; v < kVectors; ++v) {
      auto* at = reinterpret_cast<int16_t*>(pairs + v * kLanes);
      const auto mask = hn::LoadMaskBits(d, kept + v * kLanes / 4);
      hn::StoreU(hn::IfThenElseZero(mask, hn::LoadU(d, at)), d, at);
    }
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif
