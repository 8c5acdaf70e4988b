#include "expr/cuda_writer.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <string_view>

namespace fovea::expr {
namespace {

/// Steps inside one expression; compilers have limits, and readers too.
constexpr int kMaxNested = 8;

/// Whether a text is a name, a literal or a call: no operator stands outside its parentheses.
bool is_primary(std::string_view text) {
  if (text.front() == '-' || text.front() == '!') return false;
  int open = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool behind_space = i > 0 && text[i - 1] == ' ';
    if (c == '(' || c == '[' || (c == '<' && !behind_space)) ++open;
    if (c == ')' || c == ']' || (c == '>' && open > 0 && !behind_space && text[i - 1] != '-')) --open;
    if (c == ' ' && open == 0) return false;
  }
  return true;
}

}  // namespace

std::string member_name(const Steps& steps, StepId id) {
  const Place place = steps[id].place;
  const char* letter = place == Place::kHead ? "h_" : place == Place::kQuery ? "q_" : "k_";
  return letter + std::to_string(id);
}

// --- members ---

CudaMembers::CudaMembers(const Steps& steps, const std::vector<StepId>& used_by_pairs)
    : steps_(steps), needed_(steps.size(), false), member_(steps.size(), false) {
  need(used_by_pairs, Place::kPair);
  for (const Place place : {Place::kQuery, Place::kKey, Place::kHead}) {
    choose(place);
    if (place != Place::kHead) need(of(place), place);
  }
}

std::vector<StepId> CudaMembers::of(Place place) const {
  std::vector<StepId> members;
  for (StepId id = 0; id < steps_.size(); ++id) {
    if (member_[id] && steps_[id].place == place) members.push_back(id);
  }
  return members;
}

void CudaMembers::need(const std::vector<StepId>& used, Place place) {
  std::vector<StepId> waiting = used;
  std::vector<bool> seen(steps_.size(), false);
  while (!waiting.empty()) {
    const StepId id = waiting.back();
    waiting.pop_back();
    if (seen[id]) continue;
    seen[id] = true;
    const Step& step = steps_[id];
    if (step.constant() || step.parameter()) continue;
    if (step.place != place) {
      needed_[id] = true;
    } else {
      waiting.insert(waiting.end(), step.operands.begin(), step.operands.end());
    }
  }
}

StepId CudaMembers::base_of(StepId id) const {
  while (steps_[id].cheap) {
    const auto& operands = steps_[id].operands;
    const auto next = std::find_if(operands.begin(), operands.end(),
                                   [&](StepId operand) { return !steps_[operand].constant(); });
    if (steps_[*next].place != steps_[id].place || steps_[*next].parameter()) break;
    id = *next;
  }
  return id;
}

/// Steps that are cheap from the same base share it as their member; a single one is a member itself.
void CudaMembers::choose(Place place) {
  std::map<StepId, std::vector<StepId>> by_base;
  for (StepId id = 0; id < steps_.size(); ++id) {
    if (needed_[id] && steps_[id].place == place) by_base[base_of(id)].push_back(id);
  }
  for (const auto& [base, users] : by_base) member_[users.size() > 1 ? base : users[0]] = true;
}

// --- functions ---

CudaFunction::CudaFunction(const Steps& steps, const CudaMembers& members, Place place)
    : steps_(steps),
      members_(members),
      place_(place),
      uses_(steps.size(), 0),
      counted_(steps.size(), false),
      written_(steps.size(), false) {}

void CudaFunction::count(StepId root) {
  ++uses_[root];
  std::vector<StepId> waiting = {root};
  while (!waiting.empty()) {
    const StepId id = waiting.back();
    waiting.pop_back();
    const bool member = members_.is_member(id) && steps_[id].place != place_;
    if (counted_[id] || member) continue;
    counted_[id] = true;
    for (const StepId operand : steps_[id].operands) {
      ++uses_[operand];
      waiting.push_back(operand);
    }
  }
}

std::string CudaFunction::name(StepId id) const {
  static constexpr std::array<std::string_view, 3> kObjects = {"head.", "query.", "key."};
  const Step& step = steps_[id];
  if (members_.is_member(id) && (step.place != place_ || written_[id])) {
    const size_t object = step.place == Place::kHead ? 0 : step.place == Place::kQuery ? 1 : 2;
    return std::string(step.place == place_ ? "" : kObjects[object]) + member_name(steps_, id);
  }
  return "x_" + std::to_string(id);
}

std::string CudaFunction::reference(StepId id, int depth) {
  const Step& step = steps_[id];
  if (written_[id] || (members_.is_member(id) && step.place != place_)) return name(id);
  const bool leaf = step.operands.empty();
  if (leaf || (uses_[id] < 2 && depth < kMaxNested)) return expression(id, depth + 1);
  const std::string value = expression(id, 0);
  line((step.kind == Kind::kPointer ? step.type + " const x_" : "const " + step.type + " x_") +
       std::to_string(id) + " = " + value + ";");
  written_[id] = true;
  return name(id);
}

std::string CudaFunction::expression(StepId id, int depth) {
  const Step& step = steps_[id];
  std::string text;
  for (size_t i = 0; i < step.text.size(); ++i) {
    const char c = step.text[i];
    if (c == '@') {
      if (place_ != Place::kHead) text += "head.";
    } else if (c == '$' || (c == '%' && i + 1 < step.text.size() && std::isdigit(step.text[i + 1]))) {
      const std::string operand = reference(step.operands[static_cast<size_t>(step.text[++i] - '0')], depth);
      const bool bare = c == '$' || is_primary(operand);
      text += bare ? operand : "(" + operand + ")";
    } else {
      text += c;
    }
  }
  return text;
}

void CudaFunction::assign_member(StepId id) {
  const std::string value = expression(id, 0);
  const bool pointer = steps_[id].kind == Kind::kPointer;
  line(member_name(steps_, id) + " = " + (pointer ? "opaque(" + value + ")" : value) + ";");
  written_[id] = true;
}

}  // namespace fovea::expr
