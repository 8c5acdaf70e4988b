// Tensors whose rows lie in one .safetensors file or in several, read by rows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/array.hpp"
#include "io/file_error.hpp"
#include "io/safetensors.hpp"

namespace fovea::io {

inline constexpr std::string_view kIndexEnding = ".safetensors.index.json";

/// Whether a path is that of an index: FILE.safetensors.index.json.
bool is_index(const std::filesystem::path& path);

/// "q-00002-of-00004.safetensors" for the second of four shards of q.safetensors or q.safetensors.index.json.
std::filesystem::path shard_path(const std::filesystem::path& set, std::size_t number, std::size_t count);

/// The dimension of rows: the first, or of four the second.
constexpr std::size_t row_axis(std::span<const std::int64_t> shape) {
  return shape.size() > 3 ? 1 : 0;
}

/// The files that hold a tensor, and those that say so.
struct ShardSet {
  std::vector<std::filesystem::path> shards;  ///< in the order of the rows
  std::filesystem::path index;                ///< empty where there is none
};

/// What a name stands for: an index, whose `weight_map` names for each tensor a file (as Hugging Face writes it) or a list of files; a
/// .safetensors file; or, where there is no such file, the index beside it, else the shards FILE-00001-of-0000N.safetensors. Throws
/// FileError for an index that is damaged or does not name the tensor, for a missing shard, and for shards of two numbers N.
ShardSet find_shards(const std::filesystem::path& path, const std::string& tensor);

/// One tensor over its shards. Rows are indices of the first dimension, or, of four, of the second.
class RowFile {
 public:
  /// Reads headers only. Throws FileError as find_shards does, for shards that lack the tensor, and for those that have it in another type or, but
  /// for the rows, in another shape than the first.
  RowFile(const std::filesystem::path& path, const std::string& tensor);

  ElementType type() const { return type_; }
  /// That of the whole.
  const std::vector<std::int64_t>& shape() const { return shape_; }
  const Metadata& metadata() const { return metadata_; }
  /// Every file that is read.
  std::vector<std::filesystem::path> files() const;
  /// Rows [begin, end) of one index of the dimension before them, which is 0 where there is none.
  void read(std::int64_t outer, std::int64_t begin, std::int64_t end, std::span<std::byte> to) const;
  Array read_all() const;

 private:
  struct Shard {
    std::filesystem::path file;
    std::uint64_t offset;     ///< of the tensor in the file
    std::int64_t begin, end;  ///< rows of the whole
  };
  std::uint64_t row_bytes() const;
  void append(const std::filesystem::path& file, TensorPlace place);

  std::string name_;
  std::filesystem::path index_;
  ElementType type_ = ElementType::f32;
  std::vector<std::int64_t> shape_;
  Metadata metadata_;
  std::vector<Shard> shards_;
};

}  // namespace fovea::io
