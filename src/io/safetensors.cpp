// Reads and writes the .safetensors format: the definitions of safetensors.hpp.
#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "io/atomic_file.hpp"
#include "io/source.hpp"

namespace fovea::io {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
/// The limit of the safetensors library.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kHeaderAlignment = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

struct Entry {
  std::string name;
  std::string type;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< bytes from the start of the data
  std::uint64_t end = 0;

  std::string label() const { return "tensor " + printable(name); }
};

struct Header {
  std::vector<Entry> entries;
  Metadata metadata;
  std::uint64_t data_begin = 0;  ///< bytes from the start of the file

  /// Throws FileError where there is none of that name.
  const Entry& find(const Source& source, const std::string& name) const;
};

/// Takes the events of nlohmann's parser. Only the one shape of JSON that the format allows is accepted,
/// event by event: no tree is built, so neither nesting nor duplicate keys can hide or cost anything. Members
/// return true
/// ("go on"), as the parser's interface asks, and report faults by throwing.
class HeaderReader {
 public:
  explicit HeaderReader(const Source& source) : source_(source) {}

  Header take() { return std::move(header_); }

  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("a boolean"); }
  bool binary(Json::binary_t&) { unexpected("binary data"); }

  bool number_integer(Json::number_integer_t value) {
    if (value >= 0) return number_unsigned(static_cast<Json::number_unsigned_t>(value));
    if (in_list()) fail_in_entry(field_ + " has the negative number " + std::to_string(value));
    unexpected("a number");
  }

  bool number_unsigned(Json::number_unsigned_t value) {
    if (!in_list()) unexpected("a number");
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail_in_entry(field_ + " has the number " + std::to_string(value) + ", beyond 63 bits");
    }
    if (place_ == Place::shape) {
      if (entry_.shape.size() == kMaxRank) {
        fail_in_entry("shape has more than " + std::to_string(kMaxRank) + " dimensions");
      }
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else {
      if (offsets_seen_ == 2) fail_in_entry("data_offsets has more than two numbers");
      (offsets_seen_++ == 0 ? entry_.begin : entry_.end) = value;
    }
    return true;
  }

  bool number_float(Json::number_float_t, const std::string& written) {
    if (in_list())
      fail_in_entry(field_ + " has " + printable(written) + ", which is not a 64-bit whole number");
    unexpected("a number");
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata.emplace(metadata_key_, value);
      return true;
    }
    if (place_ != Place::entry || field_ != "dtype") unexpected("a string");
    entry_.type = value;
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = entry_.name == kMetadataKey ? Place::metadata : Place::entry;
      fields_seen_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    switch (place_) {
      case Place::top:
        if (!names_.insert(value).second) fail("the header has " + printable(value) + " twice");
        entry_ = Entry{value, {}, {}, 0, 0};
        offsets_seen_ = 0;
        break;
      case Place::entry:
        if (value != "dtype" && value != "shape" && value != "data_offsets") {
          fail_in_entry("has the unknown key " + printable(value));
        }
        field_ = value;
        if (!fields_seen_.insert(value).second) fail_in_entry("has " + value + " twice");
        break;
      default:
        if (header_.metadata.contains(value)) fail("__metadata__ has the key " + printable(value) + " twice");
        metadata_key_ = value;
        break;
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::entry) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_seen_.contains(field)) fail_in_entry(std::string("lacks ") + field);
      }
      header_.entries.push_back(std::move(entry_));
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::entry || field_ == "dtype") unexpected("a list");
    place_ = field_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() {
    if (place_ == Place::offsets && offsets_seen_ != 2) fail_in_entry("data_offsets has not two numbers");
    place_ = Place::entry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception&) {
    fail("the header is not valid JSON, at its byte " + std::to_string(position == 0 ? 0 : position - 1));
  }

 private:
  enum class Place { outside, top, entry, shape, offsets, metadata };

  bool in_list() const { return place_ == Place::shape || place_ == Place::offsets; }

  [[noreturn]] void fail(const std::string& fault) const { source_.fail(fault); }

  [[noreturn]] void fail_in_entry(const std::string& fault) const { fail(entry_.label() + ": " + fault); }

  [[noreturn]] void unexpected(const char* what) const {
    const std::string found = std::string(what) + " stands where ";
    switch (place_) {
      case Place::outside:
        fail("the header is not a JSON object");
      case Place::top:
        fail_in_entry(found + "an object was expected");
      case Place::entry:
        fail_in_entry(field_ + ": " + found + (field_ == "dtype" ? "a string" : "a list") + " was expected");
      case Place::shape:
      case Place::offsets:
        fail_in_entry(field_ + ": " + found + "a whole number was expected");
      case Place::metadata:
        break;
    }
    fail("__metadata__ " + printable(metadata_key_) + ": " + found + "a string was expected");
  }

  const Source& source_;
  Header header_;
  Place place_ = Place::outside;
  std::set<std::string> names_;
  Entry entry_;
  std::set<std::string> fields_seen_;
  std::string field_;
  int offsets_seen_ = 0;
  std::string metadata_key_;
};

