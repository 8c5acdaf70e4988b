// What rungs are held against: the library itself on tensors of the same sizes, and other libraries, whose
// times bench/gpu/ladder_peers.py has measured.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/terminal/text.hpp"
#include "ladder/harness/run.hpp"

namespace fovea::cli {

struct Peer {
  std::string name;
  bool is_library = false;
  double seconds = 0;
  double beside = 0;  ///< seconds of the rung in turns with it; 0: it was timed apart
};

/// The library on a problem of a group of attention, with tensors of its own in the memory of the device.
class LibraryCall {
 public:
  virtual ~LibraryCall() = default;
  virtual void run() = 0;
  virtual std::string name() const = 0;  ///< and its backend
};
/// With the values of `inputs`, on which the power that products take depends, and with it the clock of a
/// GPU. Null for groups that the library does nothing of.
std::unique_ptr<LibraryCall> library_call(ladder::Device& device, const ladder::Group& group,
                                          ladder::Shape shape, const std::vector<ladder::HostTensor>& inputs);
/// The library's name there, and the most memory that its tensors, its workspace and one run held.
struct LibraryMemory {
  std::string name;
  size_t peak_bytes = 0;
};
std::optional<LibraryMemory> weigh_library(ladder::Device& device, const ladder::Group& group,
                                           ladder::Shape shape);

/// A rung in Python: how bench/gpu/ladder_peers.py found it.
struct StoredRung {
  ladder::Summary timing;
  ladder::Checked checked;
  std::string timer;  ///< "graph", or "events" around launches one by one
};

/// Times of other libraries and of rungs in Python, from a file that bench/gpu/ladder_peers.py wrote.
class StoredPeers {
 public:
  StoredPeers() = default;
  /// Throws io::FileError when the file is something else, or of another machine than `host` and `gpu` (null:
  /// there is none).
  StoredPeers(const std::filesystem::path& path, const ladder::Device& host, const ladder::Device* gpu);

  std::vector<Peer> of(const ladder::Group& group, ladder::Shape shape) const;
  /// Null where the file has no time of it.
  const StoredRung* rung(const ladder::Rung& rung, ladder::Shape shape) const;
  /// When and with which versions they were timed; null without a file.
  const Json& about() const { return about_; }

 private:
  struct Row {
    std::string group, shape;
    Peer peer;
  };
  struct RungRow {
    std::string name, shape;
    StoredRung stored;
  };
  std::vector<Row> rows_;
  std::vector<RungRow> rungs_;
  Json about_;
};

}  // namespace fovea::cli
