// Few queries of few heads over many keys: tiles whose keys several CTAs share, down to CTAs and warps without any.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec few_queries(int64_t seqlen_k, int64_t heads_kv, int64_t group) {
  ProblemSpec s;
  s.type = Type::kBF16;
  s.batch = 1;
  s.heads_kv = heads_kv;
  s.heads_q = heads_kv * group;
  s.seqlen_q = 1;
  s.seqlen_k = seqlen_k;
  s.head_dim = s.head_dim_v = 64;
  return s;
}

/// Of as many sequences as `used_k` has lengths, or one; in pages of `page` rows of a pool of little more than one sequence, or in one piece.
void put_in_cache(ProblemSpec& s, int64_t page, const std::vector<int32_t>& used_k) {
  if (!used_k.empty()) s.batch = static_cast<int64_t>(used_k.size());
  s.used_k = used_k;
  if (page == 0) return;
  s.page_size = page;
  s.caches = s.seqlen_k / page + 3;
}

TEST(FewQueries, OverAnyNumberOfKeys) {
  for (const int64_t keys : {1, 15, 16, 17, 33, 65, 127, 300, 1025}) {
    for (const int64_t heads : {1, 2, 3, 4}) expect_conformance(few_queries(keys, heads, 3), forward_only());
  }
}

TEST(FewQueries, OfEveryHeadSize) {
  constexpr std::array<std::array<int64_t, 2>, 6> kSizes = {
      {{1, 8}, {48, 64}, {96, 72}, {128, 128}, {136, 256}, {256, 200}}};
  for (const auto& [size, size_v] : kSizes) {
    ProblemSpec s = few_queries(400, 1, 8);
    s.head_dim = size;
    s.head_dim_v = size_v;
    expect_conformance_of_all_types(s, forward_only());
  }
}

/// As many rows as a tile of 16 takes, fewer, and one more.
TEST(FewQueries, OfEveryGroup) {
  for (const int64_t group : {1, 4, 15, 16, 17}) {
    for (const int64_t queries : {1, 2, 4}) {
      ProblemSpec s = few_queries(200, 1, group);
      s.seqlen_q = queries;
      s.causal = true;
      s.sink = queries == 2;
      expect_conformance(s, forward_only());
    }
  }
}

TEST(FewQueries, InPartOfSequences) {
  ProblemSpec s = few_queries(250, 1, 4);
  s.batch = 3;
  s.seqlen_q = 4;
  s.used_q = {0, 4, 1};
  s.used_k = {250, 0, 100};
  expect_conformance(s, forward_only());
  s.window_left = 20;
  s.window_right = 3;
  expect_conformance(s, forward_only());
  s = few_queries(0, 1, 4);
  s.batch = 3;
  s.seqlen_q = 3;
  s.seqlen_k = 70;
  s.lengths_q = {1, 0, 3};
  s.lengths_k = {70, 40, 0};
  expect_conformance(s, forward_only());
}

/// Room for many keys, of which sequences have few: of the CTAs that share those of the longest most have nothing to do.
TEST(FewQueries, InSequencesOfManyLengths) {
  ProblemSpec s = few_queries(4100, 1, 4);
  s.batch = 6;
  s.used_k = {300, 0, 40, 1, 64, 257};
  for (const int64_t queries : {1, 3}) {
    s.seqlen_q = queries;
    s.causal = queries > 1;
    expect_conformance(s, forward_only());
  }
}

/// Heads of a sequence that share a cluster: a short sequence's tiles have a CTA each, those of a long one several. Of two sequences, as the
/// emulated device has them, and of more, which fill a GPU.
TEST(FewQueries, OfHeadsThatShareClusters) {
  struct Case {
    int64_t heads_kv, head_dim, page, room;
    std::vector<int32_t> used_k;
  };
  const std::vector<Case> cases = {
      {2, 64, 0, 4160, {300, 40}},
      {4, 64, 16, 4160, {100, 4150}},
      {4, 72, 0, 200, {0, 170}},
      {5, 128, 1, 2100, {150, 2090}},
      {8, 64, 16, 4160, {4150, 0, 40, 1, 700, 257, 64, 33, 16}},
      {4, 128, 64, 4160, {2100, 0, 40, 1, 700, 257, 64, 33, 16, 2, 90, 31, 0, 0, 5, 8, 4155, 1}},
  };
  for (const Case& c : cases) {
    ProblemSpec s = few_queries(c.room, c.heads_kv, 3);
    s.head_dim = s.head_dim_v = c.head_dim;
    put_in_cache(s, c.page, c.used_k);
    expect_conformance(s, forward_only());
  }
}

