// A stream of random problems over everything that the library promises. Problem `index` of `seed` is the same on
// every machine, also with more work per problem (the stream for GPUs).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "verify/owned_problem.hpp"

namespace fovea::verify {

/// Work of a problem, in multiply-adds of one product: pairs * heads * (D + Dv), about.
inline constexpr int64_t kHostWork = 900'000;  ///< a few milliseconds for the oracle and the plain loop
/// Fills several tiles of a GPU's kernels in every direction, at common head sizes.
inline constexpr int64_t kDeviceWork = 8'000'000;

/// Of a stream: those that GPUs have kernels of their own for are a fourteenth of all.
enum class HeadSizes { kAny, kAbove256 };

namespace detail {

/// Lengths where blocked code goes wrong: around the multiples of usual block sizes, and small ones.
inline int64_t random_length(Random& random, int64_t limit) {
  int64_t length = 0;
  if (random.chance(0.4)) {
    length = random.one_of<int64_t>({16, 32, 48, 64, 80, 96, 128, 128, 192, 256, 320, 384}) +
             random.between(-2, 2);
  } else {
    length = random.between(1, random.chance(0.3) ? 8 : 300);
  }
  // A length above the limit becomes any other: the limit itself is rarely an edge.
  if (length > limit) length = random.between(1, std::max<int64_t>(limit, 1));
  return length;
}

inline int64_t random_wide_head_size(Random& random) {
  return random.one_of<int64_t>({257, 264, 320, 384, 448, 512, 575, 576});
}
inline int64_t random_head_size(Random& random) {
  if (random.chance(0.4)) return random.one_of<int64_t>({16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 256});
  if (random.chance(0.4)) return 8 * random.between(1, 32);
  if (random.chance(0.8)) return random.between(1, random.chance(0.8) ? 72 : 256);
  return random_wide_head_size(random);
}

inline void random_head_sizes(Random& random, ProblemSpec& s) {
  s.head_dim = random_head_size(random);
  s.head_dim_v = random.chance(0.75) ? s.head_dim : random_head_size(random);
  // The two shapes of latent attention, expanded and absorbed.
  if (random.chance(0.05)) {
    s.head_dim = 192;
    s.head_dim_v = 128;
  } else if (random.chance(0.01)) {
    s.head_dim = 576;
    s.head_dim_v = 512;
  }
}

/// One problem, drawn in a fixed order: each step takes its numbers from the stream after the one before.
class RandomProblem {
 public:
  RandomProblem(uint64_t seed, uint64_t index) : random_(Random(seed).bits() + index * 0xd1342543de82ef95u) {}

  ProblemSpec draw(int64_t usual_work, HeadSizes sizes) {
    draw_types();
    random_head_sizes(random_, s_);
    if (sizes == HeadSizes::kAbove256) {
      s_.head_dim = random_wide_head_size(random_);
      s_.head_dim_v = random_.chance(0.5) ? s_.head_dim : random_head_size(random_);
    }
    draw_shape(usual_work);
    draw_score_terms();
    draw_keys();
    draw_packing();
    draw_used_lengths();
    draw_bias();
    draw_masks();
    draw_head_terms();
    draw_memory();
    draw_expressions();
    draw_lists();
    draw_cache();
    draw_key_type();
    draw_qv();
    draw_query_type();
    draw_values_in_keys();
    return s_;
  }

 private:
  void draw_types() {
    s_.data_seed = random_.bits();
    s_.type = random_.one_of({Type::kF32, Type::kF16, Type::kBF16, Type::kBF16});
    s_.o_is_f32 = random_.chance(0.15);
    s_.gradients_are_f32 = random_.chance(0.05);
  }

