// cuda::move of cuda.hpp: launches of one kernel, each of which takes some of the boxes.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "core/status.hpp"
#include "cuda/kernels/move_args.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_table.hpp"

namespace fovea::cuda {
namespace {

const Kernel& move_kernel() {
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->kind == KernelKind::kMove) return *kernel;
  }
  throw RequestError(Status::kInternal, "", "this build has no kernel that moves boxes");
}

/// A run of single elements that lie side by side on both sides is one run of many.
Box with_long_runs(Box box, int64_t from_bytes, int64_t to_bytes) {
  for (const size_t axis : {size_t{1}, size_t{2}}) {
    if (box.elements == 1 && box.from_stride[axis] == from_bytes && box.to_stride[axis] == to_bytes)
      std::swap(box.elements, box.size[axis]);
  }
  return box;
}

int64_t units_of(const Box& box) {
  return box.size[0] * box.size[1] * box.size[2] * ((box.elements + kColumns - 1) / kColumns);
}

bool starts_at_vectors(const Box& box) {
  constexpr int64_t kVector = 16;
  bool aligned = box.elements % kColumns == 0 && reinterpret_cast<uintptr_t>(box.from) % kVector == 0 &&
                 reinterpret_cast<uintptr_t>(box.to) % kVector == 0;
  for (size_t axis = 0; axis < 3; ++axis)
    aligned &= box.from_stride[axis] % kVector == 0 && box.to_stride[axis] % kVector == 0;
  return aligned;
}

/// Collects boxes, and launches when there is no room for more.
class BoxLaunches {
 public:
  BoxLaunches(DType from, DType to, bool add, bool copies_vectors, const LoadedKernel& code, CUstream stream,
              int64_t most_ctas)
      : code_(code), stream_(stream), most_ctas_(most_ctas) {
    args_.from = from;
    args_.to = to;
    args_.add = add;
    args_.copies_vectors = copies_vectors;
  }

  void add(const Box& box) {
    const int64_t units = units_of(box);
    if (units == 0) return;
    if (units > kMostMoveUnits) return add_halves(box);
    if (args_.count == kMostMoveBoxes || units_ + units > kMostMoveUnits) launch();
    units_ += units;
    MoveBox& to = args_.boxes[args_.count++];
    to.from = box.from;
    to.to = box.to;
    for (size_t axis = 0; axis < 3; ++axis) {
      to.from_stride[axis] = box.from_stride[axis];
      to.to_stride[axis] = box.to_stride[axis];
      to.size[axis] = static_cast<uint32_t>(box.size[axis]);
    }
    to.elements = static_cast<uint32_t>(box.elements);
    to.end = static_cast<uint32_t>(units_);
    to.vectors = starts_at_vectors(box);
  }
  void launch() {
    if (args_.count == 0) return;
    const auto ctas = static_cast<unsigned>(std::min((units_ + kMoveThreads - 1) / kMoveThreads, most_ctas_));
    std::array<void*, 1> parameters = {&args_};
    const Kernel& kernel = move_kernel();
    const CUresult error =
        driver().launch_kernel(code_.function, ctas, 1, 1, static_cast<unsigned>(kernel.threads), 1, 1, 0,
                               stream_, parameters.data(), nullptr);
    if (error != CUDA_SUCCESS) throw_cuda(kernel.name, error);
    args_.count = 0;
    units_ = 0;
  }

 private:
  /// Of the axis that has most.
  void add_halves(const Box& box) {
    const auto largest = std::max_element(box.size.begin(), box.size.end()) - box.size.begin();
    const auto axis = static_cast<size_t>(largest);
    Box first = box, second = box;
    first.size[axis] /= 2;
    second.size[axis] -= first.size[axis];
    second.from += first.size[axis] * box.from_stride[axis];
    second.to += first.size[axis] * box.to_stride[axis];
    add(first);
    add(second);
  }

  MoveArgs args_;
  int64_t units_ = 0;
  const LoadedKernel& code_;
  CUstream stream_;
  int64_t most_ctas_;
};

}  // namespace

void load_move(int device) {
  const ContextScope scope(primary_context(device));
  usable(move_kernel(), device);
}

void move(std::span<const Box> boxes, DType from, DType to, bool add, int device, void* stream,
          int64_t most_ctas) {
  const ContextScope scope(primary_context(device));
  const LoadedKernel& code = usable(move_kernel(), device);
  const auto on = static_cast<CUstream>(stream);
  BoxLaunches vectors(DType::kF16, DType::kF16, false, true, code, on, most_ctas),
      elements(from, to, add, false, code, on, most_ctas);
  for (const Box& given : boxes) {
    const Box box = with_long_runs(given, size_of(from), size_of(to));
    Box halves = box;
    halves.elements *= size_of(from) / size_of(DType::kF16);
    const bool copies = from == to && !add && starts_at_vectors(halves);
    copies ? vectors.add(halves) : elements.add(box);
  }
  vectors.launch();
  elements.launch();
}

}  // namespace fovea::cuda
