// The CPU backends against the oracle on expressions, through the C ABI: both passes, every instruction set of this
// machine, and the same bits for every number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "fovea/fovea.h"

namespace fovea {
namespace {

/// SplitMix64.
struct Random {
  uint64_t state;
  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  float normal() {
    float sum = -2;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits() >> 40) * 0x1p-24f;
    return sum * 1.7320508f;
  }
};

/// A compact tensor of floats, or of ints.
struct Tensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
  fovea_tensor view{};

  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }
  void resize() { bytes.assign(static_cast<size_t>(count() * size_of(dtype)) + 8, 0); }
  void set(int64_t i, double x) {
    char* at = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto value) { std::memcpy(at, &value, sizeof(value)); };
    switch (dtype) {
      case DType::kF16:
        return put(from_float<F16>(static_cast<float>(x)));
      case DType::kBF16:
        return put(from_float<Bf16>(static_cast<float>(x)));
      case DType::kI32:
        return put(static_cast<int32_t>(x));
      case DType::kU8:
        return put(static_cast<uint8_t>(x));
      default:
        return put(static_cast<float>(x));
    }
  }
  double get(int64_t i) const {
    const char* at = bytes.data() + i * size_of(dtype);
    if (dtype == DType::kF32) return *reinterpret_cast<const float*>(at);
    if (dtype == DType::kBF16) return static_cast<double>(to_float(*reinterpret_cast<const Bf16*>(at)));
    return static_cast<double>(to_float(*reinterpret_cast<const F16*>(at)));
  }
  const fovea_tensor* describe() {
    const DTypeInfo& info = info_of(dtype);
    view = {bytes.data(),
            {FOVEA_CPU, 0},
            static_cast<int32_t>(shape.size()),
            {static_cast<uint8_t>(info.code), static_cast<uint8_t>(info.bits), 1},
            shape.data(),
            nullptr,
            0};
    return &view;
  }
};

struct Shape {
  int64_t batch = 2, sq = 70, sk = 150, heads = 2, heads_kv = 1, d = 24;
  bool packed = false, causal = false, softcap = false, bias = false, sink = false, mask = false;
  double dropout = 0;
  DType dtype = DType::kF32;
};

/// A problem that owns its tensors; named ones are those that the texts mention.
class Problem {
 public:
  Problem(const Shape& shape, std::string score_text, std::string sees_text)
      : s(shape), score(std::move(score_text)), sees(std::move(sees_text)) {
    const int64_t rows_q = s.packed ? s.batch * s.sq : s.sq, rows_k = s.packed ? s.batch * s.sk : s.sk;
    const auto rows = [&](int64_t n, int64_t heads, int64_t d) {
      return s.packed ? std::vector<int64_t>{n, heads, d} : std::vector<int64_t>{s.batch, n, heads, d};
    };
    for (const char* name : {"q", "d_o", "o", "dq"}) add(name, s.dtype, rows(rows_q, s.heads, s.d));
    for (const char* name : {"k", "v", "dk", "dv"}) add(name, s.dtype, rows(rows_k, s.heads_kv, s.d));
    add("lse", DType::kF32,
        s.packed ? std::vector<int64_t>{s.heads, rows_q} : std::vector<int64_t>{s.batch, s.heads, s.sq});
    if (s.packed) {
      for (const bool keys : {false, true}) {
        Tensor& cu = add(keys ? "cu_k" : "cu_q", DType::kI32, {s.batch + 1});
        for (int64_t b = 0; b <= s.batch; ++b)  // unequal lengths
          cu.set(b, static_cast<double>(b == 0 ? 0 : b * (keys ? s.sk : s.sq) - (b < s.batch ? 7 : 0)));
      }
    }
    if (s.bias) add("bias_term", DType::kF32, {1, s.heads, s.sq, s.sk});
    if (s.bias) add("dbias_term", DType::kF32, {1, s.heads, s.sq, s.sk});
    if (s.sink) add("sink", DType::kF32, {s.heads});
    if (s.sink) add("dsink", DType::kF32, {s.heads});
    if (s.mask) add("mask", DType::kU8, {1, 1, s.sq, s.sk});
    for (auto& [name, t] : tensors) {
      if (name.starts_with("cu_")) continue;
      for (int64_t i = 0; i < t.count(); ++i)
        t.set(i, name == "mask" ? random.below(3) != 0 : random.normal());
    }
    add_named("slope", DType::kF32, {s.heads});
    add_named("bias", DType::kBF16, {s.batch, s.heads, longest(s.sq), longest(s.sk)});
    add_named("pairs", DType::kF32, {1, 1, longest(s.sq), longest(s.sk)});
    add_named("doc", DType::kI32, {s.batch, std::max(longest(s.sq), longest(s.sk))});
    add_named("flag", DType::kU8, {longest(s.sk)});
    add_named("gain", DType::kF16, {});
    add_named("table", DType::kF32, {s.heads, 33});
    add_named("one", DType::kF32, {s.batch, 1});
    add_named("short", DType::kF32, {10});
  }

