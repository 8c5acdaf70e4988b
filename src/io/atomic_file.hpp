// A file that appears complete or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

namespace fovea::io {

/// Throws FileError when `output` exists and is the same file as one of `inputs`, whether by the same name,
/// another spelling of it, a symbolic link or a hard link.
void refuse_input_as_output(const std::filesystem::path& output,
                            std::span<const std::filesystem::path> inputs);

/// A file that appears complete or not at all. The bytes go to a temporary in the same directory; commit()
/// puts it in place in one step. Until then, and whenever anything fails, an older file of that name stays as
/// it was. An existing output keeps its permissions; a symbolic link is followed, and stays.
class AtomicFile {
 public:
  /// Throws FileError when the output is one of the inputs, is not a regular file, is a link to nothing, or
  /// when its directory cannot be written.
  explicit AtomicFile(std::filesystem::path output, std::span<const std::filesystem::path> inputs = {});
  /// Removes the temporary, unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. Throws FileError, for example when the disk is full.
  void write(std::span<const std::byte> content);

  /// Brings the bytes to the disk (fsync) and renames the temporary to the output. Throws FileError; the
  /// temporary is then removed. To be called once.
  void commit();

 private:
  [[noreturn]] void fail_with_errno(const char* what) const;
  void discard() noexcept;

  std::filesystem::path output_;
  std::vector<std::filesystem::path> inputs_;
  /// `output_` with its symbolic links followed.
  std::filesystem::path target_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

/// Writes one whole file by AtomicFile. Throws FileError.
void write_file_atomically(const std::filesystem::path& output, std::span<const std::byte> content,
                           std::span<const std::filesystem::path> inputs = {});

}  // namespace fovea::io
