// The oracle's gradients against central differences of its forward: with the loss
//   L = sum(o * d_o) + sum over finite lse of (lse * dlse)
// dq, dk, dv, dbias, dsink and the gradients of named tensors are dL by q, k, v, bias, sink and these tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "float64_problem.hpp"

namespace fovea::testing {
namespace {

double loss(Float64Problem& x) {
  x.run(Pass::kForward);
  double sum = 0;
  for (size_t c = 0; c < x[Role::kO].size(); ++c) sum += x[Role::kO][c] * x[Role::kDO][c];
  if (x.problem.has(Role::kDLse)) {
    for (size_t c = 0; c < x[Role::kLse].size(); ++c) {
      if (std::isfinite(x[Role::kLse][c])) sum += x[Role::kLse][c] * x[Role::kDLse][c];
    }
  }
  return sum;
}

struct Feature {
  std::string name;
  std::function<Float64Problem()> make;
};

/// The base problem: GQA, Sq != Sk, D != Dv.
Float64Problem base() {
  return {2, 5, 7, 4, 2, 6, 3};
}

/// `base` changed by `add`.
Feature with(std::string name, const std::function<void(Float64Problem&)>& add) {
  return {std::move(name), [add] {
            Float64Problem x = base();
            add(x);
            return x;
          }};
}

void add_bias(Float64Problem& x, const std::vector<int64_t>& shape) {
  x.add(Role::kBias, shape);
  x.add(Role::kDBias, shape);
}
void add_sink(Float64Problem& x) {
  x.add(Role::kSink, {x.problem.heads_q});
  x.add(Role::kDSink, {x.problem.heads_q});
}
/// Four keys for each query: some twice, some none.
void add_lists(Float64Problem& x, int64_t batch, int64_t heads) {
  std::vector<int32_t> lists;
  for (int64_t i = 0; i < batch * heads * x.problem.seqlen_q; ++i) {
    const auto keys = static_cast<int32_t>(x.problem.seqlen_k), n = static_cast<int32_t>(i);
    for (const int32_t j : {n % keys, n % 3 == 1 ? -1 : (5 * n + 2) % keys, (n + 1) % keys, n % keys})
      lists.push_back(n == 6 ? -1 : j);
  }
  x.add_lists({batch, heads, x.problem.seqlen_q, 4}, lists);
}
void make_causal(Float64Problem& x) {
  x.problem.causal = true;
  x.problem.window_right = 0;
}

std::vector<Feature> features() {
  std::vector<Feature> list = {
      {"plain", base},
      {"more_queries_than_keys", [] { return Float64Problem(1, 9, 4, 2, 1, 5, 5); }},
      {"one_query", [] { return Float64Problem(1, 1, 12, 4, 1, 8, 8); }},
      {"causal_with_rows_that_see_nothing",
       [] {
         Float64Problem x(1, 9, 4, 2, 1, 5, 5);
         make_causal(x);
         return x;
       }},
      {"packed",
       [] {
         Float64Problem x(1, 1, 1, 4, 2, 4, 3);
         x.pack({3, 0, 5, 2}, {4, 3, 0, 6}, 2);
         return x;
       }},
      {"packed_with_everything",
       [] {
         Float64Problem x(1, 1, 1, 4, 2, 4, 3);
         x.pack({3, 0, 5, 2}, {4, 3, 2, 6}, 1);
         make_causal(x);
         x.problem.window_left = 3;
         x.problem.softcap = 1.5;
         x.problem.dropout = 0.3;
         x.add(Role::kAlibi, {1, 4});
         x.add_integers(Role::kSeqUsedK, {3, 3, 2, 5});
         add_sink(x);
         add_bias(x, {4, 4, 5, 6});
         return x;
       }},
  };
  list.push_back(
      with("without_dlse", [](auto& x) { x.problem.tensors[index_of(Role::kDLse)].present = false; }));
  list.push_back(with("negative_scale", [](auto& x) { x.problem.scale = -0.7; }));
  list.push_back(with("causal", make_causal));
  list.push_back(with("window", [](auto& x) {
    x.problem.window_left = 2;
    x.problem.window_right = 1;
  }));
  list.push_back(with("softcap", [](auto& x) { x.problem.softcap = 0.8; }));
  list.push_back(with("alibi_by_batch", [](auto& x) { x.add(Role::kAlibi, {2, 4}); }));
  list.push_back(with("sink", add_sink));
  list.push_back(with("sink_with_rows_that_see_nothing", [](auto& x) {
    add_sink(x);
    x.add_mask(Role::kMask, {2, 1, 5, 1}, 0.5);
  }));
  list.push_back(with("mask", [](auto& x) { x.add_mask(Role::kMask, {2, 4, 5, 7}, 0.6); }));
  list.push_back(with("lists", [](auto& x) { add_lists(x, 2, 2); }));
  list.push_back(with("shared_lists_with_everything", [](auto& x) {
    add_lists(x, 1, 1);
    add_bias(x, {2, 1, 5, 7});
    add_sink(x);
    make_causal(x);
    x.problem.softcap = 2;
    x.problem.dropout = 0.2;
    x.add_mask(Role::kMask, {2, 4, 5, 7}, 0.8);
  }));
  list.push_back(with("mask_of_keys", [](auto& x) { x.add_mask(Role::kMask, {2, 1, 1, 7}, 0.6); }));
  list.push_back(with("block_mask", [](auto& x) {
    x.problem.block_q = 2;
    x.problem.block_k = 3;
    x.add_mask(Role::kBlockMask, {1, 4, 3, 3}, 0.6);
  }));
  list.push_back(with("seqused", [](auto& x) {
    x.add_integers(Role::kSeqUsedQ, {3, 0});
    x.add_integers(Role::kSeqUsedK, {6, 4});
    make_causal(x);
  }));
  list.push_back(with("seqused_of_zero_keys", [](auto& x) {
    x.add_integers(Role::kSeqUsedK, {0, 7});
    add_sink(x);
  }));
  list.push_back(with("dropout", [](auto& x) { x.problem.dropout = 0.4; }));
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    std::vector<int64_t> shape = {2, 4, 5, 7};
    std::string name = "bias";
    for (size_t axis = 0; axis < 4; ++axis) {
      if (broadcast >> axis & 1) shape[axis] = 1;
      name += "_" + std::to_string(shape[axis]);
    }
    list.push_back(with(name, [shape](auto& x) { add_bias(x, shape); }));
  }
  list.push_back(with("everything", [](auto& x) {
    x.problem.scale = -0.5;
    x.problem.window_left = 4;
    x.problem.window_right = 1;
    x.problem.softcap = 1.2;
    x.problem.dropout = 0.25;
    x.problem.block_q = 2;
    x.problem.block_k = 2;
    x.add(Role::kAlibi, {1, 4});
    add_sink(x);
    add_bias(x, {1, 4, 5, 7});
    x.add_mask(Role::kMask, {2, 1, 5, 7}, 0.8);
    x.add_mask(Role::kBlockMask, {2, 1, 3, 4}, 0.8);
    x.add_integers(Role::kSeqUsedQ, {5, 4});
    x.add_integers(Role::kSeqUsedK, {7, 5});
  }));
  return list;
}

/// Expressions that are smooth where these problems are.
std::vector<Feature> expressions() {
  std::vector<Feature> list;
  for (const auto& [name, score] : std::initializer_list<std::pair<const char*, const char*>>{
           {"tanh", "1.5 * tanh(s / 1.5)"},
           {"softplus", "max(s, 0) + log(1 + exp(-abs(s)))"},
           {"hyperbola", "sqrt(1 + s * s)"},
           {"quotient", "s / (1 + s * s)"},
           {"where", "where((q + k) % 2 == 0, s * s, 0.5 * s)"},
           {"clamp", "clamp(s * 0.001, -5, 5) + s"},
           {"constant", "0.1 * float(q - k)"}}) {
    list.push_back(with(std::string("score_") + name,
                        [text = std::string(score)](auto& x) { x.set_expressions(text); }));
  }
  list.push_back(with("score_of_tensors", [](auto& x) {
    x.add_named("t", {4});
    x.add_named("bias", {2, 4, 5, 7});
    x.add_named("of_keys", {1, 7}, 0b01);
    x.set_expressions("s * exp(0.3 * t[h]) + bias[b, h, q, k] * tanh(s + of_keys[b, k])");
  }));
  list.push_back(with("score_of_a_number", [](auto& x) {
    x.add_named("gain", {});
    x.set_expressions("gain * s - gain * gain");
  }));
  list.push_back(with("score_that_reads_a_tensor_twice", [](auto& x) {
    x.add_named("p", {2, 7});
    x.set_expressions("s + p[b, q] * p[b, k]");
  }));
  list.push_back(with("score_of_a_table", [](auto& x) {
    x.add_named("table", {4, 5});
    x.add_named_integers("distance", {5, 7}, {0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2,
                                              3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4});
    x.set_expressions("s + table[h, distance[q, k]] * 0.5 + table[h, clamp(k - q, -2, 2) + 2]");
  }));
  list.push_back(with("score_with_everything", [](auto& x) {
    x.problem.softcap = 1.2;
    x.problem.dropout = 0.25;
    x.add(Role::kAlibi, {1, 4});
    add_sink(x);
    add_bias(x, {1, 4, 5, 7});
    x.add_mask(Role::kMask, {2, 1, 5, 7}, 0.8);
    x.add_integers(Role::kSeqUsedK, {7, 5});
    x.add_named("t", {4});
    x.add_named_integers("doc", {7}, {0, 0, 1, 1, 0, 2, 2});
    x.set_expressions("s * t[hk + 2] + t[h]", "doc[q] == doc[k] || q == k + 1");
  }));
  list.push_back({"packed_score", [] {
                    Float64Problem x(1, 1, 1, 4, 2, 4, 3);
                    x.pack({3, 0, 5, 2}, {4, 3, 2, 6}, 1);
                    x.add_named("p", {4, 6});
                    x.set_expressions("s * (1 + 0.1 * p[b, q]) + p[b, k] / nk", "k <= q + nk - nq");
                    return x;
                  }});
  return list;
}

class ReferenceGradient : public ::testing::TestWithParam<Feature> {};

TEST_P(ReferenceGradient, EqualsCentralDifference) {
  Float64Problem x = GetParam().make();
  x.run(Pass::kBackward);
  const std::pair<Role, Role> pairs[] = {{Role::kQ, Role::kDQ},
                                         {Role::kK, Role::kDK},
                                         {Role::kV, Role::kDV},
                                         {Role::kBias, Role::kDBias},
                                         {Role::kSink, Role::kDSink}};
  constexpr double kStep =
      1e-5;  // truncation about step^2 = 1e-10, rounding about 1e-16 * |L| / step = 1e-10
  for (const auto& [input, gradient] : pairs) {
    if (!x.problem.has(input)) continue;
    for (size_t c = 0; c < x[input].size(); ++c) {
      const double value = x[input][c];
      x[input][c] = value + kStep;
      const double above = loss(x);
      x[input][c] = value - kStep;
      const double below = loss(x);
      x[input][c] = value;
      ASSERT_NEAR(x[gradient][c], (above - below) / (2 * kStep), 2e-8)
          << name_of(gradient) << "[" << c << "]";
    }
  }
  // Named tensors are float32: the step is a power of two, so that it is exact, and their gradients are rounded.
  for (auto& [i, values] : x.named()) {
    for (size_t c = 0; c < values.size(); ++c) {
      const float value = values[c];
      values[c] = value + 0x1p-12f;
      const double step_up = static_cast<double>(values[c]) - static_cast<double>(value), above = loss(x);
      values[c] = value - 0x1p-12f;
      const double step = step_up + static_cast<double>(value) - static_cast<double>(values[c]);
      const double below = loss(x);
      values[c] = value;
      const auto got = static_cast<double>(x.named_gradient(i)[c]);
      ASSERT_NEAR(got, (above - below) / step, 1e-6 * (1 + std::abs(got)))
          << x.problem.named[i].name << ".gradient[" << c << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Features, ReferenceGradient, ::testing::ValuesIn(features()),
                         [](const auto& parameter) { return parameter.param.name; });
INSTANTIATE_TEST_SUITE_P(Expressions, ReferenceGradient, ::testing::ValuesIn(expressions()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace fovea::testing
