// Tiles in strips: each element is where TMA puts it, where wgmma's descriptors look for it, and where ldmatrix reads it.
#include "tile/wgmma_strips.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>

#include "tile/fragment_map.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::tile {
namespace {

constexpr int kRows = 128;

/// Which 8 columns of which row lie at an address, of a tile of `columns` that begins at 0, as TMA writes it: a box for each strip, rows of
/// which the swizzle moves chunks of 16 bytes.
template <int kColumns>
std::map<uint32_t, Coord> copied_by_tma(int columns) {
  using Strips = WgmmaStrips<kColumns>;
  std::map<uint32_t, Coord> tile;
  for (int strip = 0; strip < Strips::of(columns); ++strip) {
    for (int row = 0; row < kRows; ++row) {
      for (int chunk = 0; chunk < kColumns / 8; ++chunk) {
        const int at = strip * kRows * Strips::kRowBytes + row * Strips::kRowBytes + chunk * kChunkBytes;
        tile[swizzled_address(Strips::kSwizzle, static_cast<uint32_t>(at))] = {row,
                                                                               strip * kColumns + chunk * 8};
      }
    }
  }
  return tile;
}

template <class T>
class WgmmaStripsOf : public testing::Test {};
template <int kColumns>
struct Columns {
  static constexpr int kValue = kColumns;
};
using Widths = testing::Types<Columns<64>, Columns<32>, Columns<16>>;
TYPED_TEST_SUITE(WgmmaStripsOf, Widths);

TYPED_TEST(WgmmaStripsOf, FillTheTileOnce) {
  using Strips = WgmmaStrips<TypeParam::kValue>;
  for (const int columns : {64, 96, 128, 192}) {
    const auto tile = copied_by_tma<TypeParam::kValue>(columns);
    const int bytes = Strips::of(columns) * kRows * Strips::kRowBytes;
    EXPECT_EQ(tile.size(), static_cast<size_t>(bytes / kChunkBytes));
    EXPECT_EQ(tile.rbegin()->first, static_cast<uint32_t>(bytes - kChunkBytes));
  }
}

TYPED_TEST(WgmmaStripsOf, StepsOfKMajorOperands) {
  using Strips = WgmmaStrips<TypeParam::kValue>;
  const auto tile = copied_by_tma<TypeParam::kValue>(96);
  for (int step = 0; step < 96 / 16; ++step) {
    WgmmaDescriptor d = wgmma_k_major(0, Strips::kSwizzle);
    d.start += static_cast<uint32_t>(Strips::column_at(16 * step, kRows));
    for (int row = 0; row < kRows; ++row) {
      for (int chunk = 0; chunk < 2; ++chunk)
        ASSERT_EQ(tile.at(wgmma_k_major_address(d, row, chunk)), (Coord{row, 16 * step + 8 * chunk}));
    }
  }
}

/// Slices of MN-major operands begin at a strip, or 64 bytes inside one.
TYPED_TEST(WgmmaStripsOf, SlicesOfMnMajorOperands) {
  using Strips = WgmmaStrips<TypeParam::kValue>;
  const auto tile = copied_by_tma<TypeParam::kValue>(96);
  for (const auto& [column, width] : {std::pair(0, 48), {48, 48}, {0, 96}, {32, 32}, {64, 32}}) {
    const bool crosses = column % TypeParam::kValue + width > TypeParam::kValue;
    if (column % TypeParam::kValue != 0 && crosses) continue;  // no descriptor says that
    const WgmmaDescriptor d =
        wgmma_mn_major(static_cast<uint32_t>(Strips::column_at(column, kRows)), Strips::kSwizzle, kRows);
    for (int k = 0; k < kRows; ++k) {
      for (int chunk = 0; chunk < width / 8; ++chunk)
        ASSERT_EQ(tile.at(wgmma_mn_major_address(d, k, chunk)), (Coord{k, column + 8 * chunk}));
    }
  }
}

/// Lanes 0 to 7 give the rows of the matrix that becomes register 0, the next those of register 1, and so on.
TYPED_TEST(WgmmaStripsOf, LanesReadOperandA) {
  using Strips = WgmmaStrips<TypeParam::kValue>;
  const auto tile = copied_by_tma<TypeParam::kValue>(96);
  for (int step = 0; step < 96 / 16; ++step) {
    for (int row = 0; row < kRows; row += 16) {
      for (int thread = 0; thread < kWarpLanes; ++thread) {
        for (int reg = 0; reg < WgmmaOperandA::kRegs; ++reg) {
          const int giver = reg * 8 + thread / 4;  // ldmatrix: the lane whose row holds what `thread` gets
          const Coord begin = tile.at(Strips::operand_a_at(16 * step, kRows, row, giver));
          const Coord wanted = WgmmaOperandA::at(thread, reg, 0);
          ASSERT_EQ((Coord{begin.row, begin.col + thread % 4 * 2}),
                    (Coord{row + wanted.row, 16 * step + wanted.col}));
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::tile