/// Bytes of one element of any type the format knows in whole bytes, or nothing for others.
std::optional<std::size_t> size_of_type(std::string_view name) {
  if (const auto type = element_type_from_name(name)) return element_size(*type);
  constexpr std::array<std::pair<std::string_view, std::size_t>, 8> kOthers{{{"I8", 1},
                                                                             {"F8_E5M2", 1},
                                                                             {"F8_E8M0", 1},
                                                                             {"I16", 2},
                                                                             {"U16", 2},
                                                                             {"U32", 4},
                                                                             {"U64", 8},
                                                                             {"C64", 8}}};
  const auto row = std::ranges::find(kOthers, name, [](const auto& other) { return other.first; });
  if (row == kOthers.end()) return std::nullopt;
  return row->second;
}

/// Sorts the entries by their place and checks that they
/// cover the data exactly, each with the bytes it needs.
void check_layout(const Source& source, std::vector<Entry>& entries, std::uint64_t data_bytes) {
  std::ranges::sort(entries, {},
                    [](const Entry& entry) { return std::tie(entry.begin, entry.end, entry.name); });
  std::uint64_t covered = 0;
  for (const Entry& entry : entries) {
    const std::string range = entry.label() + ": data_offsets [" + std::to_string(entry.begin) + ", " +
                              std::to_string(entry.end) + "]";
    if (entry.begin > entry.end) source.fail(range + " end before they begin");
    if (entry.end > data_bytes) {
      source.fail(range + " reach past the end of the data, which has " + std::to_string(data_bytes) +
                  " bytes");
    }
    if (entry.begin < covered)
      source.fail(range + " overlap the tensor before, which ends at " + std::to_string(covered));
    if (entry.begin > covered) source.fail(range + " leave a gap after byte " + std::to_string(covered));
    covered = entry.end;

    const auto size = size_of_type(entry.type);
    const auto expected = byte_count(entry.shape, size.value_or(1));
    if (!expected)
      source.fail(entry.label() + " has a shape whose size overflows: " + shape_text(entry.shape));
    if (size && *expected != entry.end - entry.begin) {
      source.fail(range + " span " + std::to_string(entry.end - entry.begin) + " bytes, but " + entry.type +
                  " of shape " + shape_text(entry.shape) + " takes " + std::to_string(*expected));
    }
  }
  if (covered < data_bytes) {
    source.fail("has " + std::to_string(data_bytes - covered) + " trailing bytes that belong to no tensor");
  }
}

std::string known_names(const std::vector<Entry>& entries) {
  constexpr std::size_t kMostNames = 8;
  if (entries.empty()) return "it has none";
  std::string text = "it has ";
  for (std::size_t i = 0; i < std::min(entries.size(), kMostNames); ++i) {
    if (i > 0) text += ", ";
    text += printable(entries[i].name);
  }
  if (entries.size() > kMostNames) text += " and " + std::to_string(entries.size() - kMostNames) + " more";
  return text;
}

const Entry& Header::find(const Source& source, const std::string& name) const {
  const auto entry = std::ranges::find(entries, name, &Entry::name);
  if (entry == entries.end()) source.fail("has no tensor " + printable(name) + "; " + known_names(entries));
  return *entry;
}

ElementType type_of(const Source& source, const Entry& entry) {
  const auto type = element_type_from_name(entry.type);
  if (!type) {
    source.fail(entry.label() + " is of type " + printable(entry.type) +
                "; supported are F64 F32 F16 BF16 I64 I32 U8 BOOL");
  }
  return *type;
}

