// A tensor that owns its memory, laid out so that every misuse shows: bytes that are no element of it (gaps
// between strides, guards before and behind) hold a NaN pattern, outputs start as that pattern, and half of
// the tensors end where an unreadable page begins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "verify/element.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define FOVEA_CONFORMANCE_PAGES 1
#endif
#if defined(__SANITIZE_ADDRESS__)
#define FOVEA_CONFORMANCE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FOVEA_CONFORMANCE_ASAN 1
#endif
#endif
#if defined(FOVEA_CONFORMANCE_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace fovea::verify {

/// Where a tensor lies: between guards, or ending at an unreadable page.
enum class Placement : uint8_t { kGuarded, kPageEnd };

inline constexpr unsigned char kPattern = 0xff;  ///< a NaN of every floating type

/// Bytes with guards around them.
class Memory {
 public:
  static constexpr size_t kGuard = 128;

  Memory() = default;
  /// `skew` shifts the start away from an alignment of 64 bytes.
  Memory(size_t size, size_t skew, Placement placement) : size_(size) {
#if defined(FOVEA_CONFORMANCE_PAGES)
    if (placement == Placement::kPageEnd) {
      const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      const size_t usable = (size + kGuard + page - 1) / page * page;
      void* mapped = mmap(nullptr, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      base_ = std::shared_ptr<unsigned char>(static_cast<unsigned char*>(mapped),
                                             [usable, page](unsigned char* p) { munmap(p, usable + page); });
      mprotect(base_.get() + usable, page, PROT_NONE);
      begin_ = usable - size;
      total_ = usable;
      std::memset(base_.get(), kPattern, total_);
      return;
    }
#endif
    static_cast<void>(placement);
    begin_ = kGuard + skew;
    total_ = begin_ + size + kGuard;
    constexpr std::align_val_t kAlignment{64};
    base_ = std::shared_ptr<unsigned char>(static_cast<unsigned char*>(::operator new(total_, kAlignment)),
                                           [](unsigned char* p) { ::operator delete(p, kAlignment); });
    std::memset(base_.get(), kPattern, total_);
  }

  unsigned char* data() const {
    return base_.get() + begin_;
  }
  size_t size() const {
    return size_;
  }
  unsigned char* whole() const {
    return base_.get();
  }
  size_t whole_size() const {
    return total_;
  }
  size_t begin() const {
    return begin_;
  }

  /// Makes AddressSanitizer report accesses to the guards.
  void forbid_guards(bool forbid) const {
#if defined(FOVEA_CONFORMANCE_ASAN)
    const size_t end = begin_ + size_;
    if (forbid) {
      __asan_poison_memory_region(base_.get(), begin_);
      __asan_poison_memory_region(base_.get() + end, total_ - end);
    } else {
      __asan_unpoison_memory_region(base_.get(), total_);
    }
#else
    static_cast<void>(forbid);
#endif
  }
  bool guards_intact() const {
    const auto intact = [](unsigned char b) { return b == kPattern; };
    return std::all_of(whole(), whole() + begin_, intact) &&
           std::all_of(whole() + begin_ + size_, whole() + total_, intact);
  }

 private:
  std::shared_ptr<unsigned char> base_;
  size_t size_ = 0, begin_ = 0, total_ = 0;
};

using Sizes = std::vector<int64_t>;

inline int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

inline Sizes compact_strides(const Sizes& shape) {
  Sizes strides(shape.size());
  int64_t count = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = count;
    count *= std::max<int64_t>(shape[axis], 1);
  }
  return strides;
}

/// Elements in the order of the indices ("dense order"), wherever the strides put them.
class OwnedTensor {
 public:
  OwnedTensor(Type type, Sizes shape, Sizes strides, Placement placement = Placement::kGuarded,
              size_t skew = 0)
      : type_(type), shape_(std::move(shape)), strides_(std::move(strides)) {
    int64_t extent = count() > 0 ? 1 : 0;
    for (size_t axis = 0; axis < shape_.size() && extent > 0; ++axis) {
      extent += (shape_[axis] - 1) * strides_[axis];
    }
    memory_ = Memory(static_cast<size_t>(extent) * size_of(type_), skew * size_of(type_), placement);
  }

  /// The first `count` elements of each row, in the same memory.
  OwnedTensor first_columns(int64_t count) const {
    OwnedTensor part = *this;
    part.shape_.back() = count;
    return part;
  }

