// What is asked: the problem as the caller describes it (ProblemDescription) and as the backends see it
// (AttentionProblem, made by plan/validate, where every field is resolved and consistent).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/arriving_keys.hpp"
#include "core/dropout_place.hpp"
#include "core/dtype.hpp"
#include "core/roles.hpp"

namespace fovea {

namespace expr {
struct PairExpressions;
}

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

/// A tensor that expressions read, and its gradient where that is asked for.
struct NamedTensor {
  std::string name;
  TensorDesc tensor, gradient;
  size_t place = 0, gradient_place = 0;  ///< among Buffers::data, where runs bring their pointers
};

/// What a problem has memory of: a place for each role, then the named tensors, then their gradients.
inline constexpr size_t kMaxNamedTensors = FOVEA_MAX_NAMED_TENSORS;
/// Those, and the tensors of terms that are arguments: slopes, bias, mask and block mask.
inline constexpr size_t kMaxTermTensors = kMaxNamedTensors + 4;
inline constexpr size_t kPlaceCount = kRoleCount + 2 * kMaxNamedTensors;
constexpr size_t place_of_named(size_t i) {
  return kRoleCount + i;
}
constexpr size_t place_of_gradient(size_t i) {
  return kRoleCount + kMaxNamedTensors + i;
}

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
  bool rotary_interleaved = false;
  std::string score, sees;  ///< "": none
  std::vector<NamedTensor> named;
};

/// A valid problem. Every tensor of `tensors` is rewritten to one form, so that backends index without cases:
///   q k v o qv d_o dq dk dv: (batch, seqlen, heads, size); packed: batch stride 0, the row of a sequence starts
///   at
///                         cu_seqlens[b]; k and v of a cache: (sequences or pages, rows, heads, size)
///   lse dlse:             (batch, heads, seqlen); packed: batch stride 0, likewise
///   bias dbias mask:      (batch, heads, seqlen_q, seqlen_k), stride 0 where a dimension broadcasts
///   block_mask:           the same, in blocks
///   keys:                 (batch, heads_kv, seqlen_q, count), stride 0 where batch or heads broadcast; packed as lse
///   k_new v_new:          as q; packed by cu_seqlens_k_new
///   alibi:                (batch, heads), stride 0 where it broadcasts
///   named and gradients:  as they are; a dimension of size 1 that is indexed by a name of the pair alone has stride 0, and
///                         the size kMaxDimension
struct AttentionProblem {
  Pass pass = Pass::kForward;
  DType dtype = DType::kF32;  ///< of q, k, v and d_o, those of 8 bits left out; of o where q has 8 bits
  int64_t batch = 0, heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;  ///< longest sequence of the batch
  int64_t total_q = 0, total_k = 0;    ///< packed: rows of q and k; else batch * seqlen
  bool packed = false;                 ///< queries have cu_seqlens
  bool packed_k = false;               ///< keys, too; the backward has both or neither
  double scale = 1;
  bool causal = false;                          ///< as asked; already folded into window_right
  int64_t window_left = -1, window_right = -1;  ///< -1: unlimited; causal gives window_right = 0
  double softcap = 0, dropout = 0;
  int64_t block_q = 0, block_k = 0;
  int64_t list_size = 0;       ///< entries of each list of keys
  int64_t arriving_keys = 0;   ///< forward: the first keys of each sequence, for which a run has ArrivingKeys
  int64_t arriving_heads = 0;  ///< key heads that arrive together
  int64_t caches = 0, cache_rows = 0;  ///< with page_table or cache_batch: the first sizes of k and v
  int64_t table_columns = 0;
  int64_t new_rows = 0;  ///< rows that a sequence appends at most
  int64_t total_new = 0;
  int64_t positions = 0, rotary_half = 0;  ///< rows and columns of the tables of angles
  bool rotary_interleaved = false;
  bool rotary_by_row = false;  ///< each query has a position of its own; else all that of the first
  TensorDescs tensors;
  std::shared_ptr<const expr::PairExpressions> expressions;  ///< null: the problem has none
  std::vector<NamedTensor> named;
  int named_slopes = -1;  ///< the named tensor that a run brings for alibi, too; -1: alibi comes as itself

