// Swizzled layouts in a simulation of the banks of shared memory: the number of conflicts of each access
// pattern is asserted, with the swizzle and, for contrast, without.
#include "tile/swizzle.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shared_memory_banks.hpp"
#include "tile/fragment_map.hpp"
#include "tile/layout.hpp"

namespace fovea::tile {
namespace {

constexpr int kLargestRow = 64;  ///< chunks: head size 256 of 4 bytes

int plain_address(int row_bytes, int row, int chunk) {
  return row * row_bytes + chunk * kChunkBytes;
}
int swizzled_address_of(int row_bytes, int row, int chunk) {
  return row * row_bytes + (chunk ^ swizzle_of_row(row_bytes, row)) * kChunkBytes;
}

/// Rows of the kernels (head sizes 16 to 256, padded) and others, with the conflicts of unswizzled columns of
/// eight chunks.
struct RowCase {
  int bytes;
  int group;                    ///< chunks that the swizzle permutes
  int conflicts_of_plain_rows;  ///< cycles beyond the first, eight rows of one column
};
constexpr RowCase kRowCases[] = {
    {16, 1, 0},  {32, 2, 1},  {48, 1, 0},  {64, 4, 3},  {80, 1, 0},  {96, 2, 1},  {128, 8, 7}, {160, 2, 1},
    {192, 4, 3}, {256, 8, 7}, {320, 4, 3}, {384, 8, 7}, {512, 8, 7}, {640, 8, 7}, {768, 8, 7}, {1024, 8, 7},
};

TEST(SharedMemoryBanks, TheSimulationCounts) {
  std::vector<int> lanes(32);
  const auto fill = [&](auto address) {
    for (int lane = 0; lane < 32; ++lane) lanes[static_cast<size_t>(lane)] = address(lane);
  };
  fill([](int lane) { return lane * 4; });
  EXPECT_EQ(bank_conflicts(lanes, 4), 0);
  fill([](int) { return 400; });  // one word for all
  EXPECT_EQ(bank_conflicts(lanes, 4), 0);
  fill([](int lane) { return lane * 8; });
  EXPECT_EQ(bank_conflicts(lanes, 4), 1);
  EXPECT_EQ(bank_conflicts(lanes, 8), 0);
  fill([](int lane) { return lane * 128; });
  EXPECT_EQ(bank_conflicts(lanes, 4), 31);
  EXPECT_EQ(bank_conflicts(lanes, 8), 2 * 15);
  EXPECT_EQ(bank_conflicts(lanes, 16), 4 * 7);
  fill([](int lane) { return lane * 132; });  // the classic padding
  EXPECT_EQ(bank_conflicts(lanes, 4), 0);
  fill([](int lane) { return lane * 16; });
  EXPECT_EQ(bank_conflicts(lanes, 16), 0);
}

TEST(Swizzle, GroupsOfTheRows) {
  for (const RowCase& c : kRowCases) EXPECT_EQ(swizzle_group(c.bytes), c.group) << c.bytes;
}

/// Every row keeps its chunks, every aligned group of chunks its members, and twice is nothing.
TEST(Swizzle, PermutesWithinGroupsOfARow) {
  for (int chunks = 1; chunks <= kLargestRow; ++chunks) {
    const int bytes = chunks * kChunkBytes, group = swizzle_group(bytes);
    ASSERT_EQ(chunks % group, 0);
    for (int row = 0; row < 64; ++row) {
      std::vector<bool> taken(static_cast<size_t>(chunks));
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int physical = chunk ^ swizzle_of_row(bytes, row);
        ASSERT_LT(physical, chunks);
        ASSERT_EQ(physical / group, chunk / group);
        ASSERT_EQ(physical ^ swizzle_of_row(bytes, row), chunk);
        ASSERT_FALSE(taken[static_cast<size_t>(physical)]);
        taken[static_cast<size_t>(physical)] = true;
      }
    }
  }
}

/// What ldmatrix, plain or .trans, reads for one 8x8 matrix: eight rows, one chunk of each.
TEST(Swizzle, EightRowsOfOneChunkMeetNoBankTwice) {
  for (int chunks = 1; chunks <= kLargestRow; ++chunks) {
    const int bytes = chunks * kChunkBytes;
    for (int first_row = 0; first_row < 64; ++first_row) {  // any, not only multiples of 8
      for (int chunk = 0; chunk < chunks; ++chunk) {
        std::vector<int> lanes;
        for (int row = first_row; row < first_row + 8; ++row)
          lanes.push_back(swizzled_address_of(bytes, row, chunk));
        ASSERT_EQ(bank_conflicts(lanes, 16), 0)
            << bytes << " bytes, row " << first_row << ", chunk " << chunk;
      }
    }
  }
}

TEST(Swizzle, WithoutItEightRowsOfOneChunkConflict) {
  for (const RowCase& c : kRowCases) {
    for (int first_row = 0; first_row < 16; ++first_row) {
      for (int chunk = 0; chunk < c.bytes / kChunkBytes; ++chunk) {
        std::vector<int> lanes;
        for (int row = first_row; row < first_row + 8; ++row)
          lanes.push_back(plain_address(c.bytes, row, chunk));
        ASSERT_EQ(bank_conflicts(lanes, 16), c.conflicts_of_plain_rows) << c.bytes;
      }
    }
  }
}

/// The four matrices of an x4, in both orders that fragments are read in.
TEST(Swizzle, LdmatrixX4) {
  for (const RowCase& c : kRowCases) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int chunk = 0; chunk + 1 < c.bytes / kChunkBytes; ++chunk) {
        for (const bool down : {true, false}) {
          std::vector<int> swizzled, plain;
          for (int lane = 0; lane < 32; ++lane) {
            const ChunkCoord at = down ? ldmatrix_down_first(lane) : ldmatrix_across_first(lane);
            swizzled.push_back(swizzled_address_of(c.bytes, first_row + at.row, chunk + at.chunk));
            plain.push_back(plain_address(c.bytes, first_row + at.row, chunk + at.chunk));
          }
          ASSERT_EQ(bank_conflicts(swizzled, 16), 0) << c.bytes;
          ASSERT_EQ(bank_conflicts(plain, 16), 4 * c.conflicts_of_plain_rows) << c.bytes;
        }
      }
    }
  }
}

