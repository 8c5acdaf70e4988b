// The header that replaces cuda/warp/expression.cuh for one problem: score, derivative, sees, what it promises.
#include "expr/cuda_text.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "expr/cuda_lowering.hpp"
#include "expr/cuda_writer.hpp"
#include "expr/differentiate.hpp"
#include "expr/print.hpp"

namespace fovea::expr {
namespace {

/// Functions that expressions call; each text has those that it needs.
struct Helper {
  std::string_view name, text;
};
constexpr Helper kHelpers[] = {{"wrapping_add", R"(
  __device__ __forceinline__ static long long wrapping_add(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
  }
)"},
                               {"wrapping_subtract", R"(
  __device__ __forceinline__ static long long wrapping_subtract(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b));
  }
)"},
                               {"wrapping_multiply", R"(
  __device__ __forceinline__ static long long wrapping_multiply(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b));
  }
)"},
                               {"wrapping_absolute", R"(
  __device__ __forceinline__ static long long wrapping_absolute(long long a) {
    return a < 0 ? static_cast<long long>(0 - static_cast<unsigned long long>(a)) : a;
  }
)"},
                               {"absolute", R"(
  template <class T>
  __device__ __forceinline__ static T absolute(T a) {
    return a < 0 ? -a : a;
  }
)"},
                               {"smaller", R"(
  template <class T>
  __device__ __forceinline__ static T smaller(T a, T b) {
    return b < a ? b : a;
  }
)"},
                               {"larger", R"(
  template <class T>
  __device__ __forceinline__ static T larger(T a, T b) {
    return b > a ? b : a;
  }
)"},
                               {"non_zero", R"(
  /// Pairs that divide by 0 are not valid, whatever they compute.
  template <class T>
  __device__ __forceinline__ static T non_zero(T a) {
    return a == 0 ? 1 : a;
  }
)"},
                               {"floor_quotient", R"(
  template <class T>
  __device__ __forceinline__ static T floor_quotient(T a, T b) {
    if (b == -1) return static_cast<T>(0 - static_cast<unsigned long long>(a));
    const T quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
  }
)"},
                               {"floor_remainder", R"(
  template <class T>
  __device__ __forceinline__ static T floor_remainder(T a, T b) {
    if (b == -1) return 0;
    const T remainder = a % b;
    return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
  }
)"},
                               {"minimum", R"(
  /// b is never NaN.
  __device__ __forceinline__ static float minimum(float a, float b) { return b < a ? b : a; }
)"},
                               {"minimum_of_number", R"(
  /// a is never NaN.
  __device__ __forceinline__ static float minimum_of_number(float a, float b) { return b >= a ? a : b; }
)"},
                               {"minimum_of_any", R"(
  __device__ __forceinline__ static float minimum_of_any(float a, float b) { return b != b || b < a ? b : a; }
)"},
                               {"maximum", R"(
  /// b is never NaN.
  __device__ __forceinline__ static float maximum(float a, float b) { return b > a ? b : a; }
)"},
                               {"maximum_of_number", R"(
  /// a is never NaN.
  __device__ __forceinline__ static float maximum_of_number(float a, float b) { return b <= a ? a : b; }
)"},
                               {"maximum_of_any", R"(
  __device__ __forceinline__ static float maximum_of_any(float a, float b) { return b != b || b > a ? b : a; }
)"},
                               {"opaque", R"(
  /// Compilers that see through a pointer add all offsets up for each pair, in 64 bits, before they add the pointer.
  template <class T>
  __device__ __forceinline__ static T* opaque(T* pointer) {
#ifdef __CUDA_ARCH__
    asm("" : "+l"(pointer));
#endif
    return pointer;
  }
)"}};

bool calls(const std::string& text, std::string_view name) {
  const std::string called(name);
  for (const std::string_view open : {"(", "<"}) {
    const std::string call = called + std::string(open);
    for (size_t at = text.find(call); at != std::string::npos; at = text.find(call, at + 1)) {
      const char before = at == 0 ? ' ' : text[at - 1];
      if (before == ' ' || before == '(' || before == '!' || before == '-') return true;
    }
  }
  return false;
}

