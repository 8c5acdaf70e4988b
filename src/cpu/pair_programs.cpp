// Makes the programs of a problem.
#include "cpu/pair_programs.hpp"

#include <algorithm>
#include <limits>

#include "cpu/lowering.hpp"
#include "cpu/ops.hpp"
#include "cpu/program_compiler.hpp"
#include "expr/differentiate.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu {
namespace {

/// NaN where a pair is not valid.
ValueId score_of(Values& values, const Lowered& lowered) {
  if (lowered.valid == kNoValue) return lowered.value;
  const ValueId nan = values.number(std::numeric_limits<float>::quiet_NaN());
  return values.select(Kind::kFloat, lowered.valid, lowered.value, nan);
}

ValueId not_equal_zero(Values& values, ValueId value) {
  return values.make(Code::kNotEqual, Kind::kFloat, Kind::kMask, {value, values.number(0)});
}

bool is_number(const expr::Graph& graph, expr::NodeId id, double value) {
  return graph[id].op == expr::Op::kFloat && graph[id].as_float() == value;
}

/// The name s: the products times the scale.
ValueId s_of(const AttentionProblem& p, Values& values) {
  const ValueId tile = values.tile(kScoreTile);
  if (p.scale == 1) return tile;
  return values.make(Code::kMultiply, Kind::kFloat, {tile, values.number(static_cast<float>(p.scale))});
}

/// An addition to the gradient of each element that the score reads.
ValueId addition_of(const expr::Graph& graph, const expr::ElementDerivative& d, const TensorDesc& layout,
                    size_t target, Lowering& lowering, Values& values) {
  lowering.of(d.element);
  const Offsets offsets = lowering.offsets_of(d.element, layout);
  const ValueId d_score = values.tile(kGradientTile);
  // What nothing is added to stays as it is, even where the other factor is infinite.
  ValueId added = kNoValue, value = d_score;
  if (!is_number(graph, d.derivative, 1)) {
    const ValueId derivative = score_of(values, lowering.of(d.derivative));
    added = values.both(not_equal_zero(values, d_score), not_equal_zero(values, derivative));
    value = values.make(Code::kMultiply, Kind::kFloat, {value, derivative});
  }
  added = values.both(added, offsets.valid);
  if (added != kNoValue) value = values.select(Kind::kFloat, added, value, values.number(0));
  ValueNode node{Code::kAddTo, Kind::kFloat, Kind::kFloat};
  node.wide_offsets = offsets.wide;
  node.everywhere = offsets.valid == kNoValue;
  // Two elements that are one where a dimension stands for all are added twice, so their additions must differ.
  node.payload = static_cast<int64_t>(target) | static_cast<int64_t>(d.element) << kGradientBits;
  node.shape = kByPair;
  node.operand = {offsets.part[0], offsets.part[1], offsets.part[2], value};
  return values.add(node);
}

Program gradient_program(const AttentionProblem& p, std::span<const GradientLayout> layouts) {
  expr::Expression score = *p.expressions->score;
  std::vector<std::vector<expr::ElementDerivative>> derivatives;
  for (const GradientLayout& layout : layouts)
    derivatives.push_back(expr::differentiate_by_elements(score, layout.tensor));
  Values values;
  Lowering lowering(p, score, false, s_of(p, values), values);
  std::vector<ValueId> additions;
  for (size_t i = 0; i < layouts.size(); ++i) {
    for (const expr::ElementDerivative& d : derivatives[i]) {
      if (is_number(score.graph, d.derivative, 0)) continue;
      additions.push_back(addition_of(score.graph, d, layouts[i].layout, i, lowering, values));
    }
  }
  return compile(std::move(values), {}, additions, false, kPanel);
}

/// Of an expression without s.
Program value_program(const AttentionProblem& p, const expr::Expression& expression) {
  Values values;
  Lowering lowering(p, expression, false, kNoValue, values);
  const ValueId value = score_of(values, lowering.of(expression.root));
  const ProgramOutput output{value, kScoreTile};
  return compile(std::move(values), {&output, 1}, {}, false, kPanel);
}

bool reads_tile(const Program& program, ProgramTile tile) {
  return std::any_of(program.pairs.begin(), program.pairs.end(), [&](const Instruction& i) {
    return std::any_of(i.operand.begin(), i.operand.end(), [&](const Place& place) {
      return place.space == Space::kTile && place.offset == tile;
    });
  });
}

}  // namespace

