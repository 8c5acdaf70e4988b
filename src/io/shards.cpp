// Finds shards and reads rows of them: the definitions of shards.hpp.
#include "io/shards.hpp"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "io/source.hpp"

namespace fovea::io {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr std::string_view kEnding = ".safetensors";
constexpr std::string_view kOf = "-of-";
constexpr std::size_t kDigits = 5;
/// Far above the indexes of the largest models, which name some thousand tensors.
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

/// "q" for q.safetensors and for its index.
std::string stem_of(const fs::path& set) {
  std::string name = set.filename().string();
  for (const std::string_view ending : {kIndexEnding, kEnding}) {
    if (!name.ends_with(ending)) continue;
    name.resize(name.size() - ending.size());
    break;
  }
  return name;
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string names_of(const Json& map) {
  constexpr std::size_t kMostNames = 8;
  std::string text;
  std::size_t count = 0;
  for (const auto& [name, file] : map.items()) {
    if (count++ < kMostNames) text += (text.empty() ? "" : ", ") + printable(name);
  }
  if (count > kMostNames) text += " and " + std::to_string(count - kMostNames) + " more";
  return text.empty() ? "none" : text;
}

/// A file that an index names: one that lies beside it, so that an index cannot reach for others.
fs::path file_beside(const fs::path& index, const std::string& tensor, const Json& value) {
  if (!value.is_string())
    throw FileError(index.string(), "weight_map has for " + printable(tensor) +
                                        " neither the name of a file nor a list of names");
  const auto name = value.get<std::string>();
  if (!name.ends_with(kEnding) || name.find('/') != std::string::npos || name.find('\0') != std::string::npos)
    throw FileError(index.string(), "weight_map has for " + printable(tensor) + " the file " +
                                        printable(name) +
                                        ", expected the name of a .safetensors file beside the index");
  fs::path file = index.parent_path() / name;
  if (!is_there(file))
    throw FileError(index.string(), "weight_map has for " + printable(tensor) + " the file " +
                                        printable(name) + ", which is missing; put it beside the index");
  return file;
}

ShardSet read_index(const fs::path& index, const std::string& tensor) {
  const FileSource source(index);
  if (source.size() > kMaxIndexBytes)
    source.fail("has " + std::to_string(source.size()) + " bytes; of an index at most " +
                std::to_string(kMaxIndexBytes) + " are read");
  const Json json = Json::parse(source.read_text(0, source.size()), nullptr, false);
  if (json.is_discarded()) source.fail("is not valid JSON; write the index again");
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (!json.is_object() || map == json.end() || !map->is_object())
    source.fail("has no object weight_map, expected one from names of tensors to files");
  const auto entry = map->find(tensor);
  if (entry == map->end())
    source.fail("names no tensor " + printable(tensor) + "; it names " + names_of(*map));
  ShardSet set{{}, index};
  if (!entry->is_array()) {
    set.shards.push_back(file_beside(index, tensor, *entry));
    return set;
  }
  if (entry->empty()) source.fail("weight_map has for " + printable(tensor) + " no file");
  for (const Json& value : *entry) {
    fs::path file = file_beside(index, tensor, value);
    if (std::ranges::find(set.shards, file) != set.shards.end())
      source.fail("weight_map has for " + printable(tensor) + " the file " +
                  printable(value.get<std::string>()) + " twice");
    set.shards.push_back(std::move(file));
  }
  return set;
}

/// The number that stands for a shard, or for how many there are; 0: none does.
std::size_t number_of(std::string_view text) {
  std::size_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return text.size() == kDigits && error == std::errc() && end == text.data() + text.size() ? number : 0;
}

/// How many shards of a set there are to be -> the names of those that are there.
std::map<std::size_t, std::vector<std::size_t>> shards_beside(const fs::path& set) {
  std::map<std::size_t, std::vector<std::size_t>> found;
  const std::string stem = stem_of(set) + "-";
  std::error_code error;
  const fs::path folder = set.has_parent_path() ? set.parent_path() : fs::path(".");
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(stem) || !name.ends_with(kEnding)) continue;
    const std::string_view rest =
        std::string_view(name).substr(stem.size(), name.size() - stem.size() - kEnding.size());
    if (rest.size() != 2 * kDigits + kOf.size() || rest.substr(kDigits, kOf.size()) != kOf) continue;
    const std::size_t number = number_of(rest.substr(0, kDigits));
    const std::size_t count = number_of(rest.substr(kDigits + kOf.size()));
    if (number > 0 && count > 0) found[count].push_back(number);
  }
  return found;
}

}  // namespace

bool is_index(const fs::path& path) {
  return path.filename().string().ends_with(kIndexEnding);
}

