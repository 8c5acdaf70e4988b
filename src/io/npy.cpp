// Reads and writes the .npy format of numpy: the definitions of npy.hpp.
#include "io/npy.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "io/atomic_file.hpp"
#include "io/source.hpp"

namespace fovea::io {

namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kVersionEnd = 8;
constexpr std::uint64_t kAlignment = 64;
/// With at most kMaxRank dimensions a real header has less than 2 KiB.
constexpr std::uint64_t kMaxHeaderBytes = 1 << 20;
/// numpy leaves room for this many digits of the first dimension, so that a file can grow in place.
constexpr std::size_t kGrowthDigits = 21;

struct Header {
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
};

struct Descr {
  ElementType type;
  /// Kind and size as numpy spells them, after the character of the byte order.
  std::string_view code;
  /// The whole spelling numpy writes.
  std::string_view written;
};

constexpr std::array<Descr, 9> kDescrs{{
    {ElementType::boolean, "b1", "|b1"},
    {ElementType::u8, "u1", "|u1"},
    {ElementType::f16, "f2", "<f2"},
    {ElementType::bf16, "V2", "<V2"},
    {ElementType::i32, "i4", "<i4"},
    {ElementType::f32, "f4", "<f4"},
    {ElementType::f64, "f8", "<f8"},
    {ElementType::i64, "i8", "<i8"},
    {ElementType::e4m3, "V1", "<V1"},
}};

/// Reads the header: the one form of Python dictionary that numpy writes, in any spacing and order of keys.
/// It has no nesting beyond the tuple, so it needs no recursion.
class HeaderParser {
 public:
  HeaderParser(const Source& source, std::string_view text) : source_(source), text_(text) {}

