// What a mask of ggml says: float16 numbers that are added to the scores, minus infinity where a key is not seen.
#pragma once

#include <cstdint>
#include <vector>

namespace fovea_ggml {

/// A mask where it lies: number (batch, head, query, key), strides in elements, keys contiguous. One plane stands for all
/// batches or heads where `batches` or `heads` is 1.
struct MaskView {
  const uint16_t* data = nullptr;
  int64_t batches = 1, heads = 1, queries = 0, keys = 0;
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0;

  const uint16_t* row(int64_t batch, int64_t head, int64_t query) const {
    return data + batch * batch_stride + head * head_stride + query * query_stride;
  }
};

enum class MaskKind {
  kNone,   ///< no mask
  kBand,   ///< zeros, and minus infinity outside a causal band or behind the last key
  kZeros,  ///< zeros and minus infinity, in any order
  kAdded,  ///< other numbers as well
};

/// Classes of blocks of kMaskQueries queries and kMaskKeys keys: small enough that the edge of a band wastes little, large
/// enough that the table is a hundredth of the mask. Fovea leaves out keys in steps of 32.
inline constexpr int64_t kMaskQueries = 8, kMaskKeys = 32;
inline constexpr uint8_t kBlockUnseen = 0, kBlockMixed = 1, kBlockPlain = 2;

struct MaskSummary {
  MaskKind kind = MaskKind::kNone;
  std::vector<int32_t> used_keys;  ///< a batch: keys from this one on are seen by no query
  bool causal = false;             ///< band: query i sees keys up to i + used_keys - queries
  int64_t window = -1;             ///< band: and from `window` before that on; -1: all
  /// Other kinds: class of block (batch, head, query / kMaskQueries, key / kMaskKeys).
  std::vector<uint8_t> blocks;
  int64_t block_rows = 0, block_columns = 0;
};

MaskSummary summarise(const MaskView& mask, int threads);

}  // namespace fovea_ggml
