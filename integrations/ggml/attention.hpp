// Computes a node FLASH_ATTN_EXT of ggml through the C ABI of Fovea.
#pragma once

#include <deque>
#include <string>

#include "part.hpp"

namespace fovea_ggml {

/// Keeps plans and memory from one node to the next. One caller at a time.
class Attention {
 public:
  void set_threads(int threads);
  /// False when Fovea refuses the node: error() says why.
  bool compute(const ggml_tensor& node);
  const std::string& error() const { return error_; }

 private:
  struct Chunks;
  bool compute_panels(const Work& work);
  bool compute_panel(const Work& work, int64_t batch, int64_t key_head, int64_t key_heads);
  Chunks chunks_of(const Work& work, int64_t most_keys) const;
  bool compute_chunks(const Work& work);
  bool compute_chunk(const Work& work, const Chunks& chunks, int64_t item, Worker& worker) const;
  bool failed();
  bool failed(const Worker& worker);

  int threads_ = 1;
  std::deque<Worker> workers_ =
      std::deque<Worker>(1);  ///< one a thread; the first also runs with all threads
  Memory queries_, partial_;
  std::string error_;
};

}  // namespace fovea_ggml
