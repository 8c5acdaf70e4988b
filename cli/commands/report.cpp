// `fovea report`: one HTML page from files of results. bench/report/report.py makes the page, with Plotly and
// Jinja2; this command finds it and an interpreter, and is replaced by them (exec).
#include <fmt/core.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands/commands.hpp"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;

struct ReportOptions {
  std::vector<std::string> results;
  std::string output = "report.html", title;
};

/// Run-time files of this program: FOVEA_SHARE, or share/fovea beside its folder bin, in an installation and
/// in a build tree.
fs::path share_folder() {
  if (const char* folder = std::getenv("FOVEA_SHARE"); folder != nullptr && *folder != '\0') return folder;
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  return program.empty() ? fs::path() : program.parent_path().parent_path() / "share" / "fovea";
}

Exit run_report(const ReportOptions& options) {
  const fs::path script = share_folder() / "report" / "report.py";
  if (std::error_code ignored; !fs::exists(script, ignored)) {
    throw Failure(
        Exit::resources,
        fmt::format("{} is not there; install the program together with its folder share, name that "
                    "in FOVEA_SHARE, or run bench/report/report.py of the sources",
                    script.string()));
  }
  const char* chosen = std::getenv("FOVEA_PYTHON");
  const std::string python = chosen != nullptr && *chosen != '\0' ? chosen : "python3";
  std::vector<std::string> words = {python, script.string(), "--output", options.output};
  if (!options.title.empty()) words.insert(words.end(), {"--title", options.title});
  words.emplace_back("--");
  words.insert(words.end(), options.results.begin(), options.results.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execvp(python.c_str(), arguments.data());
  throw Failure(Exit::resources, fmt::format("{} cannot be started ({}); FOVEA_PYTHON names another Python",
                                             python, std::strerror(errno)));
}

}  // namespace

void add_report(CLI::App& program, Action& action) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* command = program.add_subcommand(
      "report", "Draw measurements: one HTML page from the files that --json of ladder and bench wrote");
  command
      ->add_option("results", options->results,
                   "Files of results, or folders of them (bench/results of the sources)")
      ->type_name("FILE");
  command->add_option("--output", options->output, "The page (report.html)")->type_name("PAGE");
  command->add_option("--title", options->title, "Title of the page")->type_name("TEXT");
  command->footer(
      "The page needs no network. Python makes it, with Plotly and Jinja2 (pip install plotly jinja2):\n"
      "FOVEA_PYTHON names the interpreter (python3).\n"
      "\n"
      "Examples:\n"
      "  fovea ladder --json > results/ladder.json && fovea report results\n"
      "  fovea report bench/results --output report.html");
  command->callback([options, &action] { action = [options] { return run_report(*options); }; });
}

}  // namespace fovea::cli
