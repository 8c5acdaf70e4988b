#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

/// What runs now, where a signal handler can read it.
char running[1024] = "nothing yet";

#if defined(FOVEA_CONFORMANCE_PAGES) && !defined(FOVEA_CONFORMANCE_ASAN)
void say(const char* text) {
  const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
  static_cast<void>(written);  // there is nobody left to tell
}
void on_crash(int signal) {
  say("crashed (a touch of memory that is not the problem's?) while running: ");
  say(running);
  say("\n");
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}
void report_crashes() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) std::signal(signal, on_crash);
}
#else
void report_crashes() {}
#endif

std::map<Role, Margin>& margins() {
  static std::map<Role, Margin> all;
  return all;
}

/// Prints, at the end, how close the results came to what is allowed.
class PrintMargins : public testing::Environment {
 public:
  void TearDown() override { std::printf("error / allowed error, at most:%s\n", margins_seen().c_str()); }
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
  return !environment("FOVEA_TEST_BACKEND", "").empty();
}

std::vector<std::string> backends_under_test() {
  if (only_one_backend()) return {environment("FOVEA_TEST_BACKEND", "")};
  return available_backends();
}

void announce(const std::string& problem) {
  std::snprintf(running, sizeof running, "%s", problem.c_str());
}

std::string margins_seen() {
  std::string line;
  for (const auto& [role, margin] : margins()) {
    char text[80];
    std::snprintf(text, sizeof text, " %s %.2f (Frobenius %.2f)", name_of(role), margin.largest,
                  margin.frobenius);
    line += text;
  }
  return line;
}

CheckOptions with_margins(CheckOptions options) {
  options.margins = &margins();
  return options;
}

void expect_conformance(const ProblemSpec& spec, const CheckOptions& options, const Tweak& tweak) {
  OwnedProblem problem(spec);
  if (tweak) tweak(problem);
  announce("preparation of " + describe(spec));
  Checker checker(problem, with_margins(options));
  int ran = 0;
  for (const std::string& backend : backends_under_test()) {
    announce(backend + ": " + describe(spec));
    const std::string failure = checker.check(backend, &ran);
    if (!failure.empty()) ADD_FAILURE() << failure << "\n    problem: " << describe(spec);
  }
  // A backend that was picked by hand may do less than all.
  EXPECT_TRUE(ran > 0 || only_one_backend()) << "no backend can do " << describe(spec);
}

void expect_conformance_of_all_types(ProblemSpec spec, const CheckOptions& options, const Tweak& tweak) {
  for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
    spec.type = type;
    expect_conformance(spec, options, tweak);
  }
}

}  // namespace fovea::conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  fovea::conformance::report_crashes();
  if (!testing::GTEST_FLAG(list_tests)) {
    testing::AddGlobalTestEnvironment(new fovea::conformance::PrintMargins);
  }
  return RUN_ALL_TESTS();
}
