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
  /// `roots` are what the function computes: for a constructor the members of its place. `given`: a step whose value is a
  /// parameter, `pair`.
  CudaFunction(const Steps& steps, const CudaMembers& members, Place place, const std::vector<StepId>& roots,
               StepId given = kNoStep);

  /// An expression for a root. What is used more than once is a constant before it.
  std::string operand(StepId id) const;
  /// Adds a line.
  void line(const std::string& text) { text_ += "    " + text + "\n"; }
  const std::string& text() const { return text_; }

 private:
  void count(const std::vector<StepId>& roots);
  void write(StepId id);
  /// A member of another place, or what has a name in this function.
  bool has_name(StepId id) const;
  std::string name(StepId id) const;
  std::string expression(StepId id) const;

  const Steps& steps_;
  const CudaMembers& members_;
  Place place_;
  StepId given_;
  std::vector<int> uses_;     ///< by steps of this function, and as roots
  std::vector<int> heights_;  ///< steps inside each other in an expression
  std::vector<bool> written_;
  std::string text_;
};

/// "h_3", "q_7", "k_5": a member's name.
std::string member_name(const Steps& steps, StepId id);

}  // namespace fovea::expr