/// cp.async and st.shared of 16 bytes, lanes in the order of TileLayout::copied_chunk: no conflict with the
/// swizzle, and none without: it costs the copies nothing.
TEST(Swizzle, CopiesOfRows) {
  for (int chunks = 1; chunks <= kLargestRow; ++chunks) {
    const int bytes = chunks * kChunkBytes;
    for (int first = 0; first + 32 <= 32 * chunks; first += 8) {  // any start that whole phases may have
      std::vector<int> swizzled, plain;
      for (int index = first; index < first + 32; ++index) {
        swizzled.push_back(swizzled_address_of(bytes, index / chunks, index % chunks));
        plain.push_back(plain_address(bytes, index / chunks, index % chunks));
      }
      ASSERT_EQ(bank_conflicts(swizzled, 16), 0) << bytes << " bytes from chunk " << first;
      ASSERT_EQ(bank_conflicts(plain, 16), 0) << bytes << " bytes from chunk " << first;
    }
  }
}

/// Accumulators rounded to 16 bits: each lane stores two neighbours, 4 bytes, of an m16n8 tile; so does the
/// epilogue, and the backward with P and dS.
TEST(Swizzle, StoresOfRoundedAccumulators) {
  for (const RowCase& c : kRowCases) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int chunk = 0; chunk < c.bytes / kChunkBytes; ++chunk) {
        std::vector<int> swizzled, plain;
        for (int lane = 0; lane < 32; ++lane) {
          const Coord at = AccumulatorM16N8::at(lane, 0);
          swizzled.push_back(swizzled_address_of(c.bytes, first_row + at.row, chunk) + at.col * 2);
          plain.push_back(plain_address(c.bytes, first_row + at.row, chunk) + at.col * 2);
        }
        ASSERT_EQ(bank_conflicts(swizzled, 4), 0) << c.bytes;
        ASSERT_EQ(bank_conflicts(plain, 4), c.conflicts_of_plain_rows) << c.bytes;
      }
    }
  }
}

