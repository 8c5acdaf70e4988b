// `fovea check`: runs random problems on this machine's backends and compares them with the oracle.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <optional>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "cli/commands/commands.hpp"
#include "cli/data/check_problems.hpp"
#include "cli/options/options.hpp"
#include "cli/terminal/progress.hpp"
#include "cli/terminal/text.hpp"
#include "verify/check.hpp"
#if defined(FOVEA_CLI_CUDA)
#include "verify/cuda_memory.hpp"
#endif

namespace fovea::cli {
namespace {

struct CheckOptions {
  std::string backend;
  uint64_t seed = 1, problems = 0;
  std::optional<uint64_t> problem;
  double seconds = 0;
  int threads = 0;
  CheckedExpressions expressions;
  bool forward_only = false, json = false;
};

volatile std::sig_atomic_t stop_asked = 0;
/// The command that repeats the problem that runs now, where a signal handler can read it.
char running[16384] = "";  // two expressions of 4,096 characters each, and file names

void on_stop(int) {
  stop_asked = 1;
}

void on_crash(int signal) {
  const char* const parts[] = {running, ": crashed (it may have touched memory outside of the tensors)\n"};
  for (const char* part : parts) {
    [[maybe_unused]] const auto written = write(STDOUT_FILENO, part, std::strlen(part));
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

std::string command_for(const CheckOptions& options, uint64_t problem, const std::string& backend) {
  std::string command =
      fmt::format("fovea check --seed {} --problem {} --backend {}", options.seed, problem, backend);
  if (options.forward_only) command += " --forward-only";
  return command + options.expressions.text();
}

std::vector<std::string> backends_to_check(const std::string& asked) {
  const std::vector<BackendInfo> all = backends();
  if (asked.empty()) return verify::available_backends();
  for (const BackendInfo& backend : all) {
    if (backend.name != asked) continue;
    if (backend.unavailable_because.empty()) return {asked};
    throw Failure(Exit::problem, fmt::format("--backend: got {}, which this machine cannot run: {}", asked,
                                             backend.unavailable_because));
  }
  std::string names;
  for (const BackendInfo& backend : all) names += (names.empty() ? "" : ", ") + backend.name;
  throw Failure(Exit::usage, fmt::format("--backend: got '{}', expected one of {}", asked, names));
}

struct Tally {
  uint64_t problems = 0, passes = 0, failures = 0;
};

/// What was checked, and what came of it.
struct Findings {
  std::vector<std::string> backends;
  std::map<std::string, Tally> tallies;
  std::map<verify::Role, verify::Margin> margins;
  Json failures = Json::array();
  uint64_t first = 0, problems = 0;
  double seconds = 0;

  uint64_t failed() const {
    uint64_t sum = 0;
    for (const auto& [backend, tally] : tallies) sum += tally.failures;
    return sum;
  }
};

/// Puts the command where on_crash finds it.
void remember_running(const std::string& command) {
  const size_t length = command.copy(running, sizeof running - 1);
  running[length] = '\0';
}

/// Counts one check, and prints its failure or keeps it for the JSON.
void count(const CheckOptions& options, const std::string& backend, const std::string& command, int passes,
           std::string failure, const verify::ProblemSpec& spec, Findings& findings) {
  Tally& tally = findings.tallies[backend];
  tally.problems += passes > 0 ? 1 : 0;
  tally.passes += static_cast<uint64_t>(passes);
  if (failure.empty()) return;
  ++tally.failures;
  std::ranges::replace(failure, '\n', ' ');
  if (options.json) {
    findings.failures.push_back(
        {{"reproduce", command}, {"failure", failure}, {"problem", verify::describe(spec)}});
    return;
  }
  fmt::print("{}: {} [{}]\n", command, failure, verify::describe(spec));
  std::fflush(stdout);
}

/// Problem `index` of the stream, on every backend.
void check_problem(const CheckOptions& options, const CheckProblems& problems, uint64_t index,
                   Findings& findings) {
  remember_running(command_for(options, index, findings.backends.front()));
  const verify::ProblemSpec spec = problems.draw(options.seed, index);
  verify::OwnedProblem problem(spec);
  verify::CheckOptions how;
  how.backward = !options.forward_only;
  how.margins = &findings.margins;
  // The problem decides the number of threads, so that a failure repeats.
  how.threads = {static_cast<int32_t>(1 + index % 5), static_cast<int32_t>(1 + index / 5 % 5)};
  if (options.threads > 0) how.threads = {options.threads, 1};
  verify::Checker checker(problem, how);
  for (const std::string& backend : findings.backends) {
    std::string command = command_for(options, index, backend);
    if (options.threads > 0) command += fmt::format(" --threads {}", options.threads);
    remember_running(command);
    int passes = 0;
    std::string failure = checker.check(backend, &passes);
    count(options, backend, command, passes, std::move(failure), spec, findings);
  }
}

void print_json_findings(const CheckOptions& options, Findings& findings) {
  Json json = {{"seed", options.seed},          {"first_problem", findings.first},
               {"problems", findings.problems}, {"seconds", findings.seconds},
               {"backends", Json::array()},     {"largest_share_of_allowed_error", Json::object()},
               {"failures", findings.failures}};
  for (const std::string& name : findings.backends) {
    const Tally& tally = findings.tallies[name];
    json["backends"].push_back({{"name", name},
                                {"problems", tally.problems},
                                {"passes", tally.passes},
                                {"failures", tally.failures}});
  }
  for (const auto& [role, margin] : findings.margins) {
    json["largest_share_of_allowed_error"][verify::name_of(role)] = margin.largest;
  }
  print_json(json);
}

void print_table(const CheckOptions& options, Findings& findings) {
  fmt::print("seed {}: {} problems in {}, {} failures\n", options.seed, findings.problems,
             seconds_text(findings.seconds), findings.failed());
  Table table("  ");
  table.add({"backend", "problems", "passes", "failures"});
  for (const std::string& name : findings.backends) {
    const Tally& tally = findings.tallies[name];
    table.add(
        {name, std::to_string(tally.problems), std::to_string(tally.passes), std::to_string(tally.failures)});
  }
  fmt::print("{}", table.text());
}

Exit run_check(const CheckOptions& options) {
#if defined(FOVEA_CLI_CUDA)
  verify::use_cuda_memory();
#endif
  const CheckProblems problems(options.expressions);
  Findings findings;
  findings.backends = backends_to_check(options.backend);
  findings.first = options.problem.value_or(0);
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, on_stop);
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) std::signal(signal, on_crash);

  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const uint64_t count = options.problem ? 1 : options.problems;  // 0: until told to stop
  {
    Progress progress("problems checked", static_cast<int64_t>(count));
    for (uint64_t& done = findings.problems; count == 0 || done < count; ++done) {
      if (stop_asked != 0 || (options.seconds > 0 && elapsed() >= options.seconds)) break;
      check_problem(options, problems, findings.first + done, findings);
      progress.advance();
    }
  }
  findings.seconds = elapsed();
  (options.json ? print_json_findings : print_table)(options, findings);
  return findings.failed() == 0 ? Exit::ok : Exit::check_failed;
}

}  // namespace

void add_check(CLI::App& program, Action& action) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command = program.add_subcommand(
      "check", "Check this machine's backends on random problems, against the float64 oracle");
  command->add_option("--seed", options->seed, "Which stream of problems (1)")->type_name("N");
  command
      ->add_option("--problems", options->problems, "Stop after so many; 0 (the default): run until Ctrl-C")
      ->type_name("N");
  command->add_option("--seconds", options->seconds, "Stop after so many seconds")->type_name("S");
  command->add_option("--problem", options->problem, "Only this problem of the stream")->type_name("I");
  command->add_option("--backend", options->backend, "Only this backend (default: all that this machine has)")
      ->type_name("NAME");
  command->add_option("--threads", options->threads, "Threads (default: 1 to 5, decided by the problem)")
      ->type_name("N");
  options->expressions.add_options(*command);
  command->add_flag("--forward-only", options->forward_only, "Do not check gradients");
  add_json_option(*command, options->json);
  command->footer(
      "Draws shapes, types, strides and all terms at random, runs forward and backward on each backend, and\n"
      "compares with the oracle. Writes outside of the tensors are found, and repeated runs must agree bit "
      "for\n"
      "bit. Ctrl-C stops. Each failure prints one line that starts with the command that repeats it, and "
      "the\n"
      "exit code is 1.\n"
      "\n"
      "With --score or --sees all problems have these expressions and the sizes given here; the bound of an "
      "error then\n"
      "is how far the oracle moves when its inputs are off by roundings.\n"
      "\n"
      "Examples:\n"
      "  fovea check --seconds 60\n"
      "  fovea check --seed 7 --problem 1234 --backend cpu_generic\n"
      "  fovea check --seconds 20 --score \"s - slope[h] * abs(q - k)\" --tensor slope=slopes.npy --heads "
      "16");
  command->callback([options, &action] { action = [options] { return run_check(*options); }; });
}

}  // namespace fovea::cli
