// Compares wgmma's fragments and descriptors with the figures, tables and worked examples of the PTX manual.
#include "tile/wgmma_map.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "shared_memory_banks.hpp"
#include "tile/shared_tile.hpp"

namespace fovea::tile {
namespace {

// The figures of m64nNk16: which thread holds the first element of each row, and what each column adds to that. D has
// elements d0, d1, ... a thread, and every eight columns add 4; A has elements a0 to a7.
struct Holder {
  int thread, element;
};
// clang-format off
constexpr std::array<Holder, 64> kRowsOfFigure = {{
    {0, 0},  {4, 0},  {8, 0},   {12, 0},  {16, 0},  {20, 0},  {24, 0},  {28, 0},
    {0, 2},  {4, 2},  {8, 2},   {12, 2},  {16, 2},  {20, 2},  {24, 2},  {28, 2},
    {32, 0}, {36, 0}, {40, 0},  {44, 0},  {48, 0},  {52, 0},  {56, 0},  {60, 0},
    {32, 2}, {36, 2}, {40, 2},  {44, 2},  {48, 2},  {52, 2},  {56, 2},  {60, 2},
    {64, 0}, {68, 0}, {72, 0},  {76, 0},  {80, 0},  {84, 0},  {88, 0},  {92, 0},
    {64, 2}, {68, 2}, {72, 2},  {76, 2},  {80, 2},  {84, 2},  {88, 2},  {92, 2},
    {96, 0}, {100, 0}, {104, 0}, {108, 0}, {112, 0}, {116, 0}, {120, 0}, {124, 0},
    {96, 2}, {100, 2}, {104, 2}, {108, 2}, {112, 2}, {116, 2}, {120, 2}, {124, 2},
}};
constexpr std::array<Holder, 8> kColumnsOfD = {{{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {3, 1}}};
constexpr std::array<Holder, 16> kColumnsOfA = {{{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 0}, {2, 1}, {3, 0}, {3, 1},
                                                 {0, 4}, {0, 5}, {1, 4}, {1, 5}, {2, 4}, {2, 5}, {3, 4}, {3, 5}}};
// clang-format on

TEST(WgmmaMap, AccumulatorsOfTheManual) {
  EXPECT_EQ(WgmmaAccumulator::regs(128), 64);
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < 256; ++col) {
      const Holder& r = kRowsOfFigure[static_cast<size_t>(row)];
      const Holder& c = kColumnsOfD[static_cast<size_t>(col % 8)];
      const int thread = r.thread + c.thread, reg = r.element + c.element + col / 8 * 4;
      ASSERT_EQ(WgmmaAccumulator::at(thread, reg), (Coord{row, col}));
      ASSERT_EQ(WgmmaAccumulator::slot(row, col), (WarpgroupSlot{thread, reg, 0}));
      ASSERT_LT(reg, WgmmaAccumulator::regs(256));
    }
  }
}

TEST(WgmmaMap, OperandAOfTheManual) {
  for (int row = 0; row < 64; ++row) {
    for (int col = 0; col < 16; ++col) {
      const Holder& r = kRowsOfFigure[static_cast<size_t>(row)];
      const Holder& c = kColumnsOfA[static_cast<size_t>(col)];
      const int thread = r.thread + c.thread, element = r.element + c.element;
      ASSERT_EQ(WgmmaOperandA::at(thread, element / 2, element % 2), (Coord{row, col}));
      ASSERT_EQ(WgmmaOperandA::slot(row, col), (WarpgroupSlot{thread, element / 2, element % 2}));
    }
  }
}

/// P stays in its registers: the accumulators of 16 keys, rounded, are operand A of that step.
TEST(WgmmaMap, AccumulatorsAreOperandA) {
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    for (int step = 0; step < 16; ++step) {
      for (int reg = 0; reg < WgmmaOperandA::kRegs; ++reg) {
        for (int half = 0; half < 2; ++half) {
          Coord a = WgmmaOperandA::at(thread, reg, half);
          a.col += 16 * step;
          ASSERT_EQ(WgmmaAccumulator::at(thread, wgmma_accumulator_of_a(step, reg, half)), a);
        }
      }
    }
  }
}

/// Of 8 bits too, in the order of keys that key_at_place gives V.
TEST(WgmmaMap, AccumulatorsAreOperandAOf8Bits) {
  std::array<bool, 16> used{};
  for (int at = 0; at < 16; ++at) used[static_cast<size_t>(key_at_place(at))] = true;
  EXPECT_TRUE(std::all_of(used.begin(), used.end(), [](bool x) { return x; }));
  for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
    for (int step = 0; step < 8; ++step) {
      for (int reg = 0; reg < WgmmaOperandA8::kRegs; ++reg) {
        for (int byte = 0; byte < 4; ++byte) {
          Coord a = WgmmaOperandA8::at(thread, reg, byte);
          a.col = 32 * step + a.col / 16 * 16 + key_at_place(a.col % 16);
          ASSERT_EQ(WgmmaAccumulator::at(thread, wgmma_accumulator_of_a8(step, reg, byte)), a);
        }
      }
    }
  }
}

