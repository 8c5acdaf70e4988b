// Compares fragment maps with the figures of the PTX manual and with each other: ldmatrix gives what mma takes, and
// accumulators are operands. At the end simulated warps compute a whole tile of attention.
#include "tile/fragment_map.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "ptx_fragment_tables.hpp"
#include "tile/shared_tile.hpp"

namespace fovea::tile {
namespace {

/// Compares a map, `at(lane, element)`, and its inverse, `slot(row, col)` -> (lane, element), with a figure.
template <int kRows, int kColumns, class At, class SlotOf>
void expect_table(const FragmentTable<kRows, kColumns>& table, int elements, const At& at,
                  const SlotOf& slot) {
  ASSERT_EQ(kRows * kColumns, kWarpLanes * elements);
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kColumns; ++col) {
      const int lane = table.lane[static_cast<size_t>(row)][static_cast<size_t>(col)];
      const int element = table.element[static_cast<size_t>(row)][static_cast<size_t>(col)];
      ASSERT_LT(element, elements);
      ASSERT_EQ(at(lane, element), (Coord{row, col})) << "lane " << lane << ", element " << element;
      ASSERT_EQ(slot(row, col), std::make_pair(lane, element)) << "row " << row << ", column " << col;
    }
  }
}

template <class Mma, int kRowsA, int kColumnsA, int kRowsB, int kColumnsB>
void expect_operands(const FragmentTable<kRowsA, kColumnsA>& a, const FragmentTable<kRowsB, kColumnsB>& b) {
  constexpr int kHalves = Mma::kHalves;
  static_assert(kRowsA == Mma::kM && kColumnsA == Mma::kK && kRowsB == Mma::kK && kColumnsB == Mma::kN);
  const auto number = [](const Slot& s) { return std::make_pair(s.lane, s.reg * kHalves + s.half); };
  expect_table(
      a, Mma::kRegsA * kHalves, [](int lane, int e) { return Mma::a(lane, e / kHalves, e % kHalves); },
      [&](int row, int col) { return number(Mma::a_slot(row, col)); });
  expect_table(
      b, Mma::kRegsB * kHalves, [](int lane, int e) { return Mma::b(lane, e / kHalves, e % kHalves); },
      [&](int row, int col) { return number(Mma::b_slot(row, col)); });
}

TEST(FragmentMap, M16N8K16OfTheManual) {
  expect_operands<MmaM16N8K16>(kM16N8K16A, kM16N8K16B);
}
TEST(FragmentMap, M16N8K8OfTheManual) {
  expect_operands<MmaM16N8K8>(kM16N8K8A, kM16N8K8B);
}
TEST(FragmentMap, M16N8K8Tf32OfTheManual) {
  expect_operands<MmaM16N8K8Tf32>(kM16N8K8Tf32A, kM16N8K8Tf32B);
}

TEST(FragmentMap, AccumulatorsOfTheManual) {
  expect_table(kM16N8Accumulator, AccumulatorM16N8::kRegs, AccumulatorM16N8::at, [](int row, int col) {
    const Slot s = AccumulatorM16N8::slot(row, col);
    return std::make_pair(s.lane, s.reg);
  });
}

/// The fragments of m16n8k16 are those of two m16n8k8, as the sm_75 kernels use them: registers 0, 1 of A and
/// 0 of B for k 0..7, registers 2, 3 and 1 for k 8..15.
TEST(FragmentMap, M16N8K16IsTwoM16N8K8) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int step = 0; step < 2; ++step) {
      for (int half = 0; half < 2; ++half) {
        for (int reg = 0; reg < 2; ++reg) {
          Coord a = MmaM16N8K8::a(lane, reg, half);
          a.col += 8 * step;
          ASSERT_EQ(MmaM16N8K16::a(lane, 2 * step + reg, half), a);
        }
        Coord b = MmaM16N8K8::b(lane, 0, half);
        b.row += 8 * step;
        ASSERT_EQ(MmaM16N8K16::b(lane, step, half), b);
      }
    }
  }
}

