// Sizes and names of element types: the definitions of array.hpp.
#include "io/array.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace fovea::io {

static_assert(std::endian::native == std::endian::little,
              "arrays hold the machine's own bytes as little endian");

namespace {

struct TypeRow {
  ElementType type;
  std::string_view name;
  std::size_t size;
};

constexpr std::array<TypeRow, 9> kTypes{{
    {ElementType::boolean, "BOOL", 1},
    {ElementType::u8, "U8", 1},
    {ElementType::f16, "F16", 2},
    {ElementType::bf16, "BF16", 2},
    {ElementType::i32, "I32", 4},
    {ElementType::f32, "F32", 4},
    {ElementType::f64, "F64", 8},
    {ElementType::i64, "I64", 8},
    {ElementType::e4m3, "F8_E4M3", 1},
}};

static_assert([] {
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    if (static_cast<std::size_t>(kTypes[i].type) != i) return false;
  }
  return true;
}());

const TypeRow& row_of(ElementType type) {
  return kTypes.at(static_cast<std::size_t>(type));
}

std::uint64_t required_bytes(const std::string& name, ElementType type, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxRank) {
    throw std::invalid_argument("array '" + name + "' has " + std::to_string(shape.size()) +
                                " dimensions, more than " + std::to_string(kMaxRank));
  }
  const auto bytes = byte_count(shape, element_size(type));
  if (!bytes) {
    throw std::invalid_argument("array '" + name + "' cannot have the shape " + shape_text(shape));
  }
  return *bytes;
}

}  // namespace

std::size_t element_size(ElementType type) {
  return row_of(type).size;
}

std::string_view element_type_name(ElementType type) {
  return row_of(type).name;
}

std::optional<ElementType> element_type_from_name(std::string_view name) {
  const auto row = std::ranges::find(kTypes, name, &TypeRow::name);
  if (row == kTypes.end()) return std::nullopt;
  return row->type;
}

std::optional<std::uint64_t> byte_count(std::span<const std::int64_t> shape, std::size_t bytes_per_element) {
  auto bytes = static_cast<std::int64_t>(bytes_per_element);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : static_cast<std::uint64_t>(bytes);
}

Array make_array(std::string name, ElementType type, std::vector<std::int64_t> shape) {
  const std::uint64_t bytes = required_bytes(name, type, shape);
  return {std::move(name), type, std::move(shape), AlignedBytes(bytes)};
}

void validate(const Array& array) {
  const std::uint64_t bytes = required_bytes(array.name, array.type, array.shape);
  if (bytes != array.bytes.size()) {
    throw std::invalid_argument("array '" + array.name + "' holds " + std::to_string(array.bytes.size()) +
                                " bytes; " + std::string(element_type_name(array.type)) + " of shape " +
                                shape_text(array.shape) + " takes " + std::to_string(bytes));
  }
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (shape.size() == 1) text += ',';
  return text + ')';
}

}  // namespace fovea::io
