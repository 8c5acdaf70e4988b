// Texts become trees; each named tensor is checked against what indexes it.
#include "plan/expressions.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/status.hpp"
#include "expr/differentiate.hpp"
#include "expr/excerpt.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"
#include "plan/tensor_checks.hpp"
#include "plan/text.hpp"

namespace fovea::plan {
namespace {

std::string argument_of(const NamedTensor& named) {
  return "named." + named.name;
}
std::string gradient_of(const NamedTensor& named) {
  return argument_of(named) + ".gradient";
}

// --- names ---

void check_names(const std::vector<NamedTensor>& named) {
  if (named.size() > kMaxNamedTensors) {
    throw_invalid("num_named", std::to_string(named.size()) + " tensors",
                  "at most " + std::to_string(kMaxNamedTensors),
                  "put several into one, with an index that chooses");
  }
  for (size_t i = 0; i < named.size(); ++i) {
    if (!expr::may_name_tensor(named[i].name)) {
      throw_invalid("named." + std::to_string(i), "the name " + expr::quoted(named[i].name),
                    "a letter or _, then letters, digits and _, and no name of the language",
                    "rename the tensor");
    }
    for (size_t j = 0; j < i; ++j) {
      if (named[i].name != named[j].name) continue;
      throw_invalid(argument_of(named[i]), "two tensors of this name", "one name for each tensor",
                    "rename one of them");
    }
  }
}

// --- each tensor by itself ---

/// What the tensor is in expressions. Bools are read as bytes.
DType element_type(const NamedTensor& named) {
  const DType type = named.tensor.dtype == DType::kBool ? DType::kU8 : named.tensor.dtype;
  constexpr std::array kTypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kI32, DType::kU8};
  if (std::find(kTypes.begin(), kTypes.end(), type) == kTypes.end()) {
    throw_invalid(argument_of(named), std::string(name_of(type)),
                  "float32, float16, bfloat16, int32, uint8 or bool", "convert the tensor");
  }
  return type;
}

void check_gradient(const AttentionProblem& p, const NamedTensor& named, bool has_score) {
  if (!named.gradient.present) return;
  const std::string argument = gradient_of(named);
  if (p.pass != Pass::kBackward) {
    throw_invalid(argument, "a tensor", "none in a forward problem",
                  "leave it out, or set pass to FOVEA_BACKWARD");
  }
  if (!has_score) {
    throw_invalid(argument, "a tensor", "none, as there is no score", "leave it out: sees has no gradient");
  }
  if (!expr::is_float(named.tensor.dtype)) {
    throw_invalid(argument, "the gradient of a tensor of " + std::string(name_of(named.tensor.dtype)),
                  "one of a float tensor", "leave it out");
  }
  if (named.gradient.dtype != DType::kF32) {
    throw_invalid(argument, std::string(name_of(named.gradient.dtype)), "float32, in which it is summed",
                  "allocate it as float32");
  }
  const TensorDesc &t = named.tensor, &g = named.gradient;
  if (t.ndim != g.ndim || !std::equal(t.shape.begin(), t.shape.begin() + t.ndim, g.shape.begin())) {
    throw_invalid(argument, "shape " + shape_text(g), shape_text(t) + ", that of " + named.name,
                  "allocate it in the shape of the tensor");
  }
}

// --- texts ---

std::optional<expr::Expression> parse(const std::string& text, expr::Use use,
                                      const std::vector<expr::TensorDeclaration>& tensors) {
  if (text.empty()) return std::nullopt;
  auto parsed = expr::parse(text, use, tensors);
  if (const auto* error = std::get_if<expr::ParseError>(&parsed))
    throw RequestError(Status::kInvalidArgument, std::string(name_of(use)), error->text());
  return std::get<expr::Expression>(std::move(parsed));
}

// --- tensors and what indexes them ---

/// How many values a name takes, at most.
int64_t values_of(const AttentionProblem& p, expr::Variable name) {
  switch (name) {
    case expr::Variable::kB:
      return p.batch;
    case expr::Variable::kH:
      return p.heads_q;
    case expr::Variable::kHk:
      return p.heads_kv;
    case expr::Variable::kQ:
      return p.seqlen_q;
    case expr::Variable::kK:
      return p.seqlen_k;
    case expr::Variable::kNq:
      return p.seqlen_q + 1;
    case expr::Variable::kNk:
      return p.seqlen_k + 1;
    case expr::Variable::kS:
      break;  // no int, so it is no index
  }
  return 0;
}

/// Dimensions of size 1 that a name indexes alone, for each tensor: bit d.
using Broadcasts = std::array<int, kMaxNamedTensors>;

void check_indices(const AttentionProblem& p, const expr::Expression& expression, Broadcasts& broadcasts) {
  expr::for_each_element(expression, [&](const expr::Graph& graph, const expr::Node& element) {
    const NamedTensor& named = p.named[element.tensor()];
    for (size_t d = 0; d < element.operand_count; ++d) {
      const auto name = expr::index_name(graph, element, d);
      if (!name) continue;
      const int64_t size = named.tensor.shape[d], values = values_of(p, *name);
      if (size == 1) {
        broadcasts[element.tensor()] |= 1 << d;
      } else if (size < values) {
        throw_invalid(argument_of(named), "shape " + shape_text(named.tensor),
                      "at least " + std::to_string(values) + " in dimension " + std::to_string(d) +
                          ", which " + std::string(expr::kVariableNames[static_cast<size_t>(*name)]) +
                          " indexes, or 1 for all",
                      "check the order of its dimensions");
      }
    }
  });
}

void broadcast(TensorDesc& t, int dimensions) {
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d) {
    if ((dimensions >> d & 1) == 0) continue;
    t.stride[d] = 0;
    t.shape[d] = kMaxDimension;
  }
}

}  // namespace