  /// "" or why the backend cannot.
  std::string run(bool backward, const char* backend, int threads, std::vector<std::string>& outputs) {
    fovea_problem p = FOVEA_PROBLEM_INIT;
    p.pass = backward ? FOVEA_BACKWARD : FOVEA_FORWARD;
    p.q = at("q"), p.k = at("k"), p.v = at("v"), p.o = at("o"), p.lse = at("lse");
    outputs = backward ? std::vector<std::string>{"dq", "dk", "dv"} : std::vector<std::string>{"o", "lse"};
    if (backward) p.d_o = at("d_o"), p.dq = at("dq"), p.dk = at("dk"), p.dv = at("dv");
    if (s.packed) p.cu_seqlens_q = at("cu_q"), p.cu_seqlens_k = at("cu_k");
    if (s.packed) p.max_seqlen_q = longest(s.sq), p.max_seqlen_k = longest(s.sk);
    if (s.bias) p.bias = at("bias_term");
    if (s.sink) p.sink = at("sink");
    if (s.mask) p.mask = at("mask");
    if (backward && s.bias) p.dbias = at("dbias_term"), outputs.push_back("dbias_term");
    if (backward && s.sink) p.dsink = at("dsink"), outputs.push_back("dsink");
    p.causal = s.causal;
    p.softcap = s.softcap ? 4 : 0;
    p.dropout = s.dropout;
    if (!score.empty()) p.score = score.c_str();
    if (!sees.empty()) p.sees = sees.c_str();
    std::vector<fovea_named_tensor> named;
    for (const std::string& name : names) {
      Tensor& t = tensors.at(name);
      fovea_named_tensor n{name.c_str(), t.describe(), nullptr};
      const bool has_gradient =
          backward && (t.dtype == DType::kF32 || t.dtype == DType::kF16 || t.dtype == DType::kBF16);
      if (has_gradient) {
        Tensor& gradient = tensors["gradient of " + name];
        gradient.shape = t.shape;
        gradient.resize();
        n.gradient = gradient.describe();
        outputs.push_back("gradient of " + name);
      }
      named.push_back(n);
    }
    p.named = named.data();
    p.num_named = static_cast<int64_t>(named.size());
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = backend;
    options.num_threads = threads;
    const fovea_status status = fovea_attend(&p, &options, 11, 3);
    return status == FOVEA_OK ? "" : fovea_last_error();
  }

  std::map<std::string, Tensor> tensors;
  Shape s;
  std::string score, sees;

