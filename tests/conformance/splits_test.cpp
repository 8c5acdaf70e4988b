// Splits over keys as they are asked for, and results whose bits do not depend on the rest of the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

ProblemSpec long_keys(int64_t seqlen_q, int64_t seqlen_k) {
  ProblemSpec s;
  s.batch = 2;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.heads_kv = 2;
  s.heads_q = 6;
  s.head_dim = 40;
  s.head_dim_v = 24;
  return s;
}

CheckOptions in_splits(int32_t most) {
  CheckOptions options = many_threads();
  options.backward = false;
  options.num_splits = most;
  return options;
}

TEST(Splits, OfAnyNumber) {
  for (const int32_t most : {1, 2, 5, 0x7fffffff}) {
    for (const int64_t queries : {1, 50}) {
      ProblemSpec s = long_keys(queries, 900);
      s.used_k = {900, 310};
      expect_conformance_of_all_types(s, in_splits(most));
      s.causal = true;
      s.window_left = 400;
      s.sink = true;
      expect_conformance(s, in_splits(most));
    }
  }
}

/// More tiles than there are cores: a tile goes through its splits itself.
TEST(Splits, OfManyTiles) {
  ProblemSpec s = long_keys(200, 300);
  s.batch = 3;
  s.heads_q = s.heads_kv = 6;
  s.causal = true;
  expect_conformance_of_all_types(s, in_splits(2));
}

/// So many rows that a warp merges several, of which some take no part.
TEST(Splits, OfManyRows) {
  for (const int32_t most : {2, 3, 8, 9}) {
    ProblemSpec s = long_keys(301, 700);
    s.used_q = {301, 117};
    s.used_k = {700, 0};
    s.sink = true;
    s.head_dim_v = most == 3 ? 136 : 72;
    expect_conformance_of_all_types(s, in_splits(most));
  }
}

TEST(Splits, OfPackedQueriesAndPages) {
  ProblemSpec s = long_keys(50, 1400);
  s.page_size = 7;
  s.caches = 500;
  s.used_k = {1400, 0};
  s.lengths_q = {50, 3};
  s.spare_rows = 2;
  expect_conformance_of_all_types(s, in_splits(5));
  s.page_size = s.caches = 0;
  s.used_k.clear();
  s.lengths_k = {1399, 1};
  expect_conformance(s, in_splits(5));
}

TEST(Splits, OfListsAndKeysOf8Bits) {
  ProblemSpec s = long_keys(4, 1400);
  s.e4m3_keys = true;
  expect_conformance_of_all_types(s, in_splits(3));
  s.e4m3_keys = false;
  s.list_size = 600;
  expect_conformance_of_all_types(s, in_splits(3));
}

/// Without keys and without queries.
TEST(Splits, OfNothing) {
  expect_conformance(long_keys(3, 0), in_splits(4));
  expect_conformance(long_keys(0, 300), in_splits(4));
}

/// How sequences of a batch lie in the tensors.
enum class Form : uint8_t { kPadded, kUsed, kPacked, kPackedQueries, kPages, kPackedOverPages, kChosen };

struct InvariantCase {
  const char* name;
  Form form;
};

struct Lengths {
  int32_t queries, keys;
  int32_t padding = 0;   ///< of the keys, those in front that do not exist
  int32_t appended = 0;  ///< of the keys, the last, which the run appends
};

/// A batch in which the sequence that is looked at has place `place`; the others are random. All batches of one form differ
/// in nothing else.
struct Batch {
  ProblemSpec spec;
  std::vector<int32_t> table;  ///< page of each sequence's column; empty: no pages
  int64_t place = 0;

  Batch(ProblemSpec like, Form form, const Lengths& looked_at, int64_t batch, int64_t at, uint64_t seed);
  /// Row of k where key j of a sequence lies.
  int64_t key_row(const OwnedProblem& x, int64_t b, int64_t j) const;

 private:
  /// Of another sequence: padding and appended rows where the one that is looked at has them.
  Lengths random_lengths(Random& random, const Lengths& looked_at) const;
  void set_lengths(Form form, const std::vector<Lengths>& all);
  void make_table(Random& random);
};

constexpr int64_t kPageSize = 16;  // the smallest of usual caches

