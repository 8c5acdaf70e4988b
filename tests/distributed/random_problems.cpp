// The definitions of random_problems.hpp.
#include "distributed/random_problems.hpp"

#include <algorithm>

namespace fovea::distributed_tests {

using namespace verify;

namespace {

/// Pieces of an axis, dealt to ranks in any order; some ranks may have none.
std::vector<fovea_piece> random_pieces(Random& random, int64_t total, int ranks) {
  std::vector<fovea_piece> pieces;
  const int64_t usual = std::max<int64_t>(1, total / std::max(1, ranks));
  for (int64_t at = 0; at < total;) {
    const int64_t end = std::min(total, at + random.between(1, 2 * usual));
    pieces.push_back({static_cast<int32_t>(random.between(0, ranks - 1)), at, end});
    at = end;
  }
  if (random.chance(0.5)) std::reverse(pieces.begin(), pieces.end());
  if (pieces.empty() || random.chance(0.2)) pieces.push_back({0, 0, 0});
  return pieces;
}

std::vector<int32_t> random_lengths(Random& random, int64_t sequences, int64_t longest) {
  std::vector<int32_t> lengths;
  for (int64_t i = 0; i < sequences; ++i)
    lengths.push_back(static_cast<int32_t>(random.chance(0.15) ? 0 : random.between(1, longest)));
  return lengths;
}

const KnownExpression* one_of(Random& random, const std::vector<KnownExpression>& all) {
  return &all[static_cast<size_t>(random.between(0, static_cast<int64_t>(all.size()) - 1))];
}

/// Terms that depend on positions.
void draw_terms(Random& random, ProblemSpec& s) {
  if (random.chance(0.4)) return;
  s.alibi = random.chance(0.3);
  s.alibi_by_batch = random.chance(0.5);
  s.bias = random.chance(0.3);
  s.bias_is_f32 = random.chance(0.5);
  s.bias_broadcast = random.chance(0.5) ? 0 : static_cast<int>(random.between(0, 15));
  s.bias_expanded = random.chance(0.2);
  s.bias_values = random.chance(0.7) ? BiasValues::kNormal : BiasValues::kSomeMinusInfinity;
  s.dbias = s.bias && !s.bias_expanded && random.chance(0.6);
  s.dbias_is_f32 = random.chance(0.5);
  s.mask = random.chance(0.3);
  s.mask_broadcast = random.chance(0.5) ? 0 : static_cast<int>(random.between(0, 15));
  s.block_mask = random.chance(0.2);
  s.block_mask_broadcast = static_cast<int>(random.between(0, 3));
  s.block_q = random.one_of<int64_t>({1, 7, 16});
  s.block_k = random.one_of<int64_t>({1, 7, 16});
  if (random.chance(0.4)) s.score = one_of(random, known_scores());
  if (random.chance(0.4)) s.sees = one_of(random, known_masks());
  s.named_type = random.one_of({Type::kF32, Type::kF16, Type::kBF16});
  s.named_gradients = random.chance(0.7);
  s.named_broadcast = random.chance(0.5) ? 0 : static_cast<int>(random.between(1, 15));
  s.named_spare = random.chance(0.7) ? 0 : random.between(1, 3);
  if (s.score) s.bias_values = BiasValues::kNormal;
  s.layout = random.one_of({Layout::kCompact, Layout::kPadded, Layout::kMixed});
  // Over ranks the longest sequence is as long as tensors of pairs are.
  if (!s.packed()) return;
  s.seqlen_q = *std::max_element(s.lengths_q.begin(), s.lengths_q.end());
  s.seqlen_k = *std::max_element(s.lengths_k.begin(), s.lengths_k.end());
}

}  // namespace

ProblemSpec random_spec(Random& random, bool same_axis) {
  ProblemSpec s;
  s.data_seed = random.bits();
  s.type = random.one_of({Type::kF32, Type::kF16, Type::kBF16});
  s.o_is_f32 = random.chance(0.15);
  s.gradients_are_f32 = random.chance(0.15);
  s.heads_kv = random.between(1, 5);
  s.heads_q = s.heads_kv * random.one_of<int64_t>({1, 1, 2, 3});
  s.head_dim = random.one_of<int64_t>({8, 16, 40, 64});
  s.head_dim_v = random.chance(0.8) ? s.head_dim : random.one_of<int64_t>({8, 24, 64});
  s.batch = random.between(1, 2);
  s.seqlen_q = random.between(1, 90);
  s.seqlen_k = same_axis ? s.seqlen_q : random.between(1, 90);
  if (random.chance(0.4)) {
    s.batch = random.between(1, 6);
    s.seqlen_q = random.between(1, 40);
    s.seqlen_k = same_axis ? s.seqlen_q : random.between(1, 40);
    s.lengths_q = random_lengths(random, s.batch, s.seqlen_q);
    s.lengths_k = same_axis ? s.lengths_q : random_lengths(random, s.batch, s.seqlen_k);
  }
  s.causal = random.chance(0.4);
  if (random.chance(0.3)) {
    s.window_left = random.between(-1, 40);
    s.window_right = random.between(-1, 40);
  }
  if (random.chance(0.2)) s.scale = 0.05 + random.uniform();
  if (random.chance(0.2)) s.softcap = random.one_of({0.5, 5.0, 30.0});
  s.sink = random.chance(0.3);
  s.dsink = s.sink && random.chance(0.7);
  s.dlse = random.chance(0.3);
  s.logit = random.one_of({0.5, 1.0, 2.0, 5.0});
  draw_terms(random, s);
  if (random.chance(0.3)) {
    s.dropout = random.one_of({0.05, 0.3, 0.9});
    s.seed = random.bits();
    s.offset = random.bits();
    s.rng_state = random.chance(0.5);
  }
  return s;
}

namespace {

int64_t total_of(const std::vector<int32_t>& lengths, int64_t rows) {
  if (lengths.empty()) return rows;
  int64_t sum = 0;
  for (const int32_t length : lengths) sum += length;
  return sum;
}

}  // namespace

Division random_division(Random& random, const ProblemSpec& s, bool same_axis, int ranks) {
  Division d;
  d.ranks = ranks;
  d.queries = random_pieces(random, total_of(s.lengths_q, s.seqlen_q), d.ranks);
  d.keys = same_axis ? d.queries : random_pieces(random, total_of(s.lengths_k, s.seqlen_k), d.ranks);
  if (random.chance(0.8)) {
    std::vector<int> divisors;
    for (int g = 1; g <= d.ranks; ++g) {
      if (d.ranks % g == 0) divisors.push_back(g);
    }
    d.heads_ranks =
        divisors[static_cast<size_t>(random.between(0, static_cast<int64_t>(divisors.size()) - 1))];
    const int64_t parts_of_heads = (s.heads_kv + d.ranks - 1) / d.ranks;
    d.stages = static_cast<int>(random.between(
        1, d.ranks > 1 && d.heads_ranks == d.ranks ? parts_of_heads : d.ranks / d.heads_ranks));
  } else if (random.chance(0.5)) {
    d.memory_limit = 1;
  }
  if (random.chance(0.2)) d.delay_us = 300;
  d.deterministic = random.chance(0.3);
  return d;
}

}  // namespace fovea::distributed_tests