  /// Batch, heads and lengths. A problem above the limit of work loses batch, then heads, then length.
  void draw_shape(int64_t usual_work) {
    // Few queries: the heads of a group share a tile, and the keys are split over many CTAs.
    const bool decode = random_.chance(0.15);
    s_.heads_kv = random_.between(1, decode ? 2 : 3);
    s_.heads_q = s_.heads_kv * random_.one_of<int64_t>({1, 1, 2, 3, 4, 8});
    s_.batch = random_.between(1, 3);

    // Some problems get a higher limit, for long sequences.
    const int64_t work = random_.chance(0.1) ? 5 * usual_work : usual_work;
    const int64_t per_pair = s_.head_dim + s_.head_dim_v;
    while (s_.batch > 1 && s_.batch * s_.heads_q * per_pair > work / 2000) --s_.batch;
    while (s_.heads_q > s_.heads_kv && s_.heads_q * per_pair > work / 2000) s_.heads_q -= s_.heads_kv;
    const int64_t pairs = std::max<int64_t>(work / (s_.batch * s_.heads_q * per_pair), 16);
    if (decode) {
      s_.seqlen_q = random_.between(1, random_.chance(0.5) ? 1 : 8);
      s_.seqlen_k = random_.between(1, std::clamp<int64_t>(pairs / s_.seqlen_q, 1, 4200));
    } else {
      s_.seqlen_q = random_length(random_, pairs);
      s_.seqlen_k = random_.chance(0.4) ? std::min(s_.seqlen_q, std::max<int64_t>(pairs / s_.seqlen_q, 1))
                                        : random_length(random_, pairs / s_.seqlen_q);
    }
  }

  /// What acts on scores and weights without a tensor: causal, window, scale, softcap, dropout.
  void draw_score_terms() {
    s_.causal = random_.chance(0.4);
    if (random_.chance(0.25)) {
      const int64_t widest = random_.chance(0.7) ? 70 : 300;
      s_.window_left = random_.between(-1, std::min<int64_t>(s_.seqlen_k + 2, widest));
      s_.window_right = random_.between(-1, std::min<int64_t>(s_.seqlen_q + 2, widest));
    }
    if (random_.chance(0.25)) {
      const int sign = random_.chance(0.3) ? -1 : 1;
      s_.scale = sign * (0.05 + random_.uniform());
    }
    s_.logit = random_.one_of({0.5, 1.0, 1.0, 2.0, 5.0, 20.0});
    s_.magnitude = random_.one_of({0.1, 1.0, 1.0, 4.0});
    if (random_.chance(0.2)) s_.softcap = random_.one_of({0.5, 5.0, 30.0});
    if (random_.chance(0.25)) {
      s_.dropout = random_.one_of({0.05, 0.3, 0.5, 0.9});
      s_.seed = random_.bits();
      s_.offset = random_.chance(0.5) ? random_.bits() : random_.bits() % 1000;
      s_.rng_state = random_.chance(0.5);
    }
  }

  void draw_keys() {
    s_.keys =
        random_.chance(0.8) ? Keys::kNormal : random_.one_of({Keys::kTies, Keys::kGrowing, Keys::kOneLarge});
  }

  void draw_packing() {
    if (!random_.chance(0.3)) return;
    s_.batch += random_.between(0, 2);
    s_.lengths_q = random_lengths(s_.seqlen_q);
    s_.lengths_k = random_lengths(s_.seqlen_k);
    s_.spare_rows = random_.chance(0.25) ? static_cast<int32_t>(random_.between(1, 5)) : 0;
  }
  /// Of packed sequences; some are empty.
  std::vector<int32_t> random_lengths(int64_t longest) {
    std::vector<int32_t> lengths;
    for (int64_t b = 0; b < s_.batch; ++b) {
      lengths.push_back(static_cast<int32_t>(random_.chance(0.15) ? 0 : random_.between(1, longest)));
    }
    return lengths;
  }

  void draw_used_lengths() {
    if (random_.chance(0.12)) s_.used_q = random_used(s_.seqlen_q, s_.lengths_q);
    if (random_.chance(0.2)) s_.used_k = random_used(s_.seqlen_k, s_.lengths_k);
  }
  std::vector<int32_t> random_used(int64_t seqlen, const std::vector<int32_t>& lengths) {
    std::vector<int32_t> used;
    for (int64_t b = 0; b < s_.batch; ++b) {
      const int64_t length = lengths.empty() ? seqlen : lengths[static_cast<size_t>(b)];
      used.push_back(static_cast<int32_t>(random_.between(0, length)));
    }
    return used;
  }

