// The parameters of the kernels by which gradients of named tensors have the same bits each time (NamedSumsArgs).
#include <new>

#include "cuda/kernels/named_sums_args.hpp"
#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/driver.hpp"

namespace fovea::cuda {
namespace {

/// Strides of a gradient whose elements lie side by side; dimensions that stand for all keep 0. Returns its size.
int64_t make_dense(tile::NamedTensor& t) {
  int64_t count = 1;
  for (int d = 3; d >= 0; --d) {
    if (t.gradient_stride[d] == 0) continue;
    t.gradient_stride[d] = count;
    count *= t.extent[d];
  }
  return count;
}

NamedSumsArgs& make_args(const LaunchInput<BackwardLayout>& launch, void* to) {
  static_assert(sizeof(NamedSumsArgs) <= kMaxArgsBytes);
  const BackwardLayout& layout = launch.layout;
  auto& all = *new (to) NamedSumsArgs;
  all.b = launch.args;
  all.sums = reinterpret_cast<unsigned long long*>(launch.workspace + layout.named_sums);
  all.peaks = reinterpret_cast<uint32_t*>(all.sums + layout.named_elements);
  all.format.log2_count = layout.named_log2_count;
  uint32_t* next = all.peaks;
  for (size_t i = 0; i < tile::kMaxNamedTensors; ++i) {
    tile::NamedTensor& t = all.b.p.expression.at[i];
    if (t.gradient == nullptr) continue;
    all.outputs[i].gradient = t.gradient;
    for (size_t d = 0; d < 4; ++d) all.outputs[i].stride[d] = t.gradient_stride[d];
    t.gradient = reinterpret_cast<float*>(next);
    next += make_dense(t);
  }
  return all;
}

void bind_peaks(const LaunchInput<BackwardLayout>& launch, void* to) {
  const auto words = static_cast<size_t>(launch.layout.named_elements) * (kNamedSumBytes / sizeof(uint32_t));
  set_words(make_args(launch, to).sums, 0, words, launch.stream);  // and the peaks behind them
}
void bind_sums(const LaunchInput<BackwardLayout>& launch, void* to) {
  make_args(launch, to).adds = true;
}
void bind_results(const LaunchInput<BackwardLayout>& launch, void* to) {
  make_args(launch, to);
}

}  // namespace

extern const ArgsBinding named_peaks_args, named_sums_args, named_results_args;
const ArgsBinding named_peaks_args = {.backward = bind_peaks};
const ArgsBinding named_sums_args = {.backward = bind_sums};
const ArgsBinding named_results_args = {.backward = bind_results};

}  // namespace fovea::cuda
