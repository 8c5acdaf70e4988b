// Where the elements of a strided tensor lie in memory: extents in checked arithmetic, and whether elements
// share memory. Strides here are non-negative.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/problem.hpp"

namespace fovea::plan {

/// No tensor is larger than the address space of a machine with five-level page tables; the room up to 2^63
/// keeps the arithmetic of every backend (workspaces, offsets of rows) free of overflow.
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 57;

constexpr std::optional<int64_t> checked_multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}
constexpr std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

constexpr bool has_elements(const TensorDesc& t) {
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[static_cast<size_t>(i)] == 0) return false;
  }
  return true;
}

/// Whether any memory belongs to the tensor. In the common form of a problem a dimension of stride 0 repeats
/// what is there (the batch of packed rows, a broadcast bias), so its size does not matter: 0 repetitions
/// still leave the memory.
constexpr bool has_memory(const TensorDesc& t) {
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (t.shape[i] == 0 && t.stride[i] != 0) return false;
  }
  return true;
}

/// Bytes from the first to past the last element; nullopt when they do not fit. 0 for a tensor without memory.
constexpr std::optional<int64_t> extent_bytes(const TensorDesc& t) {
  if (!has_memory(t)) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (t.stride[i] == 0) continue;
    const auto step = checked_multiply(t.shape[i] - 1, t.stride[i]);
    if (!step) return std::nullopt;
    const auto sum = checked_add(last, *step);
    if (!sum) return std::nullopt;
    last = *sum;
  }
  const auto count = checked_add(last, 1);
  return count ? checked_multiply(*count, size_of(t.dtype)) : std::nullopt;
}

/// Bytes of a compact tensor of this shape; nullopt when they do not fit.
constexpr std::optional<int64_t> compact_bytes(const TensorDesc& t) {
  if (!has_elements(t)) return 0;
  std::optional<int64_t> bytes = size_of(t.dtype);
  for (size_t i = 0; i < static_cast<size_t>(t.ndim) && bytes; ++i)
    bytes = checked_multiply(*bytes, t.shape[i]);
  return bytes;
}

/// Whether every element has memory of its own. Sorted by stride, each stride must step over all that the
/// smaller ones span: true of every slice, transpose and padding of a compact tensor. (A layout that
/// interleaves without nesting could be free of overlaps too; it is refused.)
constexpr bool elements_are_disjoint(const TensorDesc& t) {
  if (!has_elements(t)) return true;
  std::array<bool, kMaxRank> done{};
  int64_t span = 1;
  for (int step = 0; step < t.ndim; ++step) {
    size_t smallest = kMaxRank;
    for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
      if (!done[i] && (smallest == kMaxRank || t.stride[i] < t.stride[smallest])) smallest = i;
    }
    done[smallest] = true;
    if (t.shape[smallest] == 1) continue;
    if (t.stride[smallest] < span) return false;
    span += (t.shape[smallest] - 1) * t.stride[smallest];
  }
  return true;
}

/// Whether two tensors whose extents overlap still share no byte because they interleave, as dq, dk and dv do
/// inside one (batch, seqlen, 3, heads, size) array: some stride P of theirs divides all larger ones, and
/// within P bytes each stays in a stretch of its own. `distance`: bytes from the start of `a` to the start of
/// `b`.
constexpr bool interleave_without_overlap(const TensorDesc& a, const TensorDesc& b, int64_t distance) {
  // Bytes that `t` spans within one period, or -1 when a larger stride is no multiple of it.
  const auto within = [](const TensorDesc& t, int64_t period) {
    int64_t span = size_of(t.dtype);
    for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
      if (t.shape[i] == 1 || t.stride[i] == 0) continue;
      const int64_t stride = t.stride[i] * size_of(t.dtype);
      if (stride < period) {
        span += (t.shape[i] - 1) * stride;
      } else if (stride % period != 0) {
        return int64_t{-1};
      }
    }
    return span;
  };
  for (const TensorDesc* t : {&a, &b}) {
    for (size_t i = 0; i < static_cast<size_t>(t->ndim); ++i) {
      const int64_t period = t->stride[i] * size_of(t->dtype);
      if (period == 0 || t->shape[i] == 1) continue;
      const int64_t span_a = within(a, period), span_b = within(b, period);
      if (span_a < 0 || span_b < 0) continue;
      const int64_t offset = (distance % period + period) % period;
      if (span_a <= offset && offset + span_b <= period) return true;
    }
  }
  return false;
}

/// Whether two tensors of pages are views of one pool, so that a page of one is a page of the other or shares no byte with any.
constexpr bool are_whole_pages_apart(const TensorDesc& a, const TensorDesc& b, int64_t distance) {
  const int64_t page = a.stride[0] * size_of(a.dtype);
  return a.dtype == b.dtype && a.stride == b.stride && page > 0 && distance % page == 0;
}

}  // namespace fovea::plan
