// Computes a node FLASH_ATTN_EXT of ggml through the C ABI of Fovea.
#pragma once

#include "mask.hpp"
#include "operation.hpp"
#include "request.hpp"

namespace fovea_ggml {

/// Keeps plans and memory from one node to the next. One thread at a time.
class Attention {
 public:
  void set_threads(int threads) { threads_ = threads; }
  /// False when Fovea refuses the node: fovea_last_error() says why.
  bool compute(const ggml_tensor& node);

 private:
  /// Keys of some heads of some of the batch, with their results where they go.
  struct Part {
    int64_t batch, batches, key_head, key_heads, key, keys;
    const void *k, *v;
    int64_t k_strides[3], v_strides[3];  ///< batch, key, head
    float* o;
    int64_t o_strides[3];  ///< batch, query, head
    float* lse;            ///< (heads, queries); null when the part is alone
    bool alone;            ///< no other part has keys of these heads
  };

  Part whole(const Operation& a) const;
  bool compute_converted(const Operation& a, const MaskSummary& mask);
  bool compute_chunk(const Operation& a, const MaskSummary& mask, Part part, const Part& all);
  bool run(const Operation& a, const MaskSummary& mask, const Part& part);
  void add_queries(const Operation& a, const Part& part, Request& request) const;
  void add_mask(const Operation& a, const MaskSummary& mask, const Part& part, Request& request);
  void add_band(const Operation& a, const MaskSummary& mask, const Part& part, Request& request) const;
  std::string add_numbers(const Operation& a, const MaskSummary& mask, const Part& part,
                          Request& request) const;
  bool merge(const Operation& a, const Part& sum, const Part& part) const;

  int threads_ = 1;
  Plans plans_;
  Memory queries_, panels_, partial_;
  std::vector<int32_t> used_;
  std::vector<float> slopes_, lse_;
};

}  // namespace fovea_ggml
