// A problem as GPU kernels see it: plain data that a launch passes by value. cuda/launch makes it from an
// AttentionProblem and its buffers. Every function here is constexpr, so tests run it on the host.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "tile/divisor.hpp"
#include "tile/expression_tensors.hpp"
#include "tile/philox.hpp"

namespace fovea::tile {

/// A (batch, seqlen, heads, size) tensor whose last dimension is contiguous. Strides in elements; packed sequences have
/// batch stride 0.
struct RowsView {
  char* data = nullptr;
  int64_t batch = 0, row = 0, head = 0;

  /// Element offset of the first element of a row.
  constexpr int64_t offset(int64_t b, int64_t r, int64_t h) const { return b * batch + r * row + h * head; }
};

/// A float32 number for each row, (batch, heads, seqlen); packed sequences have batch stride 0.
struct StatsView {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;

  constexpr int64_t offset(int64_t b, int64_t h, int64_t r) const { return b * batch + h * head + r * row; }
};

/// An element for each pair of a query and a key, (batch, heads, seqlen_q, seqlen_k); stride 0 where a dimension
/// broadcasts.
struct PairsView {
  char* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;

  constexpr int64_t offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * batch + h * head + i * row + j * column;
  }
};

/// A list of keys for each query, (batch, heads_kv, seqlen_q, count): count int32 side by side.
struct ListsView {
  const int32_t* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;

  constexpr int64_t offset(int64_t b, int64_t h, int64_t r) const { return b * batch + h * head + r * row; }
};

/// Pages of a cache, (batch, most pages): int32 side by side.
struct PagesView {
  const int32_t* data = nullptr;
  int64_t batch = 0;
};

/// A float32 factor for each sequence and key head; stride 0 where it is shared.
struct DescaleView {
  const float* data = nullptr;
  int64_t batch = 0, head = 0;

  constexpr float at(int64_t b, int64_t h) const {
    return data == nullptr ? 1.0f : data[b * batch + h * head];
  }
};

/// What both passes need. A pointer is null where the problem has no such tensor. Positions (rows, keys, window edges
/// and their sums) fit 32 bits: the launch refuses longer sequences.
struct AttentionParams {
  RowsView q, k, v, o;
  StatsView lse;  ///< data may be null in the forward

  RowsView d_o, dq, dk, dv;  ///< backward
  StatsView dlse;

  // Terms of the score. Elements of `bias` and `dbias` are float32 or of the type of q (of o where q has 8 bits).
  PairsView bias, dbias, mask, block_mask;
  DType o_type = DType::kF32, bias_type = DType::kF32, dbias_type = DType::kF32;
  int block_q = 1, block_k = 1;
  const float* alibi = nullptr;
  int64_t alibi_batch = 0, alibi_head = 0;
  const float* sink = nullptr;   ///< (heads_q), stride 1
  float* dsink = nullptr;        ///< (heads_q), stride 1
  ListsView keys;                ///< where queries have lists
  int list_size = 0;             ///< entries of each
  ExpressionTensors expression;  ///< what the kernels compiled for an expression read

  // Lengths. Null: every sequence has seqlen_q queries and seqlen_k keys.
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  ///< (batch + 1)
  const int32_t *seqused_q = nullptr, *seqused_k = nullptr;        ///< (batch)
  PagesView page_table;  ///< null: keys lie at their sequence's place
  int caches = 0;        ///< with page_table pages of k, with cache_batch its sequences
  Divisor cache_rows;    ///< rows of each
  const int32_t *cache_batch = nullptr, *leftpad_k = nullptr;  ///< (batch)
  DescaleView q_descale, k_descale,
      v_descale;                              ///< what the elements of q, k and v of 8 bits are multiplied by
  bool e4m3_queries = false;                  ///< q has 8 bits
  bool dq_is_f32 = false, dk_is_f32 = false;  ///< whatever the type of q; dv is as dk
  RowsView qv;                                ///< queries that meet the values, with the columns of v
  int seqlen_q = 0, seqlen_k = 0;             ///< longest of the batch
  int64_t total_q = 0, total_k = 0;           ///< packed: rows of q and k

