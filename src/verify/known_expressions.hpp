// Expressions whose meaning is written a second time here, in C++ and by hand: value, derivatives, the tensors that they
// read. Nothing of this knows the library's parser or its derivatives.
//
// Scores are continuous in s and so are their derivatives, and masks compare ints, or elements with constants that every type has:
// otherwise the rounding of s, or of a type, would choose between results that are far apart, and no bound could tell which is
// right.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <vector>

#include "verify/owned_tensor.hpp"
#include "verify/random.hpp"

namespace fovea::verify {

/// A pair of a query and a key, as expressions see it.
struct Pair {
  int64_t b, h, hk, q, k, nq, nk;
};

/// Sizes that dimensions of named tensors follow.
struct PairSizes {
  int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_k;
};

/// What the dimension of a named tensor is as large as; positive numbers are sizes. The last one is no name's alone, so it has
/// no size 1 that stands for all.
enum Extent : int64_t {
  kBatches = -1,
  kHeads = -2,
  kKeyHeads = -3,
  kQueries = -4,
  kKeys = -5,
  kPositions = -6,   ///< of queries or keys
  kKeyLengths = -7,  ///< 0 to all keys
  kDistances = -8
};

enum class Elements : uint8_t {
  kReal,
  kInteger,  ///< 0 to 127
  kTruth     ///< 0, or not
};

using Index = std::array<int64_t, 4>;

struct KnownTensor {
  const char* name;
  Elements elements;
  std::vector<int64_t> extents;
  double (*value)(Random& random, const Index& index) = nullptr;
  /// Of a tensor that somebody gives: its elements in the dense order, in place of value(), and their type.
  const std::vector<double>* given = nullptr;
  Type given_type = Type::kF32;
};

/// The elements of an expression's tensors, as float32 code reads them.
class NamedValues {
 public:
  void add(const OwnedTensor& tensor) { tensors_.push_back({tensor.shape(), tensor.values()}); }

  float real(size_t tensor, const Index& index) { return static_cast<float>(get(tensor, index)); }
  int64_t integer(size_t tensor, const Index& index) { return static_cast<int64_t>(get(tensor, index)); }
  /// Where an element is in the tensor's dense order; -1 outside.
  int64_t place(size_t tensor, const Index& index) const {
    int64_t place = 0;
    const Sizes& shape = tensors_[tensor].shape;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      const int64_t at = shape[axis] == 1 ? 0 : index[axis];
      if (at < 0 || at >= shape[axis]) return -1;
      place = place * shape[axis] + at;
    }
    return place;
  }
  /// Whether all elements read since the last call were inside.
  bool take_valid() {
    const bool valid = valid_;
    valid_ = true;
    return valid;
  }

 private:
  struct Values {
    Sizes shape;
    std::vector<double> elements;
  };
  double get(size_t tensor, const Index& index) {
    const int64_t at = place(tensor, index);
    valid_ = valid_ && at >= 0;
    return at < 0 ? 0 : tensors_[tensor].elements[static_cast<size_t>(at)];
  }

  std::vector<Values> tensors_;
  bool valid_ = true;
};

/// A score and its derivatives.
struct Scored {
  struct Element {
    size_t tensor = 0;
    Index index{};
    float slope = 0;  ///< d score / d element; 0: none is read
  };
  float value = 0;
  float slope = 1;  ///< d score / d s
  std::array<Element, 2> elements{};
};

/// An expression without `score` and `sees` is one that somebody gives: its meaning is not written a second time.
struct KnownExpression {
  const char* name;
  const char* text;
  std::vector<KnownTensor> tensors = {};  ///< places in here are those of NamedValues and Scored
  Scored (*score)(NamedValues&, const Pair&, float s) = nullptr;
  bool (*sees)(NamedValues&, const Pair&) = nullptr;
};

inline int64_t size_of(int64_t extent, const PairSizes& sizes) {
  switch (extent) {
    case kBatches:
      return sizes.batch;
    case kHeads:
      return sizes.heads_q;
    case kKeyHeads:
      return sizes.heads_kv;
    case kQueries:
      return sizes.seqlen_q;
    case kKeys:
      return sizes.seqlen_k;
    case kPositions:
      return std::max(sizes.seqlen_q, sizes.seqlen_k);
    case kKeyLengths:
      return sizes.seqlen_k + 1;
    case kDistances:
      return std::max<int64_t>(std::min(sizes.seqlen_q, sizes.seqlen_k), 2);
    default:
      return extent;
  }
}

inline Sizes shape_of(const KnownTensor& tensor, const PairSizes& sizes, int broadcast, int64_t spare) {
  Sizes shape;
  for (const int64_t extent : tensor.extents) {
    const bool by_name = extent < 0 && extent != kDistances;
    const bool one = by_name && (broadcast >> shape.size() & 1) != 0;
    shape.push_back(one ? 1 : size_of(extent, sizes) + (by_name ? spare : 0));
  }
  return shape;
}

