// `fovea check`: random problems against the oracle, on this machine, until told to stop.
#include <fmt/core.h>

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
#include "cli/options/options.hpp"
#include "cli/terminal/progress.hpp"
#include "cli/terminal/text.hpp"
#include "verify/check.hpp"
#if defined(FOVEA_CLI_CUDA)
#include "verify/cuda_memory.hpp"
#endif
#include "verify/random_problem.hpp"

namespace fovea::cli {
namespace {

struct CheckOptions {
  std::string backend;
  uint64_t seed = 1, problems = 0;
  std::optional<uint64_t> problem;
  double seconds = 0;
  int threads = 0;
  bool forward_only = false, json = false;
};

volatile std::sig_atomic_t stop_asked = 0;
/// The command that repeats what runs now, where a signal handler can read it.
char running[256] = "";

void on_stop(int) {
  stop_asked = 1;
}

void on_crash(int signal) {
  const char* const parts[] = {running, ": crashed (touched memory that is not the problem's?)\n"};
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
  return command;
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

Exit run_check(const CheckOptions& options) {
#if defined(FOVEA_CLI_CUDA)
  verify::use_cuda_memory();
#endif
  const std::vector<std::string> names = backends_to_check(options.backend);
  std::map<std::string, Tally> tallies;
  Json failures = Json::array();
  std::map<verify::Role, verify::Margin> margins;
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, on_stop);
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) std::signal(signal, on_crash);

  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const uint64_t first = options.problem.value_or(0);
  const uint64_t count = options.problem ? 1 : options.problems;
  uint64_t done = 0;
  {
    Progress progress("problems checked", static_cast<int64_t>(count));
    for (uint64_t index = first; count == 0 || index < first + count; ++index, ++done) {
      if (stop_asked != 0 || (options.seconds > 0 && elapsed() >= options.seconds)) break;
      const std::string preparing = command_for(options, index, names.front());
      preparing.copy(running, sizeof running - 1);
      running[std::min(preparing.size(), sizeof running - 1)] = '\0';
      const verify::ProblemSpec spec = verify::random_problem(options.seed, index);
      verify::OwnedProblem problem(spec);
      verify::CheckOptions how;
      how.backward = !options.forward_only;
      how.margins = &margins;
      // The number of threads belongs to the problem, so that a failure repeats.
      how.threads = {static_cast<int32_t>(1 + index % 5), static_cast<int32_t>(1 + index / 5 % 5)};
      if (options.threads > 0) how.threads = {options.threads, 1};
      verify::Checker checker(problem, how);
      for (const std::string& backend : names) {
        std::string command = command_for(options, index, backend);
        if (options.threads > 0) command += fmt::format(" --threads {}", options.threads);
        command.copy(running, sizeof running - 1);
        running[std::min(command.size(), sizeof running - 1)] = '\0';
        int passes = 0;
        std::string failure = checker.check(backend, &passes);
        Tally& tally = tallies[backend];
        tally.problems += passes > 0 ? 1 : 0;
        tally.passes += static_cast<uint64_t>(passes);
        if (failure.empty()) continue;
        ++tally.failures;
        std::replace(failure.begin(), failure.end(), '\n', ' ');
        if (options.json) {
          failures.push_back(
              {{"reproduce", command}, {"failure", failure}, {"problem", verify::describe(spec)}});
        } else {
          fmt::print("{}: {} [{}]\n", command, failure, verify::describe(spec));
          std::fflush(stdout);
        }
      }
      progress.advance();
    }
  }

  uint64_t failed = 0;
  for (const auto& [backend, tally] : tallies) failed += tally.failures;
  if (options.json) {
    Json json = {{"seed", options.seed},      {"first_problem", first},
                 {"problems", done},          {"seconds", elapsed()},
                 {"backends", Json::array()}, {"largest_share_of_allowed_error", Json::object()},
                 {"failures", failures}};
    for (const std::string& name : names) {
      const Tally& tally = tallies[name];
      json["backends"].push_back({{"name", name},
                                  {"problems", tally.problems},
                                  {"passes", tally.passes},
                                  {"failures", tally.failures}});
    }
    for (const auto& [role, margin] : margins) {
      json["largest_share_of_allowed_error"][verify::name_of(role)] = margin.largest;
    }
    print_json(json);
  } else {
    fmt::print("seed {}: {} problems in {}, {} failures\n", options.seed, done, seconds_text(elapsed()),
               failed);
    Table table("  ");
    table.add({"backend", "problems", "passes", "failures"});
    for (const std::string& name : names) {
      const Tally& tally = tallies[name];
      table.add({name, std::to_string(tally.problems), std::to_string(tally.passes),
                 std::to_string(tally.failures)});
    }
    fmt::print("{}", table.text());
  }
  return failed == 0 ? Exit::ok : Exit::check_failed;
}

}  // namespace

void add_check(CLI::App& program, Action& action) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command =
      program.add_subcommand("check", "Random problems against the float64 oracle, on this machine");
  command->add_option("--seed", options->seed, "Which stream of problems (1)")->type_name("N");
  command->add_option("--problems", options->problems, "Stop after so many; 0 (the default): when told to")
      ->type_name("N");
  command->add_option("--seconds", options->seconds, "Stop after so many seconds")->type_name("S");
  command->add_option("--problem", options->problem, "Only this problem of the stream")->type_name("I");
  command->add_option("--backend", options->backend, "Only this backend; left out: all that this machine has")
      ->type_name("NAME");
  command->add_option("--threads", options->threads, "Left out: from 1 to 5, as the problem says")
      ->type_name("N");
  command->add_flag("--forward-only", options->forward_only, "Leave the gradients out");
  add_json_option(*command, options->json);
  command->footer(
      "Draws shapes, types, strides and every term at random, runs forward and backward on each backend, and "
      "compares\n"
      "with the oracle; memory outside the tensors is guarded, and repeated runs must agree bit for bit. "
      "Ctrl-C stops.\n"
      "A failure prints one line that starts with the command that repeats it; the exit code is then 1.\n"
      "\n"
      "Examples:\n"
      "  fovea check --seconds 60\n"
      "  fovea check --seed 7 --problem 1234 --backend cpu_generic");
  command->callback([options, &action] { action = [options] { return run_check(*options); }; });
}

}  // namespace fovea::cli
