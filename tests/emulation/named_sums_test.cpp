// Gradients of named tensors in integer sums: those of float64, the same bits in any order of CTAs and warps, NaN and Inf where
// float32 sums have them. The kernels are compiled for kScoreOfNamedSums.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/kernels/bwd_lists.cuh"
#include "cuda/kernels/named_gradients.cuh"
#include "cuda/kernels/named_results.cuh"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/driver.hpp"
#include "emulation/scheduler.hpp"

namespace fovea::cuda {

extern const ArgsBinding named_peaks_args, named_sums_args, named_results_args;

/// Of the driver, on memory of the host.
void set_words(void* to, unsigned value, size_t count, void*) {
  std::fill_n(static_cast<unsigned*>(to), count, value);
}

}  // namespace fovea::cuda

namespace fovea::emulation {
namespace {

constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2, kQueries = 70, kKeys = 90, kDim = 16, kTensors = 4;
constexpr int kPlaces = 7;  ///< of the table
constexpr float kScale = 0.25f;
using Shape = std::array<int, 4>;
constexpr std::array<Shape, kTensors> kShapes = {
    Shape{kHeads, 1, 1, 1}, {kHeads, kPlaces, 1, 1}, {kBatch, kHeads, kQueries, kKeys}, {1, 1, 1, 1}};
constexpr std::array kRanks = {1, 2, 4, 0};

size_t size_of(size_t tensor) {
  size_t size = 1;
  for (const int extent : kShapes[tensor]) size *= static_cast<size_t>(extent);
  return size;
}
/// Sums of numbers, and of their magnitudes.
struct Sum {
  double value = 0, magnitude = 0;
};
using Sums = std::array<std::vector<Sum>, kTensors>;

class NamedSums : public testing::Test {
 protected:
  NamedSums() {
    for (auto* x : {&q_, &d_o_}) fill(*x, kBatch * kQueries * kHeads * kDim, 1);
    for (auto* x : {&k_, &v_}) fill(*x, kBatch * kKeys * kHeadsKv * kDim, 1);
    for (size_t t = 0; t < kTensors; ++t) {
      fill(tensors_[t], size_of(t), 0.5);
      // Twice as far apart as they need to be.
      gradients_[t].assign(2 * size_of(t), -7.0f);
    }
    // Each key once, in any order, so that sums are those without lists; the entry behind them names none.
    for (int list = 0; list < kBatch * kHeadsKv * kQueries; ++list) {
      const auto begin = lists_.insert(lists_.end(), kKeys + 1, -1);
      std::iota(begin, lists_.end() - 1, 0);
      std::shuffle(begin, lists_.end(), random_);
    }
    lse_.resize(kBatch * kHeads * kQueries);
    delta_.resize(lse_.size());
    for_each_row([&](int b, int h, int i) { attend(b, h, i); });
  }

  void fill(std::vector<float>& x, size_t size, double deviation) {
    std::normal_distribution<double> normal(0, deviation);
    x.resize(size);
    for (float& value : x) value = static_cast<float>(normal(random_));
  }
  template <class Visit>
  static void for_each_row(Visit&& visit) {
    for (int b = 0; b < kBatch; ++b)
      for (int h = 0; h < kHeads; ++h)
        for (int i = 0; i < kQueries; ++i) visit(b, h, i);
  }
  static size_t row(int b, int i, int h, int length, int heads) {
    return static_cast<size_t>((b * length + i) * heads + h) * kDim;
  }
  static size_t statistic(int b, int h, int i) {
    return static_cast<size_t>((b * kHeads + h) * kQueries + i);
  }
  static double dot(const std::vector<float>& x, size_t at_x, const std::vector<float>& y, size_t at_y) {
    double sum = 0;
    for (size_t c = 0; c < kDim; ++c) sum += static_cast<double>(x[at_x + c]) * y[at_y + c];
    return sum;
  }
  static std::array<size_t, kTensors> elements(int b, int h, int i, int j) {
    return {static_cast<size_t>(h), static_cast<size_t>(h * kPlaces + std::clamp(j - i, -3, 3) + 3),
            statistic(b, h, i) * kKeys + static_cast<size_t>(j), 0};
  }