  Header parse() {
    expect('{');
    while (!accept('}')) {
      const std::string_view key = string();
      expect(':');
      if (key == "descr") {
        once(descr_, key) = element_type();
      } else if (key == "fortran_order") {
        once(fortran_order_, key) = boolean();
      } else if (key == "shape") {
        once(shape_, key) = tuple();
      } else {
        fail("has the unknown key " + printable(key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail("goes on after the dictionary, at its byte " + std::to_string(at_));
    if (!descr_) fail("lacks the key 'descr'");
    if (!fortran_order_) fail("lacks the key 'fortran_order'");
    if (!shape_) fail("lacks the key 'shape'");
    if (*fortran_order_) {
      source_.fail(
          "is in Fortran order; save it in C order: numpy.save(file, numpy.ascontiguousarray(array))");
    }
    return {*descr_, std::move(*shape_)};
  }

 private:
  [[noreturn]] void fail(const std::string& fault) const { source_.fail("the header " + fault); }

  template <class T>
  std::optional<T>& once(std::optional<T>& slot, std::string_view key) const {
    if (slot) fail("has the key " + printable(key) + " twice");
    return slot;
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool accept(char c) {
    if (peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail_expecting(printable(std::string_view(&c, 1)));
  }

  [[noreturn]] void fail_expecting(const std::string& what) {
    const char found = peek();
    if (at_ == text_.size()) fail("ends where " + what + " was expected");
    fail("has " + printable(std::string_view(&found, 1)) + " at its byte " + std::to_string(at_) + " where " +
         what + " was expected");
  }

  std::string_view string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail_expecting("a string");
    const std::size_t begin = ++at_;
    const std::size_t end = text_.find(quote, begin);
    if (end == std::string_view::npos)
      fail("has a string without an end, at its byte " + std::to_string(begin - 1));
    const std::string_view content = text_.substr(begin, end - begin);
    if (content.find('\\') != std::string_view::npos)
      fail("has an escape in the string " + printable(content));
    at_ = end + 1;
    return content;
  }

  bool boolean() {
    const char first = peek();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (first == word.front() && text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    fail_expecting("True or False");
  }

  ElementType element_type() {
    const char first = peek();
    if (first == '[' || first == '(') {
      source_.fail("has structured elements; save each field as an array of its own");
    }
    const std::string_view descr = string();
    if (descr == "bfloat16") return ElementType::bf16;
    if (descr.find('O') != std::string_view::npos) {
      source_.fail("holds Python objects (" + printable(descr) +
                   "), which only pickle could read; save numbers, for example array.astype('float32')");
    }
    if (!descr.empty()) {
      const char order = descr.front();
      const std::string_view code = descr.substr(1);
      const auto row = std::ranges::find(kDescrs, code, &Descr::code);
      if (row != kDescrs.end()) {
        const bool has_no_order = element_size(row->type) == 1 || row->type == ElementType::bf16;
        if (order == '<' || (order == '|' && has_no_order)) return row->type;
        if (order == '>') {
          source_.fail("has big-endian elements (" + printable(descr) +
                       "); save it in little endian: array.astype('<" + std::string(code) + "')");
        }
      }
    }
    source_.fail(
        "has elements of type " + printable(descr) +
        "; supported are f8 f4 f2 i8 i4 u1 b1 in little endian, V2 as bfloat16, and V1 as float8_e4m3fn");
  }

  std::int64_t extent() {
    const char first = peek();
    if (first == '-') fail("has a negative dimension in 'shape'");
    const std::size_t begin = at_;
    std::int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (__builtin_mul_overflow(value, std::int64_t{10}, &value) ||
          __builtin_add_overflow(value, std::int64_t{text_[at_] - '0'}, &value)) {
        fail("has a dimension in 'shape' beyond 64 bits");
      }
      ++at_;
    }
    if (at_ == begin) fail_expecting("a whole number");
    if (text_[begin] == '0' && at_ - begin > 1) fail("has a dimension in 'shape' with a leading zero");
    if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
      fail("has a dimension in 'shape' that is not a whole number");
    }
    // Python 2 wrote long integers with an L.
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;
    return value;
  }

  std::vector<std::int64_t> tuple() {
    expect('(');
    std::vector<std::int64_t> extents;
    bool comma_after_last = true;
    while (!accept(')')) {
      if (!comma_after_last) fail_expecting("',' or ')'");
      if (extents.size() == kMaxRank)
        fail("has more than " + std::to_string(kMaxRank) + " dimensions in 'shape'");
      extents.push_back(extent());
      comma_after_last = accept(',');
    }
    if (extents.size() == 1 && !comma_after_last) fail("has a number as 'shape' where a tuple was expected");
    return extents;
  }

  const Source& source_;
  std::string_view text_;
  std::size_t at_ = 0;
  std::optional<ElementType> descr_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<std::int64_t>> shape_;
};

Array read(const Source& source) {
  const auto require = [&](std::uint64_t bytes, const char* what) {
    if (source.size() < bytes) {
      source.fail("is truncated: it ends at byte " + std::to_string(source.size()) + ", inside " + what);
    }
  };
  if (source.size() == 0) source.fail("is empty");
  const std::uint64_t magic_bytes = std::min<std::uint64_t>(source.size(), kMagic.size());
  if (source.read_text(0, magic_bytes) != kMagic.substr(0, magic_bytes)) {
    source.fail("is not a .npy file: it does not begin with \\x93NUMPY");
  }
  require(kVersionEnd, "the magic and version");
  const std::string version = source.read_text(kMagic.size(), 2);
  const int major = static_cast<unsigned char>(version[0]);
  const int minor = static_cast<unsigned char>(version[1]);
  if (major < 1 || major > 3 || minor != 0) {
    source.fail("has the .npy version " + std::to_string(major) + "." + std::to_string(minor) +
                "; supported are 1.0, 2.0 and 3.0");
  }

  const std::uint64_t length_bytes = major == 1 ? 2 : 4;
  const std::uint64_t header_begin = kVersionEnd + length_bytes;
  require(header_begin, "the length of the header");
  std::uint64_t header_bytes = 0;
  // The static type of the digits is char; the length is little endian.
  const std::string length = source.read_text(kVersionEnd, length_bytes);
  for (std::size_t i = 0; i < length.size(); ++i) {
    header_bytes |= std::uint64_t{static_cast<unsigned char>(length[i])} << (8 * i);
  }
  if (header_bytes > source.size() - header_begin) {
    source.fail("is truncated: its header should have " + std::to_string(header_bytes) + " bytes, but only " +
                std::to_string(source.size() - header_begin) + " follow");
  }
  if (header_bytes > kMaxHeaderBytes) {
    source.fail("has a header of " + std::to_string(header_bytes) + " bytes; at most " +
                std::to_string(kMaxHeaderBytes) + " are read");
  }

  const std::string text = source.read_text(header_begin, header_bytes);
  Header header = HeaderParser(source, text).parse();
  const auto expected = byte_count(header.shape, element_size(header.type));
  if (!expected) source.fail("has a shape whose size overflows: " + shape_text(header.shape));
  const std::uint64_t data_begin = header_begin + header_bytes;
  const std::uint64_t available = source.size() - data_begin;
  const auto described = [&] {
    return std::string(element_type_name(header.type)) + " of shape " + shape_text(header.shape) + " takes " +
           std::to_string(*expected) + " bytes";
  };
  if (available < *expected) {
    source.fail("is truncated: " + described() + ", but only " + std::to_string(available) +
                " follow the header");
  }
  if (available > *expected) {
    source.fail("has " + std::to_string(available - *expected) + " trailing bytes: " + described() +
                ", but " + std::to_string(available) + " follow the header");
  }
  return source.read_array(data_begin, "the array", std::filesystem::path(source.name()).stem().string(),
                           header.type, std::move(header.shape));
}

/// Everything before the elements, as numpy writes it.
std::string preamble(const Array& array, int version) {
  validate(array);
  if (version < 1 || version > 3) {
    throw std::invalid_argument(".npy version " + std::to_string(version) + "; there are 1, 2 and 3");
  }
  const auto descr = std::ranges::find(kDescrs, array.type, &Descr::type);
  std::string header = "{'descr': '" + std::string(descr->written) +
                       "', 'fortran_order': False, 'shape': " + shape_text(array.shape) + ", }";
  if (!array.shape.empty()) header.append(kGrowthDigits - std::to_string(array.shape.front()).size(), ' ');

  const std::size_t length_bytes = version == 1 ? 2 : 4;
  // As numpy does, a header that is aligned already is padded by a whole line.
  const std::size_t end = kVersionEnd + length_bytes + header.size() + 1;
  header.append(kAlignment - end % kAlignment, ' ');
  header += '\n';

  std::string text(kMagic);
  text += static_cast<char>(version);
  text += '\0';
  for (std::size_t i = 0; i < length_bytes; ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return text + header;
}

}  // namespace

Array read_npy(const std::filesystem::path& path) {
  return read(FileSource(path));
}

Array parse_npy(std::span<const std::byte> content, std::string name) {
  return read(MemorySource(content, std::move(name)));
}

std::vector<std::byte> serialize_npy(const Array& array, int version) {
  const std::string head = preamble(array, version);
  const auto head_bytes = std::as_bytes(std::span(head));
  std::vector<std::byte> content;
  content.reserve(head.size() + array.bytes.size());
  content.insert(content.end(), head_bytes.begin(), head_bytes.end());
  content.insert(content.end(), array.bytes.begin(), array.bytes.end());
  return content;
}

void write_npy(const std::filesystem::path& path, const Array& array,
               std::span<const std::filesystem::path> inputs, int version) {
  const std::string head = preamble(array, version);
  AtomicFile file(path, inputs);
  file.write(std::as_bytes(std::span(head)));
  file.write(array.bytes);
  file.commit();
}

}  // namespace fovea::io