TEST(FragmentMap, LdmatrixOfTheManual) {
  for (int row = 0; row < 8; ++row) {
    for (int col = 0; col < 8; ++col) {
      const auto r = static_cast<size_t>(row), c = static_cast<size_t>(col);
      EXPECT_EQ(Ldmatrix::at(kLdmatrix.lane[r][c], kLdmatrix.element[r][c], false), (Coord{row, col}));
      EXPECT_EQ(Ldmatrix::at(kLdmatrixTrans.lane[r][c], kLdmatrixTrans.element[r][c], true),
                (Coord{row, col}));
    }
  }
  // A 32-bit element takes the place of two 16-bit ones.
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    EXPECT_EQ(Ldmatrix::at32(lane).row, Ldmatrix::at(lane, 0, false).row);
    EXPECT_EQ(Ldmatrix::at32(lane).col * 2, Ldmatrix::at(lane, 0, false).col);
    EXPECT_EQ(Ldmatrix::matrix_of_address(lane), lane / 8);
    EXPECT_EQ(Ldmatrix::row_of_address(lane), lane % 8);
  }
}

// A warp, simulated: registers are pairs of 16-bit elements, which here carry any number.

using Registers = std::array<std::array<std::array<int, 2>, 4>, kWarpLanes>;  ///< [lane][reg][half]

/// ldmatrix.x4 from a memory of 16-bit elements, as the manual describes it: lane 8 m + r gives the address
/// of row r of matrix m; what lanes get is drawn in its figures.
Registers simulate_ldmatrix_x4(const std::vector<int>& memory,
                               const std::array<int, kWarpLanes>& byte_addresses, bool trans) {
  Registers registers{};
  const auto& figure = trans ? kLdmatrixTrans : kLdmatrix;
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    for (size_t row = 0; row < 8; ++row) {
      for (size_t col = 0; col < 8; ++col) {
        const int address = byte_addresses[matrix * 8 + row];
        EXPECT_EQ(address % 16, 0);
        const int value = memory[static_cast<size_t>(address / 2) + col];
        registers[static_cast<size_t>(figure.lane[row][col])][matrix]
                 [static_cast<size_t>(figure.element[row][col])] = value;
      }
    }
  }
  return registers;
}

template <class Layout, class ChunkOf>
Registers load_x4(const std::vector<int>& memory, int first_row, int first_chunk, bool trans,
                  const ChunkOf& chunk_of) {
  std::array<int, kWarpLanes> addresses{};
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const ChunkCoord at = chunk_of(lane);
    addresses[static_cast<size_t>(lane)] =
        static_cast<int>(Layout::offset(first_row + at.row, first_chunk + at.chunk));
  }
  return simulate_ldmatrix_x4(memory, addresses, trans);
}

int element_id(int row, int col) {
  return row * 1000 + col;
}

template <class Layout>
std::vector<int> numbered_tile() {
  std::vector<int> memory(static_cast<size_t>(Layout::kBytes / 2));
  for (int row = 0; row < Layout::kRows; ++row) {
    for (int col = 0; col < Layout::kColumns; ++col) {
      memory[static_cast<size_t>(Layout::element(row, col) / 2)] = element_id(row, col);
    }
  }
  return memory;
}

int get(const Registers& registers, int lane, int reg, int half) {
  return registers[static_cast<size_t>(lane)][static_cast<size_t>(reg)][static_cast<size_t>(half)];
}

/// ldmatrix gives each lane exactly the elements that mma.m16n8k16 expects there, everywhere in a swizzled tile.
template <class Layout>
void check_ldmatrix_is_mma_operand() {
  const std::vector<int> memory = numbered_tile<Layout>();
  for (int row = 0; row + 16 <= Layout::kRows; row += 16) {
    for (int chunk = 0; chunk + 2 <= Layout::kChunks; chunk += 2) {
      const int col = chunk * 8;
      const Registers a = load_x4<Layout>(memory, row, chunk, false, ldmatrix_down_first);
      const Registers b_from_n = load_x4<Layout>(memory, row, chunk, false, ldmatrix_across_first);
      const Registers b_from_k = load_x4<Layout>(memory, row, chunk, true, ldmatrix_down_first);
      const Registers a_from_k = load_x4<Layout>(memory, row, chunk, true, ldmatrix_across_first);
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        for (int reg = 0; reg < 4; ++reg) {
          for (int half = 0; half < 2; ++half) {
            // A: rows of the tile are m, or by .trans k.
            const Coord mk = MmaM16N8K16::a(lane, reg, half);
            ASSERT_EQ(get(a, lane, reg, half), element_id(row + mk.row, col + mk.col));
            ASSERT_EQ(get(a_from_k, lane, reg, half), element_id(row + mk.col, col + mk.row));
            // B: two tiles of n8. Rows of the tile are n (keys of K), or by .trans k (keys of V).
            const int n_tile = reg / 2;
            const Coord kn = MmaM16N8K16::b(lane, reg % 2, half);
            ASSERT_EQ(get(b_from_n, lane, reg, half), element_id(row + n_tile * 8 + kn.col, col + kn.row));
            ASSERT_EQ(get(b_from_k, lane, reg, half), element_id(row + kn.row, col + n_tile * 8 + kn.col));
          }
        }
      }
    }
  }
}