  const TensorDesc& operator[](Role r) const { return tensors[index_of(r)]; }
  bool has(Role r) const { return tensors[index_of(r)].present; }
  /// What lies at a place; not present where the problem has nothing there.
  const TensorDesc& at(size_t place) const {
    static constexpr TensorDesc kNothing;
    if (place < kRoleCount) return tensors[place];
    const size_t i = (place - kRoleCount) % kMaxNamedTensors;
    if (i >= named.size()) return kNothing;
    return place < place_of_gradient(0) ? named[i].tensor : named[i].gradient;
  }
  /// The same, to change it; the problem has it.
  TensorDesc& at(size_t place) {
    return const_cast<TensorDesc&>(static_cast<const AttentionProblem*>(this)->at(place));
  }
  /// What messages call it.
  std::string name_at(size_t place) const {
    if (place < kRoleCount) return name_of(static_cast<Role>(place));
    const size_t i = (place - kRoleCount) % kMaxNamedTensors;
    const std::string name = "named." + (i < named.size() ? named[i].name : std::to_string(i));
    return place < place_of_gradient(0) ? name : name + ".gradient";
  }
  bool writes(size_t place) const {
    if (place >= kRoleCount) return place >= place_of_gradient(0);
    const auto role = static_cast<Role>(place);
    return is_output(role, pass) || (appends() && is_cache(role));
  }
  /// Whether the keys of a sequence lie elsewhere than at its place of k and v.
  bool has_cache() const {
    return has(Role::kPageTable) || has(Role::kCacheBatch) || has(Role::kLeftPadK) || packed != packed_k;
  }
  /// Whether a run writes to k and v before it reads them.
  bool appends() const { return has(Role::kKNew); }
  bool packed_new() const { return has(Role::kCuSeqlensKNew); }
  bool rotates() const { return has(Role::kRotaryCos); }
  /// Elements of a query and of a key that meet in a score.
  int64_t score_dim() const { return head_dim + (has(Role::kQV) ? head_dim_v : 0); }
  int64_t group() const { return heads_q / heads_kv; }  ///< query heads that share one key head
  /// With one sequence, as long as the longest: what is chosen by its sizes is the same in any batch.
  AttentionProblem of_one_sequence() const {
    AttentionProblem one = *this;
    one.batch = 1;
    one.total_q = seqlen_q;
    one.total_k = seqlen_k;
    return one;
  }
};

/// How a forward divides the keys of a tile of queries among those that compute at the same time.
struct KeySplits {
  int most = 0;                  ///< parts, at most; 0: as many as pay, 1: all keys in one
  bool batch_invariant = false;  ///< the bits of a sequence's results do not depend on the batch around it
};

/// How to do it.
struct PlanOptions {
  const char* backend = nullptr;  ///< nullptr: first that can
  int num_threads = 0;            ///< 0: all that the process may use
  bool deterministic = false;
  KeySplits splits = {};
  int sm_margin = 0;            ///< CUDA: multiprocessors left to others
  bool check_contents = false;  ///< CUDA: each run checks what lengths and tables hold, for which it waits
  /// CPU: the problem is a part of one over several ranks. A backward is then divided for the threads that it has, not so that its bits
  /// are the same for any number of them.
  bool is_part = false;
  int64_t arriving_keys = 0, arriving_heads = 0;  ///< see AttentionProblem
};

/// Pointers of one run, by place.
struct Buffers {
  std::array<void*, kPlaceCount> data{};
  uint64_t seed = 0, offset = 0;
  DropoutPlace dropout;
  ArrivingKeys arriving;  ///< where the problem has some
  void* workspace = nullptr;
  size_t workspace_size = 0;
  void* stream = nullptr;  ///< CUDA: where the work is put; null is the default stream

  void* of(const NamedTensor& named) const { return data[named.place]; }
  void* gradient_of(const NamedTensor& named) const { return data[named.gradient_place]; }
  template <class T>
  T* get(Role r) const {
    return static_cast<T*>(data[index_of(r)]);
  }
};

}  // namespace fovea