  int batch = 0, heads_q = 0, heads_kv = 0, group = 1;  ///< group = heads_q / heads_kv
  int head_dim = 0, head_dim_v = 0;  ///< as asked; kernels pad to their own sizes with zeros
  float scale = 1;
  float softcap = 0;                        ///< 0: none
  int window_left = -1, window_right = -1;  ///< -1: unlimited; causal is window_right = 0

  /// Without dropout threshold is 0 and keep_scale 1. The key comes from rng_state where `rng_state_is_input`, else from
  /// seed and offset, which the forward writes to rng_state unless that is null.
  uint32_t dropout_threshold = 0;
  float dropout_keep_scale = 1;
  uint64_t seed = 0, offset = 0;
  uint32_t dropout_heads = 0, dropout_first_head = 0;  ///< of the problem whose stream it is (DropoutPlace)
  uint32_t dropout_first_row = 0, dropout_first_column = 0;  ///< Dropout::first_row, first_column
  int64_t* rng_state = nullptr;
  bool rng_state_is_input = false;

  /// AlignedBits of the tensors whose data, strides and head sizes are multiples of 16 bytes, so that 16-byte copies are
  /// safe. Kernels copy the others element by element.
  uint32_t aligned16 = 0;

  constexpr bool o_is_f32() const { return o_type == DType::kF32; }
  constexpr bool bias_is_f32() const { return bias_type == DType::kF32; }
  constexpr bool dbias_is_f32() const { return dbias_type == DType::kF32; }
};

enum AlignedBit : uint32_t {
  kAlignedQ = 1u << 0,
  kAlignedK = 1u << 1,
  kAlignedV = 1u << 2,
  kAlignedDO = 1u << 3,
  kAlignedO = 1u << 4,
  kAlignedDQ = 1u << 5,
  kAlignedDK = 1u << 6,
  kAlignedDV = 1u << 7,
  kAlignedQV = 1u << 8,
  kAlignedDBias = 1u << 9,
};

/// Where one sequence of the batch lies and how long it is.
struct SequenceSpan {
  int64_t row_q = 0, row_k = 0;  ///< first row (0 unless packed)
  /// Rows that the tensors hold for the sequence (for the last packed one: all that follow).
  int length_q = 0, length_k = 0;
  int used_q = 0, used_k = 0;  ///< rows that take part
};

/// Of a sequence that is as long as any, alone in its rows.
constexpr SequenceSpan whole_span(const AttentionParams& p) {
  return {0, 0, p.seqlen_q, p.seqlen_k, p.seqlen_q, p.seqlen_k};
}

/// The same rules as cpu/sequence.hpp: lengths come from seqused, else cu_seqlens, else the longest. `kCached`: packed
/// queries may have keys that are not packed.
template <bool kCached = false>
constexpr SequenceSpan sequence_span(const AttentionParams& p, int b) {
  SequenceSpan span = whole_span(p);
  if (p.cu_seqlens_q != nullptr) {
    span.row_q = p.cu_seqlens_q[b];
    span.used_q = static_cast<int>(p.cu_seqlens_q[b + 1] - span.row_q);
    // Rows of the tensors after the last sequence count as its own, so that a tile writes their zeros.
    const bool last = b + 1 == p.batch;
    span.length_q = last ? static_cast<int>(p.total_q - span.row_q) : span.used_q;
    if (!kCached || p.cu_seqlens_k != nullptr) {
      span.row_k = p.cu_seqlens_k[b];
      span.used_k = static_cast<int>(p.cu_seqlens_k[b + 1] - span.row_k);
      span.length_k = last ? static_cast<int>(p.total_k - span.row_k) : span.used_k;
    }
  }
  if (p.seqused_q != nullptr) span.used_q = p.seqused_q[b];
  if (p.seqused_k != nullptr) span.used_k = p.seqused_k[b];
  return span;
}

