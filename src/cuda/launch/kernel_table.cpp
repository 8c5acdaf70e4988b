// Gathers the kernels of all generated units and sorts them.
#include "cuda/launch/kernel_table.hpp"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace fovea::cuda {

void sort_by_preference(std::span<const Kernel*> kernels) {
  const auto any_last = [](int size) { return size == 0 ? 1 << 30 : size; };
  const auto few_rows_first = [](const Kernel* k) {
    return k->splits_in_cluster ? std::pair(0, k->tile_m)
           : k->stream_k        ? std::pair(1, k->tile_m)
                                : std::pair(2, 0);
  };
  const auto rank = [&](const Kernel* k) {
    return std::tuple(k->kind, k->family, any_last(k->head_dim), any_last(k->head_dim_v), few_rows_first(k),
                      __builtin_popcount(k->terms), !k->aligned_only);
  };
  std::stable_sort(kernels.begin(), kernels.end(),
                   [&](const Kernel* a, const Kernel* b) { return rank(a) < rank(b); });
}

std::span<const Kernel* const> kernel_table() {
  static const std::vector<const Kernel*> table = [] {
    std::vector<const Kernel*> all;
    for (const KernelUnit unit : kernel_units()) {
      for (const Kernel& kernel : unit()) all.push_back(&kernel);
    }
    std::unordered_map<std::string_view, size_t> places;
    for (const char* name : kernel_names()) places.emplace(name, places.size());
    std::sort(all.begin(), all.end(),
              [&](const Kernel* a, const Kernel* b) { return places.at(a->name) < places.at(b->name); });
    sort_by_preference(all);
    return all;
  }();
  return table;
}

const char* backend_name(Family family) {
  switch (family) {
    case Family::kSm90:
      return "cuda_sm90";
    case Family::kMmaSm80:
      return "cuda_sm80";
    case Family::kTf32:
      return "cuda_tf32";
    case Family::kMmaSm75:
      return "cuda_sm75";
    case Family::kSimt:
      return "cuda_simt";
    case Family::kAny:
      break;
  }
  return "";
}

const char* name_of(KernelKind kind) {
  switch (kind) {
    case KernelKind::kAppend:
      return "append";
    case KernelKind::kMerge:
      return "merge";
    case KernelKind::kMove:
      return "move";
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kBf16x3:
      return "bf16x3";
    case KernelKind::kTransposeValues:
      return "transposed values";
    case KernelKind::kSeenBlocks:
      return "seen blocks";
    case KernelKind::kBackwardSeenBlocks:
      return "backward (seen blocks)";
    case KernelKind::kAlibiNorms:
      return "norms";
    case KernelKind::kBackwardAlibiNorms:
      return "backward (norms)";
    case KernelKind::kClearCounter:
      return "counter";
    case KernelKind::kCombine:
      return "combine";
    case KernelKind::kBackward:
      return "backward";
    case KernelKind::kPreprocess:
      return "backward (preprocess)";
    case KernelKind::kBackwardBf16x3:
      return "backward (bf16x3)";
    case KernelKind::kBackwardDv:
      return "backward (dv)";
    case KernelKind::kBackwardDq:
      return "backward (dq)";
    case KernelKind::kPostprocess:
      return "backward (postprocess)";
    case KernelKind::kListZeros:
      return "backward (zeros for keys in lists)";
    case KernelKind::kListCounts:
      return "backward (counts of keys in lists)";
    case KernelKind::kListOffsets:
      return "backward (offsets of keys in lists)";
    case KernelKind::kListInverse:
      return "backward (queries of keys in lists)";
    case KernelKind::kListKeys:
      return "backward (dk and dv over queries of keys)";
    case KernelKind::kListGradients:
      return "backward (gradients of keys in lists)";
    case KernelKind::kDBias:
      return "dbias";
    case KernelKind::kDSink:
      return "dsink";
    case KernelKind::kNamedZeros:
      return "gradients of named tensors (zeros)";
    case KernelKind::kNamedGradients:
      return "gradients of named tensors";
    case KernelKind::kNamedPeaks:
      return "gradients of named tensors (peaks)";
    case KernelKind::kNamedSums:
      return "gradients of named tensors (sums)";
    case KernelKind::kNamedResults:
      return "gradients of named tensors (results)";
  }
  return "?";
}

}  // namespace fovea::cuda
