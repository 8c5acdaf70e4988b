// The bits of dropout on every instruction set of this machine: each weight against the stream, in all arrangements of rows and keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cpu/ops.hpp"
#include "cpu_tables.hpp"
#include "tile/philox.hpp"

namespace fovea::cpu {
namespace {

/// The lanes of a panel.
struct Rows {
  const char* what;
  std::array<int32_t, kPanel> query{}, head{};
};

std::vector<Rows> arrangements() {
  std::vector<Rows> all(6);
  all[0].what = "neighbours from the first row of a cell on";
  all[1].what = "neighbours that begin inside of a cell";
  all[2].what = "heads of a group beside each other";
  all[3].what = "a head for each 16 lanes, far away";
  all[4].what = "the last rows, repeated";
  all[5].what = "one query of many heads";
  for (int x = 0; x < kPanel; ++x) {
    const auto lane = static_cast<size_t>(x);
    all[0].query[lane] = 96 + x, all[0].head[lane] = 5;
    all[1].query[lane] = 19 + x, all[1].head[lane] = 0;
    all[2].query[lane] = x / 4, all[2].head[lane] = 8 + x % 4;
    all[3].query[lane] = (1 << 30) + x % 16, all[3].head[lane] = 1000 + x / 16;
    all[4].query[lane] = std::min(48 + x, 71), all[4].head[lane] = 2;
    all[5].query[lane] = 7, all[5].head[lane] = x;
  }
  return all;
}

bool is_kept(const std::vector<uint8_t>& kept, int64_t j, int64_t x) {
  const int64_t bit = 2 * x + j % 2;
  return (kept[static_cast<size_t>(j / 2 * kKeptBytes + bit / 8)] >> bit % 8 & 1) != 0;
}

std::vector<uint8_t> bits_of(const Ops& ops, const tile::Dropout& dropout, const Rows& rows, int64_t j0,
                             int64_t n) {
  std::vector<uint8_t> kept(static_cast<size_t>(kept_bytes(n)), 0xa5);
  ops.dropout_bits(dropout, rows.query.data(), rows.head.data(), j0, n, kept.data());
  return kept;
}

TEST(CpuDropout, EveryWeightIsThatOfTheStream) {
  for (const Ops* ops : tables_of_this_machine()) {
    for (const double p : {1e-9, 0.1, 0.9999999}) {
      tile::Dropout dropout(p, 0x0123456789abcdef, uint64_t{1} << 63 | 5);
      if (p == 0.1) dropout.begin_at(16 * 77, 16 * 5);
      for (const Rows& rows : arrangements()) {
        for (const auto& [j0, n] : std::initializer_list<std::pair<int64_t, int64_t>>{
                 {0, 128}, {0, 1}, {2, 1}, {6, 37}, {30, 300}, {int64_t{1} << 30, 17}}) {
          const std::vector<uint8_t> kept = bits_of(*ops, dropout, rows, j0, n);
          for (int64_t j = 0; j < n; ++j) {
            for (int64_t x = 0; x < kPanel; ++x) {
              const auto lane = static_cast<size_t>(x);
              ASSERT_EQ(is_kept(kept, j, x),
                        dropout.keep(static_cast<uint32_t>(rows.head[lane]),
                                     static_cast<uint32_t>(rows.query[lane]), static_cast<uint32_t>(j0 + j)))
                  << ops->name << ", " << rows.what << ", p " << p << ", keys from " << j0 << ", key " << j
                  << ", lane " << x;
            }
          }
        }
      }
    }
  }
}

TEST(CpuDropout, WhatIsNotKeptIsZeroWhateverItHolds) {
  const tile::Dropout dropout(0.5, 1, 2);
  const Rows rows = arrangements().front();
  for (const Ops* ops : tables_of_this_machine()) {
    for (const int64_t n : {1, 2, 33, 128}) {
      const std::vector<uint8_t> kept = bits_of(*ops, dropout, rows, 0, n);
      std::vector<float> x(static_cast<size_t>(n * kPanel) + 1, 3.0f);  // one more, which stays
      std::vector<uint32_t> pairs(static_cast<size_t>((n + 1) / 2 * kPanel) + 1, 0x3f803f80);
      for (int64_t i = 0; i < n * kPanel; ++i) {
        if (!is_kept(kept, i / kPanel, i % kPanel))
          x[static_cast<size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
      }
      ops->multiply_kept(x.data(), kept.data(), 2.0f, n);
      if (ops->word_elements == 2) ops->keep_pairs(pairs.data(), kept.data(), n);
      for (int64_t i = 0; i < n * kPanel; ++i) {
        const int64_t j = i / kPanel, lane = i % kPanel;
        const bool keeps = is_kept(kept, j, lane);
        ASSERT_EQ(std::bit_cast<uint32_t>(x[static_cast<size_t>(i)]),
                  std::bit_cast<uint32_t>(keeps ? 6.0f : 0.0f))
            << ops->name << " key " << j << " lane " << lane;
        if (ops->word_elements != 2) continue;
        const uint32_t word = pairs[static_cast<size_t>(j / 2 * kPanel + lane)];
        ASSERT_EQ(word >> 16 * (j % 2) & 0xffff, keeps ? 0x3f80u : 0u) << ops->name << " key " << j;
      }
      EXPECT_EQ(x.back(), 3.0f);
      EXPECT_EQ(pairs.back(), 0x3f803f80u);
    }
  }
}

}  // namespace
}  // namespace fovea::cpu
