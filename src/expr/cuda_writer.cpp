// Steps of an expression as statements of CUDA: members of Head, Query and Key, and bodies of functions.
#include "expr/cuda_writer.hpp"

#include <algorithm>
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

CudaFunction::CudaFunction(const Steps& steps, const CudaMembers& members, Place place,
                           const std::vector<StepId>& roots, StepId given)
    : steps_(steps),
      members_(members),
      place_(place),
      given_(given),
      uses_(steps.size(), 0),
      heights_(steps.size(), 0),
      written_(steps.size(), false) {
  count(roots);
  for (StepId id = 0; id < steps.size(); ++id) {
    if (uses_[id] > 0) write(id);
  }
}

bool CudaFunction::has_name(StepId id) const {
  return id == given_ || written_[id] || (members_.is_member(id) && steps_[id].place != place_);
}

void CudaFunction::count(const std::vector<StepId>& roots) {
  std::vector<StepId> waiting = roots;
  while (!waiting.empty()) {
    const StepId id = waiting.back();
    waiting.pop_back();
    if (++uses_[id] > 1 || has_name(id)) continue;
    waiting.insert(waiting.end(), steps_[id].operands.begin(), steps_[id].operands.end());
  }
}

/// Gives the step a name where it needs one, after its operands had theirs.
void CudaFunction::write(StepId id) {
  const Step& step = steps_[id];
  if (has_name(id)) return;
  const bool member = members_.is_member(id), pointer = step.kind == Kind::kPointer;
  for (const StepId operand : step.operands) {
    if (!has_name(operand)) heights_[id] = std::max(heights_[id], heights_[operand] + 1);
  }
  const bool shared = uses_[id] > 1 && !step.operands.empty();
  if (!member && !shared && heights_[id] <= kMaxNested) return;
  const std::string value = expression(id);
  written_[id] = true;
  if (member) return line(name(id) + " = " + (pointer ? "opaque(" + value + ")" : value) + ";");
  line((pointer ? step.type + " const " : "const " + step.type + " ") + name(id) + " = " + value + ";");
}

std::string CudaFunction::name(StepId id) const {
  if (id == given_) return "pair";
  const Place place = steps_[id].place;
  if (!members_.is_member(id)) return "x_" + std::to_string(id);
  const char* object = place == place_          ? ""
                       : place == Place::kHead  ? "head."
                       : place == Place::kQuery ? "query."
                                                : "key.";
  return object + member_name(steps_, id);
}

std::string CudaFunction::operand(StepId id) const {
  return has_name(id) ? name(id) : expression(id);
}

std::string CudaFunction::expression(StepId id) const {
  const Step& step = steps_[id];
  std::string text;
  for (size_t i = 0; i < step.text.size(); ++i) {
    const char c = step.text[i];
    const bool is_operand = c == '$' || (c == '%' && step.text[i + 1] != ' ');  // "a % b" is a remainder
    if (c == '@') {
      if (place_ != Place::kHead) text += "head.";
    } else if (is_operand) {
      const std::string value = operand(step.operands[static_cast<size_t>(step.text[++i] - '0')]);
      text += c == '$' || is_primary(value) ? value : "(" + value + ")";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace fovea::expr
