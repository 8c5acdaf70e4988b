// Cascades of the C++ face against one call over all keys, in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <vector>

#include "fovea/fovea.hpp"

namespace {

constexpr int64_t kHeads = 4, kHeadsKv = 2, kSize = 16, kSizeV = 24;

/// Groups of neighbouring sequences, and how many keys each shares.
struct Layer {
  std::vector<int32_t> sequences;  ///< in each group
  std::vector<int32_t> keys;       ///< of each group
};

std::vector<int32_t> starts_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> starts{0};
  for (const int32_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

std::vector<float> wave(int64_t count, double step) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) {
    const auto place = static_cast<double>(i);
    x[i] = static_cast<float>(1.5 * std::sin(step * place + 0.001 * place * place));
  }
  return x;
}

/// A level with its tensors.
struct Level {
  std::vector<int32_t> rows, starts_k;
  std::vector<float> k, v;

  fovea::Problem problem(const fovea::Tensor& q) const {
    const int64_t total = starts_k.back();
    return {.q = q,
            .k = {k.data(), {total, kHeadsKv, kSize}},
            .v = {v.data(), {total, kHeadsKv, kSizeV}},
            .cu_seqlens_q = {rows.data(), {static_cast<int64_t>(rows.size())}},
            .cu_seqlens_k = {starts_k.data(), {static_cast<int64_t>(starts_k.size())}}};
  }
};

/// Sequences over keys in levels, the same with all keys of each sequence side by side, and what both give.
class Cascades : public testing::Test {
 protected:
  void make(const std::vector<int32_t>& queries, const std::vector<Layer>& layers) {
    starts_q_ = starts_of(queries);
    total_ = starts_q_.back();
    q_ = wave(total_ * kHeads * kSize, 0.37);
    qv_ = wave(total_ * kHeads * kSizeV, 0.29);
    levels_.clear();
    for (const Layer& layer : layers) {
      Level level{{0}, starts_of(layer.keys), {}, {}};
      int32_t sequence = 0;
      for (const int32_t count : layer.sequences) {
        sequence += count;
        level.rows.push_back(starts_q_[static_cast<size_t>(sequence)]);
      }
      const double seed = static_cast<double>(levels_.size());
      level.k = wave(level.starts_k.back() * kHeadsKv * kSize, 0.71 + 0.1 * seed);
      level.v = wave(level.starts_k.back() * kHeadsKv * kSizeV, 1.13 + 0.1 * seed);
      levels_.push_back(std::move(level));
    }
    join_keys(queries.size());
    o_.assign(static_cast<size_t>(total_ * kHeads * kSizeV), 7);
    lse_.assign(static_cast<size_t>(total_ * kHeads), 7);
  }

  fovea::Tensor q() const { return {q_.data(), {total_, kHeads, kSize}}; }
  fovea::Part into() { return {{o_.data(), {total_, kHeads, kSizeV}}, {lse_.data(), {kHeads, total_}}}; }
  /// The levels; `terms` of all, and causal and the sink of the last.
  std::vector<fovea::Problem> problems(const fovea::Problem& terms = {}) const {
    std::vector<fovea::Problem> all;
    for (const Level& level : levels_) {
      all.push_back(level.problem(q()));
      all.back().scale = terms.scale;
      all.back().softcap = terms.softcap;
      all.back().qv = terms.qv;
    }
    all.back().causal = terms.causal;
    all.back().sink = terms.sink;
    return all;
  }
  /// Compares o and lse with one call of the oracle over the joined keys.
  void expect_joined(const fovea::Problem& terms = {}, double tolerance = 2e-5) {
    const auto wide = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    const std::vector<double> q = wide(q_), k = wide(joined_k_), v = wide(joined_v_), qv = wide(qv_);
    std::vector<double> o(o_.size());
    std::vector<float> lse(lse_.size());
    fovea::Problem one = terms;
    const int64_t total_k = joined_starts_.back(), starts = static_cast<int64_t>(starts_q_.size());
    if (terms.qv) one.qv = {qv.data(), {total_, kHeads, kSizeV}};
    one.lse = {lse.data(), {kHeads, total_}};
    one.cu_seqlens_q = {starts_q_.data(), {starts}};
    one.cu_seqlens_k = {joined_starts_.data(), {starts}};
    fovea::attend({q.data(), {total_, kHeads, kSize}}, {k.data(), {total_k, kHeadsKv, kSize}},
                  {v.data(), {total_k, kHeadsKv, kSizeV}}, {o.data(), {total_, kHeads, kSizeV}}, one,
                  {.backend = "reference"});
    for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o_[i], o[i], tolerance) << "o[" << i << "]";
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(lse[i])) {
        ASSERT_EQ(lse_[i], lse[i]) << "lse[" << i << "]";
      } else {
        ASSERT_NEAR(lse_[i], lse[i], 2e-5) << "lse[" << i << "]";
      }
    }
  }

  int64_t total_ = 0;
  std::vector<int32_t> starts_q_, joined_starts_;
  std::vector<float> q_, qv_, joined_k_, joined_v_, o_, lse_;
  std::vector<Level> levels_;

 private:
  void join_keys(size_t sequences) {
    joined_k_.clear();
    joined_v_.clear();
    joined_starts_ = {0};
    for (size_t b = 0; b < sequences; ++b) {
      for (const Level& level : levels_) {
        const auto group =
            std::upper_bound(level.rows.begin(), level.rows.end(), starts_q_[b]) - level.rows.begin() - 1;
        const auto append = [&](std::vector<float>& to, const std::vector<float>& from, int64_t size) {
          to.insert(to.end(), from.begin() + level.starts_k[static_cast<size_t>(group)] * kHeadsKv * size,
                    from.begin() + level.starts_k[static_cast<size_t>(group) + 1] * kHeadsKv * size);
        };
        append(joined_k_, level.k, kSize);
        append(joined_v_, level.v, kSizeV);
      }
      joined_starts_.push_back(
          static_cast<int32_t>(static_cast<int64_t>(joined_k_.size()) / (kHeadsKv * kSize)));
    }
  }
};

