// libfovea_mpi, opened when a run wants it: the program itself needs no MPI.
#pragma once

#include "fovea/distributed.hpp"

namespace fovea::cli {

/// This process among those that mpirun has started. One at a time.
class MpiProcess {
 public:
  /// Throws a Failure where the library or MPI is missing.
  explicit MpiProcess(int64_t deadline_ms);
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;
  ~MpiProcess();

  Transport transport() const { return Transport(c_); }

 private:
  fovea_transport c_{};
  void (*close_)(fovea_transport*) = nullptr;
};

}  // namespace fovea::cli
