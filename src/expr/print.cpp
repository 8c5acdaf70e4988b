// Precedence decides about parentheses, the rules of types about float(x).
#include "expr/print.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <span>

namespace fovea::expr {
namespace {

class Printer {
 public:
  Printer(const Expression& expression, size_t most)
      : tensors_(expression.tensors), graph_(expression.graph), most_(most) {}

  std::string run(NodeId root, Use use) {
    // A score that is an int is converted as a whole.
    write(use == Use::kScore ? bare(root) : root, 0);
    if (text_.size() > most_) text_.replace(most_, std::string::npos, "...");
    return std::move(text_);
  }

 private:
  /// Without the conversion of an int.
  NodeId bare(NodeId id) const { return graph_[id].op == Op::kToFloat ? graph_[id].operand[0] : id; }

  /// Whether the operation converts its operands when it is parsed from their ints: it needs floats, or, after the
  /// first int, another operand is a float.
  bool converts(const Node& node, size_t operand) const {
    if (node.op == Op::kToFloat) return false;
    std::array<Type, kMaxRank> types{};
    for (size_t i = 0; i < node.operand_count; ++i) {
      // Where all are ints, the first one is written as float(x), which makes the others follow.
      const size_t first = node.op == Op::kWhere ? 1 : 0;
      types[i] = graph_[i == first && all_ints(node, first) ? node.operand[i] : bare(node.operand[i])].type;
    }
    const std::span<const Type> given(types.data(), node.operand_count);
    return given[operand] == Type::kInt && operand_type(node.op, given, operand) == Type::kFloat;
  }

  bool all_ints(const Node& node, size_t first) const {
    if (node.op >= Op::kExp && node.op <= Op::kFloor) return false;  // these convert by themselves
    const auto operands = node.operands().subspan(first);
    return std::all_of(operands.begin(), operands.end(),
                       [&](NodeId id) { return graph_[bare(id)].type == Type::kInt; });
  }

  void operand(const Node& node, size_t i, int precedence) {
    const NodeId id = node.operand[i];
    write(graph_[id].op == Op::kToFloat && converts(node, i) ? bare(id) : id, precedence);
  }

  void list(const Node& node, char open, char close) {
    text_ += open;
    for (size_t i = 0; i < node.operand_count; ++i) {
      if (i > 0) text_ += ", ";
      operand(node, i, 0);
    }
    text_ += close;
  }

  /// Inside an operator of a precedence above that of the node, the node stands in parentheses.
  void write(NodeId id, int precedence) {
    if (text_.size() > most_) return;
    const Node& node = graph_[id];
    const OpInfo& info = info_of(node.op);
    if (info.form == Form::kLeaf) {
      leaf(node);
    } else if (info.form == Form::kCall) {
      text_ += info.text;
      list(node, '(', ')');
    } else {
      const bool inside = info.precedence < precedence;
      if (inside) text_ += '(';
      if (info.form == Form::kPrefix) {
        text_ += info.text;
        operand(node, 0, info.precedence);
      } else {
        operand(node, 0, info.precedence);
        text_.append(" ").append(info.text).append(" ");
        operand(node, 1, info.precedence + 1);  // operators group from the left
      }
      if (inside) text_ += ')';
    }
  }

  void leaf(const Node& node) {
    switch (node.op) {
      case Op::kInt:
        text_ += std::to_string(node.payload);
        break;
      case Op::kBool:
        text_ += node.payload != 0 ? "true" : "false";
        break;
      case Op::kVariable:
        text_ += kVariableNames[static_cast<size_t>(node.payload)];
        break;
      case Op::kFloat:
        number(node.as_float());
        break;
      default:
        text_ += tensors_[node.tensor()].name;
        if (node.operand_count > 0) list(node, '[', ']');
    }
  }

  /// The shortest digits that give the same float64, with a point or an exponent.
  void number(double value) {
    std::array<char, 40> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    const std::string written(digits.data(), end);
    text_ += written;
    if (written.find_first_of(".e") == std::string::npos) text_ += ".0";
  }

  const std::vector<TensorDeclaration>& tensors_;
  const Graph& graph_;
  size_t most_;
  std::string text_;
};

}  // namespace

std::string print(const Expression& expression, NodeId node, size_t most) {
  const Use use = node == expression.root ? expression.use : Use::kSees;
  return Printer(expression, most).run(node, use);
}

}  // namespace fovea::expr