TEST_F(Cascades, OfOnePrefix) {
  make({1, 1, 1, 1, 1}, {{{5}, {300}}, {{1, 1, 1, 1, 1}, {40, 1, 7, 130, 64}}});
  fovea::cascade(problems(), into());
  expect_joined();
}

TEST_F(Cascades, OfThreeLevelsAndSeveralGroups) {
  make({2, 1, 3, 1, 1}, {{{5}, {200}}, {{2, 3}, {50, 33}}, {{1, 1, 1, 1, 1}, {9, 20, 3, 1, 64}}});
  for (const bool causal : {false, true}) {
    fovea::cascade(problems({.causal = causal}), into());
    expect_joined({.causal = causal});
  }
}

TEST_F(Cascades, OfManyQueriesUnderCausal) {
  make({70, 3, 128}, {{{3}, {257}}, {{1, 1, 1}, {70, 30, 140}}});
  fovea::cascade(problems({.causal = true}), into());
  expect_joined({.causal = true});
}

TEST_F(Cascades, WithEmptyPrefixesAndSuffixes) {
  make({1, 1, 1, 1}, {{{2, 2}, {0, 100}}, {{1, 1, 1, 1}, {0, 5, 0, 30}}});
  fovea::cascade(problems({.causal = true}), into());
  expect_joined({.causal = true});  // the first sequence has no key at all
  EXPECT_EQ(lse_[0], -std::numeric_limits<float>::infinity());
}

TEST_F(Cascades, CountASinkOnce) {
  const std::vector<float> sink = {0.5f, 2, -1, 3};
  make({1, 2, 1, 1}, {{{2, 2}, {0, 100}}, {{1, 1, 1, 1}, {0, 5, 0, 30}}});
  const fovea::Problem terms = {.sink = {sink.data(), {kHeads}}};
  fovea::cascade(problems(terms), into());
  expect_joined(terms);
  // Whichever level has it.
  std::vector<fovea::Problem> levels = problems();
  levels.front().sink = terms.sink;
  fovea::cascade(levels, into());
  expect_joined(terms);
}

TEST_F(Cascades, WithScaleSoftcapAndQueriesOfValues) {
  make({1, 2, 1}, {{{3}, {90}}, {{1, 1, 1}, {4, 50, 9}}});
  fovea::Problem terms = {.scale = 0.1, .softcap = 3};
  fovea::cascade(problems(terms), into());
  expect_joined(terms);
  terms = {.qv = {qv_.data(), {total_, kHeads, kSizeV}}, .causal = true};
  fovea::cascade(problems(terms), into());
  expect_joined(terms);
}

TEST_F(Cascades, OfOneLevel) {
  make({3, 1}, {{{1, 1}, {30, 8}}});
  fovea::cascade(problems({.causal = true}), into());
  expect_joined({.causal = true});
}

/// Keys of a cache: pages in any order, of the last level.
TEST_F(Cascades, OverPages) {
  make({1, 1, 1}, {{{3}, {64}}, {{1, 1, 1}, {5, 8, 1}}});
  constexpr int64_t kPage = 4;
  const std::vector<int32_t> table = {3, 0, 4, 2, 1, -1}, lengths = {5, 8, 1};
  std::vector<float> k(5 * kPage * kHeadsKv * kSize), v(5 * kPage * kHeadsKv * kSizeV);
  const Level& own = levels_.back();
  for (size_t b = 0; b < 3; ++b) {
    for (int64_t j = 0; j < lengths[b]; ++j) {
      const int64_t to = table[2 * b + static_cast<size_t>(j / kPage)] * kPage + j % kPage,
                    from = own.starts_k[b] + j;
      std::copy_n(own.k.begin() + from * kHeadsKv * kSize, kHeadsKv * kSize,
                  k.begin() + to * kHeadsKv * kSize);
      std::copy_n(own.v.begin() + from * kHeadsKv * kSizeV, kHeadsKv * kSizeV,
                  v.begin() + to * kHeadsKv * kSizeV);
    }
  }
  std::vector<fovea::Problem> levels = problems();
  levels.back().k = {k.data(), {5, kPage, kHeadsKv, kSize}};
  levels.back().v = {v.data(), {5, kPage, kHeadsKv, kSizeV}};
  levels.back().cu_seqlens_k = {};
  levels.back().seqused_k = {lengths.data(), {3}};
  levels.back().page_table = {table.data(), {3, 2}};
  fovea::cascade(levels, into());
  expect_joined();
}

