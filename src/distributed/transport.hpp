// A fovea_transport as the library uses it: failures are exceptions that name the rank, and reach the other ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/fovea_distributed.h"

namespace fovea::distributed {

class Transport {
 public:
  /// Throws RequestError(kInvalidArgument) for a struct that is none.
  explicit Transport(const fovea_transport* given);

  int rank() const { return c_.rank; }
  int size() const { return c_.size; }
  fovea_device device() const { return c_.device; }

  void start(const std::vector<fovea_message>& sends, const std::vector<fovea_message>& receives,
             void* stream) const;
  void finish(void* stream) const;
  /// Whether ranks may reach each other's memory.
  bool peer_copies() const { return c_.peer_copies != 0; }
  /// 0: none.
  std::chrono::milliseconds deadline() const { return std::chrono::milliseconds(c_.deadline_ms); }
  /// Throws where a rank has stopped, as far as the transport knows.
  void ask() const;
  void stop(const std::string& reason) const noexcept { c_.stop(c_.context, reason.c_str()); }

 private:
  void check(fovea_status status, const char* what) const;

  fovea_transport c_;
};

}  // namespace fovea::distributed
