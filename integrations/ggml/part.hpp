// A part of a node FLASH_ATTN_EXT as a problem for Fovea: some of its keys, for the heads that share them.
#pragma once

#include <string>
#include <vector>

#include "mask.hpp"
#include "operation.hpp"
#include "request.hpp"

namespace fovea_ggml {

/// A node and what all of its parts read.
struct Work {
  Operation a;
  MaskView view;
  MaskSummary mask;
  std::vector<float> slopes;  ///< a query head; empty without ALiBi
  ggml_type type;             ///< computed_type()
  const void* queries;        ///< converted to it; null where that is float32

  int64_t group() const { return a.heads() / a.key_heads(); }
  /// Keys from this one on are seen by no query of the sequence.
  int64_t used_keys(int64_t batch) const;
  /// The first key that some query of the sequence sees, or one before it.
  int64_t first_key(int64_t batch) const;
};

struct Part {
  int64_t batch = 0, batches = 1, key_head = 0, key_heads = 1, key = 0, keys = 0;
  const void *k = nullptr, *v = nullptr;
  int64_t k_strides[3] = {}, v_strides[3] = {};  ///< batch, key, head
  float* o = nullptr;
  int64_t o_strides[3] = {};  ///< batch, query, head
  float* lse = nullptr;       ///< (query heads, queries); null when no other part has keys of these heads
  bool sinks = true;          ///< of several parts of a head one has the sinks

  bool alone() const { return lse == nullptr; }
};

/// The whole node.
Part whole(const Operation& a);
/// The result of one part of a sequence, at its place in the node's.
void place_result(const Work& work, Part& part);

/// What one thread keeps from part to part: plans and memory.
class Worker {
 public:
  /// False when Fovea refuses: error() says why.
  bool run(const Work& work, const Part& part, int threads);
  /// Converts the keys and values of the part, which is of one sequence, to the work's type and runs it on them.
  bool run_converted(const Work& work, Part part, int threads);
  /// Runs the part, which is of one sequence, on blocks of its keys and values as they are.
  bool run_blocks(const Work& work, const Part& part);
  const std::string& error() const { return error_; }

 private:
  void add_queries(const Work& work, const Part& part, Request& request) const;
  void add_mask(const Work& work, const Part& part, Request& request);
  void add_band(const Work& work, const Part& part, Request& request);
  std::string add_numbers(const Work& work, const Part& part, Request& request) const;

  Plans plans_;
  Memory panel_;
  std::vector<int32_t> used_;
  std::vector<QueryRow> rows_;
  int32_t low_ = 0;
  std::string error_;
};

}  // namespace fovea_ggml
