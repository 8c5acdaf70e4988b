// What is asked: the problem as the caller describes it (ProblemDescription) and as the backends see it
// (AttentionProblem, made by plan/validate, where every field is resolved and consistent).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "core/roles.hpp"

namespace fovea {

enum class DeviceType : uint8_t { kCpu, kCuda };

/// Shape and strides (in elements) of one tensor; `data` is known for descriptions that came with memory.
struct TensorDesc {
  bool present = false;
  DType dtype = DType::kF32;
  DeviceType device = DeviceType::kCpu;
  int device_id = 0;
  int ndim = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};
  void* data = nullptr;
};

using TensorDescs = std::array<TensorDesc, kRoleCount>;

/// The numbers of a problem, before validation (what fovea_problem holds, in C++ types).
struct ProblemDescription {
  Pass pass = Pass::kForward;
  TensorDescs tensors;
  double scale = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0, dropout = 0;
  int64_t block_q = 0, block_k = 0;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
};

/// A valid problem. Every tensor of `tensors` is rewritten to one form, so that backends index without cases:
///   q k v o d_o dq dk dv: (batch, seqlen, heads, size); packed: batch stride 0, the row of a sequence starts
///   at
///                         cu_seqlens[b]
///   lse dlse:             (batch, heads, seqlen); packed: batch stride 0, likewise
///   bias dbias mask:      (batch, heads, seqlen_q, seqlen_k), stride 0 where a dimension broadcasts
///   block_mask:           the same, in blocks
///   alibi:                (batch, heads), stride 0 where it broadcasts
struct AttentionProblem {
  Pass pass = Pass::kForward;
  DType dtype = DType::kF32;  ///< of q, k, v, d_o and the gradients
  int64_t batch = 0, heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  ///< longest sequence of the batch
  int64_t total_q = 0, total_k = 0;    ///< packed: rows of q and k; else batch * seqlen
  bool packed = false;
  double scale = 1;
  bool causal = false;                          ///< as asked; already folded into window_right
  int64_t window_left = -1, window_right = -1;  ///< -1: unlimited; causal gives window_right = 0
  double softcap = 0, dropout = 0;
  int64_t block_q = 0, block_k = 0;
  TensorDescs tensors;

  const TensorDesc& operator[](Role r) const { return tensors[index_of(r)]; }
  bool has(Role r) const { return tensors[index_of(r)].present; }
  int64_t group() const { return heads_q / heads_kv; }  ///< query heads that share one key head
};

/// How to do it.
struct PlanOptions {
  const char* backend = nullptr;  ///< nullptr: first that can
  int num_threads = 0;            ///< 0: all that the process may use
  bool deterministic = false;
};

/// Pointers of one run, by role.
struct Buffers {
  std::array<void*, kRoleCount> data{};
  uint64_t seed = 0, offset = 0;
  void* workspace = nullptr;
  size_t workspace_size = 0;
  void* stream = nullptr;  ///< CUDA: where the work is put; null is the default stream

  template <class T>
  T* get(Role r) const {
    return static_cast<T*>(data[index_of(r)]);
  }
};

}  // namespace fovea