TEST_F(Cascades, ArePlannedOnceAndRunOften) {
  make({1, 1, 1}, {{{3}, {100}}, {{1, 1, 1}, {4, 50, 9}}});
  const std::vector<fovea::Problem> levels = problems();
  const fovea::Cascade cascade(levels, {{static_cast<float*>(nullptr), {total_, kHeads, kSizeV}}, {}});
  EXPECT_FALSE(cascade.level(0).backend().empty());
  fovea::Workspace workspace(cascade.workspace_size(), cascade.device());
  const std::vector<fovea::Buffers> buffers = {fovea::buffers_of(levels[0]), fovea::buffers_of(levels[1])};
  std::vector<float> o = o_;
  fovea::cascade(levels, into());
  for (int run = 0; run < 2; ++run) {
    std::fill(o.begin(), o.end(), 7.0f);
    cascade.run(buffers, o.data(), nullptr, workspace);
    EXPECT_EQ(std::memcmp(o.data(), o_.data(), o.size() * sizeof(float)), 0);
  }
}

/// Results of 16 bits are rounded once, and strides are free.
TEST_F(Cascades, IntoOtherTypesAndStrides) {
  make({1, 1}, {{{2}, {60}}, {{1, 1}, {4, 9}}});
  const int64_t row = kSizeV + 8;
  std::vector<uint16_t> o(static_cast<size_t>(total_ * kHeads * row), 0x7fff);
  const fovea::Tensor result(reinterpret_cast<fovea::bf16*>(o.data()), {total_, kHeads, kSizeV},
                             {row, total_ * row, 1});
  fovea::cascade(problems(), {result, into().lse});
  for (int64_t i = 0; i < total_; ++i) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t c = 0; c < kSizeV; ++c) {
        const uint32_t bits = uint32_t{o[static_cast<size_t>(i * row + h * total_ * row + c)]} << 16;
        std::memcpy(&o_[static_cast<size_t>((i * kHeads + h) * kSizeV + c)], &bits, 4);
      }
    }
  }
  expect_joined({}, 0.01);
}

TEST_F(Cascades, SayWhatIsWrong) {
  make({1, 1}, {{{2}, {60}}, {{1, 1}, {4, 9}}});
  const auto message = [&](const std::vector<fovea::Problem>& levels,
                           const fovea::Part& part) -> std::string {
    try {
      fovea::cascade(levels, part);
    } catch (const fovea::Error& error) {
      EXPECT_EQ(error.status(), FOVEA_INVALID_ARGUMENT);
      return error.what();
    }
    return "nothing";
  };
  const std::vector<float> sink(kHeads);
  EXPECT_NE(message({}, into()).find("levels: got none, expected 1 or more"), std::string::npos);
  std::vector<fovea::Problem> levels = problems();
  levels[0].sink = levels[1].sink = {sink.data(), {kHeads}};
  EXPECT_NE(message(levels, into()).find("levels: got a sink in 2 levels"), std::string::npos);
  levels = problems();
  levels[1].o = into().o;
  EXPECT_NE(message(levels, into()).find("levels: got o, lse or a backward"), std::string::npos);
  EXPECT_NE(
      message(problems(), {{o_.data(), {1, total_, kHeads, kSizeV}}, {}}).find("into: got other dimensions"),
      std::string::npos);
  EXPECT_NE(
      message(problems(), {into().o, {lse_.data(), {total_, kHeads}}}).find("into: got lse of another shape"),
      std::string::npos);
  std::vector<double> wide(o_.size());
  EXPECT_NE(message(problems(), {{wide.data(), {total_, kHeads, kSizeV}}, {}}).find("into: got another type"),
            std::string::npos);
  levels = problems();
  levels[1].q = {q_.data(), {1, kHeads, kSize}};
  EXPECT_NE(message(levels, into()).find("cu_seqlens_q: got last element 2, expected at most 1"),
            std::string::npos);
  EXPECT_TRUE(std::all_of(o_.begin(), o_.end(), [](float x) { return x == 7; })) << "something was written";

  const fovea::Cascade cascade(problems(), into());
  const std::vector<fovea::Buffers> buffers(1);
  fovea::Workspace workspace(cascade.workspace_size());
  EXPECT_THROW(cascade.run(buffers, o_.data(), lse_.data(), workspace), fovea::Error);
  const std::vector<fovea::Buffers> both = {fovea::buffers_of(problems()[0]),
                                            fovea::buffers_of(problems()[1])};
  EXPECT_THROW(cascade.run(both, o_.data(), nullptr, workspace), fovea::Error);
  EXPECT_THROW(cascade.run(both, o_.data(), lse_.data(), workspace.data(), cascade.workspace_size() - 1),
               fovea::Error);
}

}  // namespace
