// The C ABI of fovea_mpi.h.
#include <exception>
#include <string>

#include "distributed/mpi/mpi_transport.hpp"
#include "fovea/fovea_mpi.h"

namespace {

using fovea::distributed::MpiFailure;
using fovea::distributed::MpiTransport;

constexpr int64_t kDeadline = 60'000;

std::string& last_error() {
  thread_local std::string text;
  return text;
}

}  // namespace

extern "C" {

fovea_status fovea_mpi_transport_open(const void* communicator, int64_t deadline_ms,
                                      fovea_transport* transport) FOVEA_NOEXCEPT {
  try {
    last_error().clear();
    if (transport == nullptr)
      throw MpiFailure(FOVEA_INVALID_ARGUMENT, "transport: got NULL, expected an address; pass one");
    *transport = {};
    if (deadline_ms < 0)
      throw MpiFailure(FOVEA_INVALID_ARGUMENT, "deadline_ms: got " + std::to_string(deadline_ms) +
                                                   ", expected 0 or more; 0 takes the usual");
    auto* const made =
        new MpiTransport(communicator, std::chrono::milliseconds(deadline_ms > 0 ? deadline_ms : kDeadline));
    *transport = made->transport();
    return FOVEA_OK;
  } catch (const MpiFailure& failure) {
    last_error() = failure.what();
    return failure.status();
  } catch (const std::exception& error) {
    last_error() = error.what();
    return FOVEA_INTERNAL;
  }
}

void fovea_mpi_transport_close(fovea_transport* transport) FOVEA_NOEXCEPT {
  if (transport == nullptr || transport->context == nullptr) return;
  delete static_cast<MpiTransport*>(transport->context);
  *transport = {};
}

const char* fovea_mpi_last_error(void) FOVEA_NOEXCEPT {
  return last_error().c_str();
}

}  // extern "C"