 private:
  int64_t longest(int64_t length) const { return s.packed ? length + 7 : length; }
  const fovea_tensor* at(const std::string& name) { return tensors.at(name).describe(); }
  Tensor& add(const std::string& name, DType dtype, std::vector<int64_t> shape) {
    Tensor& t = tensors[name];
    t.dtype = dtype;
    t.shape = std::move(shape);
    t.resize();
    return t;
  }
  void add_named(const std::string& name, DType dtype, std::vector<int64_t> shape) {
    if ((score + " " + sees).find(name) == std::string::npos) return;
    names.push_back(name);
    Tensor& t = add(name, dtype, std::move(shape));
    for (int64_t i = 0; i < t.count(); ++i) {
      const int64_t last = t.shape.empty() ? 0 : i % t.shape.back();
      t.set(i, name == "doc"    ? static_cast<double>(last / 37)
               : name == "flag" ? static_cast<double>(random.below(2))
                                : random.normal() / 4);
    }
  }

  std::vector<std::string> names;
  Random random{7};
};

/// The largest error relative to the largest element; infinite where NaN or infinities differ.
double error_of(const Tensor& got, const std::vector<double>& expected) {
  double largest = 0.5, error = 0;  // sums of terms of size 1 may cancel
  for (int64_t i = 0; i < got.count(); ++i) {
    const double x = got.get(i), y = expected[static_cast<size_t>(i)];
    if (std::isnan(x) && std::isnan(y)) continue;
    if (x == y) continue;
    if (!std::isfinite(x) || !std::isfinite(y)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, std::fabs(y));
    error = std::max(error, std::fabs(x - y));
  }
  return error / largest;
}

const char* const kBackends[] = {"cpu_amx_bf16", "cpu_avx512_bf16", "cpu_avx512",
                                 "cpu_avx2",     "cpu_neon",        "cpu_generic"};

void compare(const Shape& shape, const std::string& score, const std::string& sees) {
  SCOPED_TRACE("score \"" + score + "\" sees \"" + sees + "\"");
  Problem problem(shape, score, sees);
  const double allowed = shape.dtype == DType::kF32 ? 1e-4 : shape.dtype == DType::kF16 ? 4e-3 : 3e-2;
  for (const bool backward : {false, true}) {
    std::vector<std::string> outputs;
    ASSERT_EQ(problem.run(backward, "reference", 1, outputs), "");
    std::map<std::string, std::vector<double>> expected;
    for (const std::string& name : outputs) {
      const Tensor& t = problem.tensors.at(name);
      for (int64_t i = 0; i < t.count(); ++i) expected[name].push_back(t.get(i));
    }
    const auto keep = problem.tensors;
    for (const char* backend : kBackends) {
      std::map<std::string, std::vector<char>> bits;
      for (const int threads : {1, 2, 3}) {
        problem.tensors = keep;
        for (const std::string& name : outputs) {
          Tensor& t = problem.tensors.at(name);
          std::fill(t.bytes.begin(), t.bytes.end(), '\x55');
        }
        const std::string why = problem.run(backward, backend, threads, outputs);
        if (!why.empty()) {
          const bool unable = why.find("cannot do this problem") != std::string::npos;
          ASSERT_TRUE(unable) << why;
          ASSERT_TRUE(why.find("lacks") != std::string::npos || why.find("build") != std::string::npos ||
                      why.find("bfloat16") != std::string::npos)
              << why;
          break;
        }
        for (const std::string& name : outputs) {
          const Tensor& t = problem.tensors.at(name);
          EXPECT_LE(error_of(t, expected[name]), allowed)
              << backend << (backward ? " backward " : " ") << name;
          const size_t size = static_cast<size_t>(t.count() * size_of(t.dtype));
          std::vector<char> now(t.bytes.begin(), t.bytes.begin() + static_cast<std::ptrdiff_t>(size));
          if (threads == 1) bits[name] = now;
          EXPECT_TRUE(bits[name] == now) << backend << " " << name << " with " << threads << " threads";
        }
      }
    }
    problem.tensors = keep;
    if (::testing::Test::HasFailure()) return;
  }
}