Batch::Batch(ProblemSpec like, Form form, const Lengths& looked_at, int64_t batch, int64_t at, uint64_t seed)
    : spec(std::move(like)), place(at) {
  Random random(seed);
  spec.batch = batch;
  spec.data_seed = 2 * seed;  // even: pointers of plans are those of runs
  std::vector<Lengths> all;
  for (int64_t b = 0; b < batch; ++b) all.push_back(b == at ? looked_at : random_lengths(random, looked_at));
  set_lengths(form, all);
  // Problems that append have pages of their own for each sequence.
  if (spec.page_size > 0 && !spec.appends()) make_table(random);
}

Lengths Batch::random_lengths(Random& random, const Lengths& looked_at) const {
  const auto up_to = [&](int64_t begin, int64_t end) {
    return static_cast<int32_t>(random.between(begin, end));
  };
  Lengths lengths{up_to(0, spec.seqlen_q), up_to(looked_at.appended, spec.seqlen_k)};
  lengths.appended = spec.packed_new ? up_to(0, lengths.keys) : looked_at.appended;
  if (looked_at.padding > 0) lengths.padding = up_to(0, lengths.keys - lengths.appended);
  return lengths;
}

void Batch::set_lengths(Form form, const std::vector<Lengths>& all) {
  const bool packs_queries =
      form == Form::kPacked || form == Form::kPackedQueries || form == Form::kPackedOverPages;
  for (const Lengths& lengths : all) {
    if (form != Form::kPadded) (packs_queries ? spec.lengths_q : spec.used_q).push_back(lengths.queries);
    if (form != Form::kPadded)
      (form == Form::kPacked ? spec.lengths_k : spec.used_k).push_back(lengths.keys - lengths.appended);
    if (all[static_cast<size_t>(place)].padding > 0) spec.leftpad_k.push_back(lengths.padding);
    if (all[static_cast<size_t>(place)].appended > 0) spec.lengths_new.push_back(lengths.appended);
  }
  if (form == Form::kPages || form == Form::kPackedOverPages) {
    spec.page_size = kPageSize;
    spec.seqlen_k = (spec.seqlen_k + kPageSize - 1) / kPageSize * kPageSize;
    spec.caches = spec.batch * spec.seqlen_k / kPageSize + 3;
  }
  if (form == Form::kChosen) {
    spec.caches = spec.batch + 2;
    for (int64_t b = 0; b < spec.batch; ++b) spec.cache_batch.push_back(static_cast<int32_t>(b + 2));
  }
}

/// Each page belongs to one sequence; those of the batch are in any order.
void Batch::make_table(Random& random) {
  const int64_t columns = spec.seqlen_k / spec.page_size;
  std::vector<int32_t> pages(static_cast<size_t>(spec.caches));
  for (size_t page = 0; page < pages.size(); ++page) pages[page] = static_cast<int32_t>(page);
  for (size_t last = pages.size() - 1; last > 0; --last)
    std::swap(pages[last], pages[static_cast<size_t>(random.between(0, static_cast<int64_t>(last)))]);
  table.assign(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(spec.batch * columns));
}

int64_t Batch::key_row(const OwnedProblem& x, int64_t b, int64_t j) const {
  if (table.empty()) return x.key_row(b, j);
  const int64_t columns = spec.seqlen_k / spec.page_size,
                row = j + (spec.leftpad_k.empty() ? 0 : spec.leftpad_k[static_cast<size_t>(b)]);
  return int64_t{table[static_cast<size_t>(b * columns + row / spec.page_size)]} * spec.page_size +
         row % spec.page_size;
}

/// Copies the rows of the sequence that is looked at; `row_in`: of row i of it in a batch.
template <class RowIn>
void copy_rows(Role role, const OwnedProblem& from, const Batch& from_batch, const OwnedProblem& to,
               const Batch& to_batch, int64_t count, const RowIn& row_in) {
  const std::vector<double> source = from[role].values();
  std::vector<double> target = to[role].values();
  const auto& shape = from[role].shape();
  const int64_t width = shape[shape.size() - 2] * shape.back();
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(source.begin() + row_in(from, from_batch, i) * width, width,
                target.begin() + row_in(to, to_batch, i) * width);
  }
  to[role].assign(target);
}