TEST(FragmentMap, LdmatrixGivesTheOperandsOfMma) {
  check_ldmatrix_is_mma_operand<SharedTile<64, 16>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 32>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 64>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 96>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 128>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 192>>();
  check_ldmatrix_is_mma_operand<SharedTile<64, 256>>();
}

/// With tf32, a chunk is four elements and an 8x8 matrix of pairs an 8x4 one: the same addresses give k8.
TEST(FragmentMap, LdmatrixGivesTheOperandsOfTf32) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const Coord element = Ldmatrix::at32(lane);
    for (int reg = 0; reg < 4; ++reg) {
      // The lane that gave the address of the row that this lane's register comes from.
      const int giver = reg * 8 + element.row;
      const ChunkCoord down = ldmatrix_down_first(giver), across = ldmatrix_across_first(giver);
      ASSERT_EQ((Coord{down.row, down.chunk * 4 + element.col}), MmaM16N8K8Tf32::a(lane, reg, 0));
      const Coord kn = MmaM16N8K8Tf32::b(lane, reg % 2, 0);
      ASSERT_EQ((Coord{across.row, across.chunk * 4 + element.col}), (Coord{reg / 2 * 8 + kn.col, kn.row}));
    }
  }
}

/// ldmatrix.x2 looks at lanes 0..15 only: A of m16n8k8, and B of one n8.
TEST(FragmentMap, LdmatrixX2) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        const Coord plain = Ldmatrix::at(lane, half, false), trans = Ldmatrix::at(lane, half, true);
        const ChunkCoord down = ldmatrix_down_first(reg * 8 + plain.row);
        ASSERT_EQ((Coord{down.row, down.chunk * 8 + plain.col}), MmaM16N8K8::a(lane, reg, half));
        const ChunkCoord across = ldmatrix_across_first(reg * 8 + plain.row);
        ASSERT_EQ((Coord{across.chunk * 8 + plain.col, across.row}), MmaM16N8K16::b(lane, reg, half));
        const ChunkCoord rows_k = ldmatrix_down_first(reg * 8 + trans.row);
        ASSERT_EQ((Coord{rows_k.row, rows_k.chunk * 8 + trans.col}), MmaM16N8K16::b(lane, reg, half));
      }
    }
  }
}

/// P: the accumulators of two neighbouring n8 tiles are the fragment of A for their 16 keys.
TEST(FragmentMap, AccumulatorsAreOperandA) {
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      for (int reg = 0; reg < 4; ++reg) {
        const AccumulatorIndex from = accumulator_of_a(reg, half);
        Coord at = AccumulatorM16N8::at(lane, from.reg);
        at.col += 8 * from.tile;
        ASSERT_EQ(at, MmaM16N8K16::a(lane, reg, half));
      }
      for (int reg = 0; reg < 2; ++reg) {
        const AccumulatorIndex from = accumulator_of_a(reg, half);
        ASSERT_EQ(from.tile, 0);
        ASSERT_EQ(AccumulatorM16N8::at(lane, from.reg), MmaM16N8K8::a(lane, reg, half));
      }
    }
    for (int reg = 0; reg < 4; ++reg) {
      const Coord a = MmaM16N8K8Tf32::a(lane, reg, 0);
      ASSERT_EQ(AccumulatorM16N8::at(lane, accumulator_of_a_tf32(reg).reg),
                (Coord{a.row, tf32_key_of_k(a.col)}));
    }
  }
  std::array<bool, 8> taken{};
  for (int k = 0; k < 8; ++k) taken[static_cast<size_t>(tf32_key_of_k(k))] = true;
  for (const bool t : taken) EXPECT_TRUE(t);  // a permutation: every key once
}

// Products by the manual's tables alone, which say what element each register of a lane holds.

using Accumulators = std::array<std::array<int, 4>, kWarpLanes>;

