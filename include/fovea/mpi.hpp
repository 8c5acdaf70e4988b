// Ranks that are processes of MPI: the C++20 face of fovea_mpi.h, for programs that link libfovea_mpi.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "fovea/distributed.hpp"
#include "fovea/fovea_mpi.h"

namespace fovea {
inline namespace v0 {

/// This process among those of a communicator. Destroyed before MPI_Finalize. Where an exception destroys it, the other ranks' steps
/// fail, as after Transport::stop.
class MpiRank {
 public:
  /// `communicator`: the address of an MPI_Comm; null: all processes, and MPI is initialised where it is not.
  explicit MpiRank(const void* communicator = nullptr, int64_t deadline_ms = 0) {
    const fovea_status status = fovea_mpi_transport_open(communicator, deadline_ms, &c_);
    if (status != FOVEA_OK) throw Error(status, "communicator", fovea_mpi_last_error());
  }
  MpiRank(const MpiRank&) = delete;
  MpiRank& operator=(const MpiRank&) = delete;
  ~MpiRank() {
    if (std::uncaught_exceptions() > exceptions_)
      c_.stop(c_.context, ("rank " + std::to_string(c_.rank) + ": ended by an exception").c_str());
    fovea_mpi_transport_close(&c_);
  }

  /// Valid as long as this object.
  Transport transport() const { return Transport(c_); }

 private:
  fovea_transport c_{};
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace v0
}  // namespace fovea
