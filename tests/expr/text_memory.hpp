// Tensors in memory, as kernels see them and as the oracle does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "text_cases.hpp"

namespace fovea::expr {

/// Random elements. Each tensor has a block of memory that ends with it, for AddressSanitizer, and what lies between
/// its elements is NaN or large, so that reading it shows.
class TextMemory : public TensorReader {
 public:
  TextMemory(uint64_t seed, bool dense)
      : random_(seed), data_(kTextTensors.size()), gradients_(data_.size()) {
    for (size_t i = 0; i < data_.size(); ++i) {
      tile::NamedTensor& at = tensors_.at[i];
      const std::vector<int64_t>& extents = kTextExtents[i];
      const auto strides = text_strides(i, dense);
      int64_t last = 0;
      for (size_t d = 0; d < extents.size(); ++d) {
        at.extent[d] = static_cast<int>(extents[d]);
        at.stride[d] = strides[d];
        at.gradient_stride[d] = strides[d];
        last += (extents[d] - 1) * strides[d];
      }
      const size_t count = static_cast<size_t>(last) + 1;
      data_[i].assign(count * size(i), static_cast<char>(0xff));
      gradients_[i].assign(count, 0.0f);
      fill(i, 0, 0);
      at.data = data_[i].data();
      at.gradient = is_float(kTextTensors[i].dtype) ? gradients_[i].data() : nullptr;
    }
  }

  const tile::ExpressionTensors& tensors() const { return tensors_; }
  std::vector<std::vector<float>>& gradients() { return gradients_; }

  /// Where an element lies, or -1.
  int64_t place(size_t tensor, std::span<const int64_t> index) const {
    int64_t at = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      if (index[d] < 0 || index[d] >= kTextExtents[tensor][d]) return -1;
      at += index[d] * tensors_.at[tensor].stride[d];
    }
    return at;
  }

  std::optional<double> read(size_t tensor, std::span<const int64_t> index) const override {
    const int64_t at = place(tensor, index);
    if (at < 0) return std::nullopt;
    const char* from = data_[tensor].data() + static_cast<size_t>(at) * size(tensor);
    switch (kTextTensors[tensor].dtype) {
      case DType::kF16:
        return to_float(get<F16>(from));
      case DType::kBF16:
        return to_float(get<Bf16>(from));
      case DType::kI32:
        return get<int32_t>(from);
      case DType::kU8:
        return get<uint8_t>(from);
      default:
        return get<float>(from);
    }
  }

 private:
  template <class T>
  static T get(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static size_t size(size_t tensor) { return static_cast<size_t>(size_of(kTextTensors[tensor].dtype)); }
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }

  void fill(size_t tensor, size_t dimension, int64_t at) {
    if (dimension < kTextExtents[tensor].size()) {
      for (int64_t i = 0; i < kTextExtents[tensor][dimension]; ++i)
        fill(tensor, dimension + 1, at + i * tensors_.at[tensor].stride[dimension]);
      return;
    }
    char* to = data_[tensor].data() + static_cast<size_t>(at) * size(tensor);
    float number = static_cast<float>(below(64)) / 32 - 1;
    if (below(40) == 0)
      number = std::array{std::nanf(""), HUGE_VALF, -HUGE_VALF, -0.0f}[static_cast<size_t>(below(4))];
    const auto put = [&](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (kTextTensors[tensor].dtype) {
      case DType::kF16:
        return put(from_float<F16>(number));
      case DType::kBF16:
        return put(from_float<Bf16>(number));
      case DType::kI32:
        return put(below(8) == 0 ? static_cast<int32_t>(random_()) : below(12) - 2);
      case DType::kU8:
        return put(static_cast<uint8_t>(below(4) == 0 ? below(256) : below(2)));
      default:
        return put(number);
    }
  }

  std::mt19937_64 random_;
  std::vector<std::vector<char>> data_;
  std::vector<std::vector<float>> gradients_;
  tile::ExpressionTensors tensors_;
};

}  // namespace fovea::expr
