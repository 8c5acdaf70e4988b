// The arrays of one problem that `fovea bench` times, on the host and on the GPU where it runs.
#pragma once

#include <array>
#include <string>
#include <utility>

#include "cli/bench/mirrors.hpp"
#include "cli/data/elements.hpp"
#include "cli/data/expressions.hpp"
#include "cli/options/options.hpp"
#include "cli/options/shape_options.hpp"

namespace fovea::cli {

/// Which dimension follows the batch in memory: positions (bshd) or heads (bhsd).
enum class Layout { bshd, bhsd };

/// Indices [first, second) of one dimension.
using IndexRange = std::pair<int64_t, int64_t>;

/// A tensor (batch, length, heads, size), compact in either memory order.
class HeadArray {
 public:
  HeadArray() = default;
  HeadArray(const char* name, const std::array<int64_t, 4>& shape, ElementType type, Layout layout);

  /// What lies in memory; its shape is that of the memory order.
  Array& array() { return array_; }
  const Array& array() const { return array_; }
  bool empty() const { return array_.shape.empty(); }
  /// The tensor over `data`, which holds what the array holds.
  Tensor tensor(void* data) const;
  /// Positions `rows` of heads `heads` of one sequence, as a compact (1, rows, heads, size) array.
  Array cut_out(int64_t batch, IndexRange rows, IndexRange heads) const;
  /// Normal random numbers in the last `rows` positions of every sequence, 0 elsewhere.
  void fill_last_rows(int64_t rows, uint64_t seed);

 private:
  /// Byte at which the elements of one position of one head begin.
  size_t offset(int64_t batch, int64_t row, int64_t head) const;

  Array array_;
  std::array<int64_t, 4> shape_{}, strides_{};  ///< in elements
};

/// Nearly normal numbers of variance 1; the same for the same seed on every machine.
void fill_normal(Array& array, uint64_t seed);

/// Inputs are normal random numbers, outputs 0. With a GPU every array has a mirror in its memory.
struct BenchData {
  Shape shape;
  Expressions expressions;
  HeadArray q, k, v, o, d_o, dq, dk, dv;
  Array lse;
  std::vector<Array>
      d_tensors;  ///< gradients of those tensors of expressions that have one; others are empty

  /// `backward`: with the gradients. `gpu` may be null and has to outlive this.
  BenchData(const Shape& shape, bool backward, Expressions expressions = {}, Layout layout = Layout::bshd,
            Gpu* gpu = nullptr);
  BenchData(const BenchData&) = delete;  // mirrors are found by the address of an array
  BenchData& operator=(const BenchData&) = delete;

  /// Copies an array to its mirror, if it has one.
  void upload(const Array& array) const { mirrors_.upload(array); }
  /// Copies the outputs of `pass` from their mirrors, if they have any.
  void download_outputs(Pass pass);
  Problem problem(Pass pass, const Terms& terms) const;

 private:
  Tensor tensor(const HeadArray& array) const;

  Mirrors mirrors_;
};

}  // namespace fovea::cli
