// Writes to a temporary file in the same folder, then renames it.
#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>
#include <utility>

#include "io/file_error.hpp"

namespace fovea::io {

namespace fs = std::filesystem;

namespace {

/// Where the bytes really go. Renaming onto a link would replace the link, and renaming onto a device such as
/// /dev/null would remove the device.
fs::path follow(const fs::path& output) {
  std::error_code error;
  const fs::file_status own = fs::symlink_status(output, error);
  const bool is_link = own.type() == fs::file_type::symlink;
  const fs::file_status status = is_link ? fs::status(output, error) : own;
  switch (status.type()) {
    case fs::file_type::not_found:
      if (is_link) throw FileError(output.string(), "is a symbolic link to a file that does not exist");
      if (!output.has_filename()) throw FileError(output.string(), "is not the name of a file");
      return output;
    case fs::file_type::regular:
      break;
    case fs::file_type::none:
      throw FileError(output.string(), "cannot be looked at: " + error.message());
    default:
      throw FileError(output.string(), "exists and is not a regular file");
  }
  if (!is_link) return output;
  fs::path target = fs::canonical(output, error);
  if (error) throw FileError(output.string(), "cannot follow the symbolic link: " + error.message());
  return target;
}

fs::path directory_of(const fs::path& file) {
  fs::path directory = file.parent_path();
  return directory.empty() ? fs::path(".") : directory;
}

}  // namespace

void refuse_input_as_output(const fs::path& output, std::span<const fs::path> inputs) {
  std::error_code error;
  if (!fs::exists(output, error)) return;
  for (const fs::path& input : inputs) {
    if (!fs::exists(input, error)) continue;
    const bool same = fs::equivalent(output, input, error);
    if (error) {
      throw FileError(output.string(),
                      "cannot be compared with the input " + input.string() + ": " + error.message());
    }
    if (same) {
      throw FileError(output.string(),
                      "is the same file as the input " + input.string() + "; give the output another name");
    }
  }
}

AtomicFile::AtomicFile(fs::path output, std::span<const fs::path> inputs)
    : output_(std::move(output)), inputs_(inputs.begin(), inputs.end()) {
  refuse_input_as_output(output_, inputs_);
  target_ = follow(output_);

  static std::atomic<unsigned> counter{0};
  const fs::path directory = directory_of(target_);
  do {
    // The name does not contain the output's, which may already be as long as the file system allows.
    temporary_ =
        directory / (".fovea-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp");
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_with_errno("cannot create a file in its directory");

  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0 && ::fchmod(descriptor_, status.st_mode & 0777) != 0) {
    const int cause = errno;
    discard();
    errno = cause;
    fail_with_errno("cannot keep its permissions");
  }
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::write(std::span<const std::byte> content) {
  while (!content.empty()) {
    const ssize_t written = ::write(descriptor_, content.data(), content.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_with_errno("cannot write");
    }
    content = content.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail_with_errno("cannot bring it to the disk");
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_with_errno("cannot close");
  // Long work may lie between opening and committing, and the output may have become an input's link meanwhile.
  refuse_input_as_output(output_, inputs_);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_with_errno("cannot put it in place");
  temporary_.clear();

  // The name lives in the directory: without this, a power cut could undo the rename. Some file systems
  // cannot sync a directory; the file itself is safe by then, so that is no failure.
  const int directory = ::open(directory_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}

void AtomicFile::fail_with_errno(const char* what) const {
  throw FileError(output_.string(), std::string(what) + ": " + std::generic_category().message(errno));
}

void AtomicFile::discard() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void write_file_atomically(const fs::path& output, std::span<const std::byte> content,
                           std::span<const fs::path> inputs) {
  AtomicFile file(output, inputs);
  file.write(content);
  file.commit();
}

}  // namespace fovea::io
