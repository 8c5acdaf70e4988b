// The C++ face: everything that it adds to the C ABI.
#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>
#include <vector>

#include "fovea/fovea.hpp"

namespace {

const std::initializer_list<int64_t> kShape = {1, 4, 2, 8};

struct Data {
  std::vector<float> q = wave(0.3f), k = wave(0.7f), v = wave(1.1f), o = std::vector<float>(64);
  std::vector<float> lse = std::vector<float>(8);

  static std::vector<float> wave(float step) {
    std::vector<float> x(64);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
    return x;
  }
};

TEST(CppFace, ThreeLinesAttend) {
  Data d;
  const fovea::Tensor q(d.q.data(), kShape), k(d.k.data(), kShape), v(d.v.data(), kShape),
      o(d.o.data(), kShape);
  fovea::attend(q, k, v, o, {.causal = true});
  for (size_t c = 0; c < 16; ++c)
    EXPECT_NEAR(d.o[c], d.v[c], 1e-6);  // the first query sees the first key only
}

TEST(CppFace, PlanAndRunEqualOneCall) {
  Data one, planned;
  fovea::attend({one.q.data(), kShape}, {one.k.data(), kShape}, {one.v.data(), kShape},
                {one.o.data(), kShape}, {.lse = {one.lse.data(), {1, 2, 4}}, .window_left = 1, .softcap = 5});

  const float* nothing = nullptr;  // a plan needs no data
  const fovea::Tensor input(nothing, kShape), output(static_cast<float*>(nullptr), kShape);
  const fovea::Tensor lse(static_cast<float*>(nullptr), {1, 2, 4});
  const fovea::Plan plan(
      {.q = input, .k = input, .v = input, .o = output, .lse = lse, .window_left = 1, .softcap = 5},
      {.num_threads = 1});
  EXPECT_FALSE(plan.backend().empty());
  EXPECT_NE(plan.reason().find(plan.backend()), std::string_view::npos);
  EXPECT_GT(plan.flops(), 0);
  fovea::Workspace workspace(plan);
  EXPECT_EQ(workspace.size(), plan.workspace_size());
  plan.run({.q = planned.q.data(),
            .k = planned.k.data(),
            .v = planned.v.data(),
            .o = planned.o.data(),
            .lse = planned.lse.data()},
           workspace);
  for (size_t i = 0; i < one.o.size(); ++i) EXPECT_NEAR(one.o[i], planned.o[i], 1e-6);
  for (size_t i = 0; i < one.lse.size(); ++i) EXPECT_NEAR(one.lse[i], planned.lse[i], 1e-6);
}

TEST(CppFace, OptionsSayHowKeysAreSplit) {
  const float* nothing = nullptr;
  const fovea::Tensor q(nothing, {1, 1, 2, 16}), k(nothing, {1, 4000, 2, 16}),
      o(static_cast<float*>(nullptr), {1, 1, 2, 16});
  const fovea::Problem problem{.q = q, .k = k, .v = k, .o = o};
  const fovea::Plan plan(problem, {.backend = "cpu_generic", .num_splits = 2, .batch_invariant = true});
  EXPECT_NE(plan.reason().find("keys split in 2, the same in any batch"), std::string_view::npos);
  EXPECT_THROW(fovea::Plan(problem, {.num_splits = -2}), fovea::Error);
}

TEST(CppFace, ListsNameTheKeys) {
  Data d;
  const fovea::Tensor q(d.q.data(), kShape), k(d.k.data(), kShape), v(d.v.data(), kShape),
      o(d.o.data(), kShape);
  const std::vector<int32_t> keys = {3, -1, 2, -1, 1, -1, -1, -1};
  const fovea::Tensor lists(keys.data(), {1, 1, 4, 2});
  fovea::attend(q, k, v, o, {.keys = lists});
  for (size_t i = 0; i < 4; ++i) {
    for (size_t c = 0; c < 16; ++c) EXPECT_NEAR(d.o[16 * i + c], i == 3 ? 0.0f : d.v[16 * (3 - i) + c], 1e-6);
  }
  const fovea::Plan plan({.q = q, .k = k, .v = v, .o = o, .keys = lists});
  fovea::Workspace workspace(plan);
  Data again;
  plan.run({.q = d.q.data(), .k = d.k.data(), .v = d.v.data(), .o = again.o.data(), .keys = keys.data()},
           workspace);
  EXPECT_EQ(again.o, d.o);
}

TEST(CppFace, BackwardFillsTheGradients) {
  Data d;
  const fovea::Tensor q(d.q.data(), kShape), k(d.k.data(), kShape), v(d.v.data(), kShape),
      o(d.o.data(), kShape);
  const fovea::Tensor lse(d.lse.data(), {1, 2, 4});
  fovea::attend(q, k, v, o, {.lse = lse});
  const std::vector<float> d_o(64, 1.0f);
  std::vector<float> dq(64), dk(64), dv(64, -1.0f);
  fovea::attend_backward({.q = q,
                          .k = k,
                          .v = v,
                          .o = o,
                          .lse = lse,
                          .d_o = {d_o.data(), kShape},
                          .dq = {dq.data(), kShape},
                          .dk = {dk.data(), kShape},
                          .dv = {dv.data(), kShape}});
  // Each of the 4 rows of weights sums to 1.
  float sum = 0;
  for (const float x : dv) sum += x;
  EXPECT_NEAR(sum, 4 * 2 * 8, 1e-4);
}

/// Options with a score of two tensors, one of them a number, and a mask of ints.
fovea::Problem with_expressions(const std::vector<float>& bias, const float& gain,
                                const std::vector<int32_t>& doc) {
  return {.score = "gain * s + bias[h, q, k]",
          .sees = "doc[q] == doc[k]",
          .named = {{"bias", {bias.data(), {2, 4, 4}}},
                    {"gain", fovea::Tensor::scalar(&gain)},
                    {"doc", {doc.data(), {4}}}}};
}

TEST(CppFace, ExpressionsInOneCallAndInAPlan) {
  Data expected, one, planned;
  std::vector<float> bias(32);
  for (size_t i = 0; i < 32; ++i) bias[i] = 0.1f * static_cast<float>(i % 7);
  const float gain = 2;
  const std::vector<int32_t> doc = {3, 3, 5, 5};
  std::vector<uint8_t> mask(16);
  for (size_t i = 0; i < 16; ++i) mask[i] = i / 8 == i % 4 / 2;
  fovea::attend({expected.q.data(), kShape}, {expected.k.data(), kShape}, {expected.v.data(), kShape},
                {expected.o.data(), kShape},
                {.bias = {bias.data(), {1, 2, 4, 4}},
                 .mask = {mask.data(), {1, 1, 4, 4}},
                 .scale = 2 / std::sqrt(8.0)});

  fovea::Problem problem = with_expressions(bias, gain, doc);
  fovea::attend({one.q.data(), kShape}, {one.k.data(), kShape}, {one.v.data(), kShape},
                {one.o.data(), kShape}, problem);
  problem.q = {one.q.data(), kShape};
  problem.k = {one.k.data(), kShape};
  problem.v = {one.v.data(), kShape};
  problem.o = {one.o.data(), kShape};
  const fovea::Plan plan(problem);
  fovea::Workspace workspace(plan);
  plan.run({.q = planned.q.data(),
            .k = planned.k.data(),
            .v = planned.v.data(),
            .o = planned.o.data(),
            .named = {bias.data(), &gain, doc.data()}},
           workspace);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_NEAR(one.o[i], expected.o[i], 1e-6);
    EXPECT_EQ(planned.o[i], one.o[i]);
  }
}

