// Swizzles in a simulation of the banks of shared memory. The tests assert the number of conflicts of each access pattern
// with the swizzle and, for contrast, without; and those of the kernels' tiles (SharedTile) at the addresses that copies,
// ldmatrix and loads of tf32 fragments use.
#include "tile/swizzle.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shared_memory_banks.hpp"
#include "tile/fragment_map.hpp"
#include "tile/shared_tile.hpp"

namespace fovea::tile {
namespace {

constexpr int kLargestRow = 64;  ///< chunks: head size 256 of 4 bytes

int plain_address(int row_bytes, int row, int chunk) {
  return row * row_bytes + chunk * kChunkBytes;
}
int swizzled_address_of(int row_bytes, int row, int chunk) {
  return row * row_bytes + (chunk ^ swizzle_of_row(row_bytes, row)) * kChunkBytes;
}

/// Rows of the kernels (head sizes 16 to 256, padded) and others, with the conflicts of unswizzled columns of eight
/// chunks.
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

/// The swizzle keeps every chunk in its row and in its aligned group, and is its own inverse.
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

/// The four matrices of an x4, in both orders in which kernels read fragments.
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

/// cp.async and st.shared of 16 bytes, lane after lane, have no conflict with the swizzle and none without, so the swizzle
/// costs copies nothing.
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

template <class Tile>
void check_tile() {
  SCOPED_TRACE(std::to_string(Tile::kRowBytes) + " bytes a row");
  std::vector<bool> taken(static_cast<size_t>(Tile::kBytes / Tile::kElementBytes));
  for (int row = 0; row < Tile::kRows; ++row) {
    for (int col = 0; col < Tile::kColumns; ++col) {
      const uint32_t offset = Tile::element(row, col);
      ASSERT_LT(offset, uint32_t{Tile::kBytes});
      ASSERT_EQ(offset % Tile::kElementBytes, 0u);
      ASSERT_FALSE(taken[offset / Tile::kElementBytes]);
      taken[offset / Tile::kElementBytes] = true;
    }
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const int expected = Tile::kElementBytes == 2
                               ? swizzled_address_of(Tile::kRowBytes, row, chunk)
                               : row * Tile::kRowBytes + (chunk ^ swizzle_of_pairs(row)) * kChunkBytes;
      ASSERT_EQ(Tile::offset(row, chunk), static_cast<uint32_t>(expected));
      ASSERT_EQ(Tile::offset(row, chunk), Tile::element(row, chunk * Tile::kChunkElements));
      ASSERT_EQ(Tile::offset(row, chunk),
                static_cast<uint32_t>(Tile::index(row, chunk) * Tile::kElementBytes));
    }
  }
}

TEST(SharedTile, ElementsAndOffsetsAreOneToOne) {
  // 16-bit heads, among them those that no kernel pads to.
  check_tile<SharedTile<64, 16>>();
  check_tile<SharedTile<64, 24>>();
  check_tile<SharedTile<64, 32>>();
  check_tile<SharedTile<64, 40>>();
  check_tile<SharedTile<64, 48>>();
  check_tile<SharedTile<64, 64>>();
  check_tile<SharedTile<64, 80>>();
  check_tile<SharedTile<64, 96>>();
  check_tile<SharedTile<64, 128>>();
  check_tile<SharedTile<64, 160>>();
  check_tile<SharedTile<64, 192>>();
  check_tile<SharedTile<64, 256>>();
  // float32 heads.
  check_tile<SharedTile<32, 32, 4>>();
  check_tile<SharedTile<32, 64, 4>>();
  check_tile<SharedTile<32, 96, 4>>();
  check_tile<SharedTile<32, 128, 4>>();
  check_tile<SharedTile<32, 192, 4>>();
  check_tile<SharedTile<32, 256, 4>>();
  static_assert(SharedTile<64, 64>::element(3, 9) == 3 * 128 + (1 ^ 3) * 16 + 2);
}

/// Kernels keep one address a lane and reach the others by moved(). It is right everywhere in the tile, from every start
/// that shares no bit with the step, wherever the tile may begin.
template <class Tile>
void check_moved() {
  SCOPED_TRACE(std::to_string(Tile::kRowBytes) + " bytes a row");
  for (const uint32_t base : {0u, 128u, 1152u}) {
    for (int row = 0; row < 8; ++row) {
      for (int from = 0; from < Tile::kChunks; ++from) {
        for (int chunks = 0; from + chunks < Tile::kChunks; ++chunks) {
          if ((from & chunks & (Tile::kGroup - 1)) != 0) continue;
          for (int rows = 0; row + rows < Tile::kRows; rows += 8) {
            ASSERT_EQ(Tile::moved(base + Tile::offset(row, from), rows, chunks),
                      base + Tile::offset(row + rows, from + chunks));
          }
        }
      }
    }
  }
}

TEST(SharedTile, OneAddressReachesTheOthers) {
  check_moved<SharedTile<32, 32>>();
  check_moved<SharedTile<64, 64>>();
  check_moved<SharedTile<64, 96>>();
  check_moved<SharedTile<64, 128>>();
  check_moved<SharedTile<64, 192>>();
  check_moved<SharedTile<64, 256>>();
  check_moved<SharedTile<32, 64, 4>>();
}

/// Fragments of 16 x 16 by ldmatrix: the address of each step is that of its chunk, and no phase has a bank conflict. In
/// the backward each warp's fragments begin at a row and chunk of its own.
template <class Tile, LdmatrixOrder kOrder>
void check_fragments() {
  SCOPED_TRACE(std::to_string(Tile::kRowBytes) + " bytes a row");
  for (int first_row = 0; first_row + 16 <= Tile::kRows; first_row += 16) {
    for (int first_chunk = 0; first_chunk < Tile::kChunks; first_chunk += 2) {
      for (int rows = 0; first_row + rows + 16 <= Tile::kRows; rows += 16) {
        for (int step = 0; first_chunk + 2 * step < Tile::kChunks; ++step) {
          if ((first_chunk & (2 * step) & (Tile::kGroup - 1)) != 0) continue;
          std::vector<int> lanes;
          for (int lane = 0; lane < kWarpLanes; ++lane) {
            const ChunkCoord at = ldmatrix_chunk(kOrder, lane);
            const uint32_t address =
                FragmentAddresses<Tile, kOrder>(lane, first_row, first_chunk).at(1024, rows, step);
            ASSERT_EQ(address,
                      1024 + Tile::offset(first_row + rows + at.row, first_chunk + 2 * step + at.chunk));
            lanes.push_back(static_cast<int>(address));
          }
          ASSERT_EQ(bank_conflicts(lanes, 16), 0);
        }
      }
    }
  }
}

TEST(SharedTile, FragmentsMeetNoBankTwice) {
  const auto check = []<class Tile>(Tile) {
    check_fragments<Tile, LdmatrixOrder::kDownFirst>();
    check_fragments<Tile, LdmatrixOrder::kAcrossFirst>();
  };
  check(SharedTile<64, 32>());
  check(SharedTile<128, 64>());
  check(SharedTile<64, 96>());
  check(SharedTile<128, 128>());
  check(SharedTile<32, 192>());
  check(SharedTile<32, 256>());
}

/// Fragments of tf32, 16 bytes a lane: all rows, steps and blocks, along the rows and down them.
template <class Tile>
void check_tf32_fragments() {
  SCOPED_TRACE(std::to_string(Tile::kRowBytes) + " bytes a row");
  for (int row = 0; row < Tile::kRows; row += 8) {
    for (int chunk = 0; chunk < Tile::kChunks; chunk += 4) {
      std::vector<int> along, even, odd;
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        const auto address = [&](ChunkCoord at) {
          return static_cast<int>(Tile::offset(row + at.row, chunk + at.chunk));
        };
        along.push_back(address(tf32_chunk_along_rows(lane)));
        if (chunk % 8 != 0) continue;  // a block is eight chunks wide
        even.push_back(address(tf32_chunk_down_rows(lane, 0)));
        odd.push_back(address(tf32_chunk_down_rows(lane, 1)));
      }
      ASSERT_EQ(bank_conflicts(along, 16), 0);
      ASSERT_EQ(bank_conflicts(even, 16), 0);
      ASSERT_EQ(bank_conflicts(odd, 16), 0);
    }
  }
}

