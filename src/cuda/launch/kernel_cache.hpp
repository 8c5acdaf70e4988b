// A folder that keeps compiled kernels from one process to the next. Whatever is wrong with it, kernels are compiled: it is never
// an error.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace fovea::cuda {

class KernelCache {
 public:
  /// In $FOVEA_CACHE_DIR; without that variable in $XDG_CACHE_HOME/fovea or ~/.cache/fovea. None where it is set to "".
  static KernelCache of_user();
  /// "": none. The folder is made when something is first kept, for this user alone.
  explicit KernelCache(std::filesystem::path folder, std::string unusable = "");

  /// What was kept under the key. Files that are damaged, of another version or of another key count as not there.
  std::optional<std::string> find(const std::string& key) const;
  /// Returns why it was not kept, as a clause; "" when it was, or when there is no folder. Any number of processes may do
  /// this at once: a file appears complete or not at all.
  std::string keep(const std::string& key, const std::string& value) const;

  /// "": none.
  const std::filesystem::path& folder() const { return folder_; }
  /// The file of a key, where there is a folder.
  std::filesystem::path file_of(const std::string& key) const;

 private:
  std::filesystem::path folder_;
  std::string unusable_;  ///< why there is none although the user did not say so
};

}  // namespace fovea::cuda
