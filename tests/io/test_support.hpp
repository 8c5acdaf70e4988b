// What the tests of files share: temporary folders, bytes, expected faults.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "io/array.hpp"
#include "io/file_error.hpp"

namespace fovea::io::testing {

inline constexpr ElementType kEveryType[] = {ElementType::boolean, ElementType::u8,  ElementType::f16,
                                             ElementType::bf16,    ElementType::i32, ElementType::f32,
                                             ElementType::f64,     ElementType::i64, ElementType::e4m3};

/// A directory of the test's own, removed with everything in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fovea-io-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  /// Names of everything inside, to show that no temporary was left.
  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// `value` as little-endian bytes.
inline std::string little_endian(unsigned long long value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
  return text;
}

/// An array whose bytes are all different from their neighbours (0 and 1 alternating for booleans).
inline Array patterned_array(std::string name, ElementType type, std::vector<std::int64_t> shape) {
  Array array = make_array(std::move(name), type, std::move(shape));
  const unsigned modulus = type == ElementType::boolean ? 2 : 251;
  for (std::size_t i = 0; i < array.bytes.size(); ++i) {
    array.bytes[i] = static_cast<std::byte>((i * 7 + 1) % modulus);
  }
  return array;
}

/// Calls, and expects a FileError that names the file and whose fault contains `fault`.
template <class Call>
void expect_file_error(Call&& call, const std::string& path, const std::string& fault) {
  try {
    call();
    ADD_FAILURE() << "no FileError, expected: " << fault;
  } catch (const FileError& error) {
    EXPECT_EQ(error.path, path);
    EXPECT_NE(error.fault.find(fault), std::string::npos)
        << "fault: " << error.fault << "\nexpected: " << fault;
    EXPECT_EQ(error.what(), error.path + ": " + error.fault);
  }
}

/// A damaged or hostile file, and what must be said of it.
struct HostileCase {
  std::string label;
  std::string content;
  std::string fault;
};

/// Checks that `parse(content)` refuses the case as `name`, and `read(path)` refuses it as a file of that name.
template <class Parse, class Read>
void expect_refused(const HostileCase& hostile, const std::string& name, Parse&& parse, Read&& read) {
  expect_file_error([&] { parse(hostile.content); }, name, hostile.fault);
  const TemporaryDirectory directory;
  const auto path = directory / std::filesystem::path(name).filename().string();
  write_text(path, hostile.content);
  expect_file_error([&] { read(path); }, path.string(), hostile.fault);
}

inline void PrintTo(const HostileCase& hostile, std::ostream* out) {
  *out << hostile.label;
}

}  // namespace fovea::io::testing
