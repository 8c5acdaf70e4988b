// The ladder's harness: which results it accepts and refuses, and its list of rungs.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <set>
#include <stdexcept>
#include <thread>

#include "ladder/harness/run.hpp"
#include "ladder/harness/vector.hpp"

namespace ladder {
namespace {

/// The rung of that name with another kernel.
Rung with_kernel(const char* name, void (*run)(const Task&)) {
  for (Rung rung : rungs()) {
    if (std::string(rung.name) == name) {
      rung.run = run;
      return rung;
    }
  }
  throw std::invalid_argument(name);
}

bool is_called_right(void (*run)(const Task&)) {
  const auto device = host_device();
  const Rung rung = with_kernel("01_cpu_textbook", run);
  Problem problem(*device, rung, {2, 33, 16});
  return problem.check(1000).right;
}

void textbook(const Task& task) {
  static const Rung rung = with_kernel("01_cpu_textbook", nullptr);
  for (const Rung& r : rungs()) {
    if (std::string(r.name) == rung.name) r.run(task);
  }
}

TEST(LadderHarness, TheTextbookIsRight) {
  EXPECT_TRUE(is_called_right(textbook));
}
TEST(LadderHarness, ARungThatWritesNothingIsWrong) {
  EXPECT_FALSE(is_called_right([](const Task&) {}));
}
TEST(LadderHarness, OneWrongElementIsWrong) {
  EXPECT_FALSE(is_called_right([](const Task& task) {
    textbook(task);
    task.tensor<float>(3)[40 * 16 + 3] += 1e-3f;
  }));
}
TEST(LadderHarness, OneMissingElementIsWrong) {
  EXPECT_FALSE(is_called_right([](const Task& task) {
    textbook(task);
    task.tensor<float>(4)[65] = std::nanf("");
  }));
}
TEST(LadderHarness, AWrongLseIsWrong) {
  EXPECT_FALSE(is_called_right([](const Task& task) {
    textbook(task);
    task.tensor<float>(4)[0] *= 1.001f;
  }));
}

TEST(LadderHarness, RowsThatAreNotComparedMustBeFinite) {
  const auto device = host_device();
  const Rung rung = with_kernel("01_cpu_textbook", [](const Task& task) {
    textbook(task);
    task.tensor<float>(3)[17 * 16] = INFINITY;  // a row that is not compared
  });
  Problem problem(*device, rung, {2, 33, 16});
  const Checked checked = problem.check(2);
  EXPECT_EQ(checked.rows, 2);
  EXPECT_FALSE(checked.right);
}

TEST(LadderHarness, ShapesAreRead) {
  EXPECT_EQ(shape_text(Family::attention, parse_shape(Family::attention, "100x4096x32")), "100x4096x32");
  EXPECT_EQ(shape_text(Family::softmax, parse_shape(Family::softmax, "7x9")), "7x9");
  for (const char* text :
       {"", "1x2", "1x2x", "1x2x3x4", "1x0x3", "1x-2x3", "axbxc", "1x2x3 ", "99999999999x1x1"})
    EXPECT_THROW(parse_shape(Family::matmul, text), std::invalid_argument) << text;
  EXPECT_THROW(parse_shape(Family::softmax, "1x2x3"), std::invalid_argument);
}

TEST(LadderHarness, Summaries) {
  const Summary s = summary({5, 1, 2, 4, 3});
  EXPECT_EQ(s.runs, 5);
  EXPECT_EQ(s.median, 3);
  EXPECT_EQ(s.fastest, 1);
  EXPECT_DOUBLE_EQ(s.spread, 2.0 / 3);
}

TEST(LadderHarness, Bfloat16RoundsToNearestEven) {
  EXPECT_EQ(round_to_bf16(1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(round_to_bf16(1.0f + 0x1.8p-7f), 1.0f + 0x1p-6f);
  EXPECT_EQ(round_to_bf16(-1.0f - 0x1.1p-8f), -1.0f - 0x1p-7f);
}

/// Row i of causal attention is the last one of attention over the keys up to i.
TEST(LadderHarness, CausalRowsSeeNoLaterKey) {
  const Shape shape = {2, 6, 5};
  const std::vector<HostTensor> t = make_tensors(Family::causal, Type::f32, shape, 3);
  for (int64_t row = 6; row < 12; ++row) {
    const auto keys = static_cast<int>(row - 6) + 1;
    std::vector<HostTensor> seen = t;
    for (size_t i = 0; i < 3; ++i) {
      const auto begin = t[i].values.begin() + 6 * 5;
      seen[i].values.assign(begin, begin + keys * 5);
    }
    EXPECT_EQ(reference_row(Family::causal, shape, t, row),
              reference_row(Family::attention, {1, keys, 5}, seen, row - 6));
  }
  EXPECT_EQ(flops_of(Family::causal, {1, 3, 5}), 4 * 5 * (1 + 2 + 3));
}

/// Finite differences: the gradient of sum(o * d_o) with respect to one element each of q, k and v.
TEST(LadderHarness, TheGradientReferenceAgreesWithDifferences) {
  const Shape shape = {1, 7, 5};
  std::vector<HostTensor> t = make_tensors(Family::gradient, Type::f32, shape, 3);
  const auto loss = [&] {
    double sum = 0;
    for (int64_t row = 0; row < shape.b; ++row) {
      const auto o = reference_row(Family::attention, shape, t, row)[0];
      for (size_t c = 0; c < o.size(); ++c)
        sum += o[c] * static_cast<double>(t[5].values[static_cast<size_t>(row) * o.size() + c]);
    }
    return sum;
  };
  const int64_t row = 4;
  const size_t column = 2, at = static_cast<size_t>(row) * 5 + column;
  const auto gradients = reference_row(Family::gradient, shape, t, row);
  for (size_t which = 0; which < 3; ++which) {
    const float x = t[which].values[at];
    const float step = 1e-2f;
    t[which].values[at] = x + step;
    const double above = loss();
    t[which].values[at] = x - step;
    const double below = loss();
    t[which].values[at] = x;
    EXPECT_NEAR(gradients[which][column], (above - below) / (2 * static_cast<double>(step)), 1e-4) << which;
  }
}

TEST(LadderHarness, RungsAreInOrderAndHaveAGroup) {
  std::set<std::string> seen;
  std::string before;
  for (const Rung& rung : rungs()) {
    EXPECT_LT(before, rung.name);
    before = rung.name;
    ASSERT_GE(rung.group, &groups().front());
    ASSERT_LE(rung.group, &groups().back());
    EXPECT_EQ(rung.capability > 0, rung.group->where == Where::gpu) << rung.name;
    for (const Shape shape : rung.group->shapes) EXPECT_TRUE(rung.accepts(shape)) << rung.name;
  }
}

TEST(LadderHarness, PeakBytesAreTheMaximumOverTime) {
  const auto device = host_device();
  constexpr size_t kMiB = size_t{1} << 20;
  const auto take = [&](size_t bytes) {
    void* memory = device->allocate(bytes);
    device->upload(memory, std::vector<char>(bytes / 2).data(), bytes / 2);
    device->upload(static_cast<char*>(memory) + bytes / 2, std::vector<char>(bytes / 2).data(), bytes / 2);
    device->release(memory);
  };
  const size_t peak = device->peak_bytes([&] {
    take(8 * kMiB);
    take(256 * kMiB);
  });
  if (peak == 0) GTEST_SKIP() << "this system does not tell";
  EXPECT_GT(peak, 240 * kMiB);
  const size_t again = device->peak_bytes([&] { take(8 * kMiB); });
  EXPECT_GT(again, 7 * kMiB);
  EXPECT_LT(again, 128 * kMiB) << "the peak before was not forgotten";
}

TEST(LadderHarness, PeakOfThisMachine) {
  const auto device = host_device();
  EXPECT_GT(device->peak(Bound::cpu_f32), 1e8);
  EXPECT_GT(device->peak(Bound::cpu_memory), 1e8);
  EXPECT_EQ(device->peak(Bound::gpu_bf16), 0);
}

/// Attempts of a test that compares two measured rates: other processes lower either of them for a while, and none raises one.
constexpr int kAttempts = 50;

TEST(LadderHarness, NoRungIsFasterThanThePeak) {
  const Shape shape{4, 512, 64};
  for (const Rung& rung : rungs()) {
    if (std::string(rung.name) != "06_cpu_packed") continue;
    double rate = 0, peak = 0;
    for (int attempt = 0; attempt < kAttempts && peak <= rate; ++attempt) {
      const auto device = host_device();
      peak = std::max(peak, device->peak(Bound::cpu_f32));
      Problem problem(*device, rung, shape);
      const Summary times = summary(device->time({[&] { problem.run(); }}, {2, 11, 1})[0]);
      rate = std::max(rate, flops_of(rung.group->family, shape) / times.fastest);
    }
    EXPECT_LT(rate, peak);
    return;
  }
  FAIL() << "no rung 06_cpu_packed";
}

#if defined(__x86_64__)
/// Clocks a second, by a chain of multiplications that take three each, on every x86 processor since 2008 that has AVX2.
double clock_rate() {
  constexpr int kLinks = 1'000'000, kLatency = 3;
  double rate = 0;
  for (int attempt = 0; attempt < 20; ++attempt) {
    uint64_t x = 3;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kLinks; i += 8) {
      asm volatile(
          "imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0\n"
          "imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0\n"
          : "+r"(x));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    rate = std::max(rate, kLinks * kLatency / seconds.count());
  }
  return rate;
}

/// float32 that a pipe of this processor multiplies in a clock. Zen 4, the one of AMD's family 19h that has AVX-512, gives each of its
/// instructions two clocks (AMD, "Software Optimization Guide for the AMD Zen4 Microarchitecture").
double lanes_of_a_pipe() {
  if (!has_avx512()) return has_avx2() ? 8 : 4;
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam19h") ? 8 : 16;
}

TEST(LadderHarness, ThePeakIsWhatTwoPipesCanDo) {
  const double lanes = lanes_of_a_pipe();
  constexpr double kPipes = 2, kOperations = 2;
  const double threads = std::max(1u, std::thread::hardware_concurrency());
  double peak = 0, limit = 0;
  for (int attempt = 0; attempt < kAttempts && 1.1 * limit <= peak; ++attempt) {
    peak = std::max(peak, host_device()->peak(Bound::cpu_f32));
    limit = std::max(limit, lanes * kPipes * kOperations * clock_rate() * threads);
  }
  EXPECT_LT(peak, 1.1 * limit);
}
#endif

}  // namespace
}  // namespace ladder