/// A fifth to three quarters more tiles than SMs, and few keys of up to as many as small CTAs have room for: each has one for itself. Of 8 SMs, as
/// the emulated device has, and of an H200.
TEST(FewQueries, OfTilesThatLieUnevenlyOnSms) {
  struct Case {
    int64_t batch, heads_kv, group, queries, head_dim, page;
  };
  const std::vector<Case> cases = {
      {5, 2, 4, 1, 128, 0},  {6, 2, 7, 2, 72, 16},  {3, 4, 1, 1, 128, 64},
      {20, 1, 3, 1, 128, 0}, {20, 8, 4, 1, 64, 64}, {20, 8, 4, 1, 128, 16},
  };
  for (const Case& c : cases) {
    ProblemSpec s = few_queries(c.page > 0 ? 192 : 150, c.heads_kv, c.group);
    s.batch = c.batch;
    s.head_dim = s.head_dim_v = c.head_dim;
    s.seqlen_q = c.queries;
    s.causal = c.queries > 1;
    if (c.page > 0) {
      std::vector<int32_t> used_k(static_cast<size_t>(c.batch), 150);
      used_k[0] = 0, used_k[1] = 192, used_k[2] = 17;
      put_in_cache(s, c.page, used_k);
    }
    expect_conformance(s, forward_only());
  }
}

/// Tiles of 32 rows: three and four queries of 7 heads, four of 8, over keys enough that clusters have them.
TEST(FewQueries, OfMoreRowsThanAProductHas) {
  struct Case {
    int64_t heads_kv, group, queries, head_dim, page;
    std::vector<int32_t> used_k;
  };
  const std::vector<Case> cases = {
      {1, 7, 3, 64, 0, {}},
      {2, 8, 4, 128, 0, {}},
      {1, 7, 4, 128, 1, {1100}},
      {2, 8, 4, 72, 16, {30, 1100}},
      {3, 5, 4, 64, 12, {700, 0, 300}},
      {4, 7, 3, 128, 64, {1100, 40, 257, 1}},
  };
  for (const Case& c : cases) {
    ProblemSpec s = few_queries(c.page > 0 ? 1152 : 1100, c.heads_kv, c.group);
    s.head_dim = s.head_dim_v = c.head_dim;
    s.seqlen_q = c.queries;
    s.causal = true;
    s.sink = c.queries == 3;
    put_in_cache(s, c.page, c.used_k);
    expect_conformance(s, forward_only());
  }
}

/// Of what a row does not see nothing reaches it, whichever CTA has read it; what it sees makes the whole row so.
TEST(FewQueries, OfNumbersThatAreNotFinite) {
  for (const int64_t seen : {0, 1}) {
    ProblemSpec s = few_queries(500, 1, 2);
    s.seqlen_q = 3;
    s.causal = true;
    s.window_left = 300;
    expect_conformance(s, forward_only(), [&](OwnedProblem& x) {
      std::vector<double> values = x[Role::kV].values();
      for (const int64_t key :
           {int64_t{0}, int64_t{150}, int64_t{499}, seen == 1 ? int64_t{420} : int64_t{1}})
        values[static_cast<size_t>(x.key_row(0, key) * x.spec.head_dim_v)] =
            key == 420 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
      x[Role::kV].assign(values);
    });
  }
}

/// Shares whose maxima lie far apart.
TEST(FewQueries, OfLargeScores) {
  for (const double logit : {30.0, 3000.0}) {
    ProblemSpec s = few_queries(700, 1, 4);
    s.logit = logit;
    expect_conformance_of_all_types(s, forward_only());
  }
}

