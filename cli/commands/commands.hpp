// The subcommands of `fovea`: each function adds one, with its options.
#pragma once

#include <functional>

#include "cli/options/cli11.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

/// What the command line asks for; runs after all of it was understood.
using Action = std::function<Exit()>;

// Each adds one subcommand with its options to `program`, and puts what it does into `action` when it is chosen.
void add_demo(CLI::App& program, Action& action);
void add_attend(CLI::App& program, Action& action);
void add_look(CLI::App& program, Action& action);
void add_explain(CLI::App& program, Action& action);
void add_compile(CLI::App& program, Action& action);
void add_bench(CLI::App& program, Action& action);
void add_check(CLI::App& program, Action& action);
void add_ladder(CLI::App& program, Action& action);
void add_report(CLI::App& program, Action& action);
void add_info(CLI::App& program, Action& action);

}  // namespace fovea::cli
