// Attention of few rows over blocks of quantised caches, which become numbers in registers and nowhere else.
#pragma once

#include <cstdint>
#include <vector>

#include "blocks.hpp"

namespace fovea_ggml {

/// Keys or values of one sequence: row (key, head) of `size` elements, whole blocks, lies at data + key * key_stride + head * head_stride bytes.
struct BlockRows {
  BlockType type = BlockType::kQ8_0;
  const char* data = nullptr;
  int64_t size = 0, key_stride = 0, head_stride = 0;
};

/// A query head of a query, and its result.
struct QueryRow {
  const float* q = nullptr;
  const uint16_t* mask = nullptr;  ///< float16 of each key; null: all are seen
  float slope = 1;                 ///< what the mask's numbers are multiplied by
  float sink = 0;                  ///< a score more in the sum, where `has_sink`
  bool has_sink = false;
  float* o = nullptr;
  float* lse = nullptr;  ///< or null
  /// While keys are gone through: the largest score, and the sum of weights.
  float largest = 0, sum = 0;
};

/// `rows` of each of `heads` key heads over `keys` keys:
///   s_j = softcap(scale * q . k_j) + slope * mask_j,  o = sum of softmax(s)_j v_j,  lse = log of the sum of exp(s_j)
/// (Milakov and Gimelshein 2018, algorithm 3, for the softmax while keys come; Press et al. 2022 for slopes; softcap(x) =
/// c tanh(x / c)). Rows that see no key get zeros, and -inf. Keys with a mask of -inf are not part of any sum, whatever they hold.
struct BlockAttention {
  BlockRows k, v;
  int64_t keys = 0, heads = 0, rows = 0;
  QueryRow* queries = nullptr;  ///< [heads][rows]
  float scale = 1;
  float softcap = 0;  ///< 0: none
};

/// What a way takes at most: rows of a key head, and elements of a row of K or V.
inline constexpr int64_t kMostBlockRows = 64, kMostBlockSize = 576;

/// One way to compute it, in the calling thread.
struct BlockWay {
  const char* name;  ///< of its instructions
  void (*attend)(const BlockAttention& attention);
  /// Up to so many rows that takes less time than to convert the cache and multiply what it becomes, by `ggml_compare rows`.
  int64_t most_rows;
};
/// The ways of this processor, the fastest first.
const std::vector<BlockWay>& block_ways();

}  // namespace fovea_ggml
