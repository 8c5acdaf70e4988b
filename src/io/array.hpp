// An array as files hold it: name, element type, shape, bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace fovea::io {

/// What one element of an array is. The enumerators stand in the order in which the safetensors library ranks
/// its types, because its writer (and ours) lays tensors out by descending rank.
enum class ElementType : std::uint8_t { boolean, u8, f16, bf16, i32, f32, f64, i64, e4m3 };

/// Bytes of one element: 1, 2, 4 or 8.
std::size_t element_size(ElementType type);

/// The name safetensors gives the type: "BOOL", "U8", "F16", "BF16", "I32", "F32", "F64", "I64" or "F8_E4M3".
std::string_view element_type_name(ElementType type);

/// The type with that safetensors name (upper case, as in element_type_name), or nothing.
std::optional<ElementType> element_type_from_name(std::string_view name);

/// Hands out memory on 64-byte boundaries: a cache line, and the widest vector load.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};

  AlignedAllocator() = default;
  template <class U>
  constexpr AlignedAllocator(const AlignedAllocator<U>&) noexcept {}

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(T)) throw std::bad_array_new_length();
    return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
  }
  void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, kAlignment); }

  friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
};

/// An owning buffer whose first byte is 64-byte aligned.
using AlignedBytes = std::vector<std::byte, AlignedAllocator<std::byte>>;

/// The most dimensions an array may have; numpy's own limit.
inline constexpr std::size_t kMaxRank = 64;

/// A named array in memory: C-contiguous (the last index moves fastest), little endian, without padding.
/// A shape without dimensions is a scalar of one element; a dimension of 0 is an array of none.
struct Array {
  std::string name;
  ElementType type = ElementType::f32;
  std::vector<std::int64_t> shape;
  AlignedBytes bytes;

  /// The elements as T. Throws std::invalid_argument when T has not the size of `type`.
  template <class T>
  std::span<const T> elements() const {
    require_element_size<T>();
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  template <class T>
  std::span<T> elements() {
    require_element_size<T>();
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }

  bool operator==(const Array&) const = default;

 private:
  template <class T>
  void require_element_size() const {
    static_assert(std::is_trivially_copyable_v<T>);
    if (sizeof(T) != element_size(type)) {
      throw std::invalid_argument("array '" + name + "': elements of " + std::to_string(sizeof(T)) +
                                  " bytes asked of an array of " + std::string(element_type_name(type)));
    }
  }
};

/// Bytes of an array of that shape with elements of `bytes_per_element` bytes. Nothing when a dimension is
/// negative, or when the product does not fit int64, where dimensions of 0 count as 1: then no program could
/// compute the strides.
std::optional<std::uint64_t> byte_count(std::span<const std::int64_t> shape, std::size_t bytes_per_element);

/// A zero-filled array. Throws std::invalid_argument on a negative dimension, more than kMaxRank dimensions
/// or a byte count beyond int64; std::bad_alloc when memory is short.
Array make_array(std::string name, ElementType type, std::vector<std::int64_t> shape);

/// Throws std::invalid_argument, naming the array, unless its bytes are what its type and shape ask for.
void validate(const Array& array);

/// "(2, 3)", "(4,)", "()": as Python prints a tuple.
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace fovea::io
