// The forward where queries have lists of keys: fwd_simt over the entries of a list (simt_lists.cuh), with every term of the
// score, which reads the key of an entry.
//
// Grid     fwd_lists_ctas(args).
// Block    kSimtThreads threads.
// Shared   static, 28 KB.
#pragma once

#include "cuda/kernels/fwd_simt.cuh"

namespace fovea::cuda {

inline constexpr int kListColumns = 128;  ///< of an output slice

constexpr int64_t fwd_lists_ctas(const ForwardArgs& args) {
  const int64_t slices = (args.p.head_dim_v + kListColumns - 1) / kListColumns;
  return list_tiles(args.p) * slices * args.num_splits * args.p.heads_kv * args.p.batch;
}

template <class T>
using FwdLists = FwdSimt<T, kListColumns, true>;

/// T: float, __half or __nv_bfloat16.
template <class T>
__global__ void __launch_bounds__(kSimtThreads, FwdLists<T>::kMinCtas)
    fwd_lists(const __grid_constant__ ForwardArgs args) {
  __shared__ typename FwdLists<T>::Shared shared;
  FwdLists<T>(args, shared).run();
}

}  // namespace fovea::cuda