/// Writes the table of the batch, and numbers to the rows that it has; all other rows hold NaN.
void use_table(const OwnedProblem& x, const Batch& batch) {
  x[Role::kPageTable].assign(std::vector<double>(batch.table.begin(), batch.table.end()));
  Random random(batch.spec.data_seed);
  for (const Role role : {Role::kK, Role::kV}) {
    const int64_t width = x.spec.heads_kv * x[role].shape().back();
    std::vector<double> values(static_cast<size_t>(x[role].count()),
                               std::numeric_limits<double>::quiet_NaN());
    for (int64_t b = 0; b < x.spec.batch; ++b) {
      for (int64_t j = 0; j < x.sequence(b).used_k; ++j) {
        std::generate_n(values.begin() + batch.key_row(x, b, j) * width, width,
                        [&] { return random.normal(); });
      }
    }
    x[role].assign(values);
  }
}

/// The problem of a batch; `alone` has what its sequence and all heads get.
OwnedProblem problem_of(const Batch& batch, const OwnedProblem* alone, const Batch& batch_of_alone) {
  OwnedProblem x(batch.spec);
  if (!batch.table.empty()) use_table(x, batch);
  if (alone == nullptr) return x;
  const OwnedProblem::Sequence s = alone->sequence(batch_of_alone.place);
  const auto query_row = [](const OwnedProblem& p, const Batch& b, int64_t i) {
    return p.sequence(b.place).row_q + i;
  };
  const auto key_row = [](const OwnedProblem& p, const Batch& b, int64_t j) {
    return b.key_row(p, b.place, j);
  };
  const auto new_row = [](const OwnedProblem& p, const Batch& b, int64_t i) {
    const auto begin = p.spec.lengths_new.begin();
    return std::accumulate(begin, begin + b.place, int64_t{0}) + i;
  };
  for (const Role of_query : {Role::kQ, Role::kQV}) {
    if (x.has(of_query)) copy_rows(of_query, *alone, batch_of_alone, x, batch, s.used_q, query_row);
  }
  for (const Role appended : {Role::kKNew, Role::kVNew}) {
    if (x.has(appended))
      copy_rows(appended, *alone, batch_of_alone, x, batch, alone->spec.lengths_new[0], new_row);
  }
  copy_rows(Role::kK, *alone, batch_of_alone, x, batch, s.used_k, key_row);
  copy_rows(Role::kV, *alone, batch_of_alone, x, batch, s.used_k, key_row);
  for (const Role shared :
       {Role::kSink, Role::kAlibi, Role::kBias, Role::kQDescale, Role::kKDescale, Role::kVDescale}) {
    if (x.has(shared)) x[shared].assign((*alone)[shared].values());
  }
  return x;
}

/// o, then lse, of the sequence that is looked at.
std::vector<double> results_of(const OwnedProblem& x, const Batch& batch) {
  const OwnedProblem::Sequence s = x.sequence(batch.place);
  const std::vector<double> o = x[Role::kO].values(), lse = x[Role::kLse].values();
  const int64_t width = x.spec.heads_q * x.spec.head_dim_v;
  std::vector<double> found(o.begin() + s.row_q * width, o.begin() + (s.row_q + s.used_q) * width);
  for (int64_t head = 0; head < x.spec.heads_q; ++head) {
    const int64_t rows = x.spec.packed() ? x[Role::kLse].shape()[1] : x.spec.seqlen_q;
    const int64_t plane = x.spec.packed() ? head : batch.place * x.spec.heads_q + head;
    const int64_t first = x.spec.packed() ? s.row_q : 0;
    for (int64_t i = 0; i < s.used_q; ++i)
      found.push_back(lse[static_cast<size_t>(plane * rows + first + i)]);
  }
  return found;
}

/// Bits, not numbers: 0 and -0 differ, one NaN is as another.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  const auto same = [](double x, double y) {
    return (x == y && std::signbit(x) == std::signbit(y)) || (std::isnan(x) && std::isnan(y));
  };
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same);
}

struct Place {
  int64_t batch, at;
  int32_t threads;
};
// The largest has tiles for 64 cores, so that CPUs go through splits in turn.
constexpr Place kPlaces[] = {{1, 0, 3}, {2, 1, 1}, {5, 0, 2}, {5, 3, 5}, {33, 17, 2}};

