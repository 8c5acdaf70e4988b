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

inline int64_t random_head_size(Random& random) {
  if (random.chance(0.4)) return random.one_of<int64_t>({16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 256});
  if (random.chance(0.4)) return 8 * random.between(1, 32);
  if (random.chance(0.8)) return random.between(1, random.chance(0.8) ? 72 : 256);
  return random.one_of<int64_t>({257, 264, 320, 384, 448, 512, 575, 576});
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

}  // namespace detail

inline ProblemSpec random_problem(uint64_t seed, uint64_t index, int64_t usual_work = kHostWork) {
  Random random(Random(seed).bits() + index * 0xd1342543de82ef95u);
  ProblemSpec s;
  s.data_seed = random.bits();
  s.type = random.one_of({Type::kF32, Type::kF16, Type::kBF16, Type::kBF16});
  s.o_is_f32 = random.chance(0.15);
  detail::random_head_sizes(random, s);
  // Few queries: the heads of a group share a tile, and the keys are split over many CTAs.
  const bool decode = random.chance(0.15);
  s.heads_kv = random.between(1, decode ? 2 : 3);
  s.heads_q = s.heads_kv * random.one_of<int64_t>({1, 1, 2, 3, 4, 8});
  s.batch = random.between(1, 3);

  // A problem above the limit of work loses batch, heads, then length. Some problems get a higher limit, for long
  // sequences.
  const int64_t work = random.chance(0.1) ? 5 * usual_work : usual_work;
  const int64_t per_pair = s.head_dim + s.head_dim_v;
  while (s.batch > 1 && s.batch * s.heads_q * per_pair > work / 2000) --s.batch;
  while (s.heads_q > s.heads_kv && s.heads_q * per_pair > work / 2000) s.heads_q -= s.heads_kv;
  const int64_t pairs = std::max<int64_t>(work / (s.batch * s.heads_q * per_pair), 16);
  if (decode) {
    s.seqlen_q = random.between(1, random.chance(0.5) ? 1 : 8);
    s.seqlen_k = random.between(1, std::clamp<int64_t>(pairs / s.seqlen_q, 1, 4200));
  } else {
    s.seqlen_q = detail::random_length(random, pairs);
    s.seqlen_k = random.chance(0.4) ? std::min(s.seqlen_q, std::max<int64_t>(pairs / s.seqlen_q, 1))
                                    : detail::random_length(random, pairs / s.seqlen_q);
  }

  s.causal = random.chance(0.4);
  if (random.chance(0.25)) {
    const int64_t widest = random.chance(0.7) ? 70 : 300;
    s.window_left = random.between(-1, std::min<int64_t>(s.seqlen_k + 2, widest));
    s.window_right = random.between(-1, std::min<int64_t>(s.seqlen_q + 2, widest));
  }
  if (random.chance(0.25)) s.scale = (random.chance(0.3) ? -1 : 1) * (0.05 + random.uniform());
  s.logit = random.one_of({0.5, 1.0, 1.0, 2.0, 5.0, 20.0});
  s.magnitude = random.one_of({0.1, 1.0, 1.0, 4.0});
  if (random.chance(0.2)) s.softcap = random.one_of({0.5, 5.0, 30.0});
  if (random.chance(0.25)) {
    s.dropout = random.one_of({0.05, 0.3, 0.5, 0.9});
    s.seed = random.bits();
    s.offset = random.chance(0.5) ? random.bits() : random.bits() % 1000;
    s.rng_state = random.chance(0.5);
  }
  s.keys = random.chance(0.8) ? Keys::kNormal : random.one_of({Keys::kTies, Keys::kGrowing, Keys::kOneLarge});

  if (random.chance(0.3)) {
    const int64_t count = s.batch + random.between(0, 2);
    const auto lengths = [&](int64_t longest) {
      std::vector<int32_t> list;
      for (int64_t b = 0; b < count; ++b) {
        list.push_back(static_cast<int32_t>(random.chance(0.15) ? 0 : random.between(1, longest)));
      }
      return list;
    };
    s.lengths_q = lengths(s.seqlen_q);
    s.lengths_k = lengths(s.seqlen_k);
    s.batch = count;
    s.spare_rows = random.chance(0.25) ? static_cast<int32_t>(random.between(1, 5)) : 0;
  }
  const auto used = [&](int64_t seqlen, const std::vector<int32_t>& lengths) {
    std::vector<int32_t> list;
    for (int64_t b = 0; b < s.batch; ++b) {
      const int64_t length = s.packed() ? lengths[static_cast<size_t>(b)] : seqlen;
      list.push_back(static_cast<int32_t>(random.between(0, length)));
    }
    return list;
  };
  if (random.chance(0.12)) s.used_q = used(s.seqlen_q, s.lengths_q);
  if (random.chance(0.2)) s.used_k = used(s.seqlen_k, s.lengths_k);

  if (random.chance(0.25)) {
    s.bias = true;
    s.bias_is_f32 = random.chance(0.5);
    s.bias_broadcast = static_cast<int>(random.between(0, 15));
    s.bias_expanded = random.chance(0.2);
    s.bias_values = random.chance(0.7)
                        ? BiasValues::kNormal
                        : random.one_of({BiasValues::kSomeMinusInfinity, BiasValues::kRowsMinusInfinity});
    s.dbias = !s.bias_expanded && random.chance(0.6);
    s.dbias_is_f32 = random.chance(0.5);
  }
  if (random.chance(0.2)) {
    s.mask = true;
    s.mask_broadcast = static_cast<int>(random.between(0, 15));
    s.mask_density = random.one_of({0.1, 0.5, 0.9});
  }
  if (random.chance(0.15)) {
    s.block_mask = true;
    s.block_mask_broadcast = static_cast<int>(random.between(0, 3));
    s.block_q = random.one_of<int64_t>({1, 7, 16, 48, 64, 128});
    s.block_k = random.one_of<int64_t>({1, 7, 16, 48, 64, 128});
    s.block_mask_density = random.one_of({0.2, 0.5, 0.9});
  }
  if (random.chance(0.15)) {
    s.alibi = true;
    s.alibi_by_batch = random.chance(0.5);
  }
  if (random.chance(0.15)) {
    s.sink = true;
    s.dsink = random.chance(0.8);
  }
  s.dlse = random.chance(0.25);
  s.plan_knows_data = random.chance(0.7);
  // Kernels copy 16 bytes at once where pointers and strides allow it.
  s.layout = random.one_of({Layout::kCompact, Layout::kCompact, Layout::kHeadsFirst, Layout::kPadded,
                            Layout::kSliced, Layout::kMixed});
  s.aligned = random.chance(0.5);
  s.placement = random.chance(0.5) ? Placement::kGuarded : Placement::kPageEnd;
  return s;
}

}  // namespace fovea::verify
