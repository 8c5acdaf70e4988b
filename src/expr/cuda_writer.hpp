// Steps as statements: which of them are members of Head, Query and Key, and the bodies of functions.
#pragma once

#include <string>
#include <vector>

#include "expr/cuda_steps.hpp"

namespace fovea::expr {

/// What functions of the pair use, and what Head, Query and Key therefore keep.
class CudaMembers {
 public:
  CudaMembers(const Steps& steps, const std::vector<StepId>& used_by_pairs);

  bool is_member(StepId id) const { return member_[id]; }
  /// Those of a place, in the order of ids.
  std::vector<StepId> of(Place place) const;

 private:
  /// Finds the steps below those used at `place` that other places compute.
  void need(const std::vector<StepId>& used, Place place);
  void choose(Place place);
  StepId base_of(StepId id) const;

  const Steps& steps_;
  std::vector<bool> needed_, member_;
};

/// The body of a constructor, or of a function of the pair.
class CudaFunction {
 public:
  CudaFunction(const Steps& steps, const CudaMembers& members, Place place);

  /// Counts the uses of what the function computes; before any text of it.
  void count(StepId root);
  /// An expression for the step; what is used more than once becomes a constant before it.
  std::string operand(StepId id) { return reference(id, 0); }
  /// Adds a line.
  void line(const std::string& text) { text_ += "    " + text + "\n"; }
  void assign_member(StepId id);
  const std::string& text() const { return text_; }

 private:
  std::string name(StepId id) const;
  std::string reference(StepId id, int depth);
  std::string expression(StepId id, int depth);

  const Steps& steps_;
  const CudaMembers& members_;
  Place place_;
  std::vector<int> uses_;
  std::vector<bool> counted_, written_;
  std::string text_;
};

/// "h_3", "q_7", "k_5": a member's name.
std::string member_name(const Steps& steps, StepId id);

}  // namespace fovea::expr