/// The same where keys may lie in a cache: rows in front of key 0 are left out. Contents that the tensors cannot have make the
/// sequence shorter, so that no kernel reads outside of them.
constexpr SequenceSpan cached_span(const AttentionParams& p, int b) {
  const auto clamp = [](int x, int most) { return x < 0 ? 0 : (x > most ? most : x); };
  SequenceSpan span = sequence_span<true>(p, b);
  span.used_k = clamp(span.used_k, p.seqlen_k);
  if (p.leftpad_k != nullptr) {
    const int pad = clamp(p.leftpad_k[b], span.used_k);
    span.row_k += pad;
    span.length_k -= pad;
    span.used_k -= pad;
  }
  const uint32_t cache = p.cache_batch != nullptr ? static_cast<uint32_t>(p.cache_batch[b]) : 0;
  const bool chooses = p.cache_batch != nullptr || p.page_table.data != nullptr;
  if (chooses && cache >= static_cast<uint32_t>(p.caches)) span.used_k = 0;
  return span;
}

/// Whether cached_span() reads no memory.
constexpr bool lengths_are_known(const AttentionParams& p) {
  return p.cu_seqlens_q == nullptr && p.cu_seqlens_k == nullptr && p.seqused_q == nullptr &&
         p.seqused_k == nullptr && p.leftpad_k == nullptr && p.cache_batch == nullptr;
}

/// Half-open range of keys (or queries), in 32 bits.
struct Span32 {
  int begin = 0, end = 0;
  constexpr bool empty() const { return begin >= end; }
};

/// Keys that query i sees under causal and window: tile::Window::keys_of in 32 bits.
constexpr Span32 keys_of(const AttentionParams& p, const SequenceSpan& s, int i) {
  const int diagonal = i + s.used_k - s.used_q;
  const auto clamp = [&](int x) { return x < 0 ? 0 : (x > s.used_k ? s.used_k : x); };
  return {p.window_left < 0 ? 0 : clamp(diagonal - p.window_left),
          p.window_right < 0 ? s.used_k : clamp(diagonal + p.window_right + 1)};
}

/// Queries that see any key of [begin, end): tile::Window::queries_of_any in 32 bits.
constexpr Span32 queries_of_any(const AttentionParams& p, const SequenceSpan& s, int begin, int end) {
  const int shift = s.used_k - s.used_q;
  const auto clamp = [&](int x) { return x < 0 ? 0 : (x > s.used_q ? s.used_q : x); };
  return {p.window_right < 0 ? 0 : clamp(begin - p.window_right - shift),
          p.window_left < 0 ? s.used_q : clamp(end + p.window_left - shift)};
}

/// The dropout stream of this run, but for its start.
constexpr Dropout dropout_without_start(const AttentionParams& p) {
  Dropout dropout;
  dropout.threshold = p.dropout_threshold;
  dropout.keep_scale = p.dropout_keep_scale;
  dropout.first_row = p.dropout_first_row;
  dropout.first_column = p.dropout_first_column;
  return dropout;
}

/// The dropout stream of this run. Reads rng_state on the device where it is an input.
constexpr Dropout dropout_of(const AttentionParams& p) {
  Dropout dropout = dropout_without_start(p);
  const uint64_t seed = p.rng_state_is_input ? static_cast<uint64_t>(p.rng_state[0]) : p.seed;
  const uint64_t offset = p.rng_state_is_input ? static_cast<uint64_t>(p.rng_state[1]) : p.offset;
  dropout.start = Dropout::start_of(seed, offset);
  return dropout;
}

/// The number of a head in the dropout stream.
constexpr uint32_t dropout_head(const AttentionParams& p, int batch, int head) {
  return p.dropout_first_head + static_cast<uint32_t>(batch) * p.dropout_heads + static_cast<uint32_t>(head);
}

}  // namespace fovea::tile
