// Single device functions of the ladder's harness, on the emulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "ladder/harness/descriptor.cuh"
#include "ladder/harness/launch.cuh"
#include "ladder/harness/online.cuh"
#include "ladder/harness/order.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"
#include "tile/wgmma_map.hpp"

namespace ladder {
namespace {

using Lanes = std::array<float, 32>;

/// Applies `function` to the value of each lane of a warp.
template <class Function>
Lanes in_a_warp(const Lanes& in, const Function& function) {
  Lanes out{};
  fovea::emulation::run({"a device function", {1, 1, 1}, 32, 0}, [&] {
    const size_t lane = threadIdx.x;
    out[lane] = function(in[lane]);
  });
  return out;
}

Lanes some_values() {
  Lanes x{};
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 37 + 11) % 32) - 20.0f;
  return x;
}

TEST(DeviceFunctions, ReductionsOfAWarp) {
  const Lanes x = some_values();
  const float largest = *std::max_element(x.begin(), x.end()),
              sum = std::accumulate(x.begin(), x.end(), 0.0f);
  for (const float got : in_a_warp(x, [](float v) { return warp_max(v); })) EXPECT_EQ(got, largest);
  for (const float got : in_a_warp(x, [](float v) { return warp_sum(v); })) EXPECT_EQ(got, sum);
}

TEST(DeviceFunctions, ReductionsOfFourLanes) {
  const Lanes x = some_values();
  const Lanes largest = in_a_warp(x, [](float v) { return quad_max(v); });
  const Lanes sum = in_a_warp(x, [](float v) { return quad_sum(v); });
  for (size_t lane = 0; lane < 32; ++lane) {
    const auto* quad = x.data() + lane / 4 * 4;
    EXPECT_EQ(largest[lane], *std::max_element(quad, quad + 4));
    EXPECT_EQ(sum[lane], std::accumulate(quad, quad + 4, 0.0f));
  }
}

TEST(DeviceFunctions, OnlineRowsMergeInAnyOrder) {
  const std::array<float, 6> scores = {3.5f, -2, 80, 79.5f, -INFINITY, 12};
  double sum = 0;
  for (const float s : scores) sum += std::exp(static_cast<double>(s) - 80);
  for (int turn = 0; turn < 6; ++turn) {
    OnlineRow row, other;
    for (int i = 0; i < 6; ++i) {
      OnlineRow piece;
      piece.max = scores[static_cast<size_t>((i + turn) % 6)];
      piece.sum = piece.max == -INFINITY ? 0.0f : 1.0f;
      (i < turn ? row : other).merge(piece);
    }
    row.merge(other);
    EXPECT_EQ(row.max, 80);
    EXPECT_NEAR(row.sum, sum, 1e-6);
  }
}

TEST(DeviceFunctions, ARowWithoutKeysStaysEmpty) {
  OnlineRow row;
  EXPECT_EQ(row.merge(OnlineRow()), 0.0f);
  EXPECT_EQ(row.sum, 0);
  EXPECT_EQ(row.max, -INFINITY);
}

/// Two blocks of 16 keys for 16 rows, the second with larger scores and of ten keys, as one softmax.
TEST(DeviceFunctions, OnlineSoftmaxOfAccumulators) {
  constexpr float kScaleLog2 = 0.5f;
  const auto score = [](int row, int key) {
    return static_cast<float>((row * 7 + key * 13) % 29) - 10.0f + (key >= 16 ? 40.0f : 0.0f);
  };
  std::array<std::array<float, 26>, 16> weights{};
  std::array<float, 16> sums{}, maxima{};
  std::array<int, 32> raised{};
  fovea::emulation::run({"a device function", {1, 1, 1}, 32, 0}, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    OnlineRow rows[2];
    float first[2][4], acc_s[2][4], factor[2] = {};
    for (int block = 0; block < 2; ++block) {
      for (int i = 0; i < 8; ++i) {
        const int key = block * 16 + i / 4 * 8 + 2 * (lane % 4) + i % 2;
        acc_s[i / 4][i % 4] = score(lane / 4 + i / 2 % 2 * 8, key);
      }
      if (block == 1) mask(acc_s, 10, lane);
      if (raise_max(acc_s, rows, factor, kScaleLog2)) ++raised[static_cast<size_t>(lane)];
      weigh(acc_s, rows, kScaleLog2);
      if (block == 0) std::memcpy(first, acc_s, sizeof first);
    }
    rescale(first, factor);
    for (int i = 0; i < 16; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, key = i / 8 * 16 + i / 4 % 2 * 8 + 2 * (lane % 4) + i % 2;
      const float weight = i < 8 ? first[i / 4][i % 4] : acc_s[i / 4 - 2][i % 4];
      if (key < 26) weights[static_cast<size_t>(row)][static_cast<size_t>(key)] = weight;
    }
    for (size_t half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows[half].sum);
      sums[static_cast<size_t>(lane) / 4 + 8 * half] = sum;
      maxima[static_cast<size_t>(lane) / 4 + 8 * half] = rows[half].max;
    }
  });
  for (const int times : raised) EXPECT_EQ(times, 2);
  for (int row = 0; row < 16; ++row) {
    const auto r = static_cast<size_t>(row);
    float largest = -INFINITY;
    for (int key = 0; key < 26; ++key) largest = std::max(largest, score(row, key));
    EXPECT_EQ(maxima[r], largest);
    double sum = 0;
    for (int key = 0; key < 26; ++key) {
      const double weight = std::exp2(static_cast<double>((score(row, key) - largest) * kScaleLog2));
      EXPECT_NEAR(weights[r][static_cast<size_t>(key)], weight, 1e-5) << row << " " << key;
      sum += weight;
    }
    EXPECT_NEAR(sums[r], sum, 1e-4);
  }
}