TEST(SharedTile, Tf32FragmentsMeetNoBankTwice) {
  check_tf32_fragments<SharedTile<64, 32, 4>>();
  check_tf32_fragments<SharedTile<32, 64, 4>>();
  check_tf32_fragments<SharedTile<16, 128, 4>>();
  check_tf32_fragments<SharedTile<16, 256, 4>>();
}

/// The threads of a CTA copy each chunk of a tile once, and no phase of a step has a bank conflict.
template <class Tile, int kThreads>
void check_copies() {
  SCOPED_TRACE(std::to_string(Tile::kRowBytes) + " bytes a row, " + std::to_string(kThreads) + " threads");
  using Share = CopyShare<Tile, kThreads>;
  std::vector<int> copies(static_cast<size_t>(Tile::kRows * Tile::kChunks));
  for (int step = 0; step < Share::kSteps; ++step) {
    for (int first = 0; first < kThreads; first += 8) {
      std::vector<int> lanes;
      for (int thread = first; thread < first + 8; ++thread) {
        const Share share(thread);
        if (!share.exists() || !share.has(step)) continue;
        const int row = share.row + step * Share::kRowsAtOnce;
        ++copies[static_cast<size_t>(row * Tile::kChunks + share.chunk)];
        lanes.push_back(static_cast<int>(Tile::offset(row, share.chunk)));
      }
      ASSERT_EQ(bank_conflicts(lanes, 16), 0);
    }
  }
  for (const int count : copies) ASSERT_EQ(count, 1);
}

TEST(SharedTile, CopiesTakeEachChunkOnce) {
  check_copies<SharedTile<64, 32>, 128>();
  check_copies<SharedTile<128, 64>, 128>();
  check_copies<SharedTile<64, 96>, 128>();
  check_copies<SharedTile<128, 96>, 256>();
  check_copies<SharedTile<128, 128>, 256>();
  check_copies<SharedTile<32, 192>, 128>();
  check_copies<SharedTile<64, 256>, 256>();
  check_copies<SharedTile<64, 576>, 128>();
  check_copies<SharedTile<32, 64, 4>, 128>();
  check_copies<SharedTile<16, 128, 4>, 128>();
}

/// The modes of TMA bit by bit: 128B xors address bits 4, 5, 6 with 7, 8, 9; 64B 4, 5 with 7, 8; 32B 4 with 7.
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
        ASSERT_EQ(Layout::element(row, col), swizzled_address(mode, logical));
      }
    }
  };
  check(SharedTile<64, 64>{}, SwizzleMode::k128);
  check(SharedTile<64, 32>{}, SwizzleMode::k64);
  check(SharedTile<64, 16>{}, SwizzleMode::k32);
  check(SharedTile<64, 8>{}, SwizzleMode::kNone);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k128), 1024);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k64), 512);
  EXPECT_EQ(swizzle_atom_bytes(SwizzleMode::k32), 256);
}

}  // namespace
}  // namespace fovea::tile
