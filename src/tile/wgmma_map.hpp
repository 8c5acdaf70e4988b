// Fragments and shared-memory descriptors of wgmma.mma_async (sm_90a; PTX ISA, "Asynchronous Warpgroup Level
// Matrix Instructions"): operands of 16 or 8 bits, float32 accumulators. `thread` counts within the warpgroup, 0..127.
#pragma once

#include <cstdint>

#include "tile/fragment_map.hpp"
#include "tile/swizzle.hpp"

namespace fovea::tile {

inline constexpr int kWarpgroupThreads = 128;

/// Where an element lies in a warpgroup.
struct WarpgroupSlot {
  int thread = 0, reg = 0, half = 0;
  friend constexpr bool operator==(const WarpgroupSlot&, const WarpgroupSlot&) = default;
};

/// D of m64nNk16: N / 2 registers. Warp w holds rows 16 w .. 16 w + 15, as N / 8 accumulators of m16n8 side by side.
struct WgmmaAccumulator {
  static constexpr int kM = 64;
  static constexpr int regs(int n) { return n / 2; }

  static constexpr Coord at(int thread, int reg) {
    const Coord c = AccumulatorM16N8::at(thread % kWarpLanes, reg % 4);
    return {thread / kWarpLanes * 16 + c.row, reg / 4 * 8 + c.col};
  }
  static constexpr WarpgroupSlot slot(int row, int col) {
    const Slot s = AccumulatorM16N8::slot(row % 16, col % 8);
    return {row / 16 * kWarpLanes + s.lane, col / 8 * 4 + s.reg, 0};
  }
};

/// A of m64nNk16 from registers: 4 registers of two elements.
struct WgmmaOperandA {
  static constexpr int kM = 64, kK = 16, kRegs = 4;

  static constexpr Coord at(int thread, int reg, int half) {
    const Coord c = MmaM16N8K16::a(thread % kWarpLanes, reg, half);
    return {thread / kWarpLanes * 16 + c.row, c.col};
  }
  static constexpr WarpgroupSlot slot(int m, int k) {
    const Slot s = MmaM16N8K16::a_slot(m % 16, k);
    return {m / 16 * kWarpLanes + s.lane, s.reg, s.half};
  }
};

/// A of m64nNk32 from registers, elements of 8 bits: 4 registers of four elements.
struct WgmmaOperandA8 {
  static constexpr int kM = 64, kK = 32, kRegs = 4;

  static constexpr Coord at(int thread, int reg, int byte) {
    const int lane = thread % kWarpLanes;
    return {thread / kWarpLanes * 16 + lane / 4 + reg % 2 * 8, reg / 2 * 16 + lane % 4 * 4 + byte};
  }
};

/// The register of S's accumulator that becomes element (reg, half) of P as operand A in step `k_step` of 16 keys. A step
/// takes registers 8 k_step .. 8 k_step + 7 in order.
constexpr int wgmma_accumulator_of_a(int k_step, int reg, int half) {
  return k_step * 8 + reg * 2 + half;
}

/// The same of elements of 8 bits, in steps of 32 keys, where no lane needs another's: it holds keys 2 t, 2 t + 1, 8 + 2 t and
/// 8 + 2 t + 1 of each 16, t being lane % 4, and operand A wants of it those at places 4 t to 4 t + 3.
constexpr int wgmma_accumulator_of_a8(int k_step, int reg, int byte) {
  return k_step * 16 + reg / 2 * 8 + reg % 2 * 2 + byte / 2 * 4 + byte % 2;
}
/// So which key of its 16 stands at place `at`. The order in which keys are added up is free: V takes it over.
constexpr int key_at_place(int at) {
  return at / 4 * 2 + at % 2 + at % 4 / 2 * 8;
}

/// Where wgmma finds a matrix in shared memory. A matrix consists of atoms of eight rows of swizzle_row_bytes(mode). Rows
/// run along k (K-major) or along m or n (MN-major, which only 16-bit types allow). The distances, in bytes, are
///
///                     leading                                  stride
///   K-major, swizzled   not used (a field of 1)                  eight rows of m or n to the next eight
///   K-major, none       chunk of k to the next chunk             eight rows of m or n to the next eight
///   MN-major, swizzled  atom to the next one along m or n        eight rows of k to the next eight
///   MN-major, none      eight rows of k to the next eight        chunk of m or n to the next chunk
struct WgmmaDescriptor {
  uint32_t start = 0;  ///< shared address, a multiple of 16
  uint32_t leading_bytes = 0, stride_bytes = 0;
  SwizzleMode mode = SwizzleMode::kNone;
  int base_offset = 0;  ///< 0 where the atoms are aligned to swizzle_atom_bytes

