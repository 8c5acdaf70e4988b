// Runs thousands of shapes that a backend can do, one after the other, without an oracle. Kernels whose warps wait
// for each other must end for all lengths and give the same bits twice. A run that hangs is named and ends the
// program, because nothing can be freed on a device that hangs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "device_problem.hpp"
#include "verify/random_problem.hpp"

namespace fovea_test {
namespace {

using namespace std::chrono_literals;

/// FOVEA_TEST_SHAPES: the number of shapes for cuda_sm90 (default 5,000); other backends get a tenth.
uint64_t shapes_wanted() {
  const char* const text = std::getenv("FOVEA_TEST_SHAPES");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 5000;
}

constexpr int64_t kMostElements = 2'000'000;

/// Kernels of these sizes take less than a hundredth of this time, even beside other programs.
constexpr auto kLongest = 30s;

void expect_to_end(const Stream& stream, const std::string& what) {
  const auto begin = std::chrono::steady_clock::now();
  while (cudaStreamQuery(stream.get()) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() - begin > kLongest) {
      std::fprintf(stderr, "does not end: %s\n", what.c_str());
      std::_Exit(1);
    }
    std::this_thread::yield();
  }
  stream.wait();
}

/// Lengths at the edges of tiles, one row, one key, none at all; more sequences than there are SMs, and one.
ProblemSpec random_shape(Random& random, uint64_t index) {
  ProblemSpec spec = without_terms(random_problem(random.bits(), index, kDeviceWork / 4));
  // Kernels for expressions are compiled at run time, for seconds each.
  spec.score = spec.sees = nullptr;
  spec.type = random.one_of({Type::kF16, Type::kBF16, Type::kBF16, Type::kF32});
  spec.o_is_f32 = false;
  spec.softcap = random.chance(0.1) ? 5.0 : 0.0;
  spec.scale = 0;
  spec.layout = Layout::kCompact;
  spec.placement = Placement::kGuarded;
  spec.keys = Keys::kNormal;
  spec.logit = spec.magnitude = 1;
  spec.head_dim =
      random.one_of<int64_t>({64, 64, 96, 128, 128, 128, 192, 256, 256, 8 * random.between(1, 32)});
  spec.head_dim_v = spec.head_dim == 192 && random.chance(0.5) ? 128 : spec.head_dim;
  spec.rotary = std::min(spec.rotary, spec.head_dim);
  if (!spec.packed() && spec.used_q.empty() && spec.used_k.empty() && random.chance(0.5)) {
    const auto edge = [&] {
      return std::max<int64_t>(
          1, random.one_of<int64_t>({64, 80, 96, 112, 128, 192, 256}) * random.between(1, 8) +
                 random.between(-1, 1));
    };
    spec.seqlen_q = random.chance(0.2) ? random.between(1, 4) : edge();
    spec.seqlen_k = random.chance(0.5) ? spec.seqlen_q : edge();
    if (random.chance(0.1)) spec.batch = random.between(40, 150);
    // Filled on the host: a million elements take milliseconds.
    const auto elements = [&] {
      return spec.batch * spec.heads_q * std::max(spec.seqlen_q, spec.seqlen_k) * spec.head_dim;
    };
    if (elements() > kMostElements) spec.heads_q = spec.heads_kv = 1;
    while (elements() > kMostElements && spec.seqlen_q + spec.seqlen_k > 2) {
      spec.seqlen_q = std::max<int64_t>(1, spec.seqlen_q / 2);
      spec.seqlen_k = std::max<int64_t>(1, spec.seqlen_k / 2);
    }
  }
  return spec;
}

/// Pairs of queries and keys, times the head size: a forward on the CPU, which a backward needs, does as many in milliseconds.
constexpr int64_t kMostWorkOfForward = 20'000'000;

/// The same with fewer and shorter sequences.
ProblemSpec shorter(ProblemSpec spec) {
  if (spec.packed() || !spec.used_q.empty() || !spec.used_k.empty()) return spec;  // already short
  const auto work = [&] { return spec.batch * spec.heads_q * spec.seqlen_q * spec.seqlen_k * spec.head_dim; };
  while (work() > kMostWorkOfForward && spec.batch > 1) spec.batch /= 2;
  if (work() > kMostWorkOfForward) spec.heads_q = spec.heads_kv = 1;
  while (work() > kMostWorkOfForward) {
    spec.seqlen_q = std::max<int64_t>(1, spec.seqlen_q / 2);
    spec.seqlen_k = std::max<int64_t>(1, spec.seqlen_k / 2);
  }
  return spec;
}

/// Runs `shapes` problems that a backend can do, each twice, with the same bits where it promises them.
void run_shapes(const std::string& backend, fovea_pass pass, bool deterministic, uint64_t shapes) {
  const DeviceProblemOptions options = {.forward_backend = cpu_backend(), .deterministic = deterministic};
  Random random(20250);
  const Stream stream;
  uint64_t done = 0;
  for (uint64_t index = 0; done < shapes && index < 20 * shapes; ++index) {
    const ProblemSpec spec = random_shape(random, index);
    if (pass == FOVEA_BACKWARD && spec.forward_only()) continue;
    const DeviceProblem x(pass == FOVEA_FORWARD ? spec : shorter(spec), pass, backend, options);
    if (x.plan() == nullptr) continue;
    ++done;
    const std::string what = backend + ", number " + std::to_string(index) + ": " + describe(x.spec());
    Bytes first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      x.upload();
      ASSERT_EQ(x.run(stream.get()), FOVEA_OK) << what << ": " << fovea_last_error();
      expect_to_end(stream, what);
      if (repeat == 0) {
        first = x.outputs();
      } else if (deterministic) {
        ASSERT_EQ(x.outputs(), first) << what;
      }
    }
  }
  EXPECT_EQ(done, shapes) << backend;
  std::printf("%s, %s%s: %llu shapes ended\n", backend.c_str(),
              pass == FOVEA_FORWARD ? "forward" : "backward", deterministic ? "" : " in any order",
              static_cast<unsigned long long>(done));
}

TEST(Watchdog, EveryForwardEnds) {
  FOVEA_SKIP_WITHOUT_CUDA_BACKEND();
  for (const std::string& backend : cuda_backends()) {
    // Only in this backend do warps wait for each other otherwise than at barriers of a whole CTA.
    run_shapes(backend, FOVEA_FORWARD, true, backend == "cuda_sm90" ? shapes_wanted() : shapes_wanted() / 10);
  }
}

/// CTAs of a backward wait for each other: with the same bits each time in order, else where one stores, or writes, what all have added to.
TEST(Watchdog, EveryBackwardEnds) {
  FOVEA_SKIP_WITHOUT_CUDA_BACKEND();
  for (const std::string& backend : cuda_backends()) {
    if (backend != "cuda_sm90" && backend != "cuda_sm80" && backend != "cuda_sm75") continue;
    for (const bool deterministic : {true, false})
      run_shapes(backend, FOVEA_BACKWARD, deterministic,
                 backend == "cuda_sm90" ? shapes_wanted() / 2 : shapes_wanted() / 20);
  }
}

}  // namespace
}  // namespace fovea_test