TEST(FewQueries, OverKeysOf8Bits) {
  for (const int64_t size : {64, 128, 256}) {
    ProblemSpec s = few_queries(333, 2, 4);
    s.head_dim = s.head_dim_v = size;
    s.e4m3_keys = true;
    expect_conformance(s, forward_only());
    s.e4m3_queries = true;
    expect_conformance(s, forward_only());
  }
}

/// Tiles of 16 and 32 rows, for which keys and values become numbers of 16 bits: in clusters, and in equal shares where there are many.
TEST(FewQueries, OfMoreRowsOverKeysOf8Bits) {
  struct Case {
    int64_t batch, heads_kv, group, queries, seqlen_k, head_dim, page;
    std::vector<int32_t> used_k;
  };
  const std::vector<Case> cases = {
      {1, 1, 16, 1, 333, 64, 0, {}},
      {1, 2, 8, 4, 1100, 64, 0, {}},
      {1, 1, 7, 3, 129, 96, 0, {}},
      {1, 2, 16, 1, 700, 128, 0, {}},
      {2, 1, 9, 3, 1100, 128, 0, {}},
      {1, 1, 4, 4, 500, 256, 0, {}},
      {3, 2, 8, 4, 1100, 256, 0, {}},
      {0, 3, 5, 4, 1152, 64, 48, {700, 0, 300}},
      {0, 4, 7, 3, 1152, 128, 64, {1100, 40, 257, 1}},
      {0, 1, 5, 3, 1152, 192, 16, {1100, 64}},
      {67, 6, 4, 4, 40, 64, 0, {}},
      {67, 6, 5, 2, 40, 128, 0, {}},
  };
  for (const Case& c : cases) {
    ProblemSpec s = few_queries(c.seqlen_k, c.heads_kv, c.group);
    s.batch = c.batch;
    s.head_dim = s.head_dim_v = c.head_dim;
    s.seqlen_q = c.queries;
    s.causal = c.queries > 1;
    s.sink = c.queries == 3;
    if (c.queries == 4) s.window_left = 400;
    if (c.queries == 2) s.type = Type::kF16;
    if (c.group == 16) s.logit = 300;
    s.e4m3_keys = true;
    put_in_cache(s, c.page, c.used_k);
    expect_conformance(s, forward_only());
    s.e4m3_queries = true;
    expect_conformance(s, forward_only());
  }
}

/// As above: of what a row does not see nothing reaches it.
TEST(FewQueries, OfMoreRowsOverNumbersOf8BitsThatAreNotFinite) {
  for (const int64_t group : {5, 9}) {
    ProblemSpec s = few_queries(500, 1, group);
    s.seqlen_q = 3;
    s.causal = true;
    s.window_left = 300;
    s.e4m3_keys = true;
    expect_conformance(s, forward_only(), [&](OwnedProblem& x) {
      std::vector<double> values = x[Role::kV].values();
      for (const int64_t key : {0, 150, 498, 499})
        values[static_cast<size_t>(x.key_row(0, key) * x.spec.head_dim_v)] =
            std::numeric_limits<double>::quiet_NaN();
      x[Role::kV].assign(values);
      std::vector<double> q = x[Role::kQ].values();
      q[5] = std::numeric_limits<double>::infinity();
      x[Role::kQ].assign(q);
    });
  }
}

/// Clusters of two CTAs a tile for sequences that may be long, one for those that are not, and equal shares.
TEST(FewQueries, OverKeysOf8BitsInSequencesOfManyLengths) {
  for (const int64_t room : {400, 4160}) {
    for (const int64_t heads : {1, 3, 6}) {
      ProblemSpec s = few_queries(room, heads, 4);
      s.e4m3_keys = true;
      put_in_cache(s, 16, {static_cast<int32_t>(room - 3), 0, 70});
      expect_conformance(s, forward_only());
    }
  }
}

}  // namespace
}  // namespace fovea::conformance