void simulate_mma_m16n8k16(Accumulators& d, const Registers& a, const Registers& b, int first_b) {
  for (size_t m = 0; m < 16; ++m) {
    for (size_t n = 0; n < 8; ++n) {
      int sum = 0;
      for (size_t k = 0; k < 16; ++k) {
        const int ea = kM16N8K16A.element[m][k], eb = kM16N8K16B.element[k][n];
        sum += get(a, kM16N8K16A.lane[m][k], ea / 2, ea % 2) *
               get(b, kM16N8K16B.lane[k][n], first_b + eb / 2, eb % 2);
      }
      d[static_cast<size_t>(kM16N8Accumulator.lane[m][n])]
       [static_cast<size_t>(kM16N8Accumulator.element[m][n])] += sum;
    }
  }
}

/// O = (Q K^T) V for 16 queries, 32 keys and 64 columns, in integers, as a warp computes it: ldmatrix reads all operands
/// from swizzled tiles, and P comes straight from the accumulators.
TEST(FragmentMap, ATileOfAttentionByASimulatedWarp) {
  constexpr int kQueries = 16, kKeys = 32, kColumns = 64;
  using Queries = SharedTile<kQueries, kColumns>;
  using Keys = SharedTile<kKeys, kColumns>;
  const auto q_at = [](int i, int c) { return (i * 7 + c * 3) % 11 - 5; };
  const auto k_at = [](int j, int c) { return (j * 5 + c * 2) % 13 - 6; };
  const auto v_at = [](int j, int c) { return (j * 3 + c * 11) % 7 - 3; };
  std::vector<int> q(Queries::kBytes / 2), k(Keys::kBytes / 2), v(Keys::kBytes / 2);
  for (int c = 0; c < kColumns; ++c) {
    for (int i = 0; i < kQueries; ++i) q[static_cast<size_t>(Queries::element(i, c) / 2)] = q_at(i, c);
    for (int j = 0; j < kKeys; ++j) k[static_cast<size_t>(Keys::element(j, c) / 2)] = k_at(j, c);
    for (int j = 0; j < kKeys; ++j) v[static_cast<size_t>(Keys::element(j, c) / 2)] = v_at(j, c);
  }

  std::array<Accumulators, kKeys / 8> scores{};
  for (int step = 0; step < kColumns / 16; ++step) {
    const Registers a = load_x4<Queries>(q, 0, step * 2, false, ldmatrix_down_first);
    for (int n16 = 0; n16 < kKeys / 16; ++n16) {
      const Registers b = load_x4<Keys>(k, n16 * 16, step * 2, false, ldmatrix_across_first);
      simulate_mma_m16n8k16(scores[static_cast<size_t>(n16 * 2)], a, b, 0);
      simulate_mma_m16n8k16(scores[static_cast<size_t>(n16 * 2 + 1)], a, b, 2);
    }
  }
  std::array<Accumulators, kColumns / 8> output{};
  for (int step = 0; step < kKeys / 16; ++step) {
    Registers p{};
    for (size_t lane = 0; lane < kWarpLanes; ++lane) {
      for (int reg = 0; reg < 4; ++reg) {
        for (int half = 0; half < 2; ++half) {
          const AccumulatorIndex from = accumulator_of_a(reg, half);
          p[lane][static_cast<size_t>(reg)][static_cast<size_t>(half)] =
              scores[static_cast<size_t>(step * 2 + from.tile)][lane][static_cast<size_t>(from.reg)];
        }
      }
    }
    for (int n16 = 0; n16 < kColumns / 16; ++n16) {
      const Registers b = load_x4<Keys>(v, step * 16, n16 * 2, true, ldmatrix_down_first);
      simulate_mma_m16n8k16(output[static_cast<size_t>(n16 * 2)], p, b, 0);
      simulate_mma_m16n8k16(output[static_cast<size_t>(n16 * 2 + 1)], p, b, 2);
    }
  }

  for (int i = 0; i < kQueries; ++i) {
    for (int c = 0; c < kColumns; ++c) {
      int expected = 0;
      for (int j = 0; j < kKeys; ++j) {
        int score = 0;
        for (int x = 0; x < kColumns; ++x) score += q_at(i, x) * k_at(j, x);
        expected += score * v_at(j, c);
      }
      const Slot s = AccumulatorM16N8::slot(i, c % 8);
      ASSERT_EQ(output[static_cast<size_t>(c / 8)][static_cast<size_t>(s.lane)][static_cast<size_t>(s.reg)],
                expected)
          << "query " << i << ", column " << c;
    }
  }
}

}  // namespace
}  // namespace fovea::tile