TEST(CppFace, GradientsOfNamedTensors) {
  Data d;
  const fovea::Tensor q(d.q.data(), kShape), k(d.k.data(), kShape), v(d.v.data(), kShape),
      o(d.o.data(), kShape), lse(d.lse.data(), {1, 2, 4});
  std::vector<float> bias(32, 0.5f), dbias(32, -1.0f), d_o = Data::wave(0.9f), dq(64), dk(64), dv(64);
  const float gain = 1;
  float dgain = -1;
  const std::vector<int32_t> doc = {3, 3, 5, 5};
  fovea::Problem problem = with_expressions(bias, gain, doc);
  problem.lse = lse;
  fovea::attend(q, k, v, o, problem);
  problem.named[0].gradient = {dbias.data(), {2, 4, 4}};
  problem.named[1].gradient = fovea::Tensor::scalar(&dgain);
  problem.q = q;
  problem.k = k;
  problem.v = v;
  problem.o = o;
  problem.d_o = {d_o.data(), kShape};
  problem.dq = {dq.data(), kShape};
  problem.dk = {dk.data(), kShape};
  problem.dv = {dv.data(), kShape};
  fovea::attend_backward(problem);
  // The gradients of a row of scores sum to 0, and gain scales what q does.
  float of_gain = 0;
  for (size_t c = 0; c < 64; ++c) of_gain += dq[c] * d.q[c];
  EXPECT_NEAR(dgain, of_gain, 1e-5);
  for (size_t row = 0; row < 8; ++row) {
    float sum = 0;
    for (size_t j = 0; j < 4; ++j) {
      const bool seen = row % 4 / 2 == j / 2;
      EXPECT_EQ(dbias[4 * row + j] != 0, seen) << row << " " << j;
      sum += dbias[4 * row + j];
    }
    EXPECT_NEAR(sum, 0, 1e-6);
  }
}