  void draw_bias() {
    if (!random_.chance(0.25)) return;
    s_.bias = true;
    s_.bias_is_f32 = random_.chance(0.5);
    s_.bias_broadcast = static_cast<int>(random_.between(0, 15));
    s_.bias_expanded = random_.chance(0.2);
    s_.bias_values = random_.chance(0.7)
                         ? BiasValues::kNormal
                         : random_.one_of({BiasValues::kSomeMinusInfinity, BiasValues::kRowsMinusInfinity});
    s_.dbias = !s_.bias_expanded && random_.chance(0.6);
    s_.dbias_is_f32 = random_.chance(0.5);
  }

  void draw_masks() {
    if (random_.chance(0.2)) {
      s_.mask = true;
      s_.mask_broadcast = static_cast<int>(random_.between(0, 15));
      s_.mask_density = random_.one_of({0.1, 0.5, 0.9});
    }
    if (random_.chance(0.15)) {
      s_.block_mask = true;
      s_.block_mask_broadcast = static_cast<int>(random_.between(0, 3));
      s_.block_q = random_.one_of<int64_t>({1, 7, 16, 48, 64, 128});
      s_.block_k = random_.one_of<int64_t>({1, 7, 16, 48, 64, 128});
      s_.block_mask_density = random_.one_of({0.2, 0.5, 0.9});
    }
  }

  /// Terms with one number a head: ALiBi and sinks. And whether the backward gets a gradient of lse.
  void draw_head_terms() {
    if (random_.chance(0.15)) {
      s_.alibi = true;
      s_.alibi_by_batch = random_.chance(0.5);
    }
    if (random_.chance(0.15)) {
      s_.sink = true;
      s_.dsink = random_.chance(0.8);
    }
    s_.dlse = random_.chance(0.25);
  }

  void draw_memory() {
    s_.plan_knows_data = random_.chance(0.7);
    // Kernels copy 16 bytes at once where pointers and strides allow it.
    s_.layout = random_.one_of({Layout::kCompact, Layout::kCompact, Layout::kHeadsFirst, Layout::kPadded,
                                Layout::kSliced, Layout::kMixed});
    s_.aligned = random_.chance(0.5);
    s_.placement = random_.chance(0.5) ? Placement::kGuarded : Placement::kPageEnd;
  }

