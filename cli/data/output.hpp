// Output files: checked before anything is computed, written complete or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/picture/figure.hpp"
#include "io/array.hpp"
#include "io/safetensors.hpp"

namespace fovea::cli {

using Paths = std::vector<std::filesystem::path>;

/// Before anything is computed: fails when `path` has another extension than `extensions` name, is one of the
/// inputs, or lies in a directory that does not exist. `option` is for the message.
void check_output(const std::string& option, const std::filesystem::path& path,
                  const std::vector<std::string>& extensions, const Paths& inputs);
/// The same for a picture; also fails when none can be drawn.
void check_picture_output(const std::string& option, const std::filesystem::path& path, const Paths& inputs);

// Each appears complete or not at all, and never over an input.
void write_npy_output(const std::filesystem::path& path, const io::Array& array, const Paths& inputs);
void write_safetensors_output(const std::filesystem::path& path, const std::vector<io::Array>& arrays,
                              const io::Metadata& metadata, const Paths& inputs);
void write_picture_output(const std::filesystem::path& path, const Picture& picture, const Paths& inputs);

}  // namespace fovea::cli
