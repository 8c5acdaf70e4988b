// Names of element types, and conversions: the definitions of elements.hpp.
#include "cli/data/elements.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace fovea::cli {
namespace {

/// A binary format of 16 bits; normal numbers have exponents from min_exponent to max_exponent.
struct Format16 {
  int mantissa_bits, min_exponent, max_exponent;
  constexpr uint32_t infinity() const {
    return static_cast<uint32_t>(max_exponent - min_exponent + 2) << mantissa_bits;
  }
};
constexpr Format16 kFloat16 = {10, -14, 15};
constexpr Format16 kBfloat16 = {7, -126, 127};

uint16_t encode(double value, Format16 format) {
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  if (std::isnan(value)) {
    return static_cast<uint16_t>(sign | format.infinity() | (1u << (format.mantissa_bits - 1)));
  }
  if (value == 0) return static_cast<uint16_t>(sign);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | format.infinity());
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  if (exponent > format.max_exponent) return static_cast<uint16_t>(sign | format.infinity());
  const double mantissa = std::nearbyint(std::scalbn(std::abs(value), format.mantissa_bits - exponent));
  // A normal number's hidden bit, and a rounding up to the next power of two, carry into the exponent field.
  const uint32_t code = (static_cast<uint32_t>(exponent - format.min_exponent) << format.mantissa_bits) +
                        static_cast<uint32_t>(mantissa);
  return static_cast<uint16_t>(sign | std::min(code, format.infinity()));
}

template <class Out>
std::vector<Out> decode_all(const Array& array) {
  std::vector<Out> out;
  const auto append = [&](const auto& elements, const auto& decode) {
    out.reserve(elements.size());
    for (const auto element : elements) out.push_back(static_cast<Out>(decode(element)));
  };
  const auto as_is = [](auto element) { return element; };
  switch (array.type) {
    case ElementType::f16:
      append(array.elements<uint16_t>(), decode_float16);
      break;
    case ElementType::bf16:
      append(array.elements<uint16_t>(), decode_bfloat16);
      break;
    case ElementType::f32:
      append(array.elements<float>(), as_is);
      break;
    case ElementType::f64:
      append(array.elements<double>(), as_is);
      break;
    case ElementType::i32:
      append(array.elements<int32_t>(), as_is);
      break;
    case ElementType::i64:
      append(array.elements<int64_t>(), as_is);
      break;
    case ElementType::u8:
    case ElementType::boolean:
      append(array.elements<uint8_t>(), as_is);
      break;
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
  }
  return "?";
}

std::optional<ElementType> type_from_option(std::string_view name) {
  if (name == "f16" || name == "float16") return ElementType::f16;
  if (name == "bf16" || name == "bfloat16") return ElementType::bf16;
  if (name == "f32" || name == "float32") return ElementType::f32;
  if (name == "f64" || name == "float64") return ElementType::f64;
  return std::nullopt;
}

bool is_real(ElementType type) {
  return type == ElementType::f16 || type == ElementType::bf16 || type == ElementType::f32 ||
         type == ElementType::f64;
}

double unit_roundoff(ElementType type) {
  switch (type) {
    case ElementType::f16:
      return 0x1p-11;
    case ElementType::bf16:
      return 0x1p-8;
    case ElementType::f32:
      return 0x1p-24;
    default:
      return 0x1p-53;
  }
}

namespace {
fovea_dtype c_type(ElementType type) {
  switch (type) {
    case ElementType::boolean:
      return dtype_of<bool>();
    case ElementType::u8:
      return dtype_of<uint8_t>();
    case ElementType::f16:
      return dtype_of<f16>();
    case ElementType::bf16:
      return dtype_of<bf16>();
    case ElementType::i32:
      return dtype_of<int32_t>();
    case ElementType::f32:
      return dtype_of<float>();
    case ElementType::f64:
      return dtype_of<double>();
    case ElementType::i64:
      break;
  }
  return dtype_of<int64_t>();
}
}  // namespace

Tensor view(const Array& array) {
  return view(array, array.shape);
}

Tensor view(const Array& array, std::span<const int64_t> shape) {
  return Tensor(const_cast<std::byte*>(array.bytes.data()), c_type(array.type), shape);
}

Buffers buffers_of(const Problem& p) {
  return {.q = p.q.data(),
          .k = p.k.data(),
          .v = p.v.data(),
          .o = p.o.data(),
          .lse = p.lse.data(),
          .d_o = p.d_o.data(),
          .dq = p.dq.data(),
          .dk = p.dk.data(),
          .dv = p.dv.data(),
          .dbias = p.dbias.data(),
          .dsink = p.dsink.data(),
          .bias = p.bias.data(),
          .mask = p.mask.data(),
          .block_mask = p.block_mask.data(),
          .alibi = p.alibi.data(),
          .sink = p.sink.data(),
          .cu_seqlens_q = p.cu_seqlens_q.data(),
          .cu_seqlens_k = p.cu_seqlens_k.data(),
          .seqused_q = p.seqused_q.data(),
          .seqused_k = p.seqused_k.data(),
          .seed = p.seed};
}

Array converted(Array array, ElementType type) {
  if (array.type == type) return array;
  const std::vector<double> values = to_doubles(array);
  Array out = io::make_array(array.name, type, array.shape);
  const auto fill = [&](auto elements, const auto& encode_one) {
    for (size_t i = 0; i < values.size(); ++i) elements[i] = encode_one(values[i]);
  };
  switch (type) {
    case ElementType::f16:
      fill(out.elements<uint16_t>(), encode_float16);
      break;
    case ElementType::bf16:
      fill(out.elements<uint16_t>(), encode_bfloat16);
      break;
    case ElementType::f32:
      fill(out.elements<float>(), [](double value) { return static_cast<float>(value); });
      break;
    case ElementType::f64:
      fill(out.elements<double>(), [](double value) { return value; });
      break;
    default:
      throw std::invalid_argument("converted: to a type that is not real");
  }
  return out;
}

std::vector<float> to_floats(const Array& array) {
  return decode_all<float>(array);
}
std::vector<double> to_doubles(const Array& array) {
  return decode_all<double>(array);
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

uint16_t encode_float16(double value) {
  return encode(value, kFloat16);
}
uint16_t encode_bfloat16(double value) {
  return encode(value, kBfloat16);
}

}  // namespace fovea::cli
