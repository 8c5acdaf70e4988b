// V of 8 bits with its keys side by side, as operand B of P V: tensor cores take operands of 8 bits K-major only.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Keys that a product of 8 bits multiplies, and those of a 16-byte chunk of it.
inline constexpr int kKeysOfStep = 32, kKeysOfChunk = 16;

/// Blocks of `tile` keys: (heads_kv, blocks, tile / 16, columns, 16), element [column][at] of a chunk being that of key
/// tile::key_at_place(at). A sequence begins with a block of its own; keys that it lacks and columns that V lacks are 0.
struct TransposedValues {
  char* data = nullptr;
  int64_t blocks = 0;  ///< of all sequences
  int tile = 0, columns = 0;

  /// Blocks of `batch` sequences of up to `longest` keys, or packed of `total` keys.
  static constexpr int64_t blocks_of(bool packed, int64_t batch, int64_t longest, int64_t total, int tile) {
    return packed ? total / tile + batch : batch * ((longest + tile - 1) / tile);
  }
  constexpr int64_t block_bytes() const { return int64_t{tile} * columns; }
  /// The first block of sequence b: of packed sequences each has a block more than its keys fill.
  constexpr int64_t first_block(const tile::AttentionParams& p, int b) const {
    if (p.cu_seqlens_k != nullptr) return p.cu_seqlens_k[b] / tile + b;
    return int64_t{b} * ((p.seqlen_k + tile - 1) / tile);
  }
  constexpr char* block(const tile::AttentionParams& p, int b, int head_kv, int n) const {
    return data + (head_kv * blocks + first_block(p, b) + n) * block_bytes();
  }
};

/// A block of `columns` columns at `start`: chunks of keys follow each other, eight columns are 128 bytes side by side.
constexpr tile::WgmmaDescriptor transposed_values_operand(uint32_t start, int columns) {
  return {start, static_cast<uint32_t>(columns) * tile::kChunkBytes, 8 * tile::kChunkBytes,
          tile::SwizzleMode::kNone, 0};
}

}  // namespace fovea::cuda