TEST(WgmmaDescriptor, FieldsAreWhereTheManualPutsThem) {
  const auto bits = [](uint64_t value, int low, int high) {
    return (value >> low) & ((uint64_t{1} << (high - low + 1)) - 1);
  };
  struct {
    SwizzleMode mode;
    uint64_t bits;
  } constexpr kModes[] = {
      {SwizzleMode::kNone, 0}, {SwizzleMode::k128, 1}, {SwizzleMode::k64, 2}, {SwizzleMode::k32, 3}};
  for (const auto& m : kModes) {
    for (uint32_t start = 0; start < (1u << 18); start += 16 * 37) {
      for (const uint32_t bytes : {16u, 128u, 1024u, 8192u, 0x3FFF0u}) {
        const uint64_t encoded = WgmmaDescriptor{start, bytes, bytes / 2, m.mode, 5}.encode();
        ASSERT_EQ(bits(encoded, 0, 13), start >> 4);
        ASSERT_EQ(bits(encoded, 14, 15), 0u);
        ASSERT_EQ(bits(encoded, 16, 29), bytes >> 4);
        ASSERT_EQ(bits(encoded, 30, 31), 0u);
        ASSERT_EQ(bits(encoded, 32, 45), (bytes / 2) >> 4);
        ASSERT_EQ(bits(encoded, 46, 48), 0u);
        ASSERT_EQ(bits(encoded, 49, 51), 5u);
        ASSERT_EQ(bits(encoded, 52, 61), 0u);
        ASSERT_EQ(bits(encoded, 62, 63), m.bits);
      }
    }
  }
  // A whole one by hand: 128B, eight rows 1024 bytes apart, at 0x4000.
  EXPECT_EQ(wgmma_k_major(0x4000, SwizzleMode::k128).encode(), 0x4000'0040'0001'0400u);
  EXPECT_EQ(wgmma_k_major(0x100, SwizzleMode::k128).encode_from(0x3f0),
            wgmma_k_major(0x4000, SwizzleMode::k128).encode());
  for (uint32_t start = 0; start < 8192; start += 128) {
    EXPECT_EQ(wgmma_base_offset(start), static_cast<int>(start / 128 % 8));
  }
}

/// A layout as the manual writes it: sizes and strides, in elements, of the digits of each coordinate.
struct Digits {
  std::vector<int> sizes, strides;
  int offset(int index) const {
    int sum = 0;
    for (size_t d = 0; d < sizes.size(); ++d) {
      sum += index % sizes[d] * strides[d];
      index /= sizes[d];
    }
    return sum;
  }
  int size() const {
    int product = 1;
    for (const int s : sizes) product *= s;
    return product;
  }
};

/// The worked examples of the manual ("Strides"): exact layout, and LBO and SBO as they are encoded.
TEST(WgmmaDescriptor, ExamplesOfTheManual) {
  struct Example {
    SwizzleMode mode;
    int element_bytes;
    bool k_major;
    Digits mn, k;
    uint32_t leading_field, stride_field;
  };
  const Example kExamples[] = {
      {SwizzleMode::kNone, 4, true, {{8, 2}, {4, 32}}, {{4, 4}, {1, 64}}, 16, 8},
      {SwizzleMode::k32, 4, true, {{8, 2}, {8, 64}}, {{4, 2}, {1, 4}}, 1, 16},
      {SwizzleMode::kNone, 2, false, {{8, 1, 2}, {1, 8, 64}}, {{8, 2}, {8, 128}}, 16, 8},
      {SwizzleMode::k32, 2, false, {{8, 2, 2}, {1, 8, 128}}, {{8, 2}, {16, 256}}, 16, 32},
      {SwizzleMode::k64, 2, false, {{8, 4, 2}, {1, 8, 256}}, {{8, 2}, {32, 512}}, 32, 64},
  };
  for (const Example& e : kExamples) {
    const WgmmaDescriptor d{2048, e.leading_field * 16, e.stride_field * 16, e.mode, 0};
    ASSERT_EQ(d.encode() >> 16 & 0x3FFF, e.leading_field);
    ASSERT_EQ(d.encode() >> 32 & 0x3FFF, e.stride_field);
    const int of_chunk = 16 / e.element_bytes;
    for (int mn = 0; mn < e.mn.size(); ++mn) {
      for (int k = 0; k < e.k.size(); ++k) {
        const auto linear = static_cast<uint32_t>((e.mn.offset(mn) + e.k.offset(k)) * e.element_bytes);
        const uint32_t expected = swizzled_address(e.mode, 2048 + linear);
        const uint32_t chunk = e.k_major ? wgmma_k_major_address(d, mn, k / of_chunk)
                                         : wgmma_mn_major_address(d, k, mn / of_chunk);
        const int inside = (e.k_major ? k : mn) % of_chunk * e.element_bytes;
        ASSERT_EQ(chunk + static_cast<uint32_t>(inside), expected) << "mn " << mn << ", k " << k;
      }
    }
  }
}

/// What TMA (and SharedTile) writes is what the descriptors read: rows of 64, 32 or 16 elements of 16 bits.
template <class Layout>
void check_tile(SwizzleMode mode) {
  constexpr uint32_t kStart = 96 * 1024;
  static_assert(kStart % 1024 == 0);
  const WgmmaDescriptor k_major = wgmma_k_major(kStart, mode);
  const WgmmaDescriptor mn_major = wgmma_mn_major(kStart, mode, Layout::kRows);
  for (int row = 0; row < Layout::kRows; ++row) {
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
      const uint32_t expected = kStart + Layout::offset(row, chunk);
      ASSERT_EQ(wgmma_k_major_address(k_major, row, chunk), expected);    // Q, K: rows are m or n
      ASSERT_EQ(wgmma_mn_major_address(mn_major, row, chunk), expected);  // V: rows are k
      // The next tile to the right, for head sizes of several.
      ASSERT_EQ(wgmma_mn_major_address(mn_major, row, chunk + Layout::kChunks), expected + Layout::kBytes);
    }
  }
  // Steps of 16 k: 32 bytes along K-major rows, 16 rows of MN-major ones. The sum of the encoded words is the encoded
  // sum.
  for (int step = 0; step < Layout::kChunks / 2; ++step) {
    WgmmaDescriptor moved = k_major;
    moved.start += static_cast<uint32_t>(32 * step);
    ASSERT_EQ(moved.encode(), k_major.encode() + wgmma_start_step(static_cast<uint32_t>(32 * step)));
    for (int row = 0; row < Layout::kRows; ++row) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        ASSERT_EQ(wgmma_k_major_address(moved, row, chunk),
                  wgmma_k_major_address(k_major, row, step * 2 + chunk));
      }
    }
  }
  for (int step = 0; step < Layout::kRows / 16; ++step) {
    const auto bytes = static_cast<uint32_t>(step * 16 * Layout::kRowBytes);
    WgmmaDescriptor moved = mn_major;
    moved.start += bytes;
    ASSERT_EQ(moved.encode(), mn_major.encode() + wgmma_start_step(bytes));
    for (int row = 0; row < 16; ++row) {
      for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
        ASSERT_EQ(wgmma_mn_major_address(moved, row, chunk),
                  wgmma_mn_major_address(mn_major, step * 16 + row, chunk));
      }
    }
  }
  // A core matrix is eight rows of one chunk. It has no bank conflict; without a swizzle such rows would have.
  for (int row = 0; row < Layout::kRows; row += 8) {
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
      std::vector<int> swizzled, plain;
      for (int r = row; r < row + 8; ++r) {
        swizzled.push_back(static_cast<int>(wgmma_k_major_address(k_major, r, chunk)));
        plain.push_back(r * Layout::kRowBytes + chunk * kChunkBytes);
      }
      ASSERT_EQ(bank_conflicts(swizzled, 16), 0);
      ASSERT_EQ(bank_conflicts(plain, 16), Layout::kChunks - 1);
    }
  }
}

TEST(WgmmaDescriptor, ReadsWhatTmaWrites) {
  check_tile<SharedTile<64, 64>>(SwizzleMode::k128);
  check_tile<SharedTile<176, 64>>(SwizzleMode::k128);
  check_tile<SharedTile<64, 32>>(SwizzleMode::k64);
  check_tile<SharedTile<64, 16>>(SwizzleMode::k32);
}

/// Without swizzle a core matrix is 128 bytes in a row.
TEST(WgmmaDescriptor, CoreMatricesWithoutSwizzle) {
  const WgmmaDescriptor d{0, 128, 256, SwizzleMode::kNone, 0};
  for (int row = 0; row < 64; row += 8) {
    for (int chunk = 0; chunk < 2; ++chunk) {
      std::vector<int> lanes;
      for (int r = row; r < row + 8; ++r)
        lanes.push_back(static_cast<int>(wgmma_k_major_address(d, r, chunk)));
      ASSERT_EQ(lanes[0], row / 8 * 256 + chunk * 128);
      ASSERT_EQ(bank_conflicts(lanes, 16), 0);
    }
  }
}

}  // namespace
}  // namespace fovea::tile
