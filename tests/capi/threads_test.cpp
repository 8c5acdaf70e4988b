// Eight threads run one plan at once, each with its own memory, while other threads fail: results are those of one
// thread, and each thread reads its own last error.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea.hpp"

namespace {

constexpr int kThreads = 8, kRuns = 20;
constexpr int64_t kBatch = 1, kSeqlen = 33, kHeads = 2, kSize = 16;
const std::initializer_list<int64_t> kShape = {kBatch, kSeqlen, kHeads, kSize};

std::vector<float> numbers(unsigned seed) {
  std::vector<float> x(kBatch * kSeqlen * kHeads * kSize);
  for (float& value : x) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return x;
}

std::vector<float> run(const fovea::Plan& plan, const std::vector<float>& q, const std::vector<float>& k,
                       const std::vector<float>& v, const float* slopes) {
  std::vector<float> o(q.size());
  fovea::Workspace workspace(plan);
  plan.run({.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .named = {slopes}}, workspace);
  return o;
}

int check(const std::string& backend, int num_threads, bool expressions) {
  std::vector<float> q = numbers(1), k = numbers(2), v = numbers(3), o(q.size());
  const std::vector<float> slopes = {0.5f, 0.25f};
  const fovea::Tensor shaped(q.data(), kShape);
  fovea::Problem problem{.q = shaped, .k = shaped, .v = shaped, .o = shaped, .causal = !expressions};
  if (expressions) {
    problem.score = "s - slopes[h] * abs(q - k)";
    problem.sees = "k <= q";
    problem.named = {{"slopes", {slopes.data(), {kHeads}}}};
  }
  const float* named = expressions ? slopes.data() : nullptr;
  const fovea::Plan plan(problem, {.backend = backend, .num_threads = num_threads});
  const std::vector<float> expected = run(plan, q, k, v, named);

  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int repeat = 0; repeat < kRuns; ++repeat) {
        if (run(plan, q, k, v, named) != expected) ++wrong;
        const std::string name = "backend_of_thread_" + std::to_string(t);
        try {
          const fovea::Plan refused({.q = shaped, .k = shaped, .v = shaped, .o = shaped}, {.backend = name});
          ++wrong;
        } catch (const fovea::Error& error) {
          if (std::string(error.what()).find(name) == std::string::npos) ++wrong;
        }
        if (std::string(fovea_last_error()).find(name) == std::string::npos) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%s with %d%s: %d threads x %d runs, %d wrong\n", backend.c_str(), num_threads,
              expressions ? ", expressions" : "", kThreads, kRuns, wrong.load());
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (const fovea::BackendInfo& backend : fovea::backends()) {
    for (const int num_threads : {1, 2}) {
      for (const bool expressions : {false, true}) {
        try {
          wrong += check(backend.name, num_threads, expressions);
        } catch (const fovea::Error& error) {
          if (error.status() != FOVEA_UNSUPPORTED) throw;
        }
      }
    }
  }
  return wrong ? 1 : 0;
}
