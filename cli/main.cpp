// The program `fovea`: its subcommands; an exception becomes one line on stderr and an exit code.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>

#include "cli/commands/commands.hpp"
#include "fovea/fovea.hpp"
#include "io/file_error.hpp"

namespace fovea::cli {
namespace {

constexpr const char* kFooter =
    "Each subcommand has its own --help. Results go to stdout (with --json as one JSON value), errors to "
    "stderr\n"
    "as one line, and two more that show the place in an expression.\n"
    "\n"
    "Exit codes:\n"
    "  0  all went well\n"
    "  1  a check failed: some result was wrong\n"
    "  2  usage: the command line makes no sense\n"
    "  3  an input file cannot be read, is damaged, or holds something else than was expected\n"
    "  4  the problem is invalid, or the backend asked for cannot do it\n"
    "  5  an output cannot be written\n"
    "  6  out of memory, a missing program or package, or a fault of the library\n";

/// All but an excerpt of an expression with a caret under it, which keeps its two lines.
std::string in_one_line(std::string text) {
  size_t end = text.size();
  if (const size_t caret = text.rfind('\n'); caret != std::string::npos && text.ends_with('^')) {
    const bool alone = text.find_first_not_of(' ', caret + 1) + 1 == text.size();
    const size_t excerpt = caret > 0 ? text.rfind('\n', caret - 1) : std::string::npos;
    if (alone && excerpt != std::string::npos) end = excerpt;
  }
  std::replace(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), '\n', ' ');
  return text;
}

Exit report(Exit code, const std::string& name, const std::string& message) {
  fmt::print(stderr, "{}: {}\n", name, in_one_line(message));
  return code;
}

Exit run(const Action& action, const std::string& name) {
  try {
    const Exit code = action();
    // A full disk shows only when the buffer is written out.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return report(Exit::output, name, "stdout: cannot be written");
    }
    return code;
  } catch (const Failure& failure) {
    return report(failure.code, name, failure.what());
  } catch (const io::FileError& error) {
    return report(Exit::input, name, error.what());
  } catch (const Error& error) {
    const bool asked_wrongly =
        error.status() == FOVEA_INVALID_ARGUMENT || error.status() == FOVEA_UNSUPPORTED;
    return report(asked_wrongly ? Exit::problem : Exit::resources, name, error.what());
  } catch (const std::bad_alloc&) {
    return report(Exit::resources, name, "out of memory; use shorter sequences or fewer heads at a time");
  } catch (const std::exception& error) {
    return report(Exit::resources, name, error.what());
  }
}

}  // namespace

int run_program(int argc, char** argv) {
  CLI::App program(
      "Exact attention, tile by tile: o = softmax(scale q k^T + terms) v, and its gradients, in memory that "
      "grows\nwith the sequence, not with its square.",
      "fovea");
  program.set_version_flag("--version", std::string("fovea ") + fovea_version());
  program.require_subcommand(1);
  program.footer(kFooter);
  program.get_formatter()->column_width(30);

  Action action;
  add_demo(program, action);
  add_attend(program, action);
  add_look(program, action);
  add_explain(program, action);
  add_compile(program, action);
  add_bench(program, action);
  add_check(program, action);
  add_ladder(program, action);
  add_report(program, action);
  add_info(program, action);

  std::string name = "fovea";
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help, --version
    for (const CLI::App* chosen : program.get_subcommands()) name += " " + chosen->get_name();
    report(Exit::usage, name, std::string(error.what()) + " (see " + name + " --help)");
    return static_cast<int>(Exit::usage);
  }
  for (const CLI::App* chosen : program.get_subcommands()) name += " " + chosen->get_name();
  return static_cast<int>(run(action, name));
}

}  // namespace fovea::cli

int main(int argc, char** argv) {
  return fovea::cli::run_program(argc, argv);
}
