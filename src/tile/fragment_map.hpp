// Which lane holds which element in the fragments of mma.sync and of ldmatrix, as functions of the lane (PTX
// ISA, "Warp Level Matrix Instructions": mma, ldmatrix). A fragment is `reg` 32-bit registers of a lane, each
// with one 32-bit element (half = 0) or two of 16 bits, the first in the lower half. Coordinates of A are (m,
// k), of B (k, n), of C and D (m, n); accumulators are float32, one a register.
#pragma once

#include <cstdint>

namespace fovea::tile {

struct Coord {
  int row = 0, col = 0;
  friend constexpr bool operator==(const Coord&, const Coord&) = default;
};

inline constexpr int kWarpLanes = 32;

/// Where an element lies: the inverse of the maps.
struct Slot {
  int lane = 0, reg = 0, half = 0;
  friend constexpr bool operator==(const Slot&, const Slot&) = default;
};

/// C and D of every m16n8: lane l holds two neighbouring columns of rows l / 4 and l / 4 + 8.
struct AccumulatorM16N8 {
  static constexpr int kM = 16, kN = 8, kRegs = 4;

  static constexpr Coord at(int lane, int reg) { return {lane / 4 + reg / 2 * 8, lane % 4 * 2 + reg % 2}; }
  static constexpr Slot slot(int row, int col) { return {row % 8 * 4 + col / 2, row / 8 * 2 + col % 2, 0}; }
};

/// Operands of m16n8k16 of 16-bit elements (sm_80).
struct MmaM16N8K16 {
  static constexpr int kM = 16, kN = 8, kK = 16, kRegsA = 4, kRegsB = 2, kHalves = 2;

  static constexpr Coord a(int lane, int reg, int half) {
    return {lane / 4 + reg % 2 * 8, lane % 4 * 2 + half + reg / 2 * 8};
  }
  static constexpr Slot a_slot(int m, int k) { return {m % 8 * 4 + k % 8 / 2, m / 8 + k / 8 * 2, k % 2}; }
  static constexpr Coord b(int lane, int reg, int half) { return {lane % 4 * 2 + half + reg * 8, lane / 4}; }
  static constexpr Slot b_slot(int k, int n) { return {n * 4 + k % 8 / 2, k / 8, k % 2}; }
};

/// Operands of m16n8k8 of 16-bit elements (sm_75): the k < 8 half of those of m16n8k16.
struct MmaM16N8K8 {
  static constexpr int kM = 16, kN = 8, kK = 8, kRegsA = 2, kRegsB = 1, kHalves = 2;

  static constexpr Coord a(int lane, int reg, int half) { return {lane / 4 + reg * 8, lane % 4 * 2 + half}; }
  static constexpr Slot a_slot(int m, int k) { return {m % 8 * 4 + k / 2, m / 8, k % 2}; }
  static constexpr Coord b(int lane, int /*reg*/, int half) { return {lane % 4 * 2 + half, lane / 4}; }
  static constexpr Slot b_slot(int k, int n) { return {n * 4 + k / 2, 0, k % 2}; }
};

/// Operands of m16n8k8 of tf32 elements (sm_80).
struct MmaM16N8K8Tf32 {
  static constexpr int kM = 16, kN = 8, kK = 8, kRegsA = 4, kRegsB = 2, kHalves = 1;

  static constexpr Coord a(int lane, int reg, int /*half*/) {
    return {lane / 4 + reg % 2 * 8, lane % 4 + reg / 2 * 4};
  }
  static constexpr Slot a_slot(int m, int k) { return {m % 8 * 4 + k % 4, m / 8 + k / 4 * 2, 0}; }
  static constexpr Coord b(int lane, int reg, int /*half*/) { return {lane % 4 + reg * 4, lane / 4}; }
  static constexpr Slot b_slot(int k, int n) { return {n * 4 + k % 4, k / 4, 0}; }
};

/// ldmatrix.x4: register r gets matrix r, whose eight rows of 16 bytes lie where lanes 8 r .. 8 r + 7 say.
struct Ldmatrix {
  static constexpr int matrix_of_address(int lane) { return lane / 8; }
  static constexpr int row_of_address(int lane) { return lane % 8; }

  /// The 16-bit element of the matrix that a lane gets in a half of the register.
  static constexpr Coord at(int lane, int half, bool trans) {
    return trans ? Coord{lane % 4 * 2 + half, lane / 4} : Coord{lane / 4, lane % 4 * 2 + half};
  }
  /// The 32-bit element, where rows hold four of them. There is no .trans of 32-bit elements.
  static constexpr Coord at32(int lane) { return {lane / 4, lane % 4}; }
};

/// The order of the four matrices of ldmatrix.x4 in a square of 16 rows and 2 chunks, that is, which matrix
/// comes out in which register. A product takes B from two neighbouring registers, so the order decides whether
/// they need moving. tf32 with k8 (chunks of four elements) has the same orders, without .trans.
enum class LdmatrixOrder : uint8_t {
  /// 0 2    A, m16 x k16, from rows m;  B, k16 x n16, from rows k by .trans: registers 0, 1 are the first n8,
  /// 1 3    2, 3 the second
  kDownFirst,
  /// 0 1    B, k16 x n16, from rows n (registers as above);  A, m16 x k16, from rows k by .trans
  /// 2 3
  kAcrossFirst,
};
struct ChunkCoord {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const ChunkCoord&, const ChunkCoord&) = default;
};
/// Which (row, chunk) of the square a lane gives to ldmatrix.x4.
constexpr ChunkCoord ldmatrix_down_first(int lane) {
  return {lane & 15, lane >> 4};
}
constexpr ChunkCoord ldmatrix_across_first(int lane) {
  return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
}
constexpr ChunkCoord ldmatrix_chunk(LdmatrixOrder order, int lane) {
  return order == LdmatrixOrder::kDownFirst ? ldmatrix_down_first(lane) : ldmatrix_across_first(lane);
}

/// Where a lane reads 16 bytes of a float32 tile for tf32 fragments: four neighbours in memory are elements of
/// four fragments, because a product may sum over k in any order.
///   along the rows (k along them): chunk t of row g
///   down the rows (k down them): chunk g of row 2 t, and of row 2 t + 1
constexpr ChunkCoord tf32_chunk_along_rows(int lane) {
  return {lane / 4, lane % 4};
}
constexpr ChunkCoord tf32_chunk_down_rows(int lane, int odd) {
  return {lane % 4 * 2 + odd, lane / 4};
}

/// P as operand A of the second product, without leaving the lane: element (reg, half) of A (k16) comes from
/// this accumulator of n8 tile `tile` of the two that cover the same 16 keys. For k8 there is one tile,
/// registers 0 and 1.
struct AccumulatorIndex {
  int tile = 0, reg = 0;
  friend constexpr bool operator==(const AccumulatorIndex&, const AccumulatorIndex&) = default;
};
constexpr AccumulatorIndex accumulator_of_a(int reg, int half) {
  return {reg / 2, reg % 2 * 2 + half};
}

/// P as operand A in tf32: a lane holds columns 2t and 2t + 1 of P, where A wants k = t and t + 4. A product
/// may sum over k in any order, so k = t stands for key 2t and k = t + 4 for key 2t + 1, in the rows of B (V)
/// as well.
constexpr AccumulatorIndex accumulator_of_a_tf32(int reg) {
  return {0, reg % 2 * 2 + reg / 2};
}
constexpr int tf32_key_of_k(int k) {
  return k % 4 * 2 + k / 4;
}

}  // namespace fovea::tile
