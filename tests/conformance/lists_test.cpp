// Lists of keys: a query attends to the entries of its list.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec lists(int64_t seqlen_q, int64_t seqlen_k, int64_t group, int64_t list_size) {
  ProblemSpec s;
  s.batch = 2;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.heads_kv = 2;
  s.heads_q = 2 * group;
  s.head_dim = 40;
  s.head_dim_v = 24;
  s.list_size = list_size;
  s.dlse = true;
  return s;
}

TEST(Lists, OfEverySize) {
  for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
    for (const int64_t size : {0, 1, 2, 31, 127, 128, 129, 300}) {
      for (const int64_t group : {1, 3, 6}) {
        ProblemSpec s = lists(9, 150, group, size);
        s.type = type;
        expect_conformance(s);
      }
    }
  }
}

TEST(Lists, OverKeysOf8Bits) {
  for (const int64_t group : {3, 6, 12}) {
    ProblemSpec s = lists(5, 150, group, 140);
    s.dlse = false;
    s.e4m3_keys = true;
    expect_conformance_of_all_types(s, forward_only());
  }
}

TEST(Lists, OfManyHeads) {
  for (const int64_t group : {16, 47, 48, 49, 97, 200}) {
    ProblemSpec s = lists(4, 70, group, 90);
    s.batch = s.heads_kv = 1;
    s.heads_q = group;
    s.type = Type::kBF16;
    expect_conformance(s);
  }
}

TEST(Lists, OfLatentAttention) {
  for (const Type type : {Type::kF32, Type::kBF16}) {
    ProblemSpec s = lists(3, 200, 1, 140);
    s.type = type;
    s.batch = s.heads_kv = 1;
    s.heads_q = 32;
    s.head_dim = 576;
    s.head_dim_v = 512;
    expect_conformance(s);
  }
}

TEST(Lists, SharedByTheBatchOrTheHeads) {
  for (const int broadcast : {1, 2, 3}) {
    ProblemSpec s = lists(20, 60, 2, 16);
    s.list_broadcast = broadcast;
    expect_conformance(s);
    s.lengths_q = {5, 0, 20};
    s.lengths_k = {60, 3, 0};
    s.spare_rows = 2;
    expect_conformance(s);
  }
}

TEST(Lists, SharedByTheQueries) {
  for (const int64_t group : {1, 3, 11}) {
    ProblemSpec s = lists(21, 60, group, 30);
    s.list_of_all = true;
    expect_conformance(s);
    s.causal = true;
    s.window_left = 20;
    s.used_q = {21, 7};
    expect_conformance(s);
  }
}

TEST(Lists, InOrderAndEachKeyOnce) {
  ProblemSpec s = lists(33, 200, 4, 64);
  s.list_in_order = true;
  s.list_density = 1;
  expect_conformance(s);
}

TEST(Lists, UnderCausalAndWindow) {
  for (const int64_t left : {-1, 0, 20}) {
    for (const int64_t group : {1, 8}) {
      ProblemSpec s = lists(40, 50, group, 48);
      s.causal = true;
      s.window_left = left;
      expect_conformance(s);
      s.causal = false;
      s.window_right = 3;
      expect_conformance(s);
      s.seqlen_k = 30;
      s.causal = true;
      expect_conformance(s);
    }
  }
}

TEST(Lists, OfPartlyUsedSequences) {
  ProblemSpec s = lists(12, 50, 3, 30);
  s.used_q = {12, 5};
  s.used_k = {20, 0};
  expect_conformance(s);
  s.causal = true;
  s.list_broadcast = 1;
  expect_conformance(s);
}

TEST(Lists, WithEveryTerm) {
  for (const int64_t group : {1, 6}) {
    ProblemSpec s = lists(10, 60, group, 40);
    s.softcap = 5;
    expect_conformance(s);
    s.softcap = 0;
    s.scale = -0.3;
    expect_conformance(s);
    s.scale = 0;
    s.alibi = true;
    expect_conformance(s);
    s.bias = true;
    s.bias_values = BiasValues::kSomeMinusInfinity;
    expect_conformance(s);
    s.dbias = true;
    expect_conformance(s);
    s.dbias = false;
    s.mask = s.block_mask = true;
    s.block_q = 3;
    s.block_k = 7;
    expect_conformance(s);
    s.dropout = 0.3;
    s.rng_state = true;
    expect_conformance(s);
    s.sink = s.dsink = true;
    expect_conformance(s);
  }
}

