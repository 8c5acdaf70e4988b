// Cascades: keys in levels, where queries of several sequences attend once to the keys that they share. Part of fovea.hpp.
//
// A level is a forward problem over packed queries. All levels have the same q; cu_seqlens_q of each says which neighbouring rows form
// a group, and k and v (a cache or not) hold the keys that a group shares. A row attends to the keys of its group in every level:
//
//   const fovea::Problem shared = {.q = q, .k = prefix_k, .v = prefix_v, .cu_seqlens_q = all_rows, .seqused_k = prefix_lengths};
//   const fovea::Problem own = {.q = q, .k = k, .v = v, .cu_seqlens_q = starts, .seqused_k = lengths, .causal = true};
//   fovea::cascade({shared, own}, {.o = o});
//
// The result is that of one call over the keys of all levels, one level behind the other. For repeated calls make a Cascade once.
#pragma once

#include "fovea/fovea.hpp"

namespace fovea {
inline namespace v0 {

/// The levels of a cascade, planned. Immutable, as a Plan is: any number of threads may run one, each with a workspace of its own.
class Cascade {
 public:
  /// `levels`: problems without o and lse; one of them alone may have a sink. Positions (causal, windows, biases) count within a level.
  /// `into`: o (total_q, Hq, Dv), float32, float16 or bfloat16, and lse (Hq, total_q), which may be left out. Data pointers are not
  /// kept.
  Cascade(std::vector<Problem> levels, const Part& into, const Options& options = {})
      : o_dtype_(into.o.dtype()), has_lse_(into.lse) {
    check(levels, into);
    copy(into.o, o_shape_, o_strides_);
    o_shape_[0] = 1;
    lse_shape_ = {1, o_shape_[2], o_shape_[1]};
    if (into.lse) copy(into.lse, lse_shape_, lse_strides_);
    size_t of_levels = 0;
    for (Problem& level : levels) {
      level.o = described({o_shape_[1], o_shape_[2], o_shape_[3]}, into.o.device());
      level.lse = described({o_shape_[2], o_shape_[1]}, into.o.device());
      plans_.emplace_back(level, options);
      of_levels = std::max(of_levels, plans_.back().workspace_size());
    }
    parts_offset_ = rounded_up(of_levels);
    const auto rows = static_cast<size_t>(o_shape_[1] * o_shape_[2]);
    lse_offset_ = rounded_up(rows * static_cast<size_t>(o_shape_[3]) * sizeof(float));
    part_size_ = lse_offset_ + rounded_up(rows * sizeof(float));
  }

  /// Bytes that each run needs: those of a level, as they run one after the other, and a float32 result of each.
  size_t workspace_size() const noexcept { return parts_offset_ + plans_.size() * part_size_; }
  /// Where tensors and workspace lie.
  fovea_device device() const noexcept { return plans_.front().device(); }
  const Plan& level(size_t index) const { return plans_.at(index); }

  /// `levels`: the pointers of each, without o, lse and stream. `o` and `lse` (null without it) get the result. `workspace` is aligned to
  /// FOVEA_WORKSPACE_ALIGNMENT. On a GPU the work is put on `stream`, and nothing synchronises.
  void run(std::span<const Buffers> levels, void* o, void* lse, void* workspace, size_t workspace_size,
           void* stream = nullptr) const {
    check_run(levels.size(), lse, workspace_size);
    std::vector<fovea_tensor> os, lses;
    auto* const parts = static_cast<char*>(workspace) + parts_offset_;
    for (size_t i = 0; i < levels.size(); ++i) {
      Buffers buffers = levels[i];
      buffers.o = parts + i * part_size_;
      buffers.lse = parts + i * part_size_ + lse_offset_;
      buffers.stream = stream;
      plans_[i].run(buffers, parts_offset_ > 0 ? workspace : nullptr, parts_offset_);
      os.push_back(tensor(buffers.o, dtype_of<float>(), o_shape_, nullptr));
      lses.push_back(tensor(buffers.lse, dtype_of<float>(), lse_shape_, nullptr));
    }
    std::vector<const fovea_tensor*> o_parts, lse_parts;
    for (size_t i = 0; i < os.size(); ++i) {
      o_parts.push_back(&os[i]);
      lse_parts.push_back(&lses[i]);
    }
    const fovea_tensor merged = tensor(o, o_dtype_, o_shape_, o_strides_.data());
    const fovea_tensor merged_lse = tensor(lse, dtype_of<float>(), lse_shape_, lse_strides_.data());
    detail::check(fovea_merge(static_cast<int32_t>(os.size()), o_parts.data(), lse_parts.data(), &merged,
                              has_lse_ ? &merged_lse : nullptr, stream));
  }
  void run(std::span<const Buffers> levels, void* o, void* lse, Workspace& workspace,
           void* stream = nullptr) const {
    run(levels, o, lse, workspace.data(), workspace.size(), stream);
  }

 private:
  [[noreturn]] static void refuse(const std::string& argument, const std::string& what) {
    throw Error(FOVEA_INVALID_ARGUMENT, argument, argument + ": got " + what);
  }
  static void check(const std::vector<Problem>& levels, const Part& into) {
    if (levels.empty()) refuse("levels", "none, expected 1 or more; give each set of keys a level");
    if (into.o.shape().size() != 3 || (into.lse && into.lse.shape().size() != 2)) {
      refuse("into",
             "other dimensions, expected o (total_q, heads_q, head size of v) and lse (heads_q, total_q), as "
             "queries "
             "are packed; drop the batch dimension");
    }
    const auto same = [](fovea_dtype a, fovea_dtype b) { return a.code == b.code && a.bits == b.bits; };
    const fovea_dtype type = into.o.dtype();
    if ((!same(type, dtype_of<float>()) && !same(type, dtype_of<f16>()) && !same(type, dtype_of<bf16>())) ||
        (into.lse && !same(into.lse.dtype(), dtype_of<float>()))) {
      refuse("into",
             "another type, expected o of float32, float16 or bfloat16 and lse of float32; convert it behind "
             "the call");
    }
    if (into.o.read_only() || into.lse.read_only())
      refuse("into", "a pointer to const, expected memory to write; it is an output");
    if (into.lse && (into.lse.shape()[0] != into.o.shape()[1] || into.lse.shape()[1] != into.o.shape()[0]))
      refuse("into", "lse of another shape than o, expected (heads_q, total_q); make it agree");
    size_t sinks = 0;
    for (const Problem& level : levels) {
      sinks += level.sink ? 1 : 0;
      if (level.o || level.lse || level.pass != Pass::forward)
        refuse("levels",
               "o, lse or a backward, expected forward problems without them; `into` has the result");
    }
    if (sinks > 1)
      refuse("levels", "a sink in " + std::to_string(sinks) + " levels, expected it in one; it counts once");
  }
  void check_run(size_t levels, const void* lse, size_t workspace_size) const {
    if (levels != plans_.size()) {
      refuse("levels", "pointers of " + std::to_string(levels) + " levels, expected " +
                           std::to_string(plans_.size()) + ", those of the cascade; give each one its own");
    }
    if ((lse != nullptr) != has_lse_ && o_shape_[1] > 0)
      refuse("lse", has_lse_ ? "a null pointer, expected the memory of the cascade's lse; set it"
                             : "a pointer, expected none, as the cascade has no lse; leave it out");
    if (workspace_size < this->workspace_size()) {
      refuse("workspace_size", std::to_string(workspace_size) + ", expected at least " +
                                   std::to_string(this->workspace_size()) + "; see Cascade::workspace_size");
    }
  }

  /// Shape and strides of a tensor behind a dimension for the batch.
  template <size_t kRank>
  static void copy(const Tensor& from, std::array<int64_t, kRank>& shape,
                   std::array<int64_t, kRank>& strides) {
    const fovea_tensor t = from.c_tensor();
    int64_t next = 1;
    for (size_t axis = kRank; axis-- > 1;) {
      shape[axis] = t.shape[axis - 1];
      strides[axis] = t.strides == nullptr ? next : t.strides[axis - 1];
      next *= shape[axis];
    }
  }
  static Tensor described(std::initializer_list<int64_t> shape, fovea_device device) {
    return Tensor(static_cast<float*>(nullptr), shape).on(device);
  }
  template <size_t kRank>
  fovea_tensor tensor(void* data, fovea_dtype dtype, const std::array<int64_t, kRank>& shape,
                      const int64_t* strides) const {
    return {data, device(), static_cast<int32_t>(kRank), dtype, shape.data(), strides, 0};
  }
  static size_t rounded_up(size_t bytes) {
    return (bytes + FOVEA_WORKSPACE_ALIGNMENT - 1) / FOVEA_WORKSPACE_ALIGNMENT * FOVEA_WORKSPACE_ALIGNMENT;
  }

  std::vector<Plan> plans_;
  fovea_dtype o_dtype_;
  bool has_lse_;
  std::array<int64_t, 4> o_shape_{}, o_strides_{};
  std::array<int64_t, 3> lse_shape_{}, lse_strides_{};
  size_t parts_offset_ = 0, lse_offset_ = 0, part_size_ = 0;
};

/// A cascade in one call, on the data of the tensors. On a GPU its workspace is made and destroyed, which synchronises.
inline void cascade(const std::vector<Problem>& levels, const Part& into, const Options& options = {}) {
  const Cascade planned(levels, into, options);
  std::vector<Buffers> buffers;
  for (const Problem& level : levels) buffers.push_back(buffers_of(level));
  Workspace workspace(planned.workspace_size(), planned.device());
  planned.run(buffers, into.o.data(), into.lse.data(), workspace, options.stream);
}

}  // namespace v0
}  // namespace fovea
