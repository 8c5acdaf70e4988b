// fovea_merge: checks its tensors, then merges where they lie.
#include "capi/merge.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "capi/convert.hpp"
#include "core/status.hpp"
#include "cpu/backends.hpp"
#include "cuda/launch/cuda.hpp"
#include "plan/layout.hpp"
#include "plan/tensor_checks.hpp"
#include "plan/text.hpp"
#include "plan/validate.hpp"

namespace fovea::capi {
namespace {

std::string indexed(std::string name, size_t index) {
  return name.append("[").append(std::to_string(index)).append("]");
}

bool same_memory(const TensorDesc& a, const TensorDesc& b) {
  return a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && a.shape == b.shape &&
         a.stride == b.stride;
}

bool share_bytes(const TensorDesc& a, const TensorDesc& b) {
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data), begin_b = reinterpret_cast<uintptr_t>(b.data);
  const auto size_a = static_cast<uintptr_t>(plan::extent_bytes(a).value());
  const auto size_b = static_cast<uintptr_t>(plan::extent_bytes(b).value());
  if (size_a == 0 || size_b == 0 || begin_a >= begin_b + size_b || begin_b >= begin_a + size_a) return false;
  return !plan::interleave_without_overlap(a, b, static_cast<int64_t>(begin_b - begin_a));
}

/// A tensor with data, its strides usable.
/// `shape`: what it must be; empty for any of 4 dimensions. `place`: a tensor that lies where it must; null for any place.
TensorDesc read_tensor(const std::string& name, const fovea_tensor* given, bool statistics, bool output,
                       std::span<const int64_t> shape, const TensorDesc* place) {
  if (given == nullptr) throw_invalid(name, "NULL", "a tensor", "pass its address");
  TensorDesc t = to_tensor(name.c_str(), *given);
  if (place != nullptr && (t.device != place->device || t.device_id != place->device_id)) {
    throw_invalid(name, "memory of " + plan::device_text(t.device, t.device_id),
                  "memory of " + plan::device_text(place->device, place->device_id) + ", where o is",
                  "copy the tensor");
  }
  if (statistics ? t.dtype != DType::kF32
                 : t.dtype != DType::kF32 && t.dtype != DType::kF16 && t.dtype != DType::kBF16) {
    throw_invalid(name, name_of(t.dtype), statistics ? "float32" : "float32, float16 or bfloat16",
                  "convert the tensor");
  }
  const auto sizes = std::span(t.shape).first(static_cast<size_t>(t.ndim));
  if (t.ndim != (statistics ? 3 : 4)) {
    throw_invalid(
        name, std::to_string(t.ndim) + " dimensions, " + plan::shape_text(t),
        statistics ? "3 dimensions (batch, heads, seqlen)" : "4 dimensions (batch, seqlen, heads, size)",
        "add the missing dimensions");
  }
  if (!shape.empty() && !std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    throw_invalid(name, "shape " + plan::shape_text(t), plan::shape_text(shape) + ", to agree with o",
                  "merge parts of one shape");
  }
  const auto in_range = [](int64_t size) { return size >= 0 && size <= plan::kMaxDimension; };
  if (!std::all_of(sizes.begin(), sizes.end(), in_range)) {
    throw_invalid(name, "shape " + plan::shape_text(t),
                  "sizes from 0 to " + std::to_string(plan::kMaxDimension) + " in every dimension",
                  "check the shape");
  }
  const bool empty = !plan::has_elements(t);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1 || empty) t.stride[i] = 1;
    if (t.stride[i] < 0) {
      throw_invalid(name, plan::strides_text(t), "no negative stride", "copy the tensor to a compact one");
    }
  }
  if (!statistics && t.stride[3] != 1) {
    throw_invalid(name, plan::strides_text(t), "1 as the last stride: a contiguous last dimension",
                  "copy the tensor, or swap its dimensions");
  }
  const auto compact = plan::compact_bytes(t), extent = plan::extent_bytes(t);
  if (!compact || !extent || std::max(*compact, *extent) > plan::kMaxTensorBytes) {
    throw_invalid(name, "shape " + plan::shape_text(t) + " with " + plan::strides_text(t),
                  "all elements within 2^57 bytes",
                  "check shape and strides: strides count elements, not bytes");
  }
  if (output && !plan::elements_are_disjoint(t)) {
    throw_invalid(name, "shape " + plan::shape_text(t) + " with " + plan::strides_text(t),
                  "memory of its own for each element of an output",
                  "give strides that step over all smaller dimensions; outputs cannot broadcast");
  }
  if (!empty && t.data == nullptr) throw_invalid(name, "a null data pointer", "memory", "set data");
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_of(t.dtype)) != 0) {
    throw_invalid(name, "an address that is no multiple of " + std::to_string(size_of(t.dtype)) + " bytes",
                  "elements at multiples of their size", "check data and byte_offset");
  }
  return t;
}

void check_not_shared(const std::string& output_name, const TensorDesc& output, const std::string& name,
                      const TensorDesc& part, bool may_be_same) {
  if (!share_bytes(output, part) || (may_be_same && same_memory(output, part))) return;
  throw_invalid(output_name, "memory that overlaps " + name,
                may_be_same ? "memory of its own, or exactly that of one part" : "memory of its own",
                "allocate the output apart");
}

}  // namespace

void merge(int32_t num_parts, const fovea_tensor* const* o_parts, const fovea_tensor* const* lse_parts,
           const fovea_tensor* o_given, const fovea_tensor* lse_given, void* stream) {
  if (num_parts < 1)
    throw_invalid("num_parts", std::to_string(num_parts), "1 or more", "pass at least one part");
  if (o_parts == nullptr) throw_invalid("o_parts", "NULL", "an array of tensors", "pass one tensor a part");
  if (lse_parts == nullptr)
    throw_invalid("lse_parts", "NULL", "an array of tensors", "pass one tensor a part");

  const TensorDesc o = read_tensor("o", o_given, false, true, {}, nullptr);
  const std::array<int64_t, 3> rows = {o.shape[0], o.shape[2], o.shape[1]};
  TensorDesc lse;
  if (lse_given) lse = read_tensor("lse", lse_given, true, true, rows, &o);

  const auto count = static_cast<size_t>(num_parts);
  std::vector<TensorDesc> os, lses;
  os.reserve(count);
  lses.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const std::string o_name = indexed("o_parts", i), lse_name = indexed("lse_parts", i);
    os.push_back(read_tensor(o_name, o_parts[i], false, false, o.shape, &o));
    lses.push_back(read_tensor(lse_name, lse_parts[i], true, false, rows, &o));
    check_not_shared("o", o, o_name, os.back(), true);
    check_not_shared("o", o, lse_name, lses.back(), false);
    if (lse.present) {
      check_not_shared("lse", lse, o_name, os.back(), false);
      check_not_shared("lse", lse, lse_name, lses.back(), true);
    }
  }
  if (lse.present) check_not_shared("o", o, "lse", lse, false);
  if (o.device == DeviceType::kCpu) {
    cpu::merge(os, lses, o, lse);
  } else {
    cuda::merge(os, lses, o, lse, stream);
  }
}

}  // namespace fovea::capi