  /// Fields of 14 bits hold address / 16 modulo 2^18.
  static constexpr uint64_t field(uint32_t bytes) { return (bytes & 0x3FFFFu) >> 4; }

  constexpr uint64_t encode() const {
    return field(start) | field(leading_bytes) << 16 | field(stride_bytes) << 32 |
           static_cast<uint64_t>(static_cast<uint32_t>(base_offset) & 7u) << 49 |
           static_cast<uint64_t>(mode) << 62;
  }
  /// Moved by `start16` units of 16 bytes, where `this` is as if shared memory began at 0. A constant plus one uniform number:
  /// otherwise compilers make it again between a wait and its product.
  constexpr uint64_t encode_from(int start16) const {
    const uint64_t encoded = encode();
    return (encoded >> 32 << 32) | (static_cast<uint32_t>(encoded) + static_cast<uint32_t>(start16));
  }
};

/// The base_offset of a matrix whose swizzle pattern does not start at a multiple of swizzle_atom_bytes.
constexpr int wgmma_base_offset(uint32_t pattern_start) {
  return static_cast<int>((pattern_start >> 7) & 7u);
}

/// Added to an encoded descriptor, moves its start by `bytes`. A step of 16 k in K-major rows is 32 bytes. The swizzle
/// works on addresses, so it needs no change while the step stays inside the row of the atom.
constexpr uint64_t wgmma_start_step(uint32_t bytes) {
  return WgmmaDescriptor::field(bytes);
}

/// A K-major tile of 16-bit elements: rows of m or n, `swizzle_row_bytes` of k each; wider matrices are several tiles.
/// This function and the next take swizzled modes only, in which TMA fills tiles.
constexpr WgmmaDescriptor wgmma_k_major(uint32_t start, SwizzleMode mode) {
  return {start, kChunkBytes, static_cast<uint32_t>(swizzle_atom_bytes(mode)), mode, 0};
}
/// An MN-major tile of 16-bit elements: `k_rows` rows of k (a multiple of 8), `swizzle_row_bytes` of m or n
/// each; wider matrices are such tiles one after the other.
constexpr WgmmaDescriptor wgmma_mn_major(uint32_t start, SwizzleMode mode, int k_rows) {
  const auto row = static_cast<uint32_t>(swizzle_row_bytes(mode));
  return {start, row * static_cast<uint32_t>(k_rows), row * 8, mode, 0};
}

/// The byte address of a 16-byte chunk in the PTX ISA's canonical layouts: where hardware reads for a descriptor. For
/// tests, and for code that fills tiles without TMA. K-major: `chunk` of k in `row` of m or n.
constexpr uint32_t wgmma_k_major_address(const WgmmaDescriptor& d, int row, int chunk) {
  const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(chunk);
  const uint32_t along_k = c * (d.mode == SwizzleMode::kNone ? d.leading_bytes : uint32_t{kChunkBytes});
  const auto pitch = static_cast<uint32_t>(swizzle_row_bytes(d.mode));
  return swizzled_address(d.mode, d.start + r / 8 * d.stride_bytes + r % 8 * pitch + along_k);
}
/// MN-major: `chunk` of m or n in row `k`.
constexpr uint32_t wgmma_mn_major_address(const WgmmaDescriptor& d, int k, int chunk) {
  const auto r = static_cast<uint32_t>(k), c = static_cast<uint32_t>(chunk);
  const auto pitch = static_cast<uint32_t>(swizzle_row_bytes(d.mode)), chunks = pitch / kChunkBytes;
  if (d.mode == SwizzleMode::kNone)
    return d.start + c * d.stride_bytes + r / 8 * d.leading_bytes + r % 8 * pitch;
  return swizzled_address(d.mode, d.start + c / chunks * d.leading_bytes + c % chunks * kChunkBytes +
                                      r / 8 * d.stride_bytes + r % 8 * pitch);
}

}  // namespace fovea::tile
