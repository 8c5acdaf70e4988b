// A problem on one family of kernels: chosen and laid out once, launched by every run.
#pragma once

#include <cuda.h>

#include <optional>
#include <string>
#include <vector>

#include "core/backend.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {

class CudaPlan final : public Prepared {
 public:
  /// "" when the family can do the problem on the device of its tensors, else the first clause that fails.
  static std::string cannot_because(Family family, const AttentionProblem& problem);

  CudaPlan(Family family, const AttentionProblem& problem, bool deterministic);

  /// Checks the pointers and the stream, then launches. No allocation, lock, synchronisation; may be captured
  /// in a graph.
  void run(const Buffers& buffers) const;

 private:
  struct Launch {
    const Kernel* kernel;
    CUfunction function;
    unsigned x, y, z;
  };
  /// The launches of a run, in order, and what they are passed.
  struct Variant {
    std::vector<Launch> launches;
    ForwardArgs forward;  ///< without pointers
    BackwardArgs backward;
    int64_t split_q = 0, split_k = 0, split_v = 0;
    int64_t tile_counter = -1;  ///< of TmaForwardArgs; -1: without
    int64_t part_o = 0, part_lse = 0, lse_log2 = 0, delta = 0, dq_sum = 0;  ///< offsets in the workspace
    int64_t turns = -1;
    int64_t workspace_size = 0;
    bool aligned_only = false;
    const Kernel* tma = nullptr;  ///< the main kernel, where it copies by TMA
    std::string summary;
  };
  struct Memory {
    Role role;
    const char* name;
  };

  Variant make_variant(Family family, const AttentionProblem& problem, bool deterministic,
                       bool any_address) const;
  const Variant& variant_for(const tile::AttentionParams& bound) const {
    return (bound.aligned16 & needs_aligned_) == needs_aligned_ ? first_ : *any_address_;
  }
  void check_memory(const char* name, const void* pointer, const char* remedy) const;
  void check_stream(CUstream stream) const;
  template <class Args>
  void launch(const Variant& variant, Args& args, const Buffers& buffers) const;
  template <class Args>
  void add(Variant& variant, const Kernel& kernel, const Args& args) const;

  Pass pass_;
  int device_;
  DType dtype_;
  CUcontext context_;
  std::vector<Memory> memory_;  ///< tensors that have any
  Variant first_;
  /// For pointers that are no multiples of 16 bytes, where the first one needs them to be.
  std::optional<Variant> any_address_;
  uint32_t needs_aligned_ = 0;  ///< bits of tile::AlignedBit without which a run takes that
  /// Packed problems without sequences run as one empty sequence: all their rows follow it, and get their
  /// zeros. Its bounds lie here in the workspace. -1: there are sequences.
  int64_t no_sequences_ = -1;
  bool writes_rng_state_ = false;
};

}  // namespace fovea::cuda
