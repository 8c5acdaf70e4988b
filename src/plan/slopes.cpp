// Hands the slopes on: the definitions of slopes.hpp.
#include "plan/slopes.hpp"

#include <memory>
#include <utility>

namespace fovea::plan {
namespace {

class WithNamedSlopes final : public Prepared {
 public:
  WithNamedSlopes(size_t place, std::unique_ptr<const Prepared> attend)
      : place_(place), attend_(std::move(attend)) {
    workspace_size = attend_->workspace_size;
    summary = attend_->summary + (attend_->summary.empty() ? "" : ", ") + "the score as alibi";
  }

  void run(const Buffers& buffers) const override {
    Buffers own = buffers;
    own.data[index_of(Role::kAlibi)] = buffers.data[place_];
    attend_->run(own);
  }

 private:
  size_t place_;
  std::unique_ptr<const Prepared> attend_;
};

}  // namespace

Preparation with_named_slopes(const AttentionProblem& problem, Preparation preparation) {
  if (problem.named_slopes < 0 || !preparation.prepared) return preparation;
  const size_t place = problem.named[static_cast<size_t>(problem.named_slopes)].place;
  return {std::make_unique<WithNamedSlopes>(place, std::move(preparation.prepared)), ""};
}

}  // namespace fovea::plan
