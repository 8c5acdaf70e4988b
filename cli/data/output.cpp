// Checks output paths, and writes arrays: the definitions of output.hpp.
#include "cli/data/output.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <system_error>

#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"
#include "io/atomic_file.hpp"
#include "io/file_error.hpp"
#include "io/npy.hpp"

namespace fovea::cli {
namespace {

/// Turns an error of a file into a failed output.
template <class Write>
void as_output(const Write& write) {
  try {
    write();
  } catch (const io::FileError& error) {
    throw Failure(Exit::output, error.what());
  }
}

}  // namespace

void check_output(const std::string& option, const std::filesystem::path& path,
                  const std::vector<std::string>& extensions, const Paths& inputs) {
  if (std::find(extensions.begin(), extensions.end(), path.extension().string()) == extensions.end()) {
    std::string expected;
    for (const std::string& extension : extensions) expected += (expected.empty() ? "" : " or ") + extension;
    throw Failure(Exit::usage, fmt::format("{}: got '{}', expected a name that ends in {}", option,
                                           safe_text(path.string()), expected));
  }
  std::error_code ignored;
  const std::filesystem::path directory = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(directory, ignored)) {
    throw Failure(Exit::output, fmt::format("{}: there is no directory '{}'; create it first", option,
                                            safe_text(directory.string())));
  }
  as_output([&] { io::refuse_input_as_output(path, inputs); });
}

void check_picture_output(const std::string& option, const std::filesystem::path& path, const Paths& inputs) {
  check_output(option, path, kPictureEndings, inputs);
  require_pictures();
}

void write_npy_output(const std::filesystem::path& path, const io::Array& array, const Paths& inputs) {
  as_output([&] { io::write_npy(path, array, inputs); });
}

void write_safetensors_output(const std::filesystem::path& path, const std::vector<io::Array>& arrays,
                              const io::Metadata& metadata, const Paths& inputs) {
  as_output([&] { io::write_safetensors(path, arrays, metadata, inputs); });
}

void write_picture_output(const std::filesystem::path& path, const Picture& picture, const Paths& inputs) {
  as_output([&] { io::write_file_atomically(path, picture.file, inputs); });
}

}  // namespace fovea::cli