  Type type() const { return type_; }
  const Sizes& shape() const { return shape_; }
  const Sizes& strides() const { return strides_; }
  int64_t count() const { return product(shape_); }
  void* data() const { return count() > 0 ? memory_.data() : nullptr; }

  fovea_tensor view(bool with_data) const {
    fovea_tensor t{};
    t.data = with_data ? data() : nullptr;
    t.device = {FOVEA_CPU, 0};
    t.ndim = static_cast<int32_t>(shape_.size());
    t.dtype = dtype_of(type_);
    t.shape = shape_.data();
    t.strides = strides_.data();
    return t;
  }

  /// Calls visit(place in dense order, address).
  template <class Visit>
  void for_each(Visit&& visit) const {
    const auto elements = static_cast<size_t>(count());
    const auto bytes = static_cast<int64_t>(size_of(type_));
    const auto row =
        static_cast<size_t>(shape_.empty() ? 1 : shape_.back());  // the last axis, whose loop is the hot one
    const int64_t step = shape_.empty() ? 0 : strides_.back() * bytes;
    Sizes index(shape_.size(), 0);
    int64_t offset = 0;
    for (size_t place = 0; place < elements;) {
      unsigned char* at = memory_.data() + offset * bytes;
      for (const size_t end = place + row; place < end; ++place, at += step) visit(place, at);
      for (size_t axis = shape_.empty() ? 0 : shape_.size() - 1; axis-- > 0;) {
        offset += strides_[axis];
        if (++index[axis] < shape_[axis]) break;
        offset -= shape_[axis] * strides_[axis];
        index[axis] = 0;
      }
    }
  }

  void* address(const Sizes& index) const {
    int64_t offset = 0;
    for (size_t axis = 0; axis < index.size(); ++axis) offset += index[axis] * strides_[axis];
    return memory_.data() + offset * static_cast<int64_t>(size_of(type_));
  }
  void set(const Sizes& index, double x) { store(address(index), type_, x); }
  double get(const Sizes& index) const { return load(address(index), type_); }

  std::vector<double> values() const {
    std::vector<double> dense(static_cast<size_t>(count()));
    for_each([&](size_t place, const unsigned char* at) { dense[place] = load(at, type_); });
    return dense;
  }
  std::vector<float> floats() const {
    std::vector<float> dense(static_cast<size_t>(count()));
    for_each(
        [&](size_t place, const unsigned char* at) { dense[place] = static_cast<float>(load(at, type_)); });
    return dense;
  }
  void assign(const std::vector<double>& dense) {
    for_each([&](size_t place, unsigned char* at) { store(at, type_, dense[place]); });
  }
  /// The elements' bytes in dense order.
  std::vector<unsigned char> bytes() const {
    const size_t size = size_of(type_);
    std::vector<unsigned char> dense(static_cast<size_t>(count()) * size);
    for_each(
        [&](size_t place, const unsigned char* at) { std::memcpy(dense.data() + place * size, at, size); });
    return dense;
  }

  void poison() { std::memset(memory_.whole(), kPattern, memory_.whole_size()); }
  /// "" when every element and nothing else was written since poison(), else the error.
  std::string check_written() const {
    const size_t size = size_of(type_);
    std::vector<unsigned char> rest(memory_.whole(), memory_.whole() + memory_.whole_size());
    size_t missing = 0, first_missing = 0;
    for_each([&](size_t place, const unsigned char* at) {
      if (std::all_of(at, at + size, [](unsigned char b) { return b == kPattern; })) {
        if (missing++ == 0) first_missing = place;
      }
      std::memset(rest.data() + (at - memory_.whole()), kPattern, size);
    });
    if (missing > 0) {
      return std::to_string(missing) + " elements not written, first at " + std::to_string(first_missing);
    }
    const auto stray = std::find_if(rest.begin(), rest.end(), [](unsigned char b) { return b != kPattern; });
    if (stray == rest.end()) return {};
    return "written outside its elements, at byte " +
           std::to_string(stray - rest.begin() - static_cast<std::ptrdiff_t>(memory_.begin()));
  }
  const Memory& memory() const { return memory_; }

 private:
  Type type_;
  Sizes shape_, strides_;
  Memory memory_;
};

}  // namespace fovea::verify