PairPrograms::PairPrograms(const AttentionProblem& p, bool keys_on_columns,
                           std::span<const GradientLayout> gradient_layouts) {
  if (!p.expressions) return;
  const std::optional<expr::Expression>& score = p.expressions->score;
  const std::optional<expr::Expression>& sees = p.expressions->sees;
  has_score = score.has_value();
  has_sees = sees.has_value();
  const bool backward = p.pass == Pass::kBackward;
  Values values;
  const ValueId s = has_score ? s_of(p, values) : values.tile(kScoreTile);
  std::vector<ProgramOutput> outputs;
  ValueId result = s;
  if (has_score) {
    const expr::ScoreDerivative tree = expr::differentiate_by_s(*score);
    Lowering lowering(p, tree.score, keys_on_columns, s, values);
    result = score_of(values, lowering.of(tree.score.root));
    has_slope = backward && !is_number(tree.score.graph, tree.by_s, 1);
    if (has_slope) outputs.push_back({score_of(values, lowering.of(tree.by_s)), kSlopeTile});
  }
  const int64_t width = keys_on_columns ? kProgramWidth : kPanel;
  if (!keys_on_columns) add_forms(p);
  outputs.push_back({result, kScoreTile});
  if (has_score) all = compile(values, outputs, {}, keys_on_columns, width);
  if (has_score && !has_form && !keys_on_columns && !backward)
    strip = compile(values, outputs, {}, false, kAttendLanes);
  if (has_sees) {
    Lowering lowering(p, *sees, keys_on_columns, s, values);
    const Lowered seen_pairs = lowering.of(sees->root);
    const ValueId lowest = values.number(-std::numeric_limits<float>::infinity());
    outputs.back().value =
        values.select(Kind::kFloat, values.both(seen_pairs.valid, seen_pairs.value), result, lowest);
    some = compile(values, outputs, {}, keys_on_columns, width);
    const ValueId zero = values.number(0);
    const ProgramOutput output{
        values.select(Kind::kFloat, values.both(seen_pairs.valid, seen_pairs.value), zero, lowest),
        kScoreTile};
    if (!keys_on_columns) shown = compile(values, {&output, 1}, {}, false, width);
    const std::vector<bool> needed = expr::needed_by(sees->graph, sees->root);
    for (expr::NodeId id = 0; id <= sees->root; ++id) {
      const expr::Node& node = sees->graph[id];
      if (!needed[id] || node.op != expr::Op::kVariable) continue;
      sees_by_head = sees_by_head || node.variable() == expr::Variable::kH;
      sees_by_key_head = sees_by_key_head || node.variable() == expr::Variable::kHk;
    }
  }
  if (has_score && !gradient_layouts.empty()) {
    gradients = gradient_program(p, gradient_layouts);
    gradients_read_score = reads_tile(gradients, kScoreTile);
  }
}

/// What blocks need where they need no program for each pair.
void PairPrograms::add_forms(const AttentionProblem& p) {
  // Products that are not seen are -inf, and have to be scores of -inf.
  if (has_score && p.scale > 0 && p.group() <= kPanel) {
    if (const auto form = form_of_score(p, *p.expressions->score)) {
      has_form = true;
      elements = form->elements;
      if (form->of_distance) of_distance = value_program(p, *form->of_distance);
      if (form->factor) factor = value_program(p, *form->factor);
    }
  }
  if (!has_sees) return;
  mask = form_of_sees(p, *p.expressions->sees);
  classes = classes_of_sees(p, *p.expressions->sees);
}

int64_t PairPrograms::scratch_bytes() const {
  return std::max({all.scratch_bytes(), some.scratch_bytes(), gradients.scratch_bytes(),
                   of_distance.scratch_bytes(), factor.scratch_bytes(), strip.scratch_bytes(),
                   shown.scratch_bytes()});
}

std::string PairPrograms::summary() const {
  const auto count = [](int64_t n) {
    return std::to_string(n) + (n == 1 ? " operation a pair" : " operations a pair");
  };
  std::string text;
  if (has_score) text = "score of " + count(all.operations());
  if (has_sees) {
    const int64_t own = some.operations() - (has_score ? all.operations() : 0);
    text += (text.empty() ? "" : ", ") + ("sees of " + count(own));
  }
  if (!gradients.empty()) text += ", gradients of " + count(gradients.operations());
  return text;
}

}  // namespace fovea::cpu
