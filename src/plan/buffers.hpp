// The checks of one run: cheap, since everything that can be is computed once, when the plan is made.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"

namespace fovea::plan {

inline constexpr size_t kWorkspaceAlignment = 64;

/// What the pointers of a run must be.
class BufferRules {
 public:
  BufferRules() = default;
  /// `check_contents`: of a problem on a GPU, too.
  BufferRules(const AttentionProblem& problem, size_t workspace_size, bool check_contents);

  /// Checks presence, alignment, the workspace, and that no output shares memory with anything else; on the
  /// CPU then that the memory is its own (CUDA backends look at theirs themselves) and what cu_seqlens, seqused,
  /// tables and keys hold. Reads no other memory, allocates nothing unless it fails. With check_contents on a GPU it copies these to
  /// the host, for which it waits. Throws RequestError(kInvalidArgument).
  void check(const AttentionProblem& problem, const Buffers& buffers) const;

 private:
  struct Rule {
    uint8_t place;
    bool output;
    uint8_t element_size;
    int64_t extent;  ///< bytes from the first to past the last element
  };
  void check_overlaps(const AttentionProblem& problem, const Buffers& buffers) const;
  void check_memory(const AttentionProblem& problem, const Buffers& buffers) const;
  void check_contents_of_gpu(const AttentionProblem& problem, const Buffers& buffers) const;

  std::vector<Rule> rules_;  ///< of the tensors that have memory; outputs first
  size_t outputs_ = 0;
  uint64_t absent_ = 0;  ///< bit i: the problem has nothing at place i
  size_t workspace_size_ = 0;
  bool has_sequence_lengths_ = false, has_key_lists_ = false;  ///< that runs check
  bool on_gpu_ = false;
  bool tells_memory_ = false;  ///< on the CPU: whether pointers can be known for those of a GPU
};

}  // namespace fovea::plan
