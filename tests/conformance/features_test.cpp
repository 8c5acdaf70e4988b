// Every feature alone and every pair of features, at small sizes, forward and backward, in all types.
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

struct Feature {
  const char* name;
  void (*add)(ProblemSpec&);
};

/// Features that set sizes come first, then packing, which reads the sizes, then those that read lengths.
const std::vector<Feature>& features() {
  static const std::vector<Feature> list = {
      {"more_queries",
       [](ProblemSpec& s) {
         s.seqlen_q = 61;
         s.seqlen_k = 22;
       }},
      {"one_query",
       [](ProblemSpec& s) {
         s.seqlen_q = 1;
         s.seqlen_k = 131;
       }},
      {"grouped", [](ProblemSpec& s) { s.heads_q = 3 * s.heads_kv; }},
      {"other_value_size",
       [](ProblemSpec& s) {
         s.head_dim = 24;
         s.head_dim_v = 9;
       }},
      {"packed",
       [](ProblemSpec& s) {
         const auto q = static_cast<int32_t>(s.seqlen_q), k = static_cast<int32_t>(s.seqlen_k);
         s.lengths_q = {q, 0, (q + 1) / 2, 1};
         s.lengths_k = {k / 2, 3, k, 0};
         s.spare_rows = 2;
         s.batch = 4;
       }},
      {"used_queries",
       [](ProblemSpec& s) {
         s.used_q.assign(static_cast<size_t>(s.batch), 0);
         for (size_t b = 0; b < s.used_q.size(); ++b) {
           s.used_q[b] = b % 2 ? 0 : (s.packed() ? s.lengths_q[b] : static_cast<int32_t>(s.seqlen_q)) * 2 / 3;
         }
       }},
      {"used_keys",
       [](ProblemSpec& s) {
         s.used_k.assign(static_cast<size_t>(s.batch), 0);
         for (size_t b = 0; b < s.used_k.size(); ++b) {
           s.used_k[b] =
               (s.packed() ? s.lengths_k[b] : static_cast<int32_t>(s.seqlen_k)) * (b % 2 ? 3 : 2) / 4;
         }
       }},
      {"causal", [](ProblemSpec& s) { s.causal = true; }},
      {"window",
       [](ProblemSpec& s) {
         s.window_left = 9;
         s.window_right = 4;
       }},
      {"negative_scale", [](ProblemSpec& s) { s.scale = -0.4; }},
      {"softcap",
       [](ProblemSpec& s) {
         s.softcap = 1.5;
         s.logit = 2;
       }},
      {"alibi",
       [](ProblemSpec& s) {
         s.alibi = true;
         s.alibi_by_batch = true;
       }},
      {"bias",
       [](ProblemSpec& s) {
         s.bias = s.dbias = true;
         s.bias_broadcast = 0;
       }},
      {"bias_of_keys",
       [](ProblemSpec& s) {
         s.bias = s.dbias = true;
         s.bias_is_f32 = true;
         s.bias_broadcast = 0b0110;
       }},
      {"mask",
       [](ProblemSpec& s) {
         s.mask = true;
         s.mask_broadcast = 0b0010;
       }},
      {"block_mask",
       [](ProblemSpec& s) {
         s.block_mask = true;
         s.block_mask_broadcast = 0b01;
         s.block_q = 8;
         s.block_k = 16;
         s.block_mask_density = 0.5;
       }},
      {"sink", [](ProblemSpec& s) { s.sink = s.dsink = true; }},
      {"dropout",
       [](ProblemSpec& s) {
         s.dropout = 0.25;
         s.seed = 0xfeedfacecafebeef;
         s.offset = 0x123456789a;
         s.rng_state = true;
       }},
      {"gradient_of_lse", [](ProblemSpec& s) { s.dlse = true; }},
      {"float32_output", [](ProblemSpec& s) { s.o_is_f32 = true; }},
      {"float32_gradients", [](ProblemSpec& s) { s.gradients_are_f32 = true; }},
      {"padded", [](ProblemSpec& s) { s.layout = Layout::kPadded; }},
      {"heads_first", [](ProblemSpec& s) { s.layout = Layout::kHeadsFirst; }},
      {"expanded_keys", [](ProblemSpec& s) { s.expanded_keys = 0b0101; }},
      {"plan_without_data", [](ProblemSpec& s) { s.plan_knows_data = false; }},
      {"growing_keys",
       [](ProblemSpec& s) {
         s.keys = Keys::kGrowing;
         s.logit = 8;
       }},
  };
  return list;
}

struct Pair {
  size_t first, second;
};
std::string name_of(const Pair& pair) {
  const std::string first = features()[pair.first].name;
  return pair.first == pair.second ? first : first + "_and_" + features()[pair.second].name;
}
void PrintTo(const Pair& pair, std::ostream* out) {
  *out << name_of(pair);
}
std::vector<Pair> pairs() {
  std::vector<Pair> all;
  for (size_t a = 0; a < features().size(); ++a) {
    for (size_t b = a; b < features().size(); ++b) all.push_back({a, b});
  }
  return all;
}
class Features : public testing::TestWithParam<Pair> {};

TEST_P(Features, Conform) {
  const auto [first, second] = GetParam();
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = 37;
  spec.seqlen_k = 53;
  spec.head_dim = spec.head_dim_v = 16;
  spec.data_seed = 1000 + first * 100 + second;
  features()[first].add(spec);
  if (second != first) features()[second].add(spec);
  expect_conformance_of_all_types(spec);
}

INSTANTIATE_TEST_SUITE_P(Pair, Features, testing::ValuesIn(pairs()),
                         [](const auto& parameter) { return name_of(parameter.param); });

}  // namespace
}  // namespace fovea::conformance