TEST(CppFace, ErrorsOfExpressionsNameTheTensor) {
  Data d;
  const fovea::Tensor t(d.q.data(), kShape), o(d.o.data(), kShape);
  const std::vector<float> constant(4);
  const auto argument_of = [&](fovea::Problem problem) {
    problem.q = problem.k = problem.v = t;
    problem.o = o;
    try {
      fovea::attend(problem);
    } catch (const fovea::Error& error) {
      return error.argument();
    }
    return std::string("accepted");
  };
  const fovea::Tensor x(constant.data(), {4});
  EXPECT_EQ(argument_of({.score = "s + x[q]", .named = {{"x", x}}}), "accepted");
  EXPECT_EQ(argument_of({.score = "s + y[q]", .named = {{"x", x}}}), "score");
  EXPECT_EQ(argument_of({.sees = "x[q]", .named = {{"x", x}}}), "sees");
  EXPECT_EQ(argument_of({.score = "s", .named = {{"x", {}}}}), "named.x");
  EXPECT_EQ(argument_of({.score = "s + x[q]", .named = {{"x", x, x}}}), "named.x.gradient");  // const memory
  EXPECT_EQ(argument_of({.score = "s", .named = std::vector<fovea::NamedTensor>(9, {"x", x})}), "named");
}

TEST(CppFace, ScalarsHaveNoDimensions) {
  const float x = 3;
  const fovea::Tensor scalar = fovea::Tensor::scalar(&x);
  EXPECT_TRUE(scalar);
  EXPECT_TRUE(scalar.read_only());
  EXPECT_EQ(scalar.shape().size(), 0u);
  EXPECT_EQ(scalar.c_tensor().ndim, 0);
  EXPECT_EQ(scalar.c_tensor().data, &x);
}

TEST(CppFace, MergedHalvesEqualTheWhole) {
  Data whole, first, second;
  const auto attend_keys = [](Data& d, int64_t begin, int64_t end) {
    const std::initializer_list<int64_t> keys = {1, end - begin, 2, 8};
    fovea::attend({d.q.data(), kShape}, {d.k.data() + begin * 16, keys}, {d.v.data() + begin * 16, keys},
                  {d.o.data(), kShape}, {.lse = {d.lse.data(), {1, 2, 4}}});
  };
  attend_keys(whole, 0, 4);
  attend_keys(first, 0, 1);
  attend_keys(second, 1, 4);
  const auto part = [](Data& d) { return fovea::Part{{d.o.data(), kShape}, {d.lse.data(), {1, 2, 4}}}; };
  fovea::merge({part(first), part(second)}, part(first));
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(whole.o[i], first.o[i], 1e-5);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(whole.lse[i], first.lse[i], 1e-5);
}

TEST(CppFace, MergeWithoutPartsOrTensorsIsRefused) {
  Data d;
  const fovea::Part part{{d.o.data(), kShape}, {d.lse.data(), {1, 2, 4}}};
  EXPECT_THROW(fovea::merge({}, part), fovea::Error);
  EXPECT_THROW(fovea::merge({part}, fovea::Part{}), fovea::Error);
  EXPECT_THROW(fovea::merge({fovea::Part{}}, part), fovea::Error);
}