const std::vector<std::pair<const char*, const char*>> kTexts = {
    {"s - abs(slope[h]) * abs(q + nk - nq - k)", ""},
    {"3 * tanh(s / 3)", ""},
    {"s + bias[b, h, q, k]", ""},
    {"s + pairs[b, h, q, k]", ""},
    {"s + table[h, clamp(k - q, -16, 16) + 16]", ""},
    {"", "k <= q + nk - nq && q + nk - nq - k <= 40"},
    {"", "doc[b, q] == doc[b, k]"},
    {"", "k < doc[b, q] * 20 || k <= q"},
    {"", "(q / 16 - k / 16) % 4 == 0"},
    {"s * gain + exp(s / 4) - log(1.5 + abs(s))", "flag[k] != 0"},
    {"where(k < 10, s + short[min(k, 999)], s * 2)", ""},
    {"s + short[min(k, 999)]", "k < 10 && q % 3 != 1"},
    {"s + short[q % 7] * short[k % 5]", "short[min(k, 999)] > 0"},
    {"where(h == 0, s, -s)", "h == 0 || k % 2 == 0"},
    {"s * s / 2", ""},
    {"exp(s / 2)", "q != k"},
    {"k * 0.01", ""},
    {"q * 0.25", "b == 0"},
    {"s + (q * 2147483647 - k * 2147483646) % 3", "q * 4294967296 / 4294967296 == q"},
    {"s + 1 / (k - 3)", ""},
    {"s", "7 / (k - 3) >= 0"},
    {"clamp(s, -1.0, slope[h]) + min(s, gain) - max(s, 0.3) + sqrt(0.1 + abs(s)) + floor(s / 1000)", ""},
    {"s + slope[hk] + slope[h] * slope[h]", "nk - nq > 3 && hk >= 0"},
    {"where(q < k, s, -1.0 / 0)", ""},
    {"s + one[b, q] * one[b, k]", ""},
    {"", "k / 64 == hk"},
    {"", "(k / 40 + h) % 2 == 0 || q > 30"},
    {"s + (k - q) / 7 * 0.1 + (k - q) % 5 * 0.1", "(k + q) / (b + 2) % 3 != 1"},
};

TEST(CpuExpressions, Texts) {
  for (const auto& [score, sees] : kTexts) {
    compare(Shape{}, score, sees);
    if (HasFailure()) return;
  }
}
TEST(CpuExpressions, Group) {
  for (const auto& [score, sees] : kTexts)
    compare({.batch = 1, .sq = 33, .heads = 6, .heads_kv = 2}, score, sees);
}
TEST(CpuExpressions, FewRows) {
  for (const auto& [score, sees] : kTexts) {
    compare({.batch = 1, .sq = 1, .sk = 700, .heads = 4, .heads_kv = 2}, score, sees);
    compare({.batch = 2, .sq = 3, .sk = 300, .heads = 1, .heads_kv = 1}, score, sees);
  }
}
TEST(CpuExpressions, Bfloat16) {
  for (const auto& [score, sees] : kTexts)
    compare({.sq = 150, .sk = 270, .dtype = DType::kBF16}, score, sees);
}
TEST(CpuExpressions, PackedCausal) {
  for (const auto& [score, sees] : kTexts)
    compare({.batch = 3, .sq = 60, .sk = 90, .packed = true, .causal = true}, score, sees);
}
TEST(CpuExpressions, BesideOtherTerms) {
  for (const auto& [score, sees] : kTexts) {
    compare({.batch = 1, .softcap = true, .bias = true, .sink = true, .mask = true, .dropout = 0.3}, score,
            sees);
  }
}
TEST(CpuExpressions, ManyKeys) {
  for (const auto& [score, sees] : kTexts) {
    compare({.batch = 1, .sq = 210, .sk = 1300, .heads = 1, .heads_kv = 1, .d = 16, .dropout = 0.1}, score,
            sees);
  }
}

}  // namespace
}  // namespace fovea
