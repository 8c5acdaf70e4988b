// Whether mpirun, mpiexec or srun has started this process beside others: told by their variables, before MPI is opened.
#pragma once

#include <optional>
#include <string>

namespace fovea::cli {

/// Who started the processes of one program, and how many.
struct Launcher {
  std::string variable;  ///< of the environment, which says so
  int processes = 0;
};

/// Nothing where this process was started alone, or where no launcher of MPI has left its name.
std::optional<Launcher> launcher();

}  // namespace fovea::cli
