// The .safetensors format: named arrays behind a header in JSON.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/array.hpp"
#include "io/file_error.hpp"

/// .safetensors: 8 bytes with the length of the header, the header (JSON: for each tensor its type, shape and place
/// in the data; under `__metadata__` free strings), then the data, which the tensors cover without gap or overlap.
namespace fovea::io {

class AtomicFile;

using Metadata = std::map<std::string, std::string>;

/// What a .safetensors file holds.
struct Safetensors {
  std::vector<Array> arrays;
  Metadata metadata;

  /// The array of that name, or nullptr.
  const Array* find(std::string_view name) const;
};

/// Reads every tensor, in the order of their data. Throws FileError when the file cannot be read, is damaged
/// (any departure from the format: see the tests), or holds a tensor of a type Array does not have. Memory
/// stays within a small multiple of the header plus the data asked for.
Safetensors read_safetensors(const std::filesystem::path& path);

/// Reads the named tensors only, in the order of `names`; the data of others is not read, and may be of any
/// type. Throws FileError as above, and when a name is missing.
Safetensors read_safetensors(const std::filesystem::path& path, std::span<const std::string> names);

/// Where one tensor lies in a file: for readers of a part of it.
struct TensorPlace {
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< bytes from the start of the file
  Metadata metadata;         ///< of the file
};

/// Reads the header only. Throws FileError as read_safetensors does.
TensorPlace find_tensor(const std::filesystem::path& path, const std::string& name);

/// The same from memory; `name` takes the place of the path in faults.
Safetensors parse_safetensors(std::span<const std::byte> content, std::string name);
Safetensors parse_safetensors(std::span<const std::byte> content, std::string name,
                              std::span<const std::string> names);

/// The file's bytes, laid out as the safetensors library does: wider types first, then by name; the header
/// padded with spaces to 8 bytes, so that every tensor is aligned to its element. Throws
/// std::invalid_argument when an array is not valid (see validate), two have one name, one is called
/// "__metadata__", or a text is not UTF-8.
std::vector<std::byte> serialize_safetensors(std::span<const Array> arrays, const Metadata& metadata = {});

/// Writes serialize_safetensors' bytes atomically, or to a file that is committed later. Throws FileError when the file cannot be written or is one
/// of `inputs`; std::invalid_argument as serialize_safetensors.
void write_safetensors(AtomicFile& file, std::span<const Array> arrays, const Metadata& metadata = {});
void write_safetensors(const std::filesystem::path& path, std::span<const Array> arrays,
                       const Metadata& metadata = {}, std::span<const std::filesystem::path> inputs = {});

}  // namespace fovea::io