void read_expressions(const ProblemDescription& description, AttentionProblem& p) {
  if (description.score.empty() && description.sees.empty()) {
    if (description.named.empty()) return;
    throw_invalid(argument_of(description.named.front()), "a tensor", "none, as there is no expression",
                  "leave it out, or set score or sees");
  }
  check_names(description.named);
  p.named = description.named;
  std::vector<expr::TensorDeclaration> declarations;
  for (size_t i = 0; i < p.named.size(); ++i) {
    p.named[i].place = place_of_named(i);
    p.named[i].gradient_place = place_of_gradient(i);
  }
  for (NamedTensor& named : p.named) {
    declarations.push_back({named.name, element_type(named), named.tensor.ndim});
    check_memory(argument_of(named), named.tensor, p[Role::kQ], {});
    check_gradient(p, named, !description.score.empty());
    if (named.gradient.present)
      check_memory(gradient_of(named), named.gradient, p[Role::kQ], {.output = true});
  }
  auto expressions = std::make_shared<expr::PairExpressions>();
  expressions->score = parse(description.score, expr::Use::kScore, declarations);
  expressions->sees = parse(description.sees, expr::Use::kSees, declarations);
  Broadcasts broadcasts{};
  for (const auto* expression : {&expressions->score, &expressions->sees}) {
    if (*expression) check_indices(p, **expression, broadcasts);
  }
  for (size_t i = 0; i < p.named.size(); ++i) {
    broadcast(p.named[i].tensor, broadcasts[i]);
    if (p.named[i].gradient.present) broadcast(p.named[i].gradient, broadcasts[i]);
  }
  p.expressions = std::move(expressions);
}

std::string describe_expressions(const AttentionProblem& p) {
  constexpr size_t kLongest = 400;  // derivatives repeat what a tree shares
  std::string text;
  const auto line = [&](const std::string& name, const expr::Expression& expression, expr::NodeId node) {
    text += (text.empty() ? "" : "\n") + name + "\t" + expr::print(expression, node, kLongest);
  };
  if (!p.expressions) return text;
  if (p.expressions->score) {
    expr::ScoreDerivative derivative = expr::differentiate_by_s(*p.expressions->score);
    expr::Expression& score = derivative.score;
    line("score", score, score.root);
    line("d score / d s", score, derivative.by_s);
    for (size_t i = 0; i < p.named.size(); ++i) {
      if (!expr::is_float(p.named[i].tensor.dtype)) continue;
      for (const expr::ElementDerivative& d : expr::differentiate_by_elements(score, i))
        line("d score / d " + expr::print(score, d.element, kLongest), score, d.derivative);
    }
  }
  if (p.expressions->sees) line("sees", *p.expressions->sees, p.expressions->sees->root);
  return text;
}

}  // namespace fovea::plan