/// The header, checked against the size of the file.
Header read_header(const Source& source) {
  if (source.size() < kLengthBytes) {
    source.fail("is truncated: it has " + std::to_string(source.size()) +
                " bytes, less than the 8 of the header's length");
  }
  std::uint64_t header_bytes = 0;
  source.read(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  const std::uint64_t after_length = source.size() - kLengthBytes;
  if (header_bytes > after_length) {
    source.fail("is truncated or not a .safetensors file: its header should have " +
                std::to_string(header_bytes) + " bytes, but only " + std::to_string(after_length) +
                " follow");
  }
  if (header_bytes > kMaxHeaderBytes) {
    source.fail("has a header of " + std::to_string(header_bytes) + " bytes; at most " +
                std::to_string(kMaxHeaderBytes) + " are read");
  }

  Header header;
  {
    const std::string text = source.read_text(kLengthBytes, header_bytes);
    if (!text.starts_with('{')) source.fail("is not a .safetensors file: its header does not begin with '{'");
    // nlohmann's parser takes a NUL as the end of the text and would not look at what comes after.
    if (text.find('\0') != std::string::npos) source.fail("the header has a NUL byte");
    HeaderReader reader(source);
    Json::sax_parse(text, &reader);
    header = reader.take();
  }
  check_layout(source, header.entries, after_length - header_bytes);
  header.data_begin = kLengthBytes + header_bytes;
  return header;
}

/// `names` without a value asks for every tensor.
Safetensors read(const Source& source, std::optional<std::span<const std::string>> names) {
  Header header = read_header(source);
  std::vector<const Entry*> wanted;
  if (names) {
    for (const std::string& name : *names) wanted.push_back(&header.find(source, name));
  } else {
    for (const Entry& entry : header.entries) wanted.push_back(&entry);
  }

  Safetensors result;
  result.metadata = std::move(header.metadata);
  result.arrays.reserve(wanted.size());
  for (const Entry* entry : wanted) {
    result.arrays.push_back(source.read_array(header.data_begin + entry->begin, entry->label(), entry->name,
                                              type_of(source, *entry), entry->shape));
  }
  return result;
}

std::string json_string(std::string_view text) {
  try {
    return Json(text).dump();
  } catch (const Json::type_error&) {
    throw std::invalid_argument("not UTF-8: " + printable(text));
  }
}

struct Layout {
  /// The length and the header, as they stand in the file.
  std::string preamble;
  std::vector<const Array*> order;
};

Layout lay_out(std::span<const Array> arrays, const Metadata& metadata) {
  Layout layout;
  std::set<std::string_view> names;
  for (const Array& array : arrays) {
    validate(array);
    if (array.name == kMetadataKey) throw std::invalid_argument("an array cannot be called '__metadata__'");
    if (!names.insert(array.name).second)
      throw std::invalid_argument("two arrays are called " + printable(array.name));
    layout.order.push_back(&array);
  }
  std::ranges::sort(layout.order, [](const Array* a, const Array* b) {
    return a->type != b->type ? a->type > b->type : a->name < b->name;
  });

  std::string json = "{";
  const auto separate = [&] {
    if (json.size() > 1) json += ',';
  };
  if (!metadata.empty()) {
    json += "\"__metadata__\":{";
    for (auto item = metadata.begin(); item != metadata.end(); ++item) {
      if (item != metadata.begin()) json += ',';
      json += json_string(item->first) + ":" + json_string(item->second);
    }
    json += '}';
  }
  std::uint64_t offset = 0;
  for (const Array* array : layout.order) {
    separate();
    json += json_string(array->name) + ":{\"dtype\":\"" + std::string(element_type_name(array->type)) +
            "\",\"shape\":[";
    for (std::size_t i = 0; i < array->shape.size(); ++i) {
      if (i > 0) json += ',';
      json += std::to_string(array->shape[i]);
    }
    json += "],\"data_offsets\":[" + std::to_string(offset) + ",";
    offset += array->bytes.size();
    json += std::to_string(offset) + "]}";
  }
  json += '}';
  json.append((kHeaderAlignment - json.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  if (json.size() > kMaxHeaderBytes) {
    throw std::invalid_argument("a header of " + std::to_string(json.size()) +
                                " bytes, more than readers take");
  }

  for (std::uint64_t i = 0; i < kLengthBytes; ++i) {
    layout.preamble += static_cast<char>(json.size() >> (8 * i) & 0xff);
  }
  layout.preamble += json;
  return layout;
}

}  // namespace

const Array* Safetensors::find(std::string_view name) const {
  const auto array = std::ranges::find(arrays, name, &Array::name);
  return array == arrays.end() ? nullptr : &*array;
}

Safetensors read_safetensors(const std::filesystem::path& path) {
  return read(FileSource(path), std::nullopt);
}

Safetensors read_safetensors(const std::filesystem::path& path, std::span<const std::string> names) {
  return read(FileSource(path), names);
}

TensorPlace find_tensor(const std::filesystem::path& path, const std::string& name) {
  const FileSource source(path);
  Header header = read_header(source);
  const Entry& entry = header.find(source, name);
  return {type_of(source, entry), entry.shape, header.data_begin + entry.begin, std::move(header.metadata)};
}

Safetensors parse_safetensors(std::span<const std::byte> content, std::string name) {
  return read(MemorySource(content, std::move(name)), std::nullopt);
}

Safetensors parse_safetensors(std::span<const std::byte> content, std::string name,
                              std::span<const std::string> names) {
  return read(MemorySource(content, std::move(name)), names);
}

std::vector<std::byte> serialize_safetensors(std::span<const Array> arrays, const Metadata& metadata) {
  const Layout layout = lay_out(arrays, metadata);
  const auto preamble = std::as_bytes(std::span(layout.preamble));
  std::vector<std::byte> content(preamble.begin(), preamble.end());
  for (const Array* array : layout.order) {
    content.insert(content.end(), array->bytes.begin(), array->bytes.end());
  }
  return content;
}

void write_safetensors(AtomicFile& file, std::span<const Array> arrays, const Metadata& metadata) {
  const Layout layout = lay_out(arrays, metadata);
  file.write(std::as_bytes(std::span(layout.preamble)));
  for (const Array* array : layout.order) file.write(array->bytes);
}

void write_safetensors(const std::filesystem::path& path, std::span<const Array> arrays,
                       const Metadata& metadata, std::span<const std::filesystem::path> inputs) {
  AtomicFile file(path, inputs);
  write_safetensors(file, arrays, metadata);
  file.commit();
}

}  // namespace fovea::io
