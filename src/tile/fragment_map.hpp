// Which lane holds which element of the fragments of mma.sync and ldmatrix (PTX ISA, "Warp Level Matrix Instructions":
// mma, ldmatrix). The lane is an argument, so the host tests the maps.
//
// A lane holds a fragment in 32-bit registers, which `reg` counts. A register holds one 32-bit element (half = 0) or two
// of 16 bits (half = 0 is the lower one). Coordinates are (m, k) for A, (k, n) for B, and (m, n) for C and D, whose
// elements are float32.
#pragma once

#include <cstdint>

namespace fovea::tile {

struct Coord {
  int row = 0, col = 0;
  friend constexpr bool operator==(const Coord&, const Coord&) = default;
};

inline constexpr int kWarpLanes = 32;

/// Where an element lies, as the inverse maps (slot, a_slot, b_slot) return it.
struct Slot {
  int lane = 0, reg = 0, half = 0;
  friend constexpr bool operator==(const Slot&, const Slot&) = default;
};

/// C and D of every m16n8: lane l holds two adjacent columns of rows l / 4 and l / 4 + 8.
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

/// ldmatrix.x4 loads four 8x8 matrices: register r receives matrix r, and lanes 8 r .. 8 r + 7 give the addresses of
/// its eight rows of 16 bytes.
struct Ldmatrix {
  static constexpr int matrix_of_address(int lane) { return lane / 8; }
  static constexpr int row_of_address(int lane) { return lane % 8; }

  /// The 16-bit element of its matrix that a lane receives in half `half` of the register.
  static constexpr Coord at(int lane, int half, bool trans) {
    return trans ? Coord{lane % 4 * 2 + half, lane / 4} : Coord{lane / 4, lane % 4 * 2 + half};
  }
  /// The same for rows of four 32-bit elements, which .trans cannot transpose.
  static constexpr Coord at32(int lane) { return {lane / 4, lane % 4}; }
};

/// Which register of ldmatrix.x4 receives which of the four matrices in a square of 16 rows and 2 chunks; the drawings
/// name the registers. A product reads B from two consecutive registers, so the right order saves moves. tf32 with k8
/// (chunks of four elements) uses the same orders, without .trans.
enum class LdmatrixOrder : uint8_t {
  /// 0 2    A (m16 x k16) from rows of m
  /// 1 3    B (k16 x n16) from rows of k by .trans: registers 0 and 1 are the first n8, 2 and 3 the second
  kDownFirst,
  /// 0 1    A (m16 x k16) from rows of k by .trans
  /// 2 3    B (k16 x n16) from rows of n: registers 0 and 1 are the first n8, 2 and 3 the second
  kAcrossFirst,
};
struct ChunkCoord {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const ChunkCoord&, const ChunkCoord&) = default;
};
/// The (row, chunk) of the square whose address a lane gives to ldmatrix.x4.
constexpr ChunkCoord ldmatrix_down_first(int lane) {
  return {lane & 15, lane >> 4};
}
constexpr ChunkCoord ldmatrix_across_first(int lane) {
  return {(lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1};
}
constexpr ChunkCoord ldmatrix_chunk(LdmatrixOrder order, int lane) {
  return order == LdmatrixOrder::kDownFirst ? ldmatrix_down_first(lane) : ldmatrix_across_first(lane);
}

/// The 16 bytes of a float32 tile that a lane (g = lane / 4, t = lane % 4) reads for tf32 fragments. A product may sum
/// over k in any order, so four adjacent elements in memory go to four fragments.
///   along the rows   k runs along the rows: chunk t of row g
///   down the rows    k runs down the rows: chunk g of row 2 t (odd = 0) and of row 2 t + 1 (odd = 1)
constexpr ChunkCoord tf32_chunk_along_rows(int lane) {
  return {lane / 4, lane % 4};
}
constexpr ChunkCoord tf32_chunk_down_rows(int lane, int odd) {
  return {lane % 4 * 2 + odd, lane / 4};
}

/// The accumulator of S that becomes element (reg, half) of P as operand A (k16) of P V. It lies in the same lane, so P
/// needs no exchange between lanes. `tile` is one of the two n8 tiles that cover the 16 keys; with k8 there is one, and
/// A has registers 0 and 1.
struct AccumulatorIndex {
  int tile = 0, reg = 0;
  friend constexpr bool operator==(const AccumulatorIndex&, const AccumulatorIndex&) = default;
};
constexpr AccumulatorIndex accumulator_of_a(int reg, int half) {
  return {reg / 2, reg % 2 * 2 + half};
}

/// The same in tf32. A lane holds columns 2 t and 2 t + 1 of P, where A wants k = t and k = t + 4. A product may sum over
/// k in any order, so k = t stands for key 2 t and k = t + 4 for key 2 t + 1. The rows of B (V) follow: tf32_key_of_k.
constexpr AccumulatorIndex accumulator_of_a_tf32(int reg) {
  return {0, reg % 2 * 2 + reg / 2};
}
constexpr int tf32_key_of_k(int k) {
  return k % 4 * 2 + k / 4;
}

}  // namespace fovea::tile
