// fovea_merge: attention over parts of the keys, merged, is attention over all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
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

/// o with its lse.
struct Result {
  const OwnedTensor* o;
  const OwnedTensor* lse;  ///< null: not wanted
};

/// A tensor where a call finds it: on the host, or its mirror on a GPU.
fovea_tensor view_of(const OwnedTensor& t, void* data, fovea_device device) {
  fovea_tensor view = t.view(true);
  view.data = data;
  view.device = device;
  return view;
}

/// fovea_merge of parts into `result`, which may be one of them, in memory of `device` (null: of the host). Returns "" or what
/// went wrong.
std::string merge(const std::vector<Result>& parts, const Result& result, DeviceMemory* device) {
  std::vector<const OwnedTensor*> tensors;
  for (const Result& part : parts) tensors.insert(tensors.end(), {part.o, part.lse});
  tensors.insert(tensors.end(), {result.o, result.lse});
  std::vector<DeviceMemory::Block> blocks;
  std::vector<size_t> block_of(tensors.size(), 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i] == nullptr) continue;
    const size_t first =
        static_cast<size_t>(std::find(tensors.begin(), tensors.end(), tensors[i]) - tensors.begin());
    block_of[i] = first < i ? block_of[first] : blocks.size();
    if (first == i) blocks.push_back({"a part", tensors[i]->memory().data(), tensors[i]->memory().size()});
  }
  std::vector<void*> mirrors;
  if (device) mirrors = device->place(blocks, 0, 0);
  std::vector<fovea_tensor> views;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i] == nullptr) {
      views.emplace_back();
    } else {
      views.push_back(view_of(*tensors[i], device ? mirrors[block_of[i]] : tensors[i]->data(),
                              device ? device->device() : fovea_device{FOVEA_CPU, 0}));
    }
  }
  std::vector<const fovea_tensor*> o_parts, lse_parts;
  for (size_t i = 0; i < parts.size(); ++i) {
    o_parts.push_back(&views[2 * i]);
    lse_parts.push_back(&views[2 * i + 1]);
  }
  const size_t last = 2 * parts.size();
  const fovea_status status =
      fovea_merge(static_cast<int32_t>(parts.size()), o_parts.data(), lse_parts.data(), &views[last],
                  result.lse ? &views[last + 1] : nullptr, device ? device->stream() : nullptr);
  if (status != FOVEA_OK) return fovea_last_error();
  return device ? device->finish(blocks) : "";
}

/// Where merges run: on the host, and on a GPU if that is under test.
std::vector<DeviceMemory*> places() {
  if (!cuda_backends_under_test().empty()) return {&open_device_memory()};
  return {nullptr};
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
  /// The parts were rounded once and so is the result; |o| is below 4. Float32 in between.
  static void expect_whole(const OwnedProblem& out, const Partial& whole, bool with_lse) {
    EXPECT_EQ(out[Role::kO].check_written(), "");
    const std::vector<double> o = out[Role::kO].values();
    const double allowed = 4 * 2 * unit_roundoff(GetParam()) + 4 * 8 * unit_roundoff(Type::kF32);
    for (size_t c = 0; c < o.size(); ++c) ASSERT_NEAR(o[c], whole.o[c], allowed) << c;
    if (!with_lse) return;
    EXPECT_EQ(out[Role::kLse].check_written(), "");
    const std::vector<double> lse = out[Role::kLse].values();
    for (size_t c = 0; c < lse.size(); ++c) {
      ASSERT_NEAR(lse[c], whole.lse[c], 8 * unit_roundoff(Type::kF32) * (1 + std::abs(whole.lse[c]))) << c;
    }
  }
};

TEST_P(Merge, OfPartsIsTheWhole) {
  const OwnedProblem all(spec());
  const Partial whole = attend(all, 0, kCuts.back());
  for (DeviceMemory* const place : places()) {
    for (const Layout layout : {Layout::kCompact, Layout::kPadded}) {
      for (const bool in_place : {false, true}) {
        for (const bool with_lse : {true, false}) {
          ProblemSpec s = spec();
          s.layout = layout;
          std::vector<OwnedProblem> owners;
          for (size_t p = 0; p + 1 < kCuts.size(); ++p) {
            s.data_seed = p;  // other strides
            owners.emplace_back(s);
            const Partial partial = attend(all, kCuts[p], kCuts[p + 1]);
            owners[p][Role::kO].assign(partial.o);
            owners[p][Role::kLse].assign(partial.lse);
          }
          std::vector<Result> parts;
          for (const OwnedProblem& owner : owners) parts.push_back({&owner[Role::kO], &owner[Role::kLse]});
          const OwnedProblem fresh(s);
          const OwnedProblem& out = in_place ? owners[0] : fresh;
          ASSERT_EQ(merge(parts, {&out[Role::kO], with_lse ? &out[Role::kLse] : nullptr}, place), "");
          expect_whole(out, whole, with_lse);
        }
      }
    }
  }
}

/// More than a launch on a GPU takes: of each key one part, and some without keys.
TEST_P(Merge, OfManyPartsIsTheWhole) {
  const OwnedProblem all(spec());
  const Partial whole = attend(all, 0, kCuts.back());
  for (DeviceMemory* const place : places()) {
    std::vector<OwnedProblem> owners;
    std::vector<Result> parts;
    owners.reserve(static_cast<size_t>(3 * kCuts.back()));
    for (int64_t p = 0; p < 3 * kCuts.back(); ++p) {
      const int64_t begin = p / 3, end = begin + (p % 3 == 1);
      const Partial partial = attend(all, begin, end);
      const OwnedProblem& owner = owners.emplace_back(spec());
      owner[Role::kO].assign(partial.o);
      owner[Role::kLse].assign(partial.lse);
      parts.push_back({&owner[Role::kO], &owner[Role::kLse]});
    }
    const OwnedProblem out(spec());
    ASSERT_EQ(merge(parts, {&out[Role::kO], &out[Role::kLse]}, place), "");
    expect_whole(out, whole, true);
  }
}

/// What such a part holds in o is nothing to the result.
TEST_P(Merge, OfPartsWithoutKeysHasNoKeys) {
  const ProblemSpec s = spec();
  for (DeviceMemory* const place : places()) {
    const OwnedProblem a(s), b(s), out(s);
    for (const OwnedProblem* part : {&a, &b}) {
      (*part)[Role::kO].assign(std::vector<double>(static_cast<size_t>((*part)[Role::kO].count()),
                                                   std::numeric_limits<double>::quiet_NaN()));
      (*part)[Role::kLse].assign(std::vector<double>(static_cast<size_t>((*part)[Role::kLse].count()),
                                                     -std::numeric_limits<double>::infinity()));
    }
    ASSERT_EQ(merge({{&a[Role::kO], &a[Role::kLse]}, {&b[Role::kO], &b[Role::kLse]}},
                    {&out[Role::kO], &out[Role::kLse]}, place),
              "");
    for (const double value : out[Role::kO].values()) EXPECT_EQ(value, 0.0);
    for (const double value : out[Role::kLse].values())
      EXPECT_EQ(value, -std::numeric_limits<double>::infinity());
  }
}

INSTANTIATE_TEST_SUITE_P(Type, Merge, testing::Values(Type::kF32, Type::kF16, Type::kBF16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

}  // namespace
}  // namespace fovea::conformance