  /// Last, so that the problems of a seed are the same but for this.
  void draw_expressions() {
    if (!random_.chance(0.2)) return;
    const bool both = random_.chance(0.3);
    if (both || random_.chance(0.6)) s_.score = one_of(known_scores());
    if (both || !s_.score) s_.sees = one_of(known_masks());
    s_.named_type = random_.one_of({Type::kF32, Type::kF32, Type::kF16, Type::kBF16});
    s_.named_gradients = random_.chance(0.7);
    s_.named_broadcast = random_.chance(0.5) ? 0 : static_cast<int>(random_.between(1, 15));
    s_.named_spare = random_.chance(0.7) ? 0 : random_.between(1, 3);
    // Of a score of -inf most expressions make NaN, or a number: what is tested by name is enough.
    if (s_.score) s_.bias_values = BiasValues::kNormal;
  }
  void draw_lists() {
    if (!random_.chance(0.12)) return;
    s_.list_size = random_.one_of<int64_t>({1, random_.between(0, 12), random_length(random_, 300)});
    s_.list_size = std::min(s_.list_size, 2 * s_.seqlen_k);
    s_.list_broadcast = static_cast<int>(random_.between(0, 3));
    s_.list_density = random_.one_of({0.3, 0.9, 1.0});
    s_.list_in_order = random_.chance(0.4);
    if (random_.chance(0.7)) s_.dbias = false;
    s_.list_of_all = !s_.packed() && random_.chance(0.2);
  }
  /// Keys in pages, in chosen sequences or in their own, with and without rows in front; queries packed or not.
  void draw_cache() {
    if (!random_.chance(0.15)) return;
    s_.lengths_k.clear();
    s_.used_k = random_used(s_.seqlen_k, {});
    const int64_t kind = random_.between(0, 3);
    if (kind <= 1) {
      s_.page_size = random_.one_of<int64_t>({1, 7, 16, 48, 64, 128, 256});
      const int64_t columns = (s_.seqlen_k + s_.page_size - 1) / s_.page_size + random_.between(0, 2);
      s_.seqlen_k = columns * s_.page_size;
      s_.caches = random_.between(1, s_.batch * columns + 3);
    } else if (kind == 2) {
      s_.caches = random_.between(1, s_.batch + 2);
      for (int64_t b = 0; b < s_.batch; ++b)
        s_.cache_batch.push_back(static_cast<int32_t>(random_.between(0, s_.caches - 1)));
    }
    if (random_.chance(kind == 3 ? 0.8 : 0.4)) {
      for (const int32_t used : s_.used_k)
        s_.leftpad_k.push_back(static_cast<int32_t>(random_.between(0, used)));
    }
    draw_new_rows();
  }
  /// Rows that sequences append, to rows of their own.
  void draw_new_rows() {
    if (s_.has_lists() || !random_.chance(0.4)) return;
    if (s_.page_size > 0) s_.caches = s_.batch * (s_.seqlen_k / s_.page_size) + random_.between(0, 3);
    if (!s_.cache_batch.empty()) {
      s_.caches = s_.batch + random_.between(0, 2);
      for (size_t b = 0; b < s_.cache_batch.size(); ++b)
        s_.cache_batch[b] = static_cast<int32_t>(s_.cache_batch.size() - 1 - b);
    }
    s_.packed_new = random_.chance(0.3);
    int64_t room = s_.seqlen_k;
    for (const int32_t used : s_.used_k) room = std::min(room, s_.seqlen_k - used);
    const auto all = static_cast<int32_t>(random_.between(0, room));
    for (const int32_t used : s_.used_k) {
      s_.lengths_new.push_back(s_.packed_new ? static_cast<int32_t>(random_.between(0, s_.seqlen_k - used))
                                             : all);
    }
    if (s_.head_dim < 2 || !random_.chance(0.7)) return;
    s_.rotary = 2 * random_.between(1, s_.head_dim / 2);
    s_.rotary_interleaved = random_.chance(0.5);
    s_.angles_are_f32 = random_.chance(0.3);
    if (!random_.chance(0.3)) return;
    for (size_t b = 0; b < s_.lengths_new.size(); ++b)
      s_.rotary_positions.push_back(static_cast<int32_t>(random_.between(0, 50)));
  }
  /// Keys of 8 bits, more often in a cache.
  void draw_key_type() {
    if (!random_.chance(s_.has_cache() ? 0.3 : 0.04)) return;
    s_.e4m3_keys = true;
    s_.descale_broadcast = static_cast<int>(random_.between(-1, 3));
  }
  /// Queries of values, more often where d_v is the larger one, as in latent attention.
  void draw_qv() { s_.qv = random_.chance(s_.head_dim_v > s_.head_dim ? 0.3 : 0.04); }
  void draw_values_in_keys() {
    s_.values_in_keys = s_.head_dim_v <= s_.head_dim && !s_.appends() && random_.chance(0.1);
  }
  /// Queries of 8 bits beside such keys, with o of any type.
  void draw_query_type() {
    if (!s_.e4m3_keys || !random_.chance(0.5)) return;
    s_.e4m3_queries = true;
    if (s_.o_is_f32) s_.type = Type::kF32;
    s_.o_is_f32 = false;
  }
  const KnownExpression* one_of(const std::vector<KnownExpression>& all) {
    return &all[static_cast<size_t>(random_.between(0, static_cast<int64_t>(all.size()) - 1))];
  }

  Random random_;
  ProblemSpec s_;
};

}  // namespace detail

/// Problem `index` of the stream `seed`. `usual_work` is the work of nine problems in ten; the tenth has five times
/// as much.
inline ProblemSpec random_problem(uint64_t seed, uint64_t index, int64_t usual_work = kHostWork,
                                  HeadSizes sizes = HeadSizes::kAny) {
  return detail::RandomProblem(seed, index).draw(usual_work, sizes);
}

}  // namespace fovea::verify
