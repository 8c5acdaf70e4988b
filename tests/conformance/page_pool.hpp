// Pages of keys and values that sequences share, with a copy of what every byte of them has to be.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "verify/owned_tensor.hpp"
#include "verify/random.hpp"

namespace fovea::conformance {

using namespace verify;

/// Pages that nobody has hold NaN, as do the first and the last page, which nobody gets.
class PagePool {
 public:
  /// k or v.
  struct Half {
    const char* name;
    OwnedTensor tensor;                   ///< (pages, page_size, heads, size)
    std::vector<unsigned char> expected;  ///< all of its memory, guards and gaps too
  };

  /// `gap`: elements between pages.
  PagePool(Type type, int64_t pages, int64_t page_size, int64_t heads, std::array<int64_t, 2> sizes,
           int64_t gap)
      : page_size_(page_size),
        halves_{half("k", type, {pages, page_size, heads, sizes[0]}, gap),
                half("v", type, {pages, page_size, heads, sizes[1]}, gap)},
        owners_(static_cast<size_t>(pages)) {
    for (int64_t page = 1; page + 1 < pages; ++page) unused_.push_back(static_cast<int32_t>(page));
  }

  int64_t page_size() const { return page_size_; }
  const std::array<Half, 2>& halves() const { return halves_; }

  /// A page that nobody has, or none.
  std::optional<int32_t> take(Random& random) {
    if (unused_.empty()) return std::nullopt;
    const auto chosen = static_cast<size_t>(random.between(0, static_cast<int64_t>(unused_.size()) - 1));
    std::swap(unused_[chosen], unused_.back());
    const int32_t page = unused_.back();
    unused_.pop_back();
    owners_[static_cast<size_t>(page)] = 1;
    return page;
  }
  void share(int32_t page) { ++owners_[static_cast<size_t>(page)]; }
  bool is_shared(int32_t page) const { return owners_[static_cast<size_t>(page)] > 1; }
  void give_back(int32_t page) {
    if (--owners_[static_cast<size_t>(page)] > 0) return;
    for (Half& half : halves_) {
      for (int64_t row = 0; row < page_size_; ++row) fill(half, page, row);
    }
    unused_.push_back(page);
  }
  /// Copies the first `rows` rows of a page.
  void copy(int32_t from, int32_t to, int64_t rows) {
    for (Half& half : halves_) {
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(at(half, to, row), at(half, from, row), row_bytes(half));
        keep(half, to, row);
      }
    }
  }

  /// The values of a row of all heads.
  static std::vector<double> row(const Half& half, int32_t page, int64_t row) {
    const unsigned char* from = at(half, page, row);
    std::vector<double> values(row_bytes(half) / size_of(half.tensor.type()));
    for (double& value : values) {
      value = load(from, half.tensor.type());
      from += size_of(half.tensor.type());
    }
    return values;
  }
  /// What a run has written to this row is right.
  void keep(size_t which, int32_t page, int64_t row) { keep(halves_[which], page, row); }
  /// "" when every byte is as expected, else the first that is not.
  std::string changed() const {
    for (const Half& half : halves_) {
      const Memory& memory = half.tensor.memory();
      if (std::memcmp(memory.whole(), half.expected.data(), half.expected.size()) == 0) continue;
      size_t byte = 0;
      while (memory.whole()[byte] == half.expected[byte]) ++byte;
      const size_t stride = static_cast<size_t>(half.tensor.strides()[0]) * size_of(half.tensor.type());
      const auto place = static_cast<int64_t>(byte) - static_cast<int64_t>(memory.begin());
      return std::string(half.name) + ": byte " + std::to_string(place) + " changed, in page " +
             std::to_string(place / static_cast<int64_t>(stride)) + ", to which nothing was appended there";
    }
    return {};
  }

 private:
  static Half half(const char* name, Type type, const Sizes& shape, int64_t gap) {
    Sizes strides = compact_strides(shape);
    strides[0] += gap;
    OwnedTensor tensor(type, shape, strides, gap > 0 ? Placement::kGuarded : Placement::kPageEnd);
    const Memory& memory = tensor.memory();
    return {name, tensor, {memory.whole(), memory.whole() + memory.whole_size()}};
  }
  static unsigned char* at(const Half& half, int32_t page, int64_t row) {
    return static_cast<unsigned char*>(half.tensor.address({page, row, 0, 0}));
  }
  static size_t row_bytes(const Half& half) {
    return static_cast<size_t>(half.tensor.strides()[1]) * size_of(half.tensor.type());
  }
  static void keep(Half& half, int32_t page, int64_t row) {
    const unsigned char* from = at(half, page, row);
    std::memcpy(half.expected.data() + (from - half.tensor.memory().whole()), from, row_bytes(half));
  }
  static void fill(Half& half, int32_t page, int64_t row) {
    std::memset(at(half, page, row), kPattern, row_bytes(half));
    keep(half, page, row);
  }

  int64_t page_size_;
  std::array<Half, 2> halves_;
  std::vector<int32_t> owners_, unused_;
};

}  // namespace fovea::conformance