/// All that kernels compute, in one graph, so that score, derivatives and mask share what they can.
struct Roots {
  std::vector<TensorDeclaration> tensors;
  Graph graph;
  NodeId score = kNoNode, slope = kNoNode, sees = kNoNode;
  std::vector<ElementDerivative> elements;

  bool slope_is_one() const {
    return slope == kNoNode || (graph[slope].op == Op::kFloat && graph[slope].as_float() == 1.0);
  }
};

bool is_zero(const Node& node) {
  return node.op == Op::kFloat && node.as_float() == 0;
}

Roots roots_of(const CudaTextInput& input) {
  Roots roots;
  if (input.score) {
    ScoreDerivative d = differentiate_by_s(compact(*input.score));
    for (size_t tensor = 0; tensor < input.gradients.size(); ++tensor) {
      if (!input.gradients[tensor]) continue;
      for (const ElementDerivative& element : differentiate_by_elements(d.score, tensor)) {
        if (!is_zero(d.score.graph[element.derivative])) roots.elements.push_back(element);
      }
    }
    roots.tensors = d.score.tensors;
    roots.graph = std::move(d.score.graph);
    roots.score = d.score.root;
    roots.slope = d.by_s;
  }
  if (input.sees) {
    const Expression sees = compact(*input.sees);
    std::vector<NodeId> places;
    for (Node node : sees.graph.nodes()) {
      for (size_t i = 0; i < node.operand_count; ++i) node.operand[i] = places[node.operand[i]];
      places.push_back(roots.graph.add(node));
    }
    roots.tensors = sees.tensors;
    roots.sees = places[sees.root];
  }
  return roots;
}

std::vector<bool> needed_nodes(const Roots& roots) {
  std::vector<bool> needed(roots.graph.size(), false);
  const auto need = [&](NodeId root) {
    if (root == kNoNode) return;
    const std::vector<bool> of_root = needed_by(roots.graph, root);
    for (NodeId id = 0; id < needed.size(); ++id) needed[id] = needed[id] || of_root[id];
  };
  need(roots.score);
  need(roots.slope);
  need(roots.sees);
  for (const ElementDerivative& element : roots.elements) need(element.derivative);
  return needed;
}

/// The text of one header.
class Header {
 public:
  explicit Header(const CudaTextInput& input)
      : input_(input),
        roots_(roots_of(input)),
        lowering_(input, roots_.tensors, roots_.graph, needed_nodes(roots_)) {
    if (roots_.score != kNoNode) score_ = lowering_.score(roots_.score);
    pair_ = pair_element();
    if (roots_.slope != kNoNode) slope_ = lowering_.score(roots_.slope);
    if (roots_.sees != kNoNode) sees_ = lowering_.sees(roots_.sees);
    for (const ElementDerivative& element : roots_.elements)
      gradients_.push_back(lowering_.gradient(element.element, element.derivative));
    std::vector<StepId> used;
    for (const StepId root : {score_, slope_, sees_}) {
      if (root != kNoStep) used.push_back(root);
    }
    for (const ElementGradient& gradient : gradients_)
      used.insert(used.end(), {gradient.inside, gradient.pointer, gradient.derivative});
    if (pair_) used.push_back(pair_->row);
    members_.emplace(lowering_.steps(), used);
  }

  std::string text() const {
    const std::string query = object(Place::kQuery), key = object(Place::kKey), rest = functions();
    const std::string body = query + key + rest;
    const std::string all = object(Place::kHead, body.find("head.t.") != std::string::npos) + body;
    std::string text = "// What depends on the expressions of a score and a mask (src/expr/cuda_text.cpp):\n";
    if (input_.score) text += "//   score  " + print(*input_.score, input_.score->root, 400) + "\n";
    if (input_.sees) text += "//   sees   " + print(*input_.sees, input_.sees->root, 400) + "\n";
    text += "#pragma once\n\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n\n";
    text += "#include \"tile/expression_tensors.hpp\"\n\nnamespace fovea::cuda {\n\nstruct Expression {\n";
    text += constants();
    for (const Helper& helper : kHelpers) {
      if (calls(all, helper.name)) text += helper.text;
    }
    return text + all + "};\n\n}  // namespace fovea::cuda\n";
  }

