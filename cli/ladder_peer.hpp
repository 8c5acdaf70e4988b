// What rungs are held against: the library itself, on the same tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ladder/harness/run.hpp"

namespace fovea::cli {

struct Peer {
  std::string name;
  double seconds = 0;
};

/// The library's time for a problem of a group of attention; nothing for other groups.
std::optional<Peer> time_library(ladder::Device& device, const ladder::Group& group, ladder::Shape shape,
                                 const ladder::Protocol& protocol);

}  // namespace fovea::cli
