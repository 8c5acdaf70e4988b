// What `fovea ladder` found of a rung on a shape, and how it is printed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/ladder/peer.hpp"
#include "cli/terminal/text.hpp"
#include "ladder/harness/run.hpp"

namespace fovea::cli {

/// A rung on a shape: how it went.
struct LadderRow {
  const ladder::Rung* rung;
  ladder::Shape shape;
  std::string skipped;  ///< why, where it was not run
  ladder::Checked checked;
  ladder::Summary timing;
  double peak = 0;
  std::vector<Peer> peers;
  std::optional<double> before;  ///< seconds of the rung before on the same shape
  std::string timer;             ///< of a rung in Python, which bench/gpu/ladder_peers.py has timed
  bool profiled = false;         ///< with --profile
  size_t peak_bytes = 0;         ///< with --memory
  std::optional<LibraryMemory> library_memory;

  bool timed() const { return skipped.empty() && timing.runs > 0; }
  double work() const {
    const auto& group = *rung->group;
    return rung->bound == ladder::Bound::gpu_memory ? ladder::bytes_of(group.family, group.type, shape)
                                                    : ladder::flops_of(group.family, shape);
  }
  double rate() const { return work() / timing.median; }
  /// Of the rung, when the peer was timed.
  double seconds_beside(const Peer& peer) const { return peer.beside > 0 ? peer.beside : timing.median; }
  /// Times the peer.
  double share(const Peer& peer) const { return peer.seconds / seconds_beside(peer); }
};

const char* bound_name(ladder::Bound bound);
Json json_of(const LadderRow& row);
/// A table a group; `memory`: of peak bytes in place of times.
void print_table(const std::vector<LadderRow>& rows, bool memory);

}  // namespace fovea::cli
