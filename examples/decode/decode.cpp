// A server in small: sequences of different lengths share a pool of pages. Each step rotates one token a sequence, appends it to
// the cache and attends, by one plan; sequences that are done give their pages back, and others take their place. At the
// end each is computed again at once, over a cache in one piece: the results agree, or the program fails.
#include <fovea/fovea.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 4, kHeads = 8, kKeyHeads = 2, kSize = 64, kLongest = 128;
constexpr int64_t kPage = 16, kColumns = kLongest / kPage, kPages = 24, kRowQ = kHeads * kSize, kRowK = kKeyHeads * kSize;
using Floats = std::vector<float>;

struct Angles {
  Floats cos = Floats(kLongest * kSize / 2), sin = cos;
  Angles() {
    for (size_t i = 0; i < cos.size(); ++i) {
      const auto position = static_cast<float>(i / (kSize / 2)), pair = static_cast<float>(i % (kSize / 2));
      const float angle = position * std::pow(10000.0f, -2 * pair / kSize);
      cos[i] = std::cos(angle), sin[i] = std::sin(angle);
    }
  }
  fovea::Tensor of(const Floats& table) const { return {table.data(), {kLongest, kSize / 2}}; }
};

/// What a sequence was given and got, token after token, and where it ends.
struct Sequence {
  Floats q, k, v, o;
  int32_t length;
};

/// The cache, and the pages that nobody has.
struct Cache {
  Floats k = Floats(kPages * kPage * kRowK), v = k;
  std::vector<int32_t> table = std::vector<int32_t>(kBatch * kColumns, -1), used = std::vector<int32_t>(kBatch), unused;
  Cache() : unused(kPages) { std::iota(unused.begin(), unused.end(), 0); }

  void make_room(size_t b) {  // for one more row
    if (used[b] % kPage != 0) return;
    table[b * kColumns + static_cast<size_t>(used[b] / kPage)] = unused.back();
    unused.pop_back();
  }
  void give_back(size_t b) {
    for (size_t n = 0; n < kColumns; ++n) {
      int32_t& page = table[b * kColumns + n];
      if (page >= 0) unused.push_back(page);
      page = -1;
    }
    used[b] = 0;
  }
};

/// The largest difference between the results of a sequence's steps, and those of all its tokens at once.
float difference(Sequence& s, const Angles& angles) {
  const auto n = static_cast<int64_t>(s.o.size()) / kRowQ;
  Floats k(static_cast<size_t>(n * kRowK)), v = k, o(s.o.size());
  const int32_t none = 0;
  fovea::attend({s.q.data(), {1, n, kHeads, kSize}}, {k.data(), {1, n, kKeyHeads, kSize}}, {v.data(), {1, n, kKeyHeads, kSize}},
                {o.data(), {1, n, kHeads, kSize}},
                {.seqused_k = {&none, {1}},
                 .k_new = {s.k.data(), {1, n, kKeyHeads, kSize}},
                 .v_new = {s.v.data(), {1, n, kKeyHeads, kSize}},
                 .rotary_cos = angles.of(angles.cos),
                 .rotary_sin = angles.of(angles.sin),
                 .causal = true});
  float largest = 0;
  for (size_t i = 0; i < o.size(); ++i) largest = std::max(largest, std::abs(o[i] - s.o[i]));
  return largest;
}

}  // namespace

int main() {
  const Angles angles;
  Cache cache;
  std::mt19937 random(1);
  std::vector<Sequence> running(kBatch), done;
  const auto start = [&](Sequence& s) { s = {{}, {}, {}, {}, static_cast<int32_t>(1 + random() % kLongest / 2)}; };
  for (Sequence& s : running) start(s);
  Floats q(kBatch * kRowQ), k(kBatch * kRowK), v = k, o = q;  // a token of each

  const fovea::Plan plan({.q = {q.data(), {kBatch, 1, kHeads, kSize}},
                          .k = {cache.k.data(), {kPages, kPage, kKeyHeads, kSize}},
                          .v = {cache.v.data(), {kPages, kPage, kKeyHeads, kSize}},
                          .o = {o.data(), {kBatch, 1, kHeads, kSize}},
                          .seqused_k = {static_cast<int32_t*>(nullptr), {kBatch}},  // any lengths
                          .page_table = {static_cast<int32_t*>(nullptr), {kBatch, kColumns}},
                          .k_new = {k.data(), {kBatch, 1, kKeyHeads, kSize}},
                          .v_new = {v.data(), {kBatch, 1, kKeyHeads, kSize}},
                          .rotary_cos = angles.of(angles.cos),
                          .rotary_sin = angles.of(angles.sin),
                          .causal = true});
  fovea::Workspace workspace(plan);
  for (int step = 0; step < 200; ++step) {
    std::normal_distribution<float> normal;  // in place of a model
    for (Floats* x : {&q, &k, &v}) std::generate(x->begin(), x->end(), [&] { return normal(random); });
    for (size_t b = 0; b < kBatch; ++b) cache.make_room(b);
    plan.run({.q = q.data(), .k = cache.k.data(), .v = cache.v.data(), .o = o.data(), .seqused_k = cache.used.data(),
              .page_table = cache.table.data(), .k_new = k.data(), .v_new = v.data(), .rotary_cos = angles.cos.data(),
              .rotary_sin = angles.sin.data()},
             workspace);
    for (size_t b = 0; b < kBatch; ++b) {
      Sequence& s = running[b];
      const auto keep = [b](Floats& to, const Floats& from, int64_t row) {
        const auto first = from.begin() + static_cast<int64_t>(b) * row;
        to.insert(to.end(), first, first + row);
      };
      keep(s.q, q, kRowQ), keep(s.k, k, kRowK), keep(s.v, v, kRowK), keep(s.o, o, kRowQ);
      if (++cache.used[b] < s.length) continue;
      cache.give_back(b);
      done.push_back(std::move(s));
      start(s);
    }
  }

  float largest = 0;
  for (Sequence& s : done) largest = std::max(largest, difference(s, angles));
  std::printf("%zu sequences over %d pages, by %s: steps and all tokens at once differ by %.1e\n", done.size(),
              static_cast<int>(kPages), std::string(plan.backend()).c_str(), static_cast<double>(largest));
  return done.size() > 4 && largest < 1e-5f ? 0 : 1;
}
