// A server in small: sequences of different lengths share a pool of pages. Each step rotates one token a sequence, appends it to
// the cache and attends, by one plan; sequences that are done give their pages back, and others take their place. At the
// end each is computed again at once, over a cache in one piece: the results agree, or the program fails.
#include <fovea/fovea.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr size_t kBatch = 4, kHeads = 8, kKeyHeads = 2, kSize = 64, kHalf = kSize / 2, kLongest = 128;
constexpr size_t kPage = 16, kColumns = kLongest / kPage, kPages = 24;
using Floats = std::vector<float>;

struct Sequence {
  Floats q{}, k{}, v{}, o{};  // what it was given and got, token after token
  size_t length = 0;          // where it ends
};

fovea::Tensor rows(auto& x, int64_t sequences, int64_t tokens, int64_t heads) {
  return {x.data(), {sequences, tokens, heads, kSize}};
}

/// The angles of every position, or rather `turn` of them.
Floats angles(float turn(float)) {
  Floats table(kLongest * kHalf);
  for (size_t i = 0; i < table.size(); ++i)
    table[i] = turn(static_cast<float>(i / kHalf) * std::pow(10000.0f, -static_cast<float>(i % kHalf) / kHalf));
  return table;
}
const Floats cosines = angles([](float x) { return std::cos(x); }), sines = angles([](float x) { return std::sin(x); });
fovea::Tensor table(const Floats& x) { return {x.data(), {kLongest, kHalf}}; }

/// The largest difference between the results of a sequence's steps, and those of all its tokens at once.
float difference(const Sequence& s) {
  const auto n = static_cast<int64_t>(s.length);
  Floats k(s.k.size()), v = k, o(s.o.size());
  const int32_t none = 0;
  fovea::attend(rows(s.q, 1, n, kHeads), rows(k, 1, n, kKeyHeads), rows(v, 1, n, kKeyHeads), rows(o, 1, n, kHeads),
                {.seqused_k = {&none, {1}}, .k_new = rows(s.k, 1, n, kKeyHeads), .v_new = rows(s.v, 1, n, kKeyHeads),
                 .rotary_cos = table(cosines), .rotary_sin = table(sines), .causal = true});
  float largest = 0;
  for (size_t i = 0; i < o.size(); ++i) largest = std::max(largest, std::abs(o[i] - s.o[i]));
  return largest;
}

}  // namespace

int main() {
  Floats q(kBatch * kHeads * kSize), o = q, k(kBatch * kKeyHeads * kSize), v = k;  // a token of each sequence
  Floats cache_k(kPages * kPage * kKeyHeads * kSize), cache_v = cache_k;
  std::vector<int32_t> pages(kBatch * kColumns), used(kBatch), unused(kPages);  // what lies behind a sequence is never read
  std::iota(unused.begin(), unused.end(), 0);
  const fovea::Plan plan({.q = rows(q, kBatch, 1, kHeads), .k = rows(cache_k, kPages, kPage, kKeyHeads),
                          .v = rows(cache_v, kPages, kPage, kKeyHeads), .o = rows(o, kBatch, 1, kHeads),
                          .seqused_k = {static_cast<int32_t*>(nullptr), {kBatch}},  // any lengths
                          .page_table = {static_cast<int32_t*>(nullptr), {kBatch, kColumns}},
                          .k_new = rows(k, kBatch, 1, kKeyHeads), .v_new = rows(v, kBatch, 1, kKeyHeads),
                          .rotary_cos = table(cosines), .rotary_sin = table(sines), .causal = true});
  fovea::Workspace workspace(plan);

  std::mt19937 random(1);
  std::normal_distribution<float> normal;  // in place of a model
  std::vector<Sequence> running(kBatch), done;
  for (int step = 0; step < 200; ++step) {
    for (Floats* x : {&q, &k, &v}) std::generate(x->begin(), x->end(), [&] { return normal(random); });
    for (size_t b = 0; b < kBatch; ++b) {
      const auto row = static_cast<size_t>(used[b]);
      if (row == 0) running[b] = {.length = 1 + random() % kLongest / 2};
      if (row % kPage > 0) continue;
      pages[b * kColumns + row / kPage] = unused.back();
      unused.pop_back();
    }
    plan.run({.q = q.data(), .k = cache_k.data(), .v = cache_v.data(), .o = o.data(), .seqused_k = used.data(),
              .page_table = pages.data(), .k_new = k.data(), .v_new = v.data(), .rotary_cos = cosines.data(),
              .rotary_sin = sines.data()}, workspace);
    for (size_t b = 0; b < kBatch; ++b) {
      Sequence& s = running[b];
      const auto keep = [b](Floats& to, const Floats& from) {
        const size_t size = from.size() / kBatch;
        to.insert(to.end(), from.data() + b * size, from.data() + (b + 1) * size);
      };
      keep(s.q, q), keep(s.k, k), keep(s.v, v), keep(s.o, o);
      if (static_cast<size_t>(++used[b]) < s.length) continue;
      for (size_t n = 0; n * kPage < s.length; ++n) unused.push_back(pages[b * kColumns + n]);
      used[b] = 0;
      done.push_back(std::move(s));
    }
  }

  float largest = 0;
  for (const Sequence& s : done) largest = std::max(largest, difference(s));
  std::printf("%zu sequences over %zu pages, by %s: steps and all tokens at once differ by %.1e\n", done.size(), kPages,
              std::string(plan.backend()).c_str(), static_cast<double>(largest));
  return done.size() > 4 && largest < 1e-5f ? 0 : 1;
}
