// The definitions of launcher.hpp.
#include "cli/ranks/launcher.hpp"

#include <charconv>
#include <cstdlib>
#include <string_view>

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
    const std::string_view text = value;
    int processes = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), processes);
    if (error == std::errc() && end == text.data() + text.size() && processes > 1)
      return Launcher{sign.size, processes};
  }
  return std::nullopt;
}

}  // namespace fovea::cli
