// What a node FLASH_ATTN_EXT of ggml asks, and whether Fovea takes it.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <optional>

#include "block_rows.hpp"

namespace fovea_ggml {

/// Largest head size of Fovea.
inline constexpr int64_t kMostHeadSize = 576;
/// Rows (queries times heads of a group) for which a conversion of the cache costs about as much as its use.
inline constexpr int64_t kChunkRows = 48;

/// o = softmax(softcap(scale * q k) + slope * mask, and sinks) v. Tensors of ggml name their dimensions from the last on:
/// q (element, query, head, batch), k and v (element, key, head, batch), mask (key, query, head, batch), o (element, head,
/// query, batch).
struct Operation {
  const ggml_tensor *q, *k, *v, *mask, *sinks, *o;
  float scale, max_bias, softcap;
  int64_t most_keys;  ///< a promise that no query sees more; 0: none

  explicit Operation(const ggml_tensor& node);
  int64_t batches() const { return q->ne[3]; }
  int64_t queries() const { return q->ne[1]; }
  int64_t heads() const { return q->ne[2]; }
  int64_t key_heads() const { return k->ne[2]; }
  int64_t keys() const { return k->ne[1]; }
  /// Of a key head: queries of all heads that share it.
  int64_t rows() const { return queries() * (heads() / key_heads()); }
  /// ALiBi's slope of a head, as ggml defines it.
  float slope(int64_t head) const;
};

/// Rows up to which Fovea's way for few rows takes such whose scores have expressions.
inline constexpr int64_t kFewRowsOfExpressions = 4;

/// The type that Fovea computes in where it reads no blocks. More rows than few over a cache of at most 16 bits, and any over a quantised
/// one: bfloat16, where the processor multiplies that fast (AMX, and AVX512-BF16 of AMD), unless the environment has
/// FOVEA_GGML_BFLOAT16=0. Else that of a cache of float16, bfloat16 or float32, and float32 of any other. A cache of another type is
/// converted a part at a time.
/// `has_expressions`: a mask that is no band, or softcap.
ggml_type computed_type(const Operation& operation, bool has_expressions);

/// As what the code in vectors knows the blocks of a type; none where it does not.
std::optional<BlockType> block_type_of(ggml_type type);

/// Whether its rows are few and its cache is of blocks that are read as they are: then nothing is converted.
bool reads_blocks(const Operation& operation);

/// Why the node is left to ggml, in words; null when Fovea takes it.
const char* declined_because(const ggml_tensor& node);

}  // namespace fovea_ggml
