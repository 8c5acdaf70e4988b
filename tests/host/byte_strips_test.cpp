// Where rows of bytes lie for wgmma, and how warps copy them there; which keys, columns and pieces the threads of fwd_decode_e4m3 hold.
#include "tile/byte_strips.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>

namespace fovea::tile {
namespace {

/// Chunks lie where the hardware looks for them, and copies of a warp, 16 rows at a time, go there.
template <int kColumns>
void expect_strips(int rows) {
  using Strips = ByteStrips<kColumns>;
  constexpr uint32_t kBase = 3 * 1024;
  std::set<uint32_t> places;
  for (int row = 0; row < rows; ++row) {
    for (int chunk = 0; chunk < Strips::kChunks; ++chunk) {
      const uint32_t at = Strips::chunk_at(kBase, rows, row, chunk);
      places.insert(at);
      EXPECT_LT(at, kBase + static_cast<uint32_t>(rows * kColumns));
      const WgmmaDescriptor step = Strips::step_of(kBase, rows, chunk / 2);
      EXPECT_EQ(wgmma_k_major_address(step, row, chunk % 2), at);
      const uint32_t piece = kBase + static_cast<uint32_t>(row / 16 * 16 * Strips::kStripColumns);
      const int in_piece = row % 16, i = in_piece / Strips::kRowsAtOnce;
      EXPECT_EQ(Strips::copied_to(piece, rows, in_piece % Strips::kRowsAtOnce, chunk, i), at);
      if (row % 64 == 0) {  // the rows from here on are an operand of their own
        const uint32_t first = kBase + static_cast<uint32_t>(row * Strips::kStripColumns);
        EXPECT_EQ(wgmma_k_major_address(Strips::step_of(first, rows, chunk / 2), 0, chunk % 2), at);
      }
    }
  }
  EXPECT_EQ(places.size(), static_cast<size_t>(rows * Strips::kChunks));
}

TEST(ByteStrips, LieWhereWgmmaReadsThem) {
  for (const int rows : {16, 32, 64, 128}) {
    expect_strips<64>(rows);
    expect_strips<128>(rows);
    expect_strips<256>(rows);
  }
}

/// A row and all of its pieces belong to one thread of four, each piece in a register of its own.
TEST(ByteStrips, GiveAThreadAllPiecesOfItsRows) {
  for (const int rows : {4, 8}) {
    std::set<int> columns;
    for (int row = 0; row < rows; ++row) {
      for (int piece = 0; piece < kPieces; ++piece) {
        const int column = column_of_piece(row, piece);
        columns.insert(column);
        for (int half = 0; half < 2; ++half) {
          const WarpgroupSlot slot = WgmmaAccumulator::slot(5 + 8 * half, column);
          EXPECT_EQ(slot.thread % 4, row % 4);
          EXPECT_EQ(slot.thread / 4, 5);
          EXPECT_EQ(slot.reg, register_of_piece(row / 4, piece, half));
        }
      }
    }
    EXPECT_EQ(columns.size(), static_cast<size_t>(rows * kPieces));
    EXPECT_EQ(*columns.rbegin(), rows * kPieces - 1);
  }
}

/// ldmatrix.trans gives lane l columns 2 (l / 4) and the next of keys 2 (l % 4) and the next of each eight; two permutations make of two
/// registers operand A, whose rows l / 4 and 8 further are these columns.
TEST(ByteStrips, ValuesBecomeOperandA) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 4; ++reg) {
      for (int byte = 0; byte < 4; ++byte) {
        const Coord wanted = WgmmaOperandA8::at(lane, reg, byte);
        const int selected = 2 * byte + reg % 2;
        const int eight = reg / 2 * 2 + selected / 4;
        const int key = 8 * eight + 2 * (lane % 4) + selected % 4 / 2, column = lane / 4 * 2 + selected % 2;
        EXPECT_EQ(wanted.row, column / 2 + 8 * (column % 2));
        EXPECT_EQ(wanted.col / 16 * 16 + key_at_place(wanted.col % 16), key);
      }
    }
  }
}

/// Of 16 elements of a row ldmatrix gives lane l the four from 4 (l % 4) on, of rows l / 4 and 8 further; the first two become registers 0 and
/// 1 of operand A of 16 bits, the last two registers 2 and 3.
TEST(ByteStrips, WidenedKeysBecomeOperandA) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < WgmmaOperandA::kRegs; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Coord wanted = WgmmaOperandA::at(lane, reg, half);
        EXPECT_EQ(wanted.row, lane / 4 + reg % 2 * 8);
        for (const int first : {0, 16, 48})
          EXPECT_EQ(place_of_widened(first + lane % 4 * 4 + reg / 2 * 2 + half), first + wanted.col);
      }
    }
  }
}

/// Values that the permutations above have put side by side, keys 8 i + 2 (l % 4) and the next of i and i + 1, become operand A of 16 bits two
/// keys at a time, in the order of keys.
TEST(ByteStrips, WidenedValuesBecomeOperandA) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < WgmmaOperandA::kRegs; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Coord wanted = WgmmaOperandA::at(lane, reg, half);
        const int eight = reg / 2, selected = 2 * half + reg % 2;  // bytes of ldmatrix's register `eight`
        EXPECT_EQ(wanted.col, 8 * eight + 2 * (lane % 4) + selected / 2);
        EXPECT_EQ(wanted.row, lane / 4 + 8 * (selected % 2));
      }
    }
  }
}

/// Two lanes with keys g and g + 1, and 8 further, have four places side by side.
TEST(ByteStrips, WeightsStandWhereTheirValuesDo) {
  for (int g = 0; g < 8; g += 2) {
    const int keys[4] = {g, g + 1, g + 8, g + 9};
    for (int i = 0; i < 4; ++i) EXPECT_EQ(key_at_place(g / 2 * 4 + i), keys[i]);
  }
}

}  // namespace
}  // namespace fovea::tile
