// The definitions of append.hpp.
#include "plan/append.hpp"

#include <array>
#include <string>
#include <utility>

#include "plan/buffers.hpp"

namespace fovea::plan {
namespace {

constexpr std::array kOfAppending = {Role::kKNew,      Role::kVNew,      Role::kCuSeqlensKNew,
                                     Role::kRotaryCos, Role::kRotarySin, Role::kRotaryPositions};

int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = kWorkspaceAlignment;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// The workspace: lengths, the rotated q, then what attention needs.
class AppendThenAttend final : public Prepared {
 public:
  AppendThenAttend(const AttentionProblem& problem, std::unique_ptr<const AppendStep> append,
                   std::unique_ptr<const Prepared> attend)
      : append_(std::move(append)),
        attend_(std::move(attend)),
        rotates_(problem.rotates()),
        q_offset_(aligned(problem.batch * int64_t{sizeof(int32_t)})) {
    const int64_t elements = problem.total_q * problem.heads_q * problem.head_dim;
    attend_offset_ = q_offset_ + (rotates_ ? aligned(elements * size_of(problem.dtype)) : 0);
    workspace_size = static_cast<size_t>(attend_offset_) + attend_->workspace_size;
    summary = attend_->summary;
    if (!summary.empty()) summary += ", ";
    summary += rotates_ ? "behind new rows of k and v, which are rotated" : "behind new rows of k and v";
  }

  void run(const Buffers& buffers) const override {
    auto* workspace = static_cast<char*>(buffers.workspace);
    auto* lengths = reinterpret_cast<int32_t*>(workspace);
    void* q = workspace + q_offset_;
    append_->run(buffers, lengths, q);
    Buffers attend = buffers;
    for (const Role role : kOfAppending) attend.data[index_of(role)] = nullptr;
    attend.data[index_of(Role::kSeqUsedK)] = lengths;
    if (rotates_) {
      attend.data[index_of(Role::kQ)] = q;
      attend.data[index_of(Role::kQDescale)] = nullptr;
    }
    attend.workspace = attend_->workspace_size > 0 ? workspace + attend_offset_ : nullptr;
    attend.workspace_size = attend_->workspace_size;
    attend_->run(attend);
  }

 private:
  std::unique_ptr<const AppendStep> append_;
  std::unique_ptr<const Prepared> attend_;
  bool rotates_;
  int64_t q_offset_, attend_offset_ = 0;
};

}  // namespace

AttentionProblem once_appended(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  if (!p.appends()) return p;
  if (p.rotates()) {
    TensorDesc& q = p.tensors[index_of(Role::kQ)];
    q.dtype = p.dtype;
    p.tensors[index_of(Role::kQDescale)] = {};
    const int64_t row = p.heads_q * p.head_dim;
    q.stride = {p.packed ? 0 : p.seqlen_q * row, row, p.head_dim, 1};
  }
  for (const Role role : kOfAppending) p.tensors[index_of(role)] = {};
  p.new_rows = p.total_new = p.positions = p.rotary_half = 0;
  return p;
}

Preparation try_prepare(const Backend& backend, const AttentionProblem& problem,
                        const PrepareOptions& options) {
  if (!problem.appends()) return backend.try_prepare(problem, options);
  Preparation attend = backend.try_prepare(once_appended(problem), options);
  if (!attend.clause.empty()) return attend;
  return {std::make_unique<AppendThenAttend>(problem, backend.prepare_append(problem, options),
                                             std::move(attend.prepared)),
          ""};
}

}  // namespace fovea::plan