/// Accumulators in float32, two neighbours a lane, 8 bytes: half a warp stores two chunks of four rows, for
/// which the swizzle is not made.
TEST(Swizzle, StoresOfFloat32Accumulators) {
  struct {
    int bytes, swizzled, plain;
  } constexpr kCases[] = {{32, 0, 0},  {64, 2, 2},  {96, 0, 0},  {128, 2, 6}, {192, 2, 2},
                          {256, 2, 6}, {384, 2, 6}, {512, 2, 6}, {768, 2, 6}, {1024, 2, 6}};
  for (const auto& c : kCases) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int chunk = 0; chunk < c.bytes / kChunkBytes; chunk += 2) {
        std::vector<int> swizzled, plain;
        for (int lane = 0; lane < 32; ++lane) {
          const Coord at = AccumulatorM16N8::at(lane, 0);
          swizzled.push_back(swizzled_address_of(c.bytes, first_row + at.row, chunk + at.col / 4) +
                             at.col % 4 * 4);
          plain.push_back(plain_address(c.bytes, first_row + at.row, chunk + at.col / 4) + at.col % 4 * 4);
        }
        ASSERT_EQ(bank_conflicts(swizzled, 8), c.swizzled) << c.bytes;
        ASSERT_EQ(bank_conflicts(plain, 8), c.plain) << c.bytes;
      }
    }
  }
}

/// tf32 operands read as words. K: lanes are 8 rows n by 4 columns k. V: lanes are 4 rows k by 8 columns n,
/// where the rows of the register are the keys 2t (or 2t + 1) that go with accumulators, or t (or t + 4).
TEST(Swizzle, LoadsOfTf32Operands) {
  struct {
    int bytes, v_by_pairs, v_in_order;
  } constexpr kCases[] = {{64, 1, 1},  {128, 0, 1}, {256, 0, 1}, {384, 0, 1},
                          {512, 0, 1}, {768, 0, 1}, {1024, 0, 1}};
  for (const auto& c : kCases) {
    for (int first_row = 0; first_row < 64; first_row += 8) {
      for (int col = 0; col < c.bytes / 4; col += 8) {
        for (int reg = 0; reg < 2; ++reg) {
          std::vector<int> k, v_by_pairs, v_in_order;
          const auto address = [&](int row, int column) {
            return swizzled_address_of(c.bytes, first_row + row, (col + column) / 4) + (col + column) % 4 * 4;
          };
          for (int lane = 0; lane < 32; ++lane) {
            const Coord b = MmaM16N8K8Tf32::b(lane, reg, 0);
            k.push_back(address(b.col, b.row));
            v_by_pairs.push_back(address(tf32_key_of_k(b.row), b.col));
            v_in_order.push_back(address(b.row, b.col));
          }
          ASSERT_EQ(bank_conflicts(k, 4), 0) << c.bytes;
          ASSERT_EQ(bank_conflicts(v_by_pairs, 4), c.v_by_pairs) << c.bytes;
          ASSERT_EQ(bank_conflicts(v_in_order, 4), c.v_in_order) << c.bytes;
        }
      }
    }
  }
}

template <class Layout>
void check_layout() {
  SCOPED_TRACE(std::to_string(Layout::kRowBytes) + " bytes a row");
  std::vector<bool> taken(static_cast<size_t>(Layout::kBytes / Layout::kElementBytes));
  for (int row = 0; row < Layout::kRows; ++row) {
    for (int col = 0; col < Layout::kColumns; ++col) {
      const int offset = Layout::offset(row, col);
      ASSERT_GE(offset, 0);
      ASSERT_LT(offset, Layout::kBytes);
      ASSERT_EQ(offset % Layout::kElementBytes, 0);
      ASSERT_FALSE(taken[static_cast<size_t>(offset / Layout::kElementBytes)]);
      taken[static_cast<size_t>(offset / Layout::kElementBytes)] = true;
      ASSERT_EQ(Layout::at(offset), (Coord{row, col}));
    }
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
      ASSERT_EQ(Layout::chunk_offset(row, chunk), swizzled_address_of(Layout::kRowBytes, row, chunk));
      ASSERT_EQ(Layout::chunk_offset(row, chunk), Layout::offset(row, chunk * Layout::kChunkElements));
      // What kernels count on that keep one address and add constants to it.
      if (row + 8 < Layout::kRows) {
        ASSERT_EQ(Layout::chunk_offset(row + 8, chunk),
                  Layout::chunk_offset(row, chunk) + 8 * Layout::kRowBytes);
      }
      const int group = swizzle_group(Layout::kRowBytes);
      if (chunk + group < Layout::kChunks) {
        ASSERT_EQ(Layout::chunk_offset(row, chunk + group),
                  Layout::chunk_offset(row, chunk) + group * kChunkBytes);
      }
      ASSERT_EQ(swizzled_chunk<Layout::kRowBytes>(row, chunk),
                swizzled_chunk<Layout::kRowBytes>(row, 0) ^ chunk);
    }
  }
  for (int index = 0; index < Layout::kRows * Layout::kChunks; ++index) {
    const Coord chunk = Layout::copied_chunk(index);
    ASSERT_EQ(chunk.row * Layout::kChunks + chunk.col, index);
    ASSERT_LT(chunk.col, Layout::kChunks);
  }
}

