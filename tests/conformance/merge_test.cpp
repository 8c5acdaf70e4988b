// fovea_merge: attention over parts of the keys, merged, is attention over all of them.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr std::array<int64_t, 4> kCuts = {0, 13, 13, 40};  // the second part has no keys

/// o and lse (both as values) of the keys [begin, end), from the oracle in float64.
struct Partial {
  std::vector<double> o, lse;
};
Partial attend(const OwnedProblem& all, int64_t begin, int64_t end) {
  ProblemSpec spec = all.spec;
  spec.type = Type::kF64;
  spec.seqlen_k = end - begin;
  const OwnedProblem part(spec);
  part[Role::kQ].assign(all[Role::kQ].values());
  for (const Role role : {Role::kK, Role::kV}) {
    OwnedTensor& t = part[role];
    for (int64_t b = 0; b < spec.batch; ++b) {
      for (int64_t j = begin; j < end; ++j) {
        for (int64_t h = 0; h < spec.heads_kv; ++h) {
          for (int64_t c = 0; c < t.shape()[3]; ++c) t.set({b, j - begin, h, c}, all[role].get({b, j, h, c}));
        }
      }
    }
  }
  EXPECT_EQ(run_pass(part, FOVEA_FORWARD, {kOracle}).failure, "");
  return {part[Role::kO].values(), part[Role::kLse].values()};
}

class Merge : public testing::TestWithParam<Type> {
 protected:
  static ProblemSpec spec() {
    ProblemSpec s;
    s.type = GetParam();
    s.batch = 2;
    s.heads_q = 4;
    s.heads_kv = 2;
    s.seqlen_q = 9;
    s.seqlen_k = kCuts.back();
    s.head_dim = s.head_dim_v = 21;
    s.logit = 3;
    s.data_seed = 5;
    return s;
  }
};

TEST_P(Merge, OfPartsIsTheWhole) {
  const OwnedProblem all(spec());
  const Partial whole = attend(all, 0, kCuts.back());
  for (const Layout layout : {Layout::kCompact, Layout::kPadded}) {
    for (const bool in_place : {false, true}) {
      for (const bool with_lse : {true, false}) {
        ProblemSpec s = spec();
        s.layout = layout;
        std::vector<OwnedProblem> parts;
        std::vector<fovea_tensor> o_views, lse_views;
        for (size_t p = 0; p + 1 < kCuts.size(); ++p) {
          s.data_seed = p;  // other strides
          parts.emplace_back(s);
          const Partial partial = attend(all, kCuts[p], kCuts[p + 1]);
          parts[p][Role::kO].assign(partial.o);
          parts[p][Role::kLse].assign(partial.lse);
        }
        for (const OwnedProblem& part : parts) {
          o_views.push_back(part[Role::kO].view(true));
          lse_views.push_back(part[Role::kLse].view(true));
        }
        const OwnedProblem fresh(s);
        const OwnedProblem& out = in_place ? parts[0] : fresh;
        const fovea_tensor o = out[Role::kO].view(true), lse = out[Role::kLse].view(true);
        const fovea_tensor* const o_parts[] = {&o_views[0], &o_views[1], &o_views[2]};
        const fovea_tensor* const lse_parts[] = {&lse_views[0], &lse_views[1], &lse_views[2]};
        ASSERT_EQ(fovea_merge(3, o_parts, lse_parts, &o, with_lse ? &lse : nullptr), FOVEA_OK)
            << fovea_last_error();
        EXPECT_EQ(out[Role::kO].check_written(), "");
        if (with_lse) {
          EXPECT_EQ(out[Role::kLse].check_written(), "");
        }
        const std::vector<double> o_got = out[Role::kO].values(), lse_got = out[Role::kLse].values();
        // The parts were rounded once and so is the result; |o| is below 4. Float32 in between.
        const double allowed = 4 * 2 * unit_roundoff(GetParam()) + 4 * 8 * unit_roundoff(Type::kF32);
        for (size_t c = 0; c < o_got.size(); ++c) ASSERT_NEAR(o_got[c], whole.o[c], allowed) << c;
        if (!with_lse) continue;
        for (size_t c = 0; c < lse_got.size(); ++c) {
          ASSERT_NEAR(lse_got[c], whole.lse[c], 8 * unit_roundoff(Type::kF32) * (1 + std::abs(whole.lse[c])))
              << c;
        }
      }
    }
  }
}

TEST_P(Merge, OfPartsWithoutKeysHasNoKeys) {
  const ProblemSpec s = spec();
  const OwnedProblem a(s), b(s), out(s);
  for (const OwnedProblem* part : {&a, &b}) {
    (*part)[Role::kO].assign(std::vector<double>(static_cast<size_t>((*part)[Role::kO].count()), 0.0));
    (*part)[Role::kLse].assign(std::vector<double>(static_cast<size_t>((*part)[Role::kLse].count()),
                                                   -std::numeric_limits<double>::infinity()));
  }
  const fovea_tensor o_a = a[Role::kO].view(true), o_b = b[Role::kO].view(true), o = out[Role::kO].view(true);
  const fovea_tensor lse_a = a[Role::kLse].view(true), lse_b = b[Role::kLse].view(true),
                     lse = out[Role::kLse].view(true);
  const fovea_tensor* const o_parts[] = {&o_a, &o_b};
  const fovea_tensor* const lse_parts[] = {&lse_a, &lse_b};
  ASSERT_EQ(fovea_merge(2, o_parts, lse_parts, &o, &lse), FOVEA_OK) << fovea_last_error();
  for (const double value : out[Role::kO].values()) EXPECT_EQ(value, 0.0);
  for (const double value : out[Role::kLse].values())
    EXPECT_EQ(value, -std::numeric_limits<double>::infinity());
}

INSTANTIATE_TEST_SUITE_P(Type, Merge, testing::Values(Type::kF32, Type::kF16, Type::kBF16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

}  // namespace
}  // namespace fovea::conformance
