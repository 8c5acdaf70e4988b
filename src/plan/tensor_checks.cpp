// The checks of tensor_checks.hpp, one after the other.
#include "plan/tensor_checks.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "core/status.hpp"
#include "plan/layout.hpp"
#include "plan/text.hpp"

namespace fovea::plan {
namespace {

void check_device(std::string_view name, const TensorDesc& t, const TensorDesc& q) {
  if (t.device == q.device && t.device_id == q.device_id) return;
  throw_invalid(name, "memory of " + device_text(t.device, t.device_id),
                "memory of " + device_text(q.device, q.device_id) + ", as q",
                "move all tensors to one device");
}

void check_sizes(std::string_view name, const TensorDesc& t) {
  for (int i = 0; i < t.ndim; ++i) {
    const int64_t size = t.shape[static_cast<size_t>(i)];
    if (size < 0 || size > kMaxDimension) {
      throw_invalid(name, "shape " + shape_text(t),
                    "sizes from 0 to " + std::to_string(kMaxDimension) + " in every dimension",
                    "check the shape; split the problem if it is that large");
    }
  }
  const auto bytes = compact_bytes(t);
  if (!bytes || *bytes > kMaxTensorBytes) {
    throw_invalid(name, "shape " + shape_text(t) + " of " + std::string(name_of(t.dtype)),
                  "at most 2^57 bytes", "check the shape; split the problem if it is that large");
  }
}

/// Arrays come with anything as the stride of a dimension that is never stepped along.
void canonicalise_strides(TensorDesc& t) {
  const bool empty = !has_elements(t);
  int64_t compact = 1;
  for (size_t i = static_cast<size_t>(t.ndim); i-- > 0;) {
    if (empty || t.shape[i] == 1) t.stride[i] = compact;
    if (!empty) compact *= t.shape[i];
  }
}

void check_strides(std::string_view name, const TensorDesc& t, const MemoryRules& rules) {
  const auto strides = std::span(t.stride).first(static_cast<size_t>(t.ndim));
  if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s < 0; })) {
    throw_invalid(name, strides_text(t), "no negative stride", "copy the tensor to a compact one");
  }
  if (rules.contiguous && strides.back() != 1) {
    throw_invalid(name, strides_text(t), "1 as the last stride: a contiguous last dimension",
                  "copy the tensor, or swap its dimensions");
  }
  const auto extent = extent_bytes(t);
  if (!extent || *extent > kMaxTensorBytes) {
    throw_invalid(name, "shape " + shape_text(t) + " with " + strides_text(t),
                  "all elements within 2^57 bytes", "check the strides: they count elements, not bytes");
  }
  if (rules.output && !elements_are_disjoint(t)) {
    throw_invalid(name, "shape " + shape_text(t) + " with " + strides_text(t),
                  "memory of its own for each element of an output",
                  "give strides that step over all smaller dimensions; outputs cannot broadcast");
  }
}

void check_alignment(std::string_view name, const TensorDesc& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_of(t.dtype)) == 0) return;
  throw_invalid(name, "an address that is no multiple of " + std::to_string(size_of(t.dtype)) + " bytes",
                "elements of " + std::string(name_of(t.dtype)) + " at multiples of their size",
                "check data and byte_offset, or copy the tensor");
}

}  // namespace

void check_memory(std::string_view name, TensorDesc& tensor, const TensorDesc& q, const MemoryRules& rules) {
  check_device(name, tensor, q);
  check_sizes(name, tensor);
  canonicalise_strides(tensor);
  check_strides(name, tensor, rules);
  check_alignment(name, tensor);
}

}  // namespace fovea::plan
