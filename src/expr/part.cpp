// Copies a tree, and moves its names on the way.
#include "expr/part.hpp"

namespace fovea::expr {
namespace {

class Mover {
 public:
  Mover(const Expression& whole, const std::vector<Dimensions>& dimensions, const PartNames& names)
      : whole_(whole), dimensions_(dimensions), names_(names) {
    part_.use = whole.use;
    part_.tensors = whole.tensors;
  }

  Expression run() {
    for (const Node& node : whole_.graph.nodes()) places_.push_back(moved(node));
    part_.root = places_[whole_.root];
    part_ = compact(part_);
    bool reads_numbers = false;
    for_each_element(part_, [&](const Graph&, const Node& element) {
      reads_numbers = reads_numbers || element.tensor() == whole_.tensors.size();
    });
    if (reads_numbers) part_.tensors.push_back({names_.numbers, DType::kI32, 1});
    return std::move(part_);
  }

 private:
  Graph& graph() { return part_.graph; }

  NodeId number(Variable name) {
    const NodeId place = graph().integer(static_cast<int64_t>(number_of(name)));
    const NodeId given = graph().tensor(whole_.tensors.size(), DType::kI32, {&place, 1});
    const NodeId limit = graph().integer(names_.limits[number_of(name)]);
    return graph().make(Op::kClamp, {given, graph().integer(0), limit});
  }
  NodeId moved(const Node& from) {
    if (from.op == Op::kVariable) return variable(from.variable());
    Node node = from;
    for (size_t i = 0; i < node.operand_count; ++i)
      node.operand[i] = from.op == Op::kTensor ? index(from, i) : places_[from.operand[i]];
    return graph().add(node);
  }
  NodeId variable(Variable name) {
    if (!names_.is_moved[static_cast<size_t>(name)]) return graph().variable(name);
    if (!counts_pairs(name)) return number(name);
    return graph().make(Op::kAdd, {graph().variable(name), number(name)});
  }
  NodeId index(const Node& element, size_t d) {
    const Dimension& dimension = dimensions_[element.tensor()][d];
    if (dimension.name) return graph().variable(*dimension.name);
    const NodeId whole = places_[element.operand[d]];
    if (!dimension.stands_for_all) return whole;
    if (index_name(whole_.graph, element, d)) return graph().integer(0);
    // As in the whole: the one element, for any int that is not below 0.
    const NodeId is_inside = graph().make(Op::kGreaterEqual, {whole, graph().integer(0)});
    return graph().make(Op::kWhere, {is_inside, graph().integer(0), graph().integer(-1)});
  }

  const Expression& whole_;
  const std::vector<Dimensions>& dimensions_;
  const PartNames& names_;
  Expression part_;
  std::vector<NodeId> places_;
};

}  // namespace

std::vector<Dimensions> dimensions_of(const PairExpressions& all,
                                      const std::vector<std::array<bool, kMaxRank>>& is_one) {
  std::vector<Dimensions> dimensions(is_one.size());
  std::vector<std::array<bool, kMaxRank>> is_read(is_one.size()), is_mixed(is_one.size());
  for (const auto* expression : {&all.score, &all.sees}) {
    if (!*expression) continue;
    for_each_element(**expression, [&](const Graph& graph, const Node& element) {
      const size_t t = element.tensor();
      for (size_t d = 0; d < element.operand_count; ++d) {
        const auto name = index_name(graph, element, d);
        Dimension& dimension = dimensions[t][d];
        dimension.stands_for_all = dimension.stands_for_all || (name && is_one[t][d]);
        const bool differs = is_read[t][d] && dimension.name != name;
        is_mixed[t][d] = is_mixed[t][d] || differs || !name || !counts_pairs(*name);
        is_read[t][d] = true;
        dimension.name = name;
      }
    });
  }
  for (size_t t = 0; t < dimensions.size(); ++t) {
    for (size_t d = 0; d < dimensions[t].size(); ++d) {
      Dimension& dimension = dimensions[t][d];
      if (is_mixed[t][d]) dimension.name.reset();
      if (dimension.name) dimension.stands_for_all = false;
    }
  }
  return dimensions;
}

Expression in_part(const Expression& whole, const std::vector<Dimensions>& dimensions,
                   const PartNames& part) {
  return Mover(whole, dimensions, part).run();
}

}  // namespace fovea::expr