 private:
  std::string constants() const {
    const auto constant = [](std::string_view name, bool value) {
      return "  static constexpr bool " + std::string(name) + " = " + (value ? "true" : "false") + ";\n";
    };
    return constant("kHasScore", score_ != kNoStep) + constant("kHasSees", sees_ != kNoStep) +
           constant("kHasTerms", input_.has_terms) + constant("kSlopeIsOne", roots_.slope_is_one()) +
           constant("kReadsByQuery", lowering_.reads_by(Variable::kQ)) +
           constant("kReadsByKey", lowering_.reads_by(Variable::kK)) +
           constant("kHasGradients", !gradients_.empty()) + constant("kReadsPairs", pair_.has_value()) +
           "  using PairElement = " + pair_type() + ";\n";
  }

  /// One that the score reads: sees may read others.
  std::optional<PairElement> pair_element() const {
    std::optional<PairElement> found;
    if (roots_.score == kNoNode) return found;
    const std::vector<bool> read = needed_by(roots_.graph, roots_.score);
    for (const PairElement& element : lowering_.pair_elements()) {
      if (!read[element.node]) continue;
      if (!found || input_.pairs_of == roots_.graph[element.node].tensor()) found = element;
    }
    return found;
  }

  std::string pair_type() const { return pair_ && pair_->dtype == DType::kF16 ? "__half" : "__nv_bfloat16"; }

  /// Head, Query or Key.
  std::string object(Place place, bool keeps_tensors = false) const {
    const Steps& steps = lowering_.steps();
    const std::vector<StepId> members = members_->of(place);
    const CudaFunction body(steps, *members_, place, members);
    const std::string name = place == Place::kHead ? "Head" : place == Place::kQuery ? "Query" : "Key";
    const std::string parameters =
        place == Place::kHead ? "const tile::ExpressionTensors& t, int b, int h, int hk, int nq, int nk"
                              : std::string("const Head& head, int ") + (place == Place::kQuery ? "q" : "k");
    std::string text = "\n  struct " + name + " {\n";
    if (keeps_tensors) text += "    const tile::ExpressionTensors& t;\n";
    for (const StepId id : members) text += "    " + steps[id].type + " " + member_name(steps, id) + ";\n";
    text += "    __device__ __forceinline__ " + name + "(" + parameters + ")" +
            (keeps_tensors ? " : t(t)" : "") + " {\n";
    std::string_view lines = body.text();
    while (!lines.empty()) {
      const size_t end = lines.find('\n') + 1;
      text.append("  ").append(lines.substr(0, end));
      lines.remove_prefix(end);
    }
    text += "    }\n";
    if (place != Place::kHead) text += alike(place, name, members);
    return text + "  };\n";
  }

  /// Whether all members that sees reads have the same bits.
  std::string alike(Place place, const std::string& name, const std::vector<StepId>& members) const {
    const Steps& steps = lowering_.steps();
    const std::string sees = sees_body(), object = place == Place::kQuery ? "query." : "key.";
    const auto reads = [&](const std::string& member) {
      for (size_t at = sees.find(object + member); at != std::string::npos;
           at = sees.find(object + member, at + 1)) {
        const size_t end = at + object.size() + member.size();
        if (end == sees.size() || sees[end] < '0' || sees[end] > '9') return true;
      }
      return false;
    };
    std::string all;
    for (const StepId id : members) {
      const std::string member = member_name(steps, id);
      if (!reads(member)) continue;
      const auto bits = [&](const std::string& x) {
        return steps[id].type == "float" ? "__builtin_bit_cast(unsigned, " + x + ")" : x;
      };
      all += (all.empty() ? "" : " && ") + bits(member) + " == " + bits("other." + member);
    }
    return "    __device__ __forceinline__ bool alike(const " + name + "& other) const { return " +
           (all.empty() ? "true" : all) + "; }\n";
  }