TEST(DeviceFunctions, SmallGrowthRaisesNoMaximum) {
  fovea::emulation::run({"a device function", {1, 1, 1}, 32, 0}, [&] {
    float acc_s[2][4] = {}, factor[2];
    OnlineRow rows[2];
    EXPECT_TRUE(raise_max(acc_s, rows, factor, 1.0f));
    acc_s[1][3] = threadIdx.x == 17 ? kLazy : 0.0f;
    EXPECT_FALSE(raise_max(acc_s, rows, factor, 1.0f));
    acc_s[1][3] *= 1.125f;
    EXPECT_TRUE(raise_max(acc_s, rows, factor, 1.0f));  // one lane votes for all rows of the warp
    EXPECT_EQ(rows[1].max, threadIdx.x / 4 == 17 / 4 ? kLazy * 1.125f : 0.0f);
  });
}

TEST(DeviceFunctions, WeightsBecomeOperandA) {
  fovea::emulation::run({"a device function", {1, 1, 1}, 32, 0}, [&] {
    const float acc_s[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    uint32_t weights[1][4];
    pack(acc_s, weights);
    for (int i = 0; i < 4; ++i) {
      const auto low = static_cast<float>(2 * i + 1);
      EXPECT_EQ(weights[0][i], pack_bf16(low, low + 1)) << i;
    }
  });
}

/// Compared with the library's arithmetic, which other tests compare with the manual's layouts.
TEST(DeviceFunctions, DescriptorsOfWgmma) {
  using fovea::tile::SwizzleMode;
  for (const uint32_t address : {0x400u, 0x10800u, 0x37c00u}) {
    EXPECT_EQ(ptx::k_major(address), fovea::tile::wgmma_k_major(address, SwizzleMode::k128).encode());
    EXPECT_EQ(ptx::mn_major(address, 80 * 128),
              fovea::tile::wgmma_mn_major(address, SwizzleMode::k128, 80).encode());
  }
}

/// Each tile comes once, in a section the longest first. The work of two blocks differs by less than two of the
/// longest tiles, and is equal when all sections are whole.
TEST(CausalOrder, BlocksGetEqualWork) {
  constexpr int kRows = 64;
  int whole = 0;
  for (const auto& [batch, most_blocks] : std::vector<std::pair<int, int>>{{1, 7},
                                                                           {2, 7},
                                                                           {5, 7},
                                                                           {7, 7},
                                                                           {14, 7},
                                                                           {1, 12},
                                                                           {3, 12},
                                                                           {6, 12},
                                                                           {11, 12},
                                                                           {12, 12},
                                                                           {24, 12}}) {
    for (const int seqlen : {1, 64, 65, 300, 1000}) {
      SCOPED_TRACE(testing::Message()
                   << batch << " sequences of " << seqlen << ", " << most_blocks << " blocks");
      const CausalOrder order = causal_order(batch, seqlen, kRows, most_blocks);
      std::vector<int> seen(static_cast<size_t>(order.tiles)), work(static_cast<size_t>(order.blocks));
      int section = 0, before = INT_MAX;
      for (int tile = 0; tile < order.tiles; ++tile) {
        const auto [sequence, i0] = order.at(tile);
        ASSERT_TRUE(sequence >= 0 && sequence < batch && i0 >= 0 && i0 < seqlen && i0 % kRows == 0);
        ++seen[static_cast<size_t>(sequence * order.tiles_of_sequence + i0 / kRows)];
        const int of_tile = std::min(sequence, batch / order.section * order.section - 1) / order.section;
        EXPECT_GE(of_tile, section);
        if (of_tile > section) before = INT_MAX;
        section = of_tile;
        EXPECT_LE(i0, before);
        before = i0;
      }
      for (const int times : seen) EXPECT_EQ(times, 1);
      std::fill(seen.begin(), seen.end(), 0);
      for (int block = 0; block < order.blocks; ++block) {
        for (int round = 0, tile = 0; (tile = order.tile(round, block)) < order.tiles; ++round) {
          ++seen[static_cast<size_t>(tile)];
          work[static_cast<size_t>(block)] += order.at(tile).i0 + kRows;
        }
      }
      for (const int times : seen) EXPECT_EQ(times, 1);
      const auto [least, most] = std::minmax_element(work.begin(), work.end());
      const int longest = (order.tiles_of_sequence - 1) * kRows + kRows;
      const bool is_whole =
          order.section * order.tiles_of_sequence % (2 * order.blocks) == 0 && batch % order.section == 0;
      EXPECT_LE(*most - *least, is_whole ? 0 : 2 * longest);
      whole += is_whole;
    }
  }
  EXPECT_GE(whole, 10);
}

TEST(DeviceFunctions, PairsOfBfloat16) {
  EXPECT_EQ(pack_bf16(1.0f, -2.0f), 0xc0003f80u);
}

}  // namespace
}  // namespace ladder