TEST(CppFace, ErrorsCarryStatusArgumentAndMessage) {
  Data d;
  const fovea::Tensor q(d.q.data(), kShape), k(d.k.data(), kShape), v(d.v.data(), kShape),
      o(d.o.data(), kShape);
  try {
    fovea::attend(q, k, v, o, {.dropout = 2});
    FAIL() << "dropout 2 was accepted";
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.status(), FOVEA_INVALID_ARGUMENT);
    EXPECT_EQ(error.argument(), "dropout");
    EXPECT_STREQ(error.what(), fovea_last_error());
    EXPECT_STREQ(error.message(), fovea_last_error());
  }
}

TEST(CppFace, OutputsAreNotWrittenThroughPointersToConst) {
  Data d;
  const std::vector<float> constant(64);
  const fovea::Tensor q(d.q.data(), kShape), read_only(constant.data(), kShape);
  try {
    fovea::attend(q, q, q, read_only);
    FAIL() << "wrote to const memory";
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.argument(), "o");
  }
}

TEST(CppFace, TensorsOwnTheirShape) {
  std::vector<float> x(64);
  fovea::Tensor copy;
  EXPECT_FALSE(copy);
  {
    const fovea::Tensor tensor(x.data(), {1, 4, 2, 8}, {64, 16, 8, 1});
    copy = tensor;
  }
  EXPECT_TRUE(copy);
  const fovea_tensor c = copy.c_tensor();
  EXPECT_EQ(c.shape[1], 4);
  EXPECT_EQ(c.strides[2], 8);
  EXPECT_EQ(copy.shape().size(), 4u);
  EXPECT_THROW(fovea::Tensor(x.data(), {}), fovea::Error);
  EXPECT_THROW(fovea::Tensor(x.data(), {1, 1, 1, 1, 64}), fovea::Error);
  EXPECT_THROW(fovea::Tensor(x.data(), {8, 8}, {8}), fovea::Error);
}

template <class T>
bool is_dtype(fovea_dtype_code code, int bits) {
  constexpr fovea_dtype t = fovea::dtype_of<T>();
  return t.code == code && t.bits == bits && t.lanes == 1;
}

TEST(CppFace, TypesAreDeduced) {
  EXPECT_TRUE(is_dtype<float>(FOVEA_CODE_FLOAT, 32));
  EXPECT_TRUE(is_dtype<const double>(FOVEA_CODE_FLOAT, 64));
  EXPECT_TRUE(is_dtype<fovea::f16>(FOVEA_CODE_FLOAT, 16));
  EXPECT_TRUE(is_dtype<const fovea::bf16>(FOVEA_CODE_BFLOAT, 16));
  EXPECT_TRUE(is_dtype<bool>(FOVEA_CODE_BOOL, 8));
  EXPECT_TRUE(is_dtype<uint8_t>(FOVEA_CODE_UINT, 8));
  EXPECT_TRUE(is_dtype<int32_t>(FOVEA_CODE_INT, 32));
  EXPECT_TRUE(is_dtype<int64_t>(FOVEA_CODE_INT, 64));
  EXPECT_TRUE(is_dtype<long long>(FOVEA_CODE_INT, 64));
  static_assert(sizeof(fovea::f16) == 2 && sizeof(fovea::bf16) == 2);
}

TEST(CppFace, PlansMoveAndDoNotCopy) {
  static_assert(std::is_nothrow_move_constructible_v<fovea::Plan> &&
                !std::is_copy_constructible_v<fovea::Plan>);
  Data d;
  const fovea::Tensor t(d.q.data(), kShape), o(d.o.data(), kShape);
  fovea::Plan plan({.q = t, .k = t, .v = t, .o = o});
  const fovea::Plan moved = std::move(plan);
  EXPECT_FALSE(moved.backend().empty());
}

TEST(CppFace, TheLibraryDescribesItself) {
  EXPECT_EQ(fovea::version(), fovea_version());
  EXPECT_FALSE(fovea::machine().empty());
  EXPECT_GE(fovea::default_threads(), 1);
  const auto backends = fovea::backends();
  ASSERT_FALSE(backends.empty());
  EXPECT_EQ(backends.back().name, "reference");
  EXPECT_EQ(backends.back().unavailable_because, "");
}

}  // namespace