/// A sequence alone, then in batches beside others, on each backend.
void expect_the_same_in_any_batch(const ProblemSpec& like, Form form, const Lengths& looked_at,
                                  int32_t num_splits = 0) {
  const Batch batch_of_alone(like, form, looked_at, 1, 0, 7);
  const OwnedProblem alone = problem_of(batch_of_alone, nullptr, batch_of_alone);
  std::vector<Batch> batches;
  std::vector<OwnedProblem> problems;
  for (const Place& place : kPlaces) {
    batches.emplace_back(like, form, looked_at, place.batch, place.at, 11 + problems.size());
    problems.push_back(problem_of(batches.back(), &alone, batch_of_alone));
  }
  bool ran = false;
  for (const std::string& backend : backends_under_test()) {
    announce(describe(alone.spec));
    RunOptions how{backend};
    how.batch_invariant = true;
    how.num_splits = num_splits;
    const RunResult first = run_pass(alone, FOVEA_FORWARD, how);
    if (first.unsupported) continue;
    ran = true;
    ASSERT_EQ(first.failure, "") << backend << ": " << describe(alone.spec);
    const std::vector<double> expected = results_of(alone, batch_of_alone);
    EXPECT_TRUE(std::all_of(expected.begin(), expected.end(), [](double x) { return std::isfinite(x); }))
        << backend << ": " << describe(alone.spec);
    // The oracle knows no splits, and takes its time.
    const size_t count = backend == kOracle ? 2 : problems.size();
    for (size_t i = 0; i < count; ++i) {
      how.num_threads = kPlaces[i].threads;
      const RunResult result = run_pass(problems[i], FOVEA_FORWARD, how);
      ASSERT_EQ(result.failure, "") << backend << ": " << describe(problems[i].spec);
      ASSERT_FALSE(result.unsupported) << backend << ": " << describe(problems[i].spec);
      EXPECT_TRUE(same_bits(results_of(problems[i], batches[i]), expected))
          << backend << ", place " << kPlaces[i].at << " of " << kPlaces[i].batch << ": "
          << describe(problems[i].spec);
    }
  }
  EXPECT_TRUE(ran || may_be_left_out(alone.spec)) << describe(alone.spec);
}

class BatchInvariance : public testing::TestWithParam<InvariantCase> {};

TEST_P(BatchInvariance, OfFewQueriesOverManyKeys) {
  for (const Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
    for (const int32_t queries : {1, 3}) {
      ProblemSpec s = long_keys(queries, 2600);
      s.type = type;
      expect_the_same_in_any_batch(s, GetParam().form, {queries, 2600});
    }
  }
}

/// So little work that the emulated device does it, too.
TEST_P(BatchInvariance, OfFewKeys) {
  for (const Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
    ProblemSpec s = long_keys(3, 200);
    s.type = type;
    s.causal = true;
    expect_the_same_in_any_batch(s, GetParam().form, {3, 200});
  }
}

TEST_P(BatchInvariance, OfManyQueries) {
  for (const Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
    ProblemSpec s = long_keys(70, 600);
    s.type = type;
    s.causal = true;
    // A padded sequence is as long as the longest.
    const bool whole = GetParam().form == Form::kPadded;
    expect_the_same_in_any_batch(s, GetParam().form, whole ? Lengths{70, 600} : Lengths{51, 433});
  }
}

TEST_P(BatchInvariance, UnderTermsAndAskedForSplits) {
  ProblemSpec s = long_keys(5, 1800);
  s.sink = s.alibi = s.bias = true;
  s.bias_broadcast = 1;
  s.softcap = 8;
  s.window_left = 1300;
  for (const int32_t splits : {0, 3}) {
    for (const Type type : {Type::kF32, Type::kBF16}) {
      s.type = type;
      expect_the_same_in_any_batch(s, GetParam().form, {5, 1800}, splits);
    }
  }
}

/// So many parts that warps of one CTA share the parts of a row where the batch is small.
TEST_P(BatchInvariance, OfManyParts) {
  constexpr int64_t kQueries = 3, kKeys = 600;
  expect_the_same_in_any_batch(long_keys(kQueries, kKeys), GetParam().form, {kQueries, kKeys}, 16);
}

constexpr InvariantCase kCases[] = {
    {"Padded", Form::kPadded},
    {"Used", Form::kUsed},
    {"Packed", Form::kPacked},
    {"PackedQueries", Form::kPackedQueries},
    {"Pages", Form::kPages},
    {"PackedOverPages", Form::kPackedOverPages},
    {"ChosenSequences", Form::kChosen},
};
INSTANTIATE_TEST_SUITE_P(Forms, BatchInvariance, testing::ValuesIn(kCases),
                         [](const auto& made) { return std::string(made.param.name); });