TEST(Lists, WithExpressions) {
  for (const int64_t group : {1, 6}) {
    for (const KnownExpression& score : known_scores()) {
      ProblemSpec s = lists(10, 60, group, 40);
      s.score = &score;
      s.named_gradients = true;
      expect_conformance(s);
    }
    for (const KnownExpression& sees : known_masks()) {
      ProblemSpec s = lists(10, 60, group, 40);
      s.sees = &sees;
      expect_conformance(s);
    }
  }
}

TEST(Lists, InEveryLayout) {
  for (const Layout layout : {Layout::kHeadsFirst, Layout::kPadded, Layout::kSliced, Layout::kMixed}) {
    for (const Placement placement : {Placement::kGuarded, Placement::kPageEnd}) {
      ProblemSpec s = lists(12, 80, 5, 50);
      s.type = Type::kBF16;
      s.layout = layout;
      s.placement = placement;
      expect_conformance(s);
    }
  }
}

TEST(Lists, OfManyQueriesGiveTheSameBitsOnAnyNumberOfThreads) {
  ProblemSpec s = lists(300, 260, 2, 70);
  s.head_dim = s.head_dim_v = 64;
  expect_conformance(s);
}

/// Lists of few keys, whose queries fill several rows of a GPU's lanes; a list for all, for all heads, packed sequences.
std::vector<ProblemSpec> lists_of_many_queries() {
  std::vector<ProblemSpec> all;
  ProblemSpec s = lists(90, 40, 3, 30);
  s.head_dim = 136;
  s.head_dim_v = 72;
  all.push_back(s);
  s.list_of_all = true;
  all.push_back(s);
  s.list_of_all = false;
  s.list_broadcast = 2;
  s.causal = true;
  all.push_back(s);
  s.lengths_q = {37, 0, 90};
  s.lengths_k = {40, 3, 0};
  s.spare_rows = 2;
  all.push_back(s);
  return all;
}

/// A backend that has the gradients has them with `deterministic`, too.
TEST(Lists, GradientsHaveTheSameBitsEachTime) {
  for (const ProblemSpec& of_any_type : lists_of_many_queries()) {
    for (const Type type : {Type::kF32, Type::kBF16}) {
      ProblemSpec spec = of_any_type;
      spec.type = type;
      expect_conformance(spec);
      expect_same_bits_each_time(spec);
    }
  }
}

/// Rows of a (batch, rows, heads, size) tensor that hold NaN alone, one (batch, row, head) after the other; rows with some NaN
/// end the test.
std::vector<bool> rows_of_nan(const OwnedTensor& tensor) {
  const auto size = static_cast<size_t>(tensor.shape().back());
  const std::vector<double> values = tensor.values();
  std::vector<bool> rows;
  for (size_t at = 0; at < values.size(); at += size) {
    size_t count = 0;
    for (size_t c = 0; c < size; ++c) count += static_cast<size_t>(std::isnan(values[at + c]));
    EXPECT_TRUE(count == 0 || count == size) << "row " << at / size;
    rows.push_back(count > 0);
  }
  return rows;
}

/// The host cannot look at lists on a GPU. Reads stay inside the tensors, whose memory ends where the device has none.
TEST(Lists, EntriesThatNoSequenceHasMakeRowsNaNOnGPUs) {
  for (const std::string& backend : cuda_backends_under_test()) {
    ProblemSpec s = lists(6, 70, 10, 90);
    s.causal = true;
    s.placement = Placement::kPageEnd;
    OwnedProblem x(s);
    OwnedTensor& lists_of_x = x[Role::kKeys];
    std::vector<double> entries = lists_of_x.values();
    std::vector<bool> expected(2 * 6 * 20, false);
    const auto spoil = [&](size_t batch, size_t head_kv, size_t query, double entry) {
      entries[((batch * 2 + head_kv) * 6 + query) * 90 + 80] = entry;
      for (size_t h = 0; h < 10; ++h) expected[(batch * 6 + query) * 20 + head_kv * 10 + h] = true;
    };
    spoil(0, 0, 5, 70);
    spoil(0, 1, 2, -2);
    spoil(1, 1, 0, 0x7fffffff);
    spoil(1, 1, 3, -0x7fffffff);
    lists_of_x.assign(entries);
    RunResult result = run_pass(x, FOVEA_FORWARD, {backend});
    if (result.unsupported) continue;
    EXPECT_EQ(result.failure, "");
    EXPECT_EQ(rows_of_nan(x[Role::kO]), expected);
    result = run_pass(x, FOVEA_BACKWARD, {backend});
    EXPECT_EQ(result.failure, "");
    EXPECT_EQ(rows_of_nan(x[Role::kDQ]), expected);
  }
}

}  // namespace
}  // namespace fovea::conformance
