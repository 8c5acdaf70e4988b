// Bytes of known length for the readers of file formats: a file, or memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/array.hpp"

namespace fovea::io {

/// Bytes of known length that can be read from any place. The readers take everything through it, so the fuzz
/// targets (bytes in memory) run the code that reads files.
class Source {
 public:
  explicit Source(std::string name) : name_(std::move(name)) {}
  virtual ~Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  /// Length in bytes.
  virtual std::uint64_t size() const = 0;

  /// Fills `out` from `offset`. The caller has checked the range against size(). Throws FileError.
  virtual void read(std::uint64_t offset, std::span<std::byte> out) const = 0;

  const std::string& name() const { return name_; }

  /// Throws FileError for this source.
  [[noreturn]] void fail(const std::string& fault) const;

  /// The `count` bytes at `offset`, as text.
  std::string read_text(std::uint64_t offset, std::uint64_t count) const;

  /// A new array read from `offset`. The caller has checked the range, so that memory is never asked for
  /// beyond the size of the file. `what` names the array in faults.
  Array read_array(std::uint64_t offset, const std::string& what, std::string array_name, ElementType type,
                   std::vector<std::int64_t> shape) const;

 private:
  std::string name_;
};

class MemorySource final : public Source {
 public:
  /// The bytes stay the caller's and must outlive the source.
  MemorySource(std::span<const std::byte> content, std::string name)
      : Source(std::move(name)), content_(content) {}

  std::uint64_t size() const override { return content_.size(); }
  void read(std::uint64_t offset, std::span<std::byte> out) const override;

 private:
  std::span<const std::byte> content_;
};

class FileSource final : public Source {
 public:
  /// Throws FileError unless the path is a readable regular file.
  explicit FileSource(const std::filesystem::path& path);
  ~FileSource() override;

  std::uint64_t size() const override { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> out) const override;

 private:
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace fovea::io
