// Names of element types, and conversions: the definitions of elements.hpp.
#include "cli/data/elements.hpp"

#include <bit>
#include <stdexcept>

#include "verify/element.hpp"

namespace fovea::cli {
namespace {

verify::Type type_of(ElementType type) {
  using verify::Type;
  switch (type) {
    case ElementType::boolean:
      return Type::kBool;
    case ElementType::u8:
      return Type::kU8;
    case ElementType::f16:
      return Type::kF16;
    case ElementType::bf16:
      return Type::kBF16;
    case ElementType::i32:
      return Type::kI32;
    case ElementType::f32:
      return Type::kF32;
    case ElementType::f64:
      return Type::kF64;
    case ElementType::e4m3:
      return Type::kE4M3;
    case ElementType::i64:
      break;
  }
  return Type::kI64;
}

template <class Out>
std::vector<Out> decode_all(const Array& array) {
  const verify::Type type = type_of(array.type);
  const size_t size = verify::size_of(type);
  std::vector<Out> out(array.bytes.size() / size);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<Out>(verify::load(array.bytes.data() + i * size, type));
  }
  return out;
}

}  // namespace

const char* type_name(ElementType type) {
  switch (type) {
    case ElementType::boolean:
      return "bool";
    case ElementType::u8:
      return "uint8";
    case ElementType::f16:
      return "float16";
    case ElementType::bf16:
      return "bfloat16";
    case ElementType::i32:
      return "int32";
    case ElementType::f32:
      return "float32";
    case ElementType::f64:
      return "float64";
    case ElementType::i64:
      return "int64";
    case ElementType::e4m3:
      return "float8_e4m3fn";
  }
  return "?";
}

std::optional<ElementType> type_from_option(std::string_view name) {
  if (name == "f16" || name == "float16") return ElementType::f16;
  if (name == "bf16" || name == "bfloat16") return ElementType::bf16;
  if (name == "f32" || name == "float32") return ElementType::f32;
  if (name == "f64" || name == "float64") return ElementType::f64;
  if (name == "e4m3" || name == "float8_e4m3fn") return ElementType::e4m3;
  return std::nullopt;
}

bool is_real(ElementType type) {
  return type == ElementType::f16 || type == ElementType::bf16 || type == ElementType::f32 ||
         type == ElementType::f64 || type == ElementType::e4m3;
}

ElementType output_type(ElementType type) {
  return type == ElementType::e4m3 ? ElementType::bf16 : type;
}

double unit_roundoff(ElementType type) {
  return verify::unit_roundoff(type_of(type));
}

Tensor view(const Array& array) {
  return view(array, array.shape);
}

Tensor view(const Array& array, std::span<const int64_t> shape) {
  return Tensor(const_cast<std::byte*>(array.bytes.data()), verify::dtype_of(type_of(array.type)), shape);
}

Array converted(Array array, ElementType type) {
  if (array.type == type) return array;
  if (!is_real(type)) throw std::invalid_argument("converted: to a type that is not real");
  const verify::Type from = type_of(array.type), to = type_of(type);
  Array out = io::make_array(array.name, type, array.shape);
  const size_t count = out.bytes.size() / verify::size_of(to);
  for (size_t i = 0; i < count; ++i) {
    verify::store(out.bytes.data() + i * verify::size_of(to), to,
                  verify::load(array.bytes.data() + i * verify::size_of(from), from));
  }
  return out;
}

std::vector<float> to_floats(const Array& array) {
  return decode_all<float>(array);
}
std::vector<double> to_doubles(const Array& array) {
  return decode_all<double>(array);
}

float decode_e4m3(uint8_t code) {
  return static_cast<float>(verify::decode_e4m3(code));
}

float decode_bfloat16(uint16_t code) {
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
}

float decode_float16(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t magnitude = code & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Read as a float, the bits are the value times 2^-112, subnormal or not.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | sign);
}

uint8_t encode_e4m3(double value) {
  return verify::encode_e4m3(value);
}
uint16_t encode_float16(double value) {
  return verify::encode(value, verify::kF16Format);
}
uint16_t encode_bfloat16(double value) {
  return verify::encode(value, verify::kBF16Format);
}

}  // namespace fovea::cli
