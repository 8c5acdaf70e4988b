// The terms of a problem that a kernel must know about to be right. What every kernel handles (window, causal, groups of
// heads, packed and partly used sequences, dlse, any strides) is no term.
#pragma once

#include <cstdint>

namespace fovea::cuda {

/// The kernels of Hopper with a softcap of their own take a tanh whose error is absolute, 2^-21: times this, 3e-5 of a score, it
/// is what rounding a score of some hundreds in float32 costs.
inline constexpr double kMostFastSoftcap = 64;

/// X(Name, name, text, condition): the enumerator kTerm<Name>, the name in instances.toml (tools/make_instances.py reads
/// this list), what messages call it, and when a problem `p` has it.
#define FOVEA_TERMS(X)                                                                                       \
  X(Softcap, softcap, "softcap", p.softcap > 0)                                                              \
  X(WideSoftcap, wide_softcap, "a softcap above 64", p.softcap > kMostFastSoftcap)                           \
  X(Alibi, alibi, "alibi", p.has(Role::kAlibi))                                                              \
  X(Bias, bias, "bias", p.has(Role::kBias))                                                                  \
  X(Mask, mask, "mask", p.has(Role::kMask))                                                                  \
  X(BlockMask, block_mask, "block_mask", p.has(Role::kBlockMask))                                            \
  /* A forward that writes rng_state counts as one with dropout: only kernels that know dropout write it. */ \
  X(Dropout, dropout, "dropout", p.dropout > 0 || (p.pass == Pass::kForward && p.has(Role::kRngState)))      \
  X(Sink, sink, "sink", p.has(Role::kSink))                                                                  \
  X(NegativeScale, negative_scale, "a scale of 0 or less", !(static_cast<float>(p.scale) > 0))               \
  /* The forward writes it, or merges parts by it. */                                                        \
  X(Lse, lse, "lse", p.pass == Pass::kForward && p.has(Role::kLse))                                          \
  /* Of kernels that are compiled for it alone. */                                                           \
  X(Score, score, "score", p.expressions&& p.expressions->score)                                             \
  X(Sees, sees, "sees", p.expressions&& p.expressions->sees)                                                 \
  X(Lists, lists, "lists of keys", p.has(Role::kKeys))                                                       \
  X(Cache, cache, "keys of a cache (cache_batch, leftpad_k, or cu_seqlens_q alone)",                         \
    p.has(Role::kCacheBatch) || p.has(Role::kLeftPadK) || p.packed != p.packed_k)                            \
  X(Pages, pages, "page_table", p.has(Role::kPageTable))                                                     \
  X(KeysOf8Bits, keys_of_8_bits, "keys and values of 8 bits", p[Role::kK].dtype == DType::kE4M3)             \
  X(QueriesOf8Bits, queries_of_8_bits, "queries of 8 bits", p[Role::kQ].dtype == DType::kE4M3)               \
  X(QueriesOfValues, queries_of_values, "qv", p.has(Role::kQV))                                              \
  X(Arriving, arriving, "keys that arrive while it runs", p.arriving_keys > 0)

namespace term_bits {
enum Bit : uint32_t {
#define FOVEA_TERM_BIT(Name, name, text, condition) k##Name,
  FOVEA_TERMS(FOVEA_TERM_BIT)
#undef FOVEA_TERM_BIT
      kCount
};
}  // namespace term_bits

enum Term : uint32_t {
#define FOVEA_TERM(Name, name, text, condition) kTerm##Name = 1u << term_bits::k##Name,
  FOVEA_TERMS(FOVEA_TERM)
#undef FOVEA_TERM
};
inline constexpr uint32_t kNoTerms = 0;
inline constexpr uint32_t kTermExpressions = kTermScore | kTermSees;
/// Terms that only enter the end of a row, and cost nearly every kernel nothing.
inline constexpr uint32_t kPlainTerms = kTermSink | kTermLse;
/// All that a general kernel knows: what depends on where keys lie is apart (terms_known_by).
inline constexpr uint32_t kAllTerms =
    ((1u << term_bits::kCount) - 1) &
    ~(kTermExpressions | kTermLists | kTermCache | kTermPages | kTermKeysOf8Bits | kTermQueriesOf8Bits |
      kTermQueriesOfValues | kTermArriving);
/// The same, and keys that arrive while the kernel runs.
inline constexpr uint32_t kArrivingTerms = kPlainTerms | kTermArriving;

}  // namespace fovea::cuda
