// Which lane holds which element in the fragments of mma.sync and of ldmatrix, as functions of the lane (PTX
// ISA, "Warp Level Matrix Instructions": mma, ldmatrix). A fragment is `reg` 32-bit registers of a lane, each
// with one 32-bit element (half = 0) or two of 16 bits, the first in the lower half. Coordinates of A are (m,
// k), of B (k, n), of C and D (m, n); accumulators are float32, one a register.
#pragma once

#include "tile/layout.hpp"

namespace fovea::tile {

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

/// ldmatrix.x1, .x2, .x4: register r gets matrix r, whose eight rows of 16 bytes lie where lanes 8 r .. 8 r +
/// 7 say (addresses of the lanes beyond are not looked at).
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

/// Which (row, chunk) of a tile's corner a lane gives to ldmatrix.x4, the two orders of four matrices in a
/// square of 16 rows and 2 chunks:
///
///   down first   0 2      A, m16 x k16, from rows m;    B, k16 x n16, from rows k by .trans
///                1 3
///   across first 0 1      B, k16 x n16, from rows n;    A, m16 x k16, from rows k by .trans
///                2 3
///
/// Registers are then the fragment of A, or for B: 0, 1 that of n 0..7 and 2, 3 that of n 8..15. The same
/// holds for tf32 with k8 (chunks of four elements) where there is no .trans. x2 takes the first two
/// matrices.
struct ChunkCoord {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const ChunkCoord&, const ChunkCoord&) = default;
};
constexpr ChunkCoord ldmatrix_down_first(int lane) {
  return {lane % 16, lane / 16};
}
constexpr ChunkCoord ldmatrix_across_first(int lane) {
  return {lane % 8 + lane / 16 * 8, lane / 8 % 2};
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
/// does not mind the order of its k, so k = t is taken to be key 2t and k = t + 4 key 2t + 1, for the rows of
/// B (V) too.
constexpr AccumulatorIndex accumulator_of_a_tf32(int reg) {
  return {0, reg % 2 * 2 + reg / 2};
}
constexpr int tf32_key_of_k(int k) {
  return k % 4 * 2 + k / 4;
}

}  // namespace fovea::tile
