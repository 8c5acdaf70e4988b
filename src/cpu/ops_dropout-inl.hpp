// Dropout's factors of a tile of weights: cells of tile/philox.hpp, a vector of them at a time.
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
void dropout_factors(const tile::Dropout& dropout, const int32_t* query, const int32_t* head, int64_t j0,
                     int64_t n, float* keep) {
  for (int64_t j = 0; j < n; ++j) {
    for (int x = 0; x < kPanel; ++x) {
      const bool kept = dropout.keep(static_cast<uint32_t>(head[x]), static_cast<uint32_t>(query[x]),
                                     static_cast<uint32_t>(j0 + j));
      keep[j * kPanel + x] = kept ? dropout.keep_scale : 0.0f;
    }
  }
}
#else
using DU = hn::RebindToUnsigned<D>;
using VU = hn::Vec<DU>;
using DU64 = hn::RepartitionToWide<DU>;

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

/// Lanes whose cells are computed together: rows of kCellRows lanes of the panel, and kCellColumns columns of each.
inline constexpr int kCellColumns = kLanes > 8 ? 2 : 1, kCellRows = kLanes / kCellColumns;

struct CellWords {
  VU of[4];
};
/// Dropout::cell of each lane.
HWY_INLINE CellWords cells_of(const tile::Dropout& dropout, VU head, VU row, VU column) {
  const DU d;
  VU c0 = hn::Xor(column, hn::Set(d, dropout.start[0])), c1 = hn::Xor(row, hn::Set(d, dropout.start[1]));
  VU c2 = hn::Xor(head, hn::Set(d, dropout.start[2])), c3 = hn::Set(d, dropout.start[3]);
  uint32_t key0 = 0, key1 = 0;
  for (int round = 0; round < tile::Dropout::kRounds; ++round) {
    VU low0, high0, low1, high1;
    multiply_wide(c0, tile::kPhiloxMultiplier0, low0, high0);
    multiply_wide(c2, tile::kPhiloxMultiplier1, low1, high1);
    c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(d, key0));
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(d, key1));
    c1 = low1;
    c3 = low0;
    key0 += tile::kPhiloxKeyStep0;
    key1 += tile::kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

/// Of kCellRows lanes of a panel: the rows of their cells, and which words of these are theirs.
struct CellLanes {
  alignas(64) uint32_t row[kLanes], head[kLanes], far[kLanes];

  void set(const int32_t* query, const int32_t* dropout_head) {
    for (int x = 0; x < kLanes; ++x) {
      const auto i = static_cast<uint32_t>(query[x % kCellRows]);
      row[x] = tile::Dropout::row_of_cell(i);
      head[x] = static_cast<uint32_t>(dropout_head[x % kCellRows]);
      far[x] = i / 8 % 2;
    }
  }
  bool same_cells(const CellLanes& other) const {
    return std::equal(row, row + kLanes, other.row) && std::equal(head, head + kLanes, other.head);
  }
};

/// Writes the factors of a row of lanes for the keys of `words`: columns from `key` on, where they lie in [0, n).
HWY_INLINE void write_factors(const tile::Dropout& dropout, const CellLanes& lanes, const CellWords& words,
                              int64_t key, int64_t n, float* keep) {
  const D d;
  const DU du;
  const DI di;
  const auto is_far = hn::Ne(hn::LoadU(du, lanes.far), hn::Zero(du));
  const V scale = hn::Set(d, dropout.keep_scale);
  const VU bits = hn::Set(du, (tile::Dropout::kOne - 1) * 0x10001u);
  const VU above = hn::Set(du, (tile::Dropout::kOne - dropout.threshold) * 0x10001u);
  for (int u = 0; u < 2; ++u) {
    const VU word = hn::IfThenElse(is_far, words.of[2 * u + 1], words.of[2 * u]);
    const VU kept = hn::Add(hn::And(word, bits), above);  // Dropout::kept
    for (int e = 0; e < 2; ++e) {
      const auto sign = hn::BitCast(di, e == 0 ? hn::ShiftLeft<16>(kept) : kept);
      HWY_ALIGN float factors[kLanes];
      hn::Store(hn::And(scale, hn::BitCast(d, hn::BroadcastSignBit(sign))), d, factors);
      for (int c = 0; c < kCellColumns; ++c) {
        const int64_t j = key + 8 * u + 2 * c + e;
        if (j >= 0 && j < n) std::copy_n(factors + c * kCellRows, kCellRows, keep + j * kPanel);
      }
    }
  }
}

void dropout_factors(const tile::Dropout& dropout, const int32_t* query, const int32_t* head, int64_t j0,
                     int64_t n, float* keep) {
  constexpr int kGroups = kPanel / kCellRows, kFar = std::max(1, 8 / kCellRows);
  const DU du;
  CellLanes lanes[kGroups];
  for (int g = 0; g < kGroups; ++g) lanes[g].set(query + g * kCellRows, head + g * kCellRows);
  const VU columns =
      hn::ShiftRight < kCellColumns == 2 ? 3 : 5 > (hn::Iota(du, 0));  // 1 in the second column
  bool done[kGroups] = {};
  for (int g = 0; g < kGroups; ++g) {
    if (done[g]) continue;
    // The rows eight further on mostly have the other words of the same cells.
    const bool both = g + kFar < kGroups && !done[g + kFar] && lanes[g].same_cells(lanes[g + kFar]);
    if (both) done[g + kFar] = true;
    const VU row = hn::LoadU(du, lanes[g].row), heads = hn::LoadU(du, lanes[g].head);
    for (int64_t block = j0 / 16 * 16; block < j0 + n; block += 16) {
      for (int64_t t = 0; t < 4; t += kCellColumns) {
        const int64_t key = block + 2 * t - j0;
        const auto inside = [&](int64_t j) { return j < n && j + 2 * kCellColumns > 0; };
        if (!inside(key) && !inside(key + 8)) continue;
        const auto first = tile::Dropout::column_of_cell(static_cast<uint32_t>(block + 2 * t));
        const CellWords words = cells_of(dropout, heads, row, hn::Add(columns, hn::Set(du, first)));
        write_factors(dropout, lanes[g], words, key, n, keep + g * kCellRows);
        if (both) write_factors(dropout, lanes[g + kFar], words, key, n, keep + (g + kFar) * kCellRows);
      }
    }
  }
}

#endif

void multiply_kept(float* x, const float* keep, int64_t count) {
  const D d;
  for (int64_t i = 0; i < count; i += kLanes) {
    const V factor = hn::LoadU(d, keep + i);
    const V product = hn::Mul(hn::LoadU(d, x + i), factor);
    hn::StoreU(hn::IfThenElseZero(hn::Ne(factor, hn::Zero(d)), product), d, x + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif
