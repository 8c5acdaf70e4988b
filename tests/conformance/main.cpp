#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "conformance/expectations.hpp"
#if defined(FOVEA_TEST_CUDA)
#include "verify/cuda_memory.hpp"
#endif

namespace fovea::conformance {
namespace {

/// What each thread runs now, where a signal handler can read it. A failed kernel ends the work of all threads,
/// so the message names all.
struct Running {
  std::atomic<bool> taken{false};
  char text[1024] = "";
};
constexpr size_t kMostThreads = 256;
std::array<Running, kMostThreads> running;

/// The slot of the calling thread, until it ends. Threads beyond the number of slots share the last.
class MyRunning {
 public:
  MyRunning() {
    while (place_ + 1 < kMostThreads && running[place_].taken.exchange(true)) ++place_;
  }
  ~MyRunning() {
    running[place_].text[0] = '\0';
    running[place_].taken = false;
  }
  char* text() { return running[place_].text; }

 private:
  size_t place_ = 0;
};

#if defined(FOVEA_CONFORMANCE_PAGES) && !defined(FOVEA_CONFORMANCE_ASAN)
void say(const char* text) {
  const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
  static_cast<void>(written);  // nothing can be reported any more
}
void on_end(int signal) {
  say(signal == SIGTERM ? "stopped while running:\n"
                        : "crashed (a touch of memory that is not the problem's?) while running:\n");
  for (const Running& thread : running) {
    if (thread.text[0] == '\0') continue;
    say("  ");
    say(thread.text);
    say("\n");
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}
void report_crashes() {
  // SIGABRT: device memory gives up; SIGTERM: a time limit, so perhaps a kernel that hangs.
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTERM}) std::signal(signal, on_end);
}
#else
void report_crashes() {}
#endif

/// Results of a backend's runs, over all threads.
struct Tally {
  int64_t passes = 0;
  std::map<Role, Margin> margins;
};
std::mutex tallies_mutex;
std::map<std::string, Tally>& tallies() {
  static std::map<std::string, Tally> all;
  return all;
}

std::string margins_text(const std::map<Role, Margin>& margins) {
  std::string line;
  for (const auto& [role, margin] : margins) {
    char text[80];
    std::snprintf(text, sizeof text, " %s %.2f (Frobenius %.2f)", name_of(role), margin.largest,
                  margin.frobenius);
    line += text;
  }
  return line;
}

/// Prints at the end what ran and how close the results came to the bounds.
class PrintTallies : public testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [backend, tally] : tallies()) {
      std::printf("%s: %lld passes; error / allowed error, at most:%s\n", backend.c_str(),
                  static_cast<long long>(tally.passes), margins_text(tally.margins).c_str());
    }
  }
};

bool is_available(const std::string& backend) {
  for (const std::string& name : available_backends()) {
    if (name == backend) return true;
  }
  return false;
}

/// With FOVEA_TEST_BACKEND=cuda or a CUDA backend on a machine without a GPU nothing runs, which is not a success.
/// ctest and tools/test_gpu.sh take this line for "skipped".
class SkipWithoutGpu : public testing::Environment {
 public:
  void SetUp() override {
    const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
    if (wanted != "cuda" && !is_cuda(wanted)) return;
    if (cuda_backends_under_test().empty()) {
      GTEST_SKIP() << "[  SKIPPED ] all tests of " << wanted << ": " << why_no_cuda_backend();
    }
  }
};

}  // namespace

std::string environment(const char* name, const std::string& fallback) {
  const char* text = std::getenv(name);
  return text && *text ? text : fallback;
}

uint64_t environment_number(const char* name, uint64_t fallback) {
  const std::string text = environment(name, std::to_string(fallback));
  char* end = nullptr;
  const uint64_t number = std::strtoull(text.c_str(), &end, 10);
  if (*end != '\0') {
    std::fprintf(stderr, "%s=%s is not a number\n", name, text.c_str());
    std::exit(2);
  }
  return number;
}

bool only_one_backend() {
  const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
  return !wanted.empty() && wanted != "cuda";
}

bool may_be_left_out(const ProblemSpec& spec) {
  const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
  return only_one_backend() ||
         (wanted == "cuda" &&
          (spec.has_expressions() || (spec.has_lists() && (spec.dbias || spec.forward_only()))));
}

std::vector<std::string> backends_under_test() {
  const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
  if (wanted == "cuda" || is_cuda(wanted)) return cuda_backends_under_test();
  if (!wanted.empty()) return {wanted};
  std::vector<std::string> names = available_backends();
  std::erase_if(names, [](const std::string& name) { return is_cuda(name); });
  return names;
}

std::vector<std::string> cuda_backends_under_test() {
  const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
  if (is_cuda(wanted)) return is_available(wanted) ? std::vector{wanted} : std::vector<std::string>{};
  std::vector<std::string> names = available_backends();
  std::erase_if(names, [](const std::string& name) { return !is_cuda(name); });
  return names;
}

std::string why_no_cuda_backend() {
  const std::string wanted = environment("FOVEA_TEST_BACKEND", "");
  std::string reasons;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    const std::string name = fovea_backend_name(i);
    if (!is_cuda(name) || (is_cuda(wanted) && name != wanted)) continue;
    reasons += (reasons.empty() ? "" : "; ") + name + ": " + fovea_backend_unavailable_because(i);
  }
  if (reasons.empty()) return "this library has no such backend";
  return open_device_memory ? reasons : "this programme was built without CUDA";
}

void announce(const std::string& problem) {
  thread_local MyRunning mine;
  std::snprintf(mine.text(), sizeof(Running::text), "%s", problem.c_str());
}

std::string check_and_count(Checker& checker, const std::string& backend, int* ran) {
  std::map<Role, Margin> margins;
  checker.count_margins_in(&margins);
  int passes = 0;
  const std::string failure = checker.check(backend, &passes);
  if (ran) *ran += passes;
  const std::lock_guard lock(tallies_mutex);
  Tally& tally = tallies()[backend];
  tally.passes += passes;
  for (const auto& [role, margin] : margins) {
    Margin& all = tally.margins[role];
    all.largest = std::max(all.largest, margin.largest);
    all.frobenius = std::max(all.frobenius, margin.frobenius);
  }
  return failure;
}

void expect_conformance(const ProblemSpec& spec, const CheckOptions& options, const Tweak& tweak) {
  OwnedProblem problem(spec);
  if (tweak) tweak(problem);
  announce("preparation of " + describe(spec));
  Checker checker(problem, options);
  int ran = 0;
  for (const std::string& backend : backends_under_test()) {
    announce(backend + ": " + describe(spec));
    const std::string failure = check_and_count(checker, backend, &ran);
    if (!failure.empty()) ADD_FAILURE() << failure << "\n    problem: " << describe(spec);
  }
  EXPECT_TRUE(ran > 0 || may_be_left_out(spec)) << "no backend can do " << describe(spec);
}

void expect_conformance_of_all_types(ProblemSpec spec, const CheckOptions& options, const Tweak& tweak) {
  for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
    spec.type = type;
    expect_conformance(spec, options, tweak);
  }
}

void expect_same_bits_each_time(const ProblemSpec& spec) {
  for (const std::string& backend : backends_under_test()) {
    OwnedProblem x(spec);
    ASSERT_EQ(run_pass(x, FOVEA_FORWARD, {kOracle}).failure, "");
    RunOptions how{backend};
    if (run_pass(x, FOVEA_BACKWARD, how).unsupported) continue;
    how.deterministic = true;
    std::map<Role, std::vector<unsigned char>> first;
    for (int run = 0; run < 4; ++run) {
      how.workspace_fill = static_cast<unsigned char>(85 * run);
      const RunResult result = run_pass(x, FOVEA_BACKWARD, how);
      ASSERT_FALSE(result.unsupported) << describe(spec) << ", " << backend << ": " << fovea_last_error();
      ASSERT_EQ(result.failure, "") << describe(spec) << ", " << backend;
      if (run == 0) first = output_bytes(x, FOVEA_BACKWARD);
      EXPECT_TRUE(output_bytes(x, FOVEA_BACKWARD) == first) << describe(spec) << ", " << backend;
    }
  }
}

}  // namespace fovea::conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  fovea::conformance::report_crashes();
#if defined(FOVEA_TEST_CUDA)
  fovea::conformance::use_cuda_memory();
#endif
  if (!testing::GTEST_FLAG(list_tests)) {
    testing::AddGlobalTestEnvironment(new fovea::conformance::SkipWithoutGpu);
    testing::AddGlobalTestEnvironment(new fovea::conformance::PrintTallies);
  }
  return RUN_ALL_TESTS();
}