TEST(Splits, KeysOf8BitsInAnyBatch) {
  ProblemSpec s = long_keys(2, 3000);
  s.type = Type::kBF16;
  s.e4m3_keys = true;
  s.descale_broadcast = -1;
  expect_the_same_in_any_batch(s, Form::kUsed, {2, 2900});
  expect_the_same_in_any_batch(s, Form::kPages, {1, 1000});
}

/// What else a cache may have, in each form that has it.
struct CacheCase {
  const char* name;
  Form form;
  bool padding, appends;
  void (*change)(ProblemSpec&);
};

void of_8_bits(ProblemSpec& s) {
  s.e4m3_keys = s.e4m3_queries = true;
  s.descale_broadcast = 1;
  s.head_dim = s.head_dim_v = 64;
}
/// Maxima rise from block to block, for all rows of a warp where one's does.
void steep(ProblemSpec& s) {
  s.logit = 20;
}
void steep_and_large(ProblemSpec& s) {
  steep(s);
  s.head_dim = s.head_dim_v = 512;
}
void with_qv(ProblemSpec& s) {
  s.qv = true;
}
void rotated(ProblemSpec& s) {
  s.rotary = 16;
}
void packed_and_rotated(ProblemSpec& s) {
  s.packed_new = s.rotary_interleaved = true;
  s.rotary = 40;
}
void rotated_of_8_bits(ProblemSpec& s) {
  of_8_bits(s);
  rotated(s);
}

class CacheInvariance : public testing::TestWithParam<CacheCase> {
 protected:
  static void expect_it(int32_t queries, int32_t keys, Type type) {
    const CacheCase& of = GetParam();
    ProblemSpec s = long_keys(queries, keys);
    s.type = type;
    s.causal = true;
    of.change(s);
    expect_the_same_in_any_batch(s, of.form,
                                 {queries, keys - 3, of.padding ? keys / 3 : 0, of.appends ? queries : 0});
  }
};

/// So little work that the emulated device does it, too.
TEST_P(CacheInvariance, OfFewKeys) {
  for (const Type type : {Type::kF32, Type::kBF16}) expect_it(3, 150, type);
}

TEST_P(CacheInvariance, OfManyKeys) {
  expect_it(1, 1800, Type::kBF16);
  expect_it(40, 500, Type::kF16);
}

constexpr CacheCase kCacheCases[] = {
    {"BehindPadding", Form::kUsed, true, false, [](ProblemSpec&) {}},
    {"BehindPaddingInPages", Form::kPages, true, false, [](ProblemSpec&) {}},
    {"AppendedRows", Form::kUsed, false, true, rotated},
    {"AppendedRowsInPages", Form::kPages, false, true, rotated},
    {"AppendedRowsPackedOverPages", Form::kPackedOverPages, false, true, packed_and_rotated},
    {"AppendedRowsBehindPadding", Form::kChosen, true, true, rotated},
    {"QueriesOf8Bits", Form::kUsed, false, false, of_8_bits},
    {"QueriesOf8BitsPacked", Form::kPacked, false, false, of_8_bits},
    {"SteepScoresPacked", Form::kPacked, false, false, steep},
    {"SteepScoresPackedOverPages", Form::kPackedOverPages, false, false, steep},
    {"SteepScoresOfLargeHeads", Form::kPackedQueries, false, false, steep_and_large},
    {"QueriesOf8BitsAndAppendedRows", Form::kPages, false, true, rotated_of_8_bits},
    {"QueriesOfValues", Form::kPackedQueries, false, false, with_qv},
    {"QueriesOfValuesInPages", Form::kPages, true, false, with_qv},
};
INSTANTIATE_TEST_SUITE_P(With, CacheInvariance, testing::ValuesIn(kCacheCases),
                         [](const auto& made) { return std::string(made.param.name); });

/// Right, too, splits apart and in turn; the backward does as without it.
TEST(Splits, InAnyBatchAgainstTheOracle) {
  CheckOptions options = many_threads();
  options.batch_invariant = true;
  expect_conformance_of_all_types(long_keys(1, 2100), options);
  expect_conformance(long_keys(20, 2100), options);
  ProblemSpec s = long_keys(1, 2100);
  s.batch = 33;
  options.backward = false;
  expect_conformance(s, options);
}

}  // namespace
}  // namespace fovea::conformance
