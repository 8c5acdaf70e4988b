// Reads bytes and arrays from files and from memory.
#include "io/source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "io/file_error.hpp"

namespace fovea::io {

void Source::fail(const std::string& fault) const {
  throw FileError(name_, fault);
}

std::string Source::read_text(std::uint64_t offset, std::uint64_t count) const {
  std::string text(count, '\0');
  read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

Array Source::read_array(std::uint64_t offset, const std::string& what, std::string array_name,
                         ElementType type, std::vector<std::int64_t> shape) const {
  Array array;
  try {
    array = make_array(std::move(array_name), type, std::move(shape));
  } catch (const std::bad_alloc&) {
    fail(what + " does not fit in memory");
  }
  read(offset, array.bytes);
  if (type == ElementType::boolean) {
    // Any other value would be undefined behaviour in a program that reads it as a C++ bool.
    const auto wrong = std::ranges::find_if(array.bytes, [](std::byte b) { return b > std::byte{1}; });
    if (wrong != array.bytes.end()) {
      fail(what + " is boolean, but its element " + std::to_string(wrong - array.bytes.begin()) + " is " +
           std::to_string(std::to_integer<int>(*wrong)) + "; expected 0 or 1");
    }
  }
  return array;
}

void MemorySource::read(std::uint64_t offset, std::span<std::byte> out) const {
  if (!out.empty()) std::memcpy(out.data(), content_.data() + offset, out.size());
}

FileSource::FileSource(const std::filesystem::path& path) : Source(path.string()) {
  // Without O_NONBLOCK, opening a pipe nobody writes to would wait for ever.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) fail("cannot open: " + std::generic_category().message(errno));
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    fail("is not a regular file");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

FileSource::~FileSource() {
  ::close(descriptor_);
}

void FileSource::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      fail("cannot read: " + std::generic_category().message(errno));
    }
    if (got == 0) fail("became shorter while it was read");
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

}  // namespace fovea::io
