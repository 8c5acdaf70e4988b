// Failure: an error with a message for the user and an exit status.
#pragma once

#include <stdexcept>
#include <string>

namespace fovea::cli {

/// How the program ends. `fovea --help` documents the numbers: they are part of the interface.
enum class Exit : int {
  ok = 0,
  check_failed = 1,  ///< a result was wrong
  usage = 2,         ///< the command line makes no sense
  input = 3,         ///< an input file cannot be read or holds something else
  problem = 4,       ///< the problem is invalid, or the backend asked for cannot do it
  output = 5,        ///< an output cannot be written
  resources = 6,     ///< out of memory, or a fault of the library
};

/// Ends the subcommand. The message is one line: what is at fault, what came, what was expected, what to do.
struct Failure : std::runtime_error {
  Failure(Exit exit_code, const std::string& message) : std::runtime_error(message), code(exit_code) {}
  Exit code;
};

}  // namespace fovea::cli
