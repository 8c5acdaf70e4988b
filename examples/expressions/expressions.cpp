// Scores and masks by C++ operators, compared with the formula. Prints a line for each; fails where they differ.
#include <fovea/fovea.hpp>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kSeqlen = 48, kHeads = 4, kSize = 8;

size_t place(int64_t b, int64_t i, int64_t h) {
  return static_cast<size_t>(((b * kSeqlen + i) * kHeads + h) * kSize);
}

struct Data {
  std::vector<float> q, k, v, o;
  Data() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* x : {&q, &k, &v, &o}) {
      x->resize(place(kBatch, 0, 0));
      for (float& value : *x) value = normal(random);
    }
  }
};

/// A pair of a query and a key, for formulas.
struct Pair {
  double s;
  int64_t b, h, q, k;
};
using Score = std::function<double(const Pair&)>;  // -infinity: not seen

/// The largest difference of o from softmax(score) v, in float64.
double difference(const Data& data, const Score& score) {
  double largest = 0;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kSeqlen; ++i) {
        double sum = 0, out[kSize] = {};
        for (int64_t j = 0; j < kSeqlen; ++j) {
          const float *q = &data.q[place(b, i, h)], *k = &data.k[place(b, j, h)],
                      *v = &data.v[place(b, j, h)];
          double s = 0;
          for (int64_t d = 0; d < kSize; ++d) s += double{q[d]} * double{k[d]};
          const double weight = std::exp(score({s / std::sqrt(double{kSize}), b, h, i, j}));
          sum += weight;
          for (int64_t d = 0; d < kSize; ++d) out[d] += weight * double{v[d]};
        }
        const float* o = &data.o[place(b, i, h)];
        for (int64_t d = 0; d < kSize; ++d)
          largest = std::fmax(largest, std::fabs(out[d] / sum - double{o[d]}));
      }
    }
  }
  return largest;
}

bool attend_and_compare(const char* name, const fovea::Problem& terms, const Score& score) {
  Data data;
  const auto shape = {kBatch, kSeqlen, kHeads, kSize};
  fovea::attend({data.q.data(), shape}, {data.k.data(), shape}, {data.v.data(), shape},
                {data.o.data(), shape}, terms);
  const double found = difference(data, score);
  std::printf("%-12s largest difference %.1e\n", name, found);
  return found < 1e-5;
}

constexpr double kUnseen = -std::numeric_limits<double>::infinity();

bool alibi() {
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  const auto slope = fovea::named("slope", slopes.data(), {kHeads});
  return attend_and_compare(
      "alibi", {.score = fovea::score([&](auto s, auto, auto h, auto q, auto k) {
                  return s - slope[h] * abs(q - k);
                })},
      [&](const Pair& p) { return p.s - double{slopes[size_t(p.h)]} * double(std::abs(p.q - p.k)); });
}

bool softcap_and_documents() {
  std::vector<int32_t> documents;
  for (int64_t i = 0; i < kBatch * kSeqlen; ++i) documents.push_back(int32_t(i / 11));
  const auto doc = fovea::named("doc", documents.data(), {kBatch, kSeqlen});
  return attend_and_compare(
      "documents",
      {.score = fovea::score([](auto p) { return 3.0 * tanh(p.s / 3.0); }),
       .sees = fovea::sees([&](auto p) { return doc(p.b, p.q) == doc(p.b, p.k) && p.k <= p.q; })},
      [&](const Pair& p) {
        const int32_t *of_q = &documents[size_t(p.b * kSeqlen + p.q)],
                      *of_k = &documents[size_t(p.b * kSeqlen + p.k)];
        return *of_q == *of_k && p.k <= p.q ? 3 * std::tanh(p.s / 3) : kUnseen;
      });
}

bool dilated() {
  return attend_and_compare(
      "dilated",
      {.sees = fovea::sees([](auto, auto, auto q, auto k) { return (q / 8 - k / 8) % 4 == 0 && k <= q; })},
      [](const Pair& p) { return (p.q / 8 - p.k / 8) % 4 == 0 && p.k <= p.q ? p.s : kUnseen; });
}

}  // namespace

int main() {
  try {
    const bool right[] = {alibi(), softcap_and_documents(), dilated()};
    return right[0] && right[1] && right[2] ? 0 : 1;
  } catch (const fovea::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