inline Type element_type(const KnownTensor& tensor, Type real, Random& random) {
  if (tensor.given != nullptr) return tensor.given_type;
  switch (tensor.elements) {
    case Elements::kReal:
      return real;
    case Elements::kInteger:
      return random.one_of({Type::kI32, Type::kU8});
    case Elements::kTruth:
      break;
  }
  return random.one_of({Type::kBool, Type::kU8, Type::kI32});
}

/// The index of an element by its place in the dense order.
inline Index index_at(const Sizes& shape, int64_t place) {
  Index index{};
  for (size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = place % shape[axis];
    place /= shape[axis];
  }
  return index;
}

namespace detail {

inline double some_normal(Random& random, const Index&) {
  return random.normal();
}
inline double half_to_three_halves(Random& random, const Index&) {
  return 0.5 + random.uniform();
}
inline double alibi_slope(Random& random, const Index&) {
  return std::exp2(-random.uniform() * 8);
}
/// Documents of 17 positions, which begin elsewhere in each row of a batch.
inline double document(Random&, const Index& index) {
  return static_cast<double>((index[1] + 5 * index[0]) / 17 % 100);
}
inline double mostly_true(Random& random, const Index&) {
  return random.chance(0.7) ? 1 : 0;
}

inline int64_t floor_divided(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
inline int64_t floor_remainder(int64_t a, int64_t b) {
  return a - b * floor_divided(a, b);
}
inline float real(int64_t x) {
  return static_cast<float>(x);
}

inline constexpr const char* kSameDocument = "doc[b, q] == doc[b, k]";

}  // namespace detail

/// Scores that have another argument for the same.
inline std::vector<KnownExpression> scores_of_arguments() {
  using namespace detail;
  return {
      {.name = "alibi",
       .text = "s - slope[h] * abs(q + nk - nq - k)",
       .tensors = {{"slope", Elements::kReal, {kHeads}, alibi_slope}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const float distance = real(std::abs(p.q + p.nk - p.nq - p.k));
             return Scored{s - t.real(0, {p.h}) * distance, 1, {{{0, {p.h}, -distance}}}};
           }},
      {.name = "softcap",
       .text = "5 * tanh(s / 5)",
       .score =
           [](NamedValues&, const Pair&, float s) {
             const float tanh = std::tanh(s / 5);
             return Scored{5 * tanh, 1 - tanh * tanh};
           }},
      {.name = "bias",
       .text = "s + bias[b, h, q, k]",
       .tensors = {{"bias", Elements::kReal, {kBatches, kHeads, kQueries, kKeys}, some_normal}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const Index index = {p.b, p.h, p.q, p.k};
             return Scored{s + t.real(0, index), 1, {{{0, index, 1}}}};
           }},
  };
}

/// A mask of numbers, times a slope of the head.
inline std::vector<KnownExpression> scores_of_masks() {
  using namespace detail;
  return {
      {.name = "steps",
       .text = "s - slope[h] * steps[b, 0, q, k]",
       .tensors = {{"slope", Elements::kReal, {kHeads}, alibi_slope},
                   {"steps", Elements::kReal, {kBatches, 1, kQueries, kKeys}, some_normal}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const Index index = {p.b, 0, p.q, p.k};
             const float slope = t.real(0, {p.h}), steps = t.real(1, index);
             return Scored{s - slope * steps, 1, {{{0, {p.h}, -steps}, {1, index, -slope}}}};
           }},
  };
}

/// Scores that read tensors.
inline std::vector<KnownExpression> scores_of_tensors() {
  using namespace detail;
  return {
      {.name = "relative_positions",
       .text = "s + table[h, clamp(k - q, -16, 16) + 16]",
       .tensors = {{"table", Elements::kReal, {kHeads, 33}, some_normal}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const Index index = {p.h, std::clamp<int64_t>(p.k - p.q, -16, 16) + 16};
             return Scored{s + t.real(0, index), 1, {{{0, index, 1}}}};
           }},
      {.name = "temperature",
       .text = "s * temperature[h]",
       .tensors = {{"temperature", Elements::kReal, {kHeads}, half_to_three_halves}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const float temperature = t.real(0, {p.h});
             return Scored{s * temperature, temperature, {{{0, {p.h}, s}}}};
           }},
      {.name = "looked_up_distance",
       .text = "s + weight[h, distance[b, q, k]]",
       .tensors = {{"weight", Elements::kReal, {kHeads, 12}, some_normal},
                   {"distance",
                    Elements::kInteger,
                    {kBatches, kQueries, kKeys},
                    [](Random& random, const Index&) { return static_cast<double>(random.between(0, 11)); }}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const Index index = {p.h, t.integer(1, {p.b, p.q, p.k})};
             return Scored{s + t.real(0, index), 1, {{{0, index, 1}}}};
           }},
      {.name = "gain_and_shift",
       .text = "gain * s + shift",
       .tensors = {{"gain", Elements::kReal, {}, half_to_three_halves},
                   {"shift", Elements::kReal, {}, some_normal}},
       .score =
           [](NamedValues& t, const Pair&, float s) {
             const float gain = t.real(0, {});
             return Scored{gain * s + t.real(1, {}), gain, {{{0, {}, s}, {1, {}, 1}}}};
           }},
      {.name = "product_of_elements",
       .text = "s + position[b, q] * position[b, k]",
       .tensors = {{"position", Elements::kReal, {kBatches, kPositions}, some_normal}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const float of_q = t.real(0, {p.b, p.q}), of_k = t.real(0, {p.b, p.k});
             return Scored{s + of_q * of_k, 1, {{{0, {p.b, p.q}, of_k}, {0, {p.b, p.k}, of_q}}}};
           }},
      {.name = "key_heads_and_lengths",
       .text = "s + by_length[hk, nk] * by_key[k, hk]",
       .tensors = {{"by_length", Elements::kReal, {kKeyHeads, kKeyLengths}, half_to_three_halves},
                   {"by_key", Elements::kReal, {kKeys, kKeyHeads}, some_normal}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             const float a = t.real(0, {p.hk, p.nk}), c = t.real(1, {p.k, p.hk});
             return Scored{s + a * c, 1, {{{0, {p.hk, p.nk}, c}, {1, {p.k, p.hk}, a}}}};
           }},
      {.name = "minus_infinity",
       .text = "where(keep[b, k] != 0, s, -1.0 / 0)",
       .tensors = {{"keep", Elements::kTruth, {kBatches, kKeys}, mostly_true}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             if (t.integer(0, {p.b, p.k}) != 0) return Scored{s, 1};
             return Scored{-std::numeric_limits<float>::infinity(), 0};
           }},
      {.name = "other_documents",
       .text = "where(doc[b, q] == doc[b, k], s, 0.5 * s - 1)",
       .tensors = {{"doc", Elements::kInteger, {kBatches, kPositions}, document}},
       .score =
           [](NamedValues& t, const Pair& p, float s) {
             if (t.integer(0, {p.b, p.q}) == t.integer(0, {p.b, p.k})) return Scored{s, 1};
             return Scored{0.5f * s - 1, 0.5f};
           }},
  };
}

/// Scores of s and positions alone: every function once.
inline std::vector<KnownExpression> scores_of_functions() {
  using namespace detail;
  return {
      {.name = "huber",
       .text = "where(abs(s) < 1, 0.5 * s * s, abs(s) - 0.5)",
       .score =
           [](NamedValues&, const Pair&, float s) {
             if (std::abs(s) < 1) return Scored{0.5f * s * s, s};
             return Scored{std::abs(s) - 0.5f, s > 0 ? 1.0f : -1.0f};
           }},
      {.name = "softplus",
       .text = "max(s, 0) + log(1 + exp(-abs(s)))",
       .score =
           [](NamedValues&, const Pair&, float s) {
             const float e = std::exp(-std::abs(s));
             return Scored{std::max(s, 0.0f) + std::log(1 + e), s > 0 ? 1 / (1 + e) : e / (1 + e)};
           }},
      {.name = "exponential_unit",
       .text = "max(s, 0) + exp(min(s, 0)) - 1",
       .score =
           [](NamedValues&, const Pair&, float s) {
             const float e = std::exp(std::min(s, 0.0f));
             return Scored{std::max(s, 0.0f) + e - 1, s > 0 ? 1 : e};
           }},
      {.name = "hyperbola",
       .text = "sqrt(1 + s * s) - 1",
       .score =
           [](NamedValues&, const Pair&, float s) {
             const float root = std::sqrt(1 + s * s);
             return Scored{root - 1, s / root};
           }},
      {.name = "blocks",
       .text = "s - 0.25 * float(abs(q / 16 - k / 16) % 4) - floor(float((q - k) / 5) / 2.0) / 64",
       .score =
           [](NamedValues&, const Pair& p, float s) {
             const auto step = real(std::abs(p.q / 16 - p.k / 16) % 4);
             const float half = std::floor(real(floor_divided(p.q - p.k, 5)) / 2);
             return Scored{s - 0.25f * step - half / 64, 1};
           }},
      {.name = "lengths",
       .text = "s * (1 + log(2.0 + nk) / 8) + float(q * 3 - k) / (nq + nk)",
       .score =
           [](NamedValues&, const Pair& p, float s) {
             const float factor = 1 + std::log(2 + real(p.nk)) / 8;
             return Scored{s * factor + real(p.q * 3 - p.k) / real(p.nq + p.nk), factor};
           }},
  };
}

/// Masks of positions alone.
inline std::vector<KnownExpression> masks_of_positions() {
  using namespace detail;
  return {
      {.name = "causal",
       .text = "k <= q + nk - nq",
       .sees = [](NamedValues&, const Pair& p) { return p.k <= p.q + p.nk - p.nq; }},
      {.name = "causal_window",
       .text = "k <= q + nk - nq && q + nk - nq - k <= 20",
       .sees =
           [](NamedValues&, const Pair& p) {
             const int64_t back = p.q + p.nk - p.nq - p.k;
             return back >= 0 && back <= 20;
           }},
      {.name = "dilated",
       .text = "(q / 8 - k / 8) % 3 == 0",
       .sees = [](NamedValues&, const Pair& p) { return floor_remainder(p.q / 8 - p.k / 8, 3) == 0; }},
      {.name = "heads",
       .text = "h % 2 == 0 && hk >= 0 || !(abs(q - k) > 7)",
       .sees = [](NamedValues&, const Pair& p) { return p.h % 2 == 0 || std::abs(p.q - p.k) <= 7; }},
  };
}

/// Masks that read tensors.
inline std::vector<KnownExpression> masks_of_tensors() {
  using namespace detail;
  return {
      {.name = "documents",
       .text = kSameDocument,
       .tensors = {{"doc", Elements::kInteger, {kBatches, kPositions}, document}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return t.integer(0, {p.b, p.q}) == t.integer(0, {p.b, p.k});
           }},
      {.name = "prefix",
       .text = "k < prefix[b] || k <= q",
       .tensors = {{"prefix",
                    Elements::kInteger,
                    {kBatches},
                    [](Random& random, const Index&) { return static_cast<double>(random.between(0, 60)); }}},
       .sees = [](NamedValues& t, const Pair& p) { return p.k < t.integer(0, {p.b}) || p.k <= p.q; }},
      {.name = "tree",
       .text = "ancestor[b, q, k] != 0",
       .tensors = {{"ancestor", Elements::kTruth, {kBatches, kQueries, kKeys}, mostly_true}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return t.integer(0, {p.b, p.q, p.k}) != 0;
           }},
      {.name = "open",
       .text = "barrier[b, h, q, k] == 0.0",
       .tensors = {{"barrier",
                    Elements::kReal,
                    {kBatches, kHeads, kQueries, kKeys},
                    [](Random& random, const Index&) { return random.chance(0.5) ? random.normal() : 0; }}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return t.real(0, {p.b, p.h, p.q, p.k}) == 0;
           }},
      {.name = "important_keys",
       .text = "importance[hk, k] > 0.25",
       .tensors = {{"importance", Elements::kReal, {kKeyHeads, kKeys}, some_normal}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return t.real(0, {p.hk, p.k}) > 0.25f;
           }},
      {.name = "important_pairs",
       .text = "pair_weight[b, h, q, k] > -0.5",
       .tensors = {{"pair_weight", Elements::kReal, {kBatches, kHeads, kQueries, kKeys}, some_normal}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return t.real(0, {p.b, p.h, p.q, p.k}) > -0.5f;
           }},
      {.name = "past",  // outside of the tensor nothing is seen
       .text = "past[q - k] != 0",
       .tensors = {{"past", Elements::kTruth, {kDistances}, mostly_true}},
       .sees = [](NamedValues& t, const Pair& p) { return t.integer(0, {p.q - p.k}) != 0; }},
      {.name = "guarded",
       .text = "k < 24 || late[b, k - 24] != 0",
       .tensors = {{"late", Elements::kTruth, {kBatches, kDistances}, mostly_true}},
       .sees =
           [](NamedValues& t, const Pair& p) {
             return p.k < 24 || t.integer(0, {p.b, p.k - 24}) != 0;
           }},
  };
}

inline const std::vector<KnownExpression>& known_scores() {
  static const std::vector<KnownExpression> all = [] {
    std::vector<KnownExpression> list = scores_of_arguments();
    for (const auto& more : {scores_of_masks(), scores_of_tensors(), scores_of_functions()})
      list.insert(list.end(), more.begin(), more.end());
    return list;
  }();
  return all;
}
inline const std::vector<KnownExpression>& known_masks() {
  static const std::vector<KnownExpression> all = [] {
    std::vector<KnownExpression> list = masks_of_positions();
    const std::vector<KnownExpression> more = masks_of_tensors();
    list.insert(list.end(), more.begin(), more.end());
    return list;
  }();
  return all;
}

/// Null where there is none of the name.
inline const KnownExpression* known(const std::vector<KnownExpression>& all, std::string_view name) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const KnownExpression& one) { return one.name == name; });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace fovea::verify