  double product(int b, int h, int i, int j) const {
    return kScale * dot(q_, row(b, i, h, kQueries, kHeads), k_, row(b, j, h / 2, kKeys, kHeadsKv));
  }
  double score(int b, int h, int i, int j) const {
    const auto at = elements(b, h, i, j);
    return product(b, h, i, j) * tensors_[0][at[0]] + tensors_[1][at[1]] + 0.5 * tensors_[2][at[2]] +
           2.0 * tensors_[3][0];
  }
  double d_weight(int b, int h, int i, int j) const {
    return dot(d_o_, row(b, i, h, kQueries, kHeads), v_, row(b, j, h / 2, kKeys, kHeadsKv));
  }
  void attend(int b, int h, int i) {
    double sum = 0, delta = 0;
    for (int j = 0; j < kKeys; ++j) sum += std::exp(score(b, h, i, j));
    for (int j = 0; j < kKeys; ++j) delta += std::exp(score(b, h, i, j)) / sum * d_weight(b, h, i, j);
    lse_[statistic(b, h, i)] = static_cast<float>(std::log(sum));
    delta_[statistic(b, h, i)] = static_cast<float>(delta);
  }
  /// In float64.
  Sums expected() const {
    Sums all;
    for (size_t t = 0; t < kTensors; ++t) all[t].resize(size_of(t));
    for_each_row([&](int b, int h, int i) {
      for (int j = 0; j < kKeys; ++j) {
        const double ds = std::exp(score(b, h, i, j) - lse_[statistic(b, h, i)]) *
                          (d_weight(b, h, i, j) - delta_[statistic(b, h, i)]);
        const auto at = elements(b, h, i, j);
        const std::array<double, kTensors> slopes = {product(b, h, i, j), 1.0, 0.5, 2.0};
        for (size_t t = 0; t < kTensors; ++t) {
          Sum& sum = all[t][at[t]];
          sum.value += ds * slopes[t];
          sum.magnitude += std::abs(ds * slopes[t]);
        }
      }
    });
    return all;
  }

  template <class Vector>
  static tile::RowsView rows_of(Vector& x, int length, int heads) {
    return {reinterpret_cast<char*>(x.data()), int64_t{length} * heads * kDim, int64_t{heads} * kDim, kDim};
  }
  cuda::BackwardArgs make_args(bool by_lists = false) {
    cuda::BackwardArgs args;
    tile::AttentionParams& p = args.p;
    p.q = rows_of(q_, kQueries, kHeads);
    p.k = rows_of(k_, kKeys, kHeadsKv);
    p.v = rows_of(v_, kKeys, kHeadsKv);
    p.d_o = rows_of(d_o_, kQueries, kHeads);
    p.lse = {lse_.data(), int64_t{kHeads} * kQueries, kQueries, 1};
    p.batch = kBatch;
    p.heads_q = kHeads;
    p.heads_kv = kHeadsKv;
    p.group = kHeads / kHeadsKv;
    p.seqlen_q = kQueries;
    p.seqlen_k = kKeys;
    p.head_dim = p.head_dim_v = kDim;
    p.scale = kScale;
    p.expression.has_score = true;
    for (size_t t = 0; t < kTensors; ++t) {
      tile::NamedTensor& to = p.expression.at[t];
      to.data = reinterpret_cast<const char*>(tensors_[t].data());
      to.gradient = gradients_[t].data();
      int64_t stride = 1;
      for (size_t d = 4; d-- > 0;) {
        to.extent[d] = kShapes[t][d];
        if (static_cast<int>(d) >= kRanks[t]) continue;
        to.stride[d] = stride;
        to.gradient_stride[d] = 2 * stride;
        stride *= kShapes[t][d];
      }
    }
    if (by_lists) {
      p.list_size = kKeys + 1;
      p.keys = {lists_.data(), int64_t{kHeadsKv} * kQueries * p.list_size, int64_t{kQueries} * p.list_size,
                p.list_size};
    }
    args.delta = delta_.data();
    args.rows = kQueries;
    return args;
  }
  /// Every second element: the others are nobody's.
  std::array<std::vector<float>, kTensors> results() const {
    std::array<std::vector<float>, kTensors> all;
    for (size_t t = 0; t < kTensors; ++t) {
      for (size_t i = 0; i < gradients_[t].size(); ++i) {
        if (i % 2 == 0) {
          all[t].push_back(gradients_[t][i]);
        } else {
          EXPECT_EQ(gradients_[t][i], -7.0f);
        }
      }
    }
    return all;
  }

