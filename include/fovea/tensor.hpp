// What the C++20 face of Fovea speaks of everywhere: errors, element types, devices and tensors. fovea.hpp includes it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "fovea/fovea.h"

namespace fovea {
inline namespace v0 {

// ---- errors ----

/// A failed call: what() says which argument, what came, what was expected, and what to do.
class Error : public std::runtime_error {
 public:
  Error(fovea_status status, std::string argument, const std::string& message)
      : std::runtime_error(message), status_(status), argument_(std::move(argument)) {}

  fovea_status status() const noexcept { return status_; }
  /// Name of the argument at fault; "" when none is.
  const std::string& argument() const noexcept { return argument_; }
  const char* message() const noexcept { return what(); }

 private:
  fovea_status status_;
  std::string argument_;
};

namespace detail {
inline void check(fovea_status status) {
  if (status != FOVEA_OK) throw Error(status, fovea_last_error_argument(), fovea_last_error());
}
}  // namespace detail

// ---- types ----

/// Storage of one bfloat16 or float16 element. Arrays of any 16-bit type may be viewed as these by reinterpret_cast.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
/// Storage of one float8_e4m3fn element.
struct e4m3 {
  uint8_t bits;
};

/// The element type of T as the C ABI tells it.
template <class T>
constexpr fovea_dtype dtype_of() {
  using U = std::remove_cv_t<T>;
  constexpr auto make = [](fovea_dtype_code code, int bits) {
    return fovea_dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  if constexpr (std::is_same_v<U, float>)
    return make(FOVEA_CODE_FLOAT, 32);
  else if constexpr (std::is_same_v<U, double>)
    return make(FOVEA_CODE_FLOAT, 64);
  else if constexpr (std::is_same_v<U, f16>)
    return make(FOVEA_CODE_FLOAT, 16);
  else if constexpr (std::is_same_v<U, bf16>)
    return make(FOVEA_CODE_BFLOAT, 16);
  else if constexpr (std::is_same_v<U, e4m3>)
    return make(FOVEA_CODE_FLOAT8_E4M3FN, 8);
  else if constexpr (std::is_same_v<U, bool>)
    return make(FOVEA_CODE_BOOL, 8);
  else if constexpr (std::is_same_v<U, uint8_t>)
    return make(FOVEA_CODE_UINT, 8);
  else if constexpr (std::is_integral_v<U> && std::is_signed_v<U> && sizeof(U) == 4)
    return make(FOVEA_CODE_INT, 32);
  else if constexpr (std::is_integral_v<U> && std::is_signed_v<U> && sizeof(U) == 8)
    return make(FOVEA_CODE_INT, 64);
  else
    static_assert(
        sizeof(T) == 0,
        "Fovea knows float, double, fovea::f16, fovea::bf16, fovea::e4m3, bool, uint8_t, int32_t, int64_t");
}

/// Where memory lies.
constexpr fovea_device cpu() {
  return {FOVEA_CPU, 0};
}
constexpr fovea_device cuda(int32_t id = 0) {
  return {FOVEA_CUDA, id};
}

/// A view of memory: pointer, element type, shape, strides. Owns its shape, not its elements.
/// Default-constructed: no tensor, which is how optional tensors are left out.
class Tensor {
 public:
  static constexpr size_t kMaxRank = 4;

  Tensor() = default;

  /// `shape` in elements, slowest dimension first; `strides` in elements, empty for a compact tensor. `data`
  /// may be null in a tensor that only describes (for a Plan).
  template <class T>
  Tensor(T* data, std::span<const int64_t> shape, std::span<const int64_t> strides = {})
      : Tensor(const_cast<std::remove_cv_t<T>*>(data), dtype_of<T>(), shape, strides) {
    read_only_ = std::is_const_v<T>;
  }
  template <class T>
  Tensor(T* data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides = {})
      : Tensor(data, std::span(shape.begin(), shape.size()), std::span(strides.begin(), strides.size())) {}

  /// For element types known only at run time.
  Tensor(void* data, fovea_dtype dtype, std::span<const int64_t> shape, std::span<const int64_t> strides = {})
      : data_(data),
        dtype_(dtype),
        ndim_(static_cast<int32_t>(shape.size())),
        present_(true),
        has_strides_(!strides.empty()) {
    if (shape.empty() || shape.size() > kMaxRank) {
      throw Error(FOVEA_INVALID_ARGUMENT, "shape",
                  "shape: got " + std::to_string(shape.size()) +
                      " sizes, expected 1 to 4; reshape the tensor, or use Tensor::scalar");
    }
    if (has_strides_ && strides.size() != shape.size()) {
      throw Error(FOVEA_INVALID_ARGUMENT, "strides",
                  "strides: got " + std::to_string(strides.size()) + " of them, expected " +
                      std::to_string(shape.size()) +
                      ", as many as sizes; leave them out for a compact tensor");
    }
    for (size_t i = 0; i < shape.size(); ++i) shape_[i] = shape[i];
    for (size_t i = 0; i < strides.size(); ++i) strides_[i] = strides[i];
  }

  /// A tensor without dimensions: one number, as expressions may read.
  template <class T>
  static Tensor scalar(T* data) {
    Tensor t(data, {1});
    t.ndim_ = 0;
    return t;
  }

  /// The same view of memory of a device.
  Tensor on(fovea_device device) const {
    Tensor t = *this;
    t.device_ = device;
    return t;
  }

  /// Whether there is a tensor.
  explicit operator bool() const noexcept { return present_; }
  void* data() const noexcept { return data_; }
  fovea_dtype dtype() const noexcept { return dtype_; }
  fovea_device device() const noexcept { return device_; }
  /// Made from a pointer to const: may not be an output.
  bool read_only() const noexcept { return read_only_; }
  std::span<const int64_t> shape() const noexcept { return {shape_.data(), static_cast<size_t>(ndim_)}; }

  /// The view of the C ABI. Points into this object: valid while it lives and stays where it is.
  fovea_tensor c_tensor() const noexcept {
    fovea_tensor t{};
    t.data = data_;
    t.device = device_;
    t.ndim = ndim_;
    t.dtype = dtype_;
    t.shape = shape_.data();
    t.strides = has_strides_ ? strides_.data() : nullptr;
    return t;
  }

 private:
  void* data_ = nullptr;
  fovea_device device_{FOVEA_CPU, 0};
  fovea_dtype dtype_{};
  int32_t ndim_ = 0;
  bool present_ = false, has_strides_ = false, read_only_ = false;
  std::array<int64_t, kMaxRank> shape_{}, strides_{};
};

}  // namespace v0
}  // namespace fovea