TEST(TileLayout, ElementsAndOffsetsAreOneToOne) {
  // 16-bit heads, among them those that no kernel pads to.
  check_layout<TileLayout<64, 16, 2>>();
  check_layout<TileLayout<64, 24, 2>>();
  check_layout<TileLayout<64, 32, 2>>();
  check_layout<TileLayout<64, 40, 2>>();
  check_layout<TileLayout<64, 48, 2>>();
  check_layout<TileLayout<64, 64, 2>>();
  check_layout<TileLayout<64, 80, 2>>();
  check_layout<TileLayout<64, 96, 2>>();
  check_layout<TileLayout<64, 128, 2>>();
  check_layout<TileLayout<64, 160, 2>>();
  check_layout<TileLayout<64, 192, 2>>();
  check_layout<TileLayout<64, 256, 2>>();
  // 32-bit heads.
  check_layout<TileLayout<32, 16, 4>>();
  check_layout<TileLayout<32, 32, 4>>();
  check_layout<TileLayout<32, 64, 4>>();
  check_layout<TileLayout<32, 96, 4>>();
  check_layout<TileLayout<32, 128, 4>>();
  check_layout<TileLayout<32, 192, 4>>();
  check_layout<TileLayout<32, 256, 4>>();
  static_assert(TileLayout<64, 64, 2>::offset(3, 9) == 3 * 128 + (1 ^ 3) * 16 + 2);
}

/// The modes of TMA bit by bit: 128B xors address bits 4, 5, 6 with 7, 8, 9; 64B 4, 5 with 7, 8; 32B 4
/// with 7.
TEST(SwizzleMode, XorsAddressBits) {
  struct {
    SwizzleMode mode;
    std::vector<std::pair<int, int>> bits;
  } const kCases[] = {{SwizzleMode::kNone, {}},
                      {SwizzleMode::k32, {{4, 7}}},
                      {SwizzleMode::k64, {{4, 7}, {5, 8}}},
                      {SwizzleMode::k128, {{4, 7}, {5, 8}, {6, 9}}}};
  for (const auto& c : kCases) {
    for (uint32_t address = 0; address < 8192; ++address) {
      uint32_t expected = address;
      for (const auto& [to, from] : c.bits) expected ^= ((address >> from) & 1u) << to;
      ASSERT_EQ(swizzled_address(c.mode, address), expected);
      ASSERT_EQ(swizzled_address(c.mode, expected), address);  // an involution
    }
    ASSERT_EQ(swizzled_address(c.mode, 227u * 1024 - 16) >> 7, (227u * 1024 - 16) >> 7);
  }
}

/// A tile whose rows are as long as the mode's is swizzled as TMA would do it.
TEST(SwizzleMode, IsTheSwizzleOfRowsOfItsLength) {
  const auto check = [](auto layout, SwizzleMode mode) {
    using Layout = decltype(layout);
    ASSERT_EQ(Layout::kRowBytes, swizzle_row_bytes(mode));
    for (int row = 0; row < Layout::kRows; ++row) {
      for (int col = 0; col < Layout::kColumns; ++col) {
        const auto logical = static_cast<uint32_t>(row * Layout::kRowBytes + col * 2);
        ASSERT_EQ(static_cast<uint32_t>(Layout::offset(row, col)), swizzled_address(mode, logical));
      }
    }
  };
  check(TileLayout<64, 64, 2>{}, SwizzleMode::k128);
  check(TileLayout<64, 32, 2>{}, SwizzleMode::k64);
  check(TileLayout<64, 16, 2>{}, SwizzleMode::k32);
  check(TileLayout<64, 8, 2>{}, SwizzleMode::kNone);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k128), 1024);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k64), 512);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k32), 256);
}

}  // namespace
}  // namespace fovea::tile