fs::path shard_path(const fs::path& set, std::size_t number, std::size_t count) {
  char digits[48];
  std::snprintf(digits, sizeof digits, "-%05zu-of-%05zu", number, count);
  return set.parent_path() / (stem_of(set) + digits + std::string(kEnding));
}

ShardSet find_shards(const fs::path& path, const std::string& tensor) {
  if (is_index(path)) return read_index(path, tensor);
  if (is_there(path)) return {{path}, {}};
  fs::path index = path;
  index += ".index.json";
  if (is_there(index)) return read_index(index, tensor);
  const auto found = shards_beside(path);
  if (found.empty()) return {{path}, {}};
  const std::size_t count = found.begin()->first;
  if (found.size() > 1) {
    throw FileError(path.string(), "there are shards of " + std::to_string(count) + " and of " +
                                       std::to_string(std::next(found.begin())->first) +
                                       " beside each other, expected one set; move one away");
  }
  ShardSet set;
  const std::vector<std::size_t>& numbers = found.begin()->second;
  for (std::size_t number = 1; number <= count; ++number) {
    set.shards.push_back(shard_path(path, number, count));
    if (std::ranges::find(numbers, number) == numbers.end())
      throw FileError(set.shards.back().string(),
                      "is missing, expected all " + std::to_string(count) + " shards; put it there");
  }
  return set;
}

RowFile::RowFile(const fs::path& path, const std::string& tensor) : name_(tensor) {
  ShardSet set = find_shards(path, tensor);
  index_ = std::move(set.index);
  for (const fs::path& file : set.shards) append(file, find_tensor(file, tensor));
}

void RowFile::append(const fs::path& file, TensorPlace place) {
  const std::size_t axis = row_axis(place.shape);
  if (shards_.empty()) {
    type_ = place.type;
    shape_ = place.shape;
    if (shape_.empty())
      throw FileError(file.string(), "tensor " + printable(name_) + " is one number, expected rows");
    metadata_ = std::move(place.metadata);
    shards_.push_back({file, place.offset, 0, shape_[axis]});
    return;
  }
  const std::string first = printable(shards_.front().file.filename().string());
  if (place.type != type_) {
    throw FileError(file.string(), "tensor " + printable(name_) + " is " +
                                       std::string(element_type_name(place.type)) + ", expected " +
                                       std::string(element_type_name(type_)) + " as in " + first +
                                       "; write all shards in one type");
  }
  std::vector<std::int64_t> expected = shape_;
  if (place.shape.size() == shape_.size()) expected[axis] = place.shape[axis];
  if (place.shape != expected) {
    throw FileError(file.string(), "tensor " + printable(name_) + " has shape " + shape_text(place.shape) +
                                       ", expected " + shape_text(expected) +
                                       ", which agrees but for its rows with that in " + first);
  }
  const std::int64_t begin = shards_.back().end;
  std::int64_t end = 0;
  const bool overflows = __builtin_add_overflow(begin, place.shape[axis], &end);
  expected[axis] = end;
  if (overflows || !byte_count(expected, element_size(type_)))
    throw FileError(file.string(),
                    "tensor " + printable(name_) + " has over all shards a size that overflows");
  shards_.push_back({file, place.offset, begin, end});
  shape_ = std::move(expected);
}

std::vector<fs::path> RowFile::files() const {
  std::vector<fs::path> files;
  if (!index_.empty()) files.push_back(index_);
  for (const Shard& shard : shards_) files.push_back(shard.file);
  return files;
}

std::uint64_t RowFile::row_bytes() const {
  const std::span<const std::int64_t> shape = shape_;
  return *byte_count(shape.subspan(row_axis(shape_) + 1), element_size(type_));
}

void RowFile::read(std::int64_t outer, std::int64_t begin, std::int64_t end, std::span<std::byte> to) const {
  for (const Shard& shard : shards_) {
    const std::int64_t first = std::max(begin, shard.begin), last = std::min(end, shard.end);
    if (first >= last) continue;
    const std::uint64_t row = row_bytes();
    const auto at = static_cast<std::uint64_t>(outer * (shard.end - shard.begin) + first - shard.begin);
    FileSource(shard.file)
        .read(shard.offset + at * row, to.subspan(static_cast<std::size_t>(first - begin) * row,
                                                  static_cast<std::size_t>(last - first) * row));
  }
}

Array RowFile::read_all() const {
  Array all = make_array(name_, type_, shape_);
  const std::int64_t rows = shape_[row_axis(shape_)], outer = row_axis(shape_) > 0 ? shape_[0] : 1;
  const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes();
  for (std::int64_t i = 0; i < outer; ++i)
    read(i, 0, rows, std::span(all.bytes).subspan(static_cast<std::size_t>(i) * bytes, bytes));
  return all;
}

}  // namespace fovea::io
