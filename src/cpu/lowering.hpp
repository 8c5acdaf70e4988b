// Trees of expressions as values of a program: kinds of lanes, offsets of elements, and masks of pairs that are not valid.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "core/problem.hpp"
#include "cpu/program.hpp"
#include "expr/graph.hpp"
#include "expr/range.hpp"

namespace fovea::cpu {

using ValueId = uint32_t;
inline constexpr ValueId kNoValue = ~ValueId{0};

/// What a value depends on.
enum Shape : uint8_t { kUniform = 0, kByColumn = 1, kByRow = 2, kByPair = 3 };

struct ValueNode {
  Code code = Code::kConstant;
  Kind kind = Kind::kFloat;    ///< of the instruction
  Kind result = Kind::kFloat;  ///< of its elements
  DType dtype = DType::kF32;
  bool wide_offsets = false, everywhere = false;
  uint8_t shape = kUniform;
  int64_t payload = 0;
  std::array<ValueId, 4> operand = {kNoValue, kNoValue, kNoValue, kNoValue};

  auto key() const {
    return std::tuple(code, kind, result, dtype, wide_offsets, everywhere, shape, payload, operand);
  }
  friend bool operator<(const ValueNode& a, const ValueNode& b) { return a.key() < b.key(); }
};

/// Equal values are one; operands stand before what uses them.
class Values {
 public:
  const ValueNode& operator[](ValueId id) const { return nodes_[id]; }
  ValueNode& at(ValueId id) { return nodes_[id]; }
  size_t size() const { return nodes_.size(); }

  /// The shape of the operands is added to that of the node.
  ValueId add(ValueNode node);
  ValueId make(Code code, Kind kind, Kind result, std::initializer_list<ValueId> operands,
               int64_t payload = 0);
  ValueId make(Code code, Kind kind, std::initializer_list<ValueId> operands, int64_t payload = 0) {
    return make(code, kind, kind, operands, payload);
  }
  ValueId number(float value);
  ValueId integer(Kind kind, int64_t value);
  /// A tile of the run, as a value of each pair.
  ValueId tile(ProgramTile number);
  ValueId converted(ValueId value, Kind kind);
  /// Both masks; kNoValue is one that is set everywhere.
  ValueId both(ValueId a, ValueId b);
  ValueId either(ValueId a, ValueId b);
  ValueId negated(ValueId mask) { return make(Code::kNot, Kind::kMask, {mask}); }
  ValueId select(Kind kind, ValueId mask, ValueId a, ValueId b) {
    return make(Code::kSelect, kind, {mask, a, b});
  }

 private:
  std::vector<ValueNode> nodes_;
  std::map<ValueNode, ValueId> places_;
};

/// A value, and the mask of where it is valid: kNoValue where it always is.
struct Lowered {
  ValueId value = kNoValue, valid = kNoValue;
};

/// The offset of an element in memory, in the parts that depend on the column, on the row and on the pair.
struct Offsets {
  std::array<ValueId, 3> part = {kNoValue, kNoValue, kNoValue};
  bool wide = false;
  ValueId valid = kNoValue;
};

/// Turns nodes of one expression's graph into values. `s` is the value of the name s.
class Lowering {
 public:
  Lowering(const AttentionProblem& problem, const expr::Expression& expression, bool keys_on_columns,
           ValueId s, Values& values);

  Lowered of(expr::NodeId id);
  /// The place of an element, in a tensor of these extents and strides.
  Offsets offsets_of(expr::NodeId element, const TensorDesc& tensor);

 private:
  bool fits(expr::NodeId id) const;
  Lowered made(expr::NodeId id);
  Lowered leaf(const expr::Node& node);
  Lowered element(expr::NodeId id);
  Lowered choice(expr::NodeId id);
  Lowered of_ints(expr::NodeId id);
  Lowered of_floats(expr::NodeId id);
  Lowered compared(const expr::Node& node);
  Lowered as_float(expr::NodeId int_node);
  ValueId product(ValueId a, ValueId b);
  ValueId quotient(ValueId a, ValueId b);
  bool has_steps() const;
  bool is_exact_as_float(expr::NodeId id) const;
  ValueId divided(const expr::Node& node, Kind kind, ValueId a, ValueId b);
  ValueId valid_of(const expr::Node& node);

  const AttentionProblem& p_;
  const expr::Expression& expression_;
  const expr::Graph& graph_;
  bool keys_on_columns_;
  ValueId s_;
  bool has_steps_;
  Values& values_;
  std::vector<expr::Range> ranges_;
  std::vector<Lowered> lowered_;
};

/// For each node, what it may be over all pairs of the problem.
std::vector<expr::Range> ranges_of(const AttentionProblem& problem, const expr::Expression& expression);

}  // namespace fovea::cpu
