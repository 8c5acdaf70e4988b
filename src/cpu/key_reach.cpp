// Searches distances from the far end for the first that may have a weight: the definitions of key_reach.hpp.
#include "cpu/key_reach.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "tile/alibi_reach.hpp"

namespace fovea::cpu {
namespace {

// With fewer, what is left out takes less time than to find it.
constexpr int64_t kFewestKeys = 1024, kFewestQueries = 256;
constexpr int64_t kKeysAtOnce = 128;  // those of a block, for which PairScratch has room

/// A query of a sequence that looks at keys one after the other, all heads of its group at once.
struct DistanceReader {
  const Ops& ops;
  const Group& group;
  const ScoreTerms& terms;
  const PairScratch& scratch;

  /// f of head x of the group and key j0 + i goes to visit(x, j0 + i, f).
  template <class Visit>
  void read(int64_t query, int64_t j0, int64_t n, const Visit& visit) const {
    const int64_t heads = group.size(), row = query * heads;
    const DistanceValues values =
        distance_values(ops, group, terms, row, heads, j0, n, 1.0f, scratch.registers, scratch.distances);
    for (int64_t j = j0; j < j0 + n; ++j)
      for (int64_t x = 0; x < heads; ++x) visit(x, j, *values.of(row + x, j, heads));
  }
  /// Of n keys the first, or with `last` the last, for which f of some head x is not below least[x]: it may have a weight, as it may where
  /// f is NaN. -1: none.
  int64_t key_with_weight(int64_t query, int64_t j0, int64_t n, bool last, const float* least) const {
    int64_t found = -1;
    read(query, j0, n, [&](int64_t x, int64_t j, float f) {
      if (f < least[x]) return;
      if (found < 0 || last) found = j;
    });
    return found;
  }
  /// The largest distance from the last query to a key before it that may have a weight.
  int64_t before(const float* least) const {
    const int64_t keys = group.span.used_k;
    for (int64_t j = 0; j < keys; j += kKeysAtOnce) {
      const int64_t found =
          key_with_weight(group.span.used_q - 1, j, std::min(kKeysAtOnce, keys - j), false, least);
      if (found >= 0) return keys - 1 - found;
    }
    return 0;
  }
  /// The largest distance from the first query to a key behind it that may have a weight.
  int64_t behind(const float* least) const {
    const int64_t keys = group.span.used_k, own = keys - group.span.used_q;
    for (int64_t end = keys; end > own; end -= kKeysAtOnce) {
      const int64_t j = std::max(own, end - kKeysAtOnce);
      const int64_t found = key_with_weight(0, j, end - j, true, least);
      if (found >= 0) return found - own;
    }
    return 0;
  }
};

/// The largest norm of rows; infinite where an element is not finite.
template <class Row>
float largest_norm(const Ops& ops, DType type, int64_t rows, int64_t size, const Row& row) {
  float largest = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float square = ops.sum_of_squares(row(i), type, size);
    largest = std::max(largest, square < std::numeric_limits<float>::infinity()
                                    ? square
                                    : std::numeric_limits<float>::infinity());
  }
  return std::sqrt(largest);
}

}  // namespace

KeyReach::KeyReach(const AttentionProblem& p, const PairPrograms& programs) {
  const bool by_distance = programs.has_form && !programs.of_distance.empty() && !programs.elements;
  const bool positions = !programs.has_sees && !p.has(Role::kKeys) && !p.has(Role::kQV);
  if (by_distance && positions && p.seqlen_k >= kFewestKeys && p.seqlen_q >= kFewestQueries)
    groups_ = p.batch * p.heads_kv;
}

int64_t KeyReach::bytes() const {
  return round_up(groups_ * static_cast<int64_t>(sizeof(Sides)), kAlignment);
}

void KeyReach::set_memory(void* memory) {
  sides_ = static_cast<Sides*>(memory);
  for (int64_t i = 0; i < groups_; ++i) sides_[i] = {-1, -1, 0};
}

void KeyReach::find(const Ops& ops, const Group& group, const ScoreTerms& terms,
                    const PairScratch& scratch) const {
  Sides& sides = sides_[group.index()];
  const AttentionProblem& p = *group.problem;
  const int64_t heads = group.size(), keys = group.span.used_k;
  const auto publish = [&] { std::atomic_ref(sides.known).store(1, std::memory_order_release); };
  // Every query sees its own position, at distance 0, where there are as many keys as queries.
  if (group.span.used_q == 0 || keys < group.span.used_q) return publish();
  const DistanceReader reader{ops, group, terms, scratch};
  std::array<float, kPanel> own{}, least{};
  reader.read(group.span.used_q - 1, keys - 1, 1,
              [&](int64_t x, int64_t, float f) { own[static_cast<size_t>(x)] = f; });
  // `norms`: of the head's queries times those of the keys.
  const auto least_of = [&](size_t x, float norms) {
    const float most = std::abs(static_cast<float>(p.scale)) * group.product_scale * norms;
    constexpr float kRounding = 1.0f / (1 << 20);
    return own[x] - std::abs(own[x]) * kRounding - 2 * tile::kRoundedUp * most - tile::kLeastExponent;
  };
  for (size_t x = 0; x < static_cast<size_t>(heads); ++x) least[x] = least_of(x, 0);
  const bool right = group.window.right != 0;
  if (reader.before(least.data()) >= keys - 1 &&
      (!right || reader.behind(least.data()) >= group.span.used_q - 1))
    return publish();  // whatever the norms are
  const KeyRows k_rows = group.key_rows(Role::kK);
  const float k =
      largest_norm(ops, k_rows.type(), keys, p.head_dim, [&](int64_t j) { return k_rows.row(j); });
  const HeadRows q_rows = group.head_rows(Role::kQ);
  for (int64_t x = 0; x < heads; ++x) {
    const float q = largest_norm(ops, p[Role::kQ].dtype, group.span.used_q, p.head_dim,
                                 [&](int64_t i) { return q_rows.row(i, group.head_kv * heads + x); });
    least[static_cast<size_t>(x)] = least_of(static_cast<size_t>(x), q * k);
  }
  sides.left = reader.before(least.data());
  if (right) sides.right = reader.behind(least.data());
  publish();
}

void KeyReach::narrow(Group& group) const {
  if (groups_ == 0) return;
  Sides& sides = sides_[group.index()];
  const std::atomic_ref known(sides.known);
  while (known.load(std::memory_order_acquire) == 0) std::this_thread::yield();
  // One that leaves nothing out stays unlimited, for which no pair is asked.
  const auto narrowed = [](int64_t window, int64_t reach, int64_t all) {
    if (reach < 0 || reach >= all) return window;
    return window < 0 ? reach : std::min(window, reach);
  };
  group.window.left = narrowed(group.window.left, sides.left, group.span.used_k - 1);
  group.window.right = narrowed(group.window.right, sides.right, group.span.used_q - 1);
}

}  // namespace fovea::cpu