  std::string functions() const {
    constexpr std::string_view kObjects = "const Head& head, const Query& query, const Key& key";
    const auto function = [&](std::string_view type, std::string_view name, std::string_view more,
                              const std::string& body, std::string_view before = "") {
      std::string text = "\n";
      text.append(before)
          .append("  __device__ __forceinline__ static ")
          .append(type)
          .append(" ")
          .append(name);
      return text.append("(").append(kObjects).append(more).append(") {\n").append(body).append("  }\n");
    };
    const StepId pair = pair_ ? pair_->value : kNoStep;
    return function("float", "score", ", float s", score_body(false)) +
           function("float", "score", ", float s, float& slope", score_body(true)) +
           function("float", "score_with", ", float s, float pair", score_body(false, pair)) +
           function("float", "score_with", ", float s, float pair, float& slope", score_body(true, pair)) +
           "\n  __device__ __forceinline__ static const " + pair_type() +
           "* pair_row(const Head& head, const Query& query) {\n" + pair_row_body() + "  }\n" +
           "\n  __device__ __forceinline__ static int64_t pair_row_step(const Head& head) {\n" +
           pair_row_step_body() + "  }\n" + function("bool", "sees", "", sees_body()) +
           function("void", "add_gradients", ", float s, float d_score, const Add& add", gradient_body(),
                    "  template <class Add>\n");
  }

  CudaFunction pair_function(const std::vector<StepId>& roots, StepId given = kNoStep) const {
    return {lowering_.steps(), *members_, Place::kPair, roots, given};
  }

  std::string pair_row_body() const {
    if (!pair_) return "    return nullptr;\n";
    CudaFunction body = pair_function({pair_->row});
    body.line("return " + body.operand(pair_->row) + ";");
    return body.text();
  }

  std::string pair_row_step_body() const {
    if (!pair_) return "    return 0;\n";
    CudaFunction body = pair_function({pair_->step});
    body.line("return " + body.operand(pair_->step) + ";");
    return body.text();
  }

  std::string score_body(bool with_slope, StepId given = kNoStep) const {
    if (score_ == kNoStep)
      return std::string(with_slope ? "    slope = 1.0f;\n" : "").append("    return s;\n");
    CudaFunction body = pair_function(with_slope ? std::vector{slope_, score_} : std::vector{score_}, given);
    if (with_slope) body.line("slope = " + body.operand(slope_) + ";");
    body.line("return " + body.operand(score_) + ";");
    return body.text();
  }

  std::string sees_body() const {
    if (sees_ == kNoStep) return "    return true;\n";
    CudaFunction body = pair_function({sees_});
    body.line("return " + body.operand(sees_) + ";");
    return body.text();
  }

  /// Lanes whose pairs have the same element add to it one after the other.
  std::string gradient_body() const {
    const Steps& steps = lowering_.steps();
    std::vector<StepId> roots;
    for (const ElementGradient& x : gradients_)
      roots.insert(roots.end(), {x.wanted, x.inside, x.pointer, x.derivative});
    CudaFunction body = pair_function(roots);
    for (const ElementGradient& x : gradients_) {
      const std::string derivative = body.operand(x.derivative);
      const std::string inside = steps.is(x.inside, true) ? "" : " && (" + body.operand(x.inside) + ")";
      const std::string times = derivative == "1.0f" ? "" : " * (" + derivative + ")";
      body.line("if (" + body.operand(x.wanted) + inside + ") add(" + body.operand(x.pointer) + ", d_score" +
                times + ");");
    }
    return body.text();
  }

  const CudaTextInput& input_;
  const Roots roots_;
  CudaLowering lowering_;
  StepId score_ = kNoStep, slope_ = kNoStep, sees_ = kNoStep;
  std::optional<PairElement> pair_;
  std::vector<ElementGradient> gradients_;
  std::optional<CudaMembers> members_;
};

}  // namespace

std::string cuda_text(const CudaTextInput& input) {
  return Header(input).text();
}

}  // namespace fovea::expr
