// The definitions of mpi_library.hpp.
#include "cli/ranks/mpi_library.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "cli/terminal/failure.hpp"
#include "fovea/fovea_mpi.h"

namespace fovea::cli {
namespace {

constexpr const char* kLibrary = "libfovea_mpi.so.0";

/// Beside the program, as build trees and installations have it, else where the system looks. MPI's own plugins look for names of MPI
/// among those of the whole program.
void* open_library() {
  std::error_code none;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", none);
  constexpr int kMode = RTLD_NOW | RTLD_GLOBAL;
  if (!none) {
    const std::filesystem::path beside = program.parent_path().parent_path() / "lib" / kLibrary;
    if (void* library = dlopen(beside.c_str(), kMode)) return library;
  }
  if (void* library = dlopen(kLibrary, kMode)) return library;
  const char* why = dlerror();
  throw Failure(
      Exit::resources,
      std::string("--mpi: ") + (why ? why : kLibrary) +
          "; build Fovea where CMake finds MPI (Debian: openmpi-bin libopenmpi-dev), or pass --no-mpi "
          "for ranks that are threads");
}

template <class Function>
Function* function(void* library, const char* name) {
  auto* const found = reinterpret_cast<Function*>(dlsym(library, name));
  if (found == nullptr)
    throw Failure(Exit::resources, std::string("--mpi: ") + kLibrary + " lacks " + name +
                                       ", expected the library of this version of Fovea");
  return found;
}

}  // namespace

MpiProcess::MpiProcess(int64_t deadline_ms) {
  void* const library = open_library();
  auto* const open = function<decltype(fovea_mpi_transport_open)>(library, "fovea_mpi_transport_open");
  auto* const last_error = function<decltype(fovea_mpi_last_error)>(library, "fovea_mpi_last_error");
  close_ = function<decltype(fovea_mpi_transport_close)>(library, "fovea_mpi_transport_close");
  if (open(nullptr, deadline_ms, &c_) != FOVEA_OK)
    throw Failure(Exit::resources, std::string("--mpi: ") + last_error());
}

MpiProcess::~MpiProcess() {
  close_(&c_);
}

}  // namespace fovea::cli
