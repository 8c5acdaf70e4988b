// Device functions of the harness, each by itself, on the emulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder {
namespace {

using Lanes = std::array<float, 32>;

/// `function` of what each lane holds, in a warp.
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

TEST(DeviceFunctions, PairsOfBfloat16) {
  EXPECT_EQ(pack_bf16(1.0f, -2.0f), 0xc0003f80u);
}

}  // namespace
}  // namespace ladder
