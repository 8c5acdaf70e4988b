// The definitions of launcher.hpp.
#include "cli/ranks/launcher.hpp"

#include <cstdlib>
#include <limits>

#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct Sign {
  const char* size;    ///< the variable that counts processes
  const char* beside;  ///< counts only where this one is set as well, or nullptr
};

/// Slurm counts tasks in every job, whatever they are: only beside a rank of PMI are they processes of one MPI program.
constexpr Sign kSigns[] = {
    {"OMPI_COMM_WORLD_SIZE", nullptr},      // Open MPI
    {"PMI_SIZE", nullptr},                  // MPICH and what stems from it; Slurm's PMI and PMI-2
    {"MV2_COMM_WORLD_SIZE", nullptr},       // MVAPICH
    {"SLURM_STEP_NUM_TASKS", "PMIX_RANK"},  // srun --mpi=pmix
    {"SLURM_STEP_NUM_TASKS", "PMI_RANK"},
};

}  // namespace

std::optional<Launcher> launcher() {
  for (const Sign& sign : kSigns) {
    const char* const value = std::getenv(sign.size);
    if (value == nullptr || (sign.beside != nullptr && std::getenv(sign.beside) == nullptr)) continue;
    const std::optional<int64_t> processes = whole_number(value);
    if (processes && *processes > 1 && *processes <= std::numeric_limits<int>::max())
      return Launcher{sign.size, static_cast<int>(*processes)};
  }
  return std::nullopt;
}

}  // namespace fovea::cli
