// FileError: a file that cannot be read or written, with its name.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace fovea::io {

/// A file that cannot be read or written. what() is "<path>: <fault>".
struct FileError : std::runtime_error {
  /// `file_path` as the caller gave it; `file_fault` says what is wrong and, where there is one, the remedy.
  FileError(std::string file_path, std::string file_fault);

  std::string path;
  std::string fault;
};

/// Text taken from a file, made safe to print: in single quotes, anything but printable ASCII as \xNN, cut after 64
/// bytes. A hostile file must not be able to send control codes to a terminal through an error message.
std::string printable(std::string_view text);

}  // namespace fovea::io