  template <class Kernel>
  static void launch(const char* name, const Index& grid, int threads, Kernel&& kernel) {
    run({name, grid, threads, 0, true}, kernel);
  }
  static Index grid_of_pairs(const cuda::BackwardArgs& args) {
    return {static_cast<unsigned>(cuda::named_gradients_ctas(args)), 1, 1};
  }
  std::array<std::vector<float>, kTensors> in_any_order() {
    const cuda::BackwardArgs args = make_args();
    for (auto& gradient : gradients_)
      for (size_t i = 0; i < gradient.size(); i += 2) gradient[i] = 0;
    launch("named_gradients", grid_of_pairs(args), cuda::kNamedGradientsThreads,
           [&] { cuda::named_gradients<float>(args); });
    return results();
  }
  /// By the parameters that a plan makes, in a workspace with contents.
  std::array<std::vector<float>, kTensors> in_integers(bool by_lists = false) {
    const cuda::BackwardArgs args = make_args(by_lists);
    cuda::BackwardLayout layout;
    for (size_t t = 0; t < kTensors; ++t) layout.named_elements += static_cast<int64_t>(size_of(t));
    layout.named_sums = 256;
    layout.named_log2_count = 18;  // 2 * 4 * 70 * 90 * 3 = 151,200
    std::vector<uint64_t> workspace(static_cast<size_t>(layout.named_elements) * 2 + 64, 0x3c3c3c3c3c3c3c3c);
    const auto launch_bound = [&](const char* name, const cuda::ArgsBinding& binding, const Index& grid,
                                  int threads, auto&& kernel) {
      const cuda::Kernel of_table{.name = name};
      alignas(64) std::array<std::byte, cuda::kMaxArgsBytes> bound;
      binding.backward({of_table, layout, args, reinterpret_cast<char*>(workspace.data()), nullptr, {}},
                       bound.data());
      launch(name, grid, threads,
             [&] { kernel(*reinterpret_cast<const cuda::NamedSumsArgs*>(bound.data())); });
    };
    const Index grid_of_lists = {static_cast<unsigned>(cuda::named_list_sums_ctas(args)), 1, 1};
    for (const auto& [name, binding] :
         {std::pair{"named_peaks", &cuda::named_peaks_args}, {"named_sums", &cuda::named_sums_args}}) {
      if (by_lists) {
        launch_bound(name, *binding, grid_of_lists, cuda::kSimtThreads, cuda::named_list_sums<float>);
      } else {
        launch_bound(name, *binding, grid_of_pairs(args), cuda::kNamedGradientsThreads,
                     cuda::named_sums<float>);
      }
    }
    const auto grid = cuda::named_elements_grid<cuda::Grid>(args);
    launch_bound("named_results", cuda::named_results_args,
                 {static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1},
                 cuda::kNamedElementsThreads, cuda::named_results<cuda::kNamedElementsThreads>);
    return results();
  }

  std::mt19937_64 random_{1};
  std::vector<float> q_, k_, v_, d_o_, lse_, delta_;
  std::array<std::vector<float>, kTensors> tensors_, gradients_;
  std::vector<int32_t> lists_;
};

TEST_F(NamedSums, AreThoseOfFloat64) {
  const Sums exact = expected();
  for (const bool by_lists : {false, true}) {
    const auto got = in_integers(by_lists);
    for (size_t t = 0; t < kTensors; ++t) {
      for (size_t i = 0; i < exact[t].size(); ++i) {
        // A few roundings of float32 for each pair, and cancellation in dP - delta.
        ASSERT_NEAR(got[t][i], exact[t][i].value, 1e-6 * exact[t][i].magnitude + 1e-7)
            << "tensor " << t << ", element " << i << (by_lists ? ", lists" : "");
      }
    }
  }
}

TEST_F(NamedSums, HaveTheSameBitsEachTime) {
  for (const bool by_lists : {false, true}) {
    const auto first = in_integers(by_lists);
    for (int i = 0; i < 6; ++i) {
      const auto again = in_integers(by_lists);
      for (size_t t = 0; t < kTensors; ++t) {
        ASSERT_EQ(std::memcmp(first[t].data(), again[t].data(), first[t].size() * sizeof(float)), 0)
            << "tensor " << t << (by_lists ? ", lists" : "");
      }
    }
  }
}

/// Keys whose values make dP infinite, of one sign and of both, or NaN.
TEST_F(NamedSums, AreNotFiniteWhereFloat32SumsAreNot) {
  v_[row(0, 5, 0, kKeys, kHeadsKv)] = INFINITY;
  v_[row(1, 80, 1, kKeys, kHeadsKv)] = NAN;
  delta_[statistic(0, 1, 3)] = INFINITY;
  const auto expected = in_any_order(), got = in_integers();
  int infinite = 0, not_a_number = 0;
  for (size_t t = 0; t < kTensors; ++t) {
    for (size_t i = 0; i < got[t].size(); ++i) {
      ASSERT_EQ(std::isnan(got[t][i]), std::isnan(expected[t][i])) << "tensor " << t << ", element " << i;
      if (std::isinf(expected[t][i])) {
        ASSERT_EQ(got[t][i], expected[t][i]) << "tensor " << t << ", element " << i;
      }
      infinite += std::isinf(got[t][i]);
      not_a_number += std::isnan(got[t][i]);
    }
  }
  EXPECT_GT(infinite, 0);
  EXPECT_GT(not_a_number, 0);
}

}  // namespace
}  // namespace fovea::emulation
