// Elements of tensors: where they lie, and whether they are inside.
#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "expr/cuda_lowering.hpp"

namespace fovea::expr {
namespace {

const char* type_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "const __half*";
    case DType::kBF16:
      return "const __nv_bfloat16*";
    case DType::kI32:
      return "const int*";
    case DType::kU8:
      return "const unsigned char*";
    default:
      return "const float*";
  }
}

std::string tensor_text(size_t tensor) {
  return "@t.at[" + std::to_string(tensor) + "]";
}

/// What is known of one dimension, or -1.
int64_t known(const std::vector<std::array<int64_t, kMaxRank>>& all, size_t tensor, size_t dimension) {
  return tensor < all.size() ? all[tensor][dimension] : -1;
}

bool fits_int(const std::optional<IntRange>& range) {
  return range && expr::fits_int(*range);
}

}  // namespace

bool CudaLowering::is_inside(const Node& element, size_t dimension) {
  const NodeId index = element.operand[dimension];
  if (graph_[index].op == Op::kVariable) return true;  // the promise of those who make Query and Key
  const IntRange range = steps_[step(index)].range.integer;
  const int64_t extent = known(input_.extents, element.tensor(), dimension);
  return range.lowest >= 0 && range.highest < extent;
}

StepId CudaLowering::inside(const Node& element) {
  StepId all = steps_.boolean(true);
  for (size_t d = 0; d < element.operand_count; ++d) {
    if (is_inside(element, d)) continue;
    const StepId index = step(element.operand[d]);
    // As unsigned, what is negative is above every extent.
    const std::string cast =
        steps_[index].kind == Kind::kLong ? "static_cast<unsigned long long>(" : "static_cast<unsigned>(";
    const std::string extent = tensor_text(element.tensor()) + ".extent[" + std::to_string(d) + "]";
    all = steps_.both(all, steps_.add(Kind::kBool, cast + "$0) < " + cast + extent + ")", {index},
                                      Range::of_bool(true, true), Place::kHead));
  }
  return all;
}

StepId CudaLowering::offset(const Sum& index, size_t tensor, size_t dimension, bool gradient) {
  const StepId at = ints_.total(index);
  const int64_t stride = known(gradient ? input_.gradient_strides : input_.strides, tensor, dimension);
  if (stride == 1) return at;
  const std::string text =
      tensor_text(tensor) + (gradient ? ".gradient_stride[" : ".stride[") + std::to_string(dimension) + "]";
  const std::array operands = {steps_[at].range, Range::of_int(0, std::max<int64_t>(stride, 0))};
  const bool narrow = stride >= 0 && stride <= std::numeric_limits<int32_t>::max() &&
                      expr::fits_int(apply(Op::kMultiply, Type::kInt, operands).integer);
  // The range of an offset would depend on the value of its stride.
  if (narrow)
    return steps_.add(Kind::kInt, "%0 * static_cast<int>(" + text + ")", {at},
                      Range::of_int(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()),
                      Place::kHead);
  return steps_.add(Kind::kLong, "static_cast<long long>($0) * " + text, {at}, Range{}, Place::kHead);
}

/// The head's part of the offset is added first, the pair's last. That of the key is one number, as a pointer of the
/// query is another.
StepId CudaLowering::pointer(const Node& element, bool gradient) {
  const size_t tensor = element.tensor();
  std::vector<StepId> head, query, key, pair;
  const auto add = [&](const Sum& index, size_t d) {
    if (index.terms.empty() && index.constant == 0) return;
    const Place place = ints_.place(index);
    auto& list = place == Place::kPair    ? pair
                 : place == Place::kKey   ? key
                 : place == Place::kQuery ? query
                                          : head;
    list.push_back(offset(index, tensor, d, gradient));
  };
  for (size_t d = 0; d < element.operand_count; ++d) {
    const Sum& index = sums_[element.operand[d]];
    const SumParts parts = ints_.parts(index);
    Sum variable = IntSteps::combined(parts.pair, parts.key), fixed = parts.base;
    fixed.constant = index.constant;
    variable.constant = 0;
    // Where the index is compared with the extent, it is there as a whole.
    if (is_inside(element, d) && fits_int(ints_.range(variable)) && fits_int(ints_.range(fixed))) {
      add(fixed, d);
      add(variable, d);
    } else {
      add(index, d);
    }
  }
  const std::string type = gradient ? "float*" : type_of(tensors_[tensor].dtype);
  StepId at = gradient
                  ? steps_.pointer(type, tensor_text(tensor) + ".gradient", {}, Place::kHead)
                  : steps_.pointer(type, "reinterpret_cast<" + type + ">(" + tensor_text(tensor) + ".data)",
                                   {}, Place::kHead);
  const auto advance = [&](const std::vector<StepId>& offsets) {
    for (const StepId offset : offsets) at = steps_.pointer(type, "%0 + %1", {at, offset});
  };
  advance(head);
  advance(query);
  if (key.size() > 1) {
    StepId sum = key[0];
    for (size_t i = 1; i < key.size(); ++i)
      sum = steps_.add(Kind::kLong, "static_cast<long long>($0) + %1", {sum, key[i]}, Range{});
    key = {sum};
  }
  advance(key);
  advance(pair);
  return at;
}

void CudaLowering::lower_element(NodeId id, const Node& node) {
  const size_t tensor = node.tensor();
  const DType dtype = tensors_[tensor].dtype;
  StepId valid = steps_.boolean(true);
  for (const NodeId index : node.operands()) {
    valid = steps_.both(valid, valid_[index]);
    const Node& name = graph_[index];
    if (name.op != Op::kVariable) continue;
    reads_[0] = reads_[0] || name.variable() == Variable::kQ;
    reads_[1] = reads_[1] || name.variable() == Variable::kK;
  }
  const StepId in = inside(node), at = pointer(node, false);
  valid_[id] = steps_.both(valid, in);

  Range range;
  if (dtype == DType::kU8) range.integer = {0, 255};
  if (dtype == DType::kI32)
    range.integer = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  const bool is_half = dtype == DType::kF16 || dtype == DType::kBF16, is_float = expr::is_float(dtype);
  std::string text = is_half ? "static_cast<float>(__ldg($0))" : "__ldg($0)";
  std::vector<StepId> operands = {at};
  if (!steps_.is(in, true)) {
    text = "%1 ? " + text + (is_float ? " : 0.0f" : " : 0");
    operands.push_back(in);
  }
  const StepId value = steps_.add(is_float ? Kind::kFloat : Kind::kInt, text, operands, range);
  if (is_half && steps_.is(in, true)) note_pair_element(id, at, value);
  if (is_float) {
    values_[id] = value;
  } else {
    sums_[id] = ints_.of_term(value);
    origins_[value] = id;
  }
}

void CudaLowering::note_pair_element(NodeId id, StepId pointer, StepId value) {
  const Node& element = graph_[id];
  const size_t rank = element.operand_count;
  if (rank < 2 || known(input_.strides, element.tensor(), rank - 1) != 1) return;
  const auto is = [&](size_t dimension, Variable name) {
    const Node& index = graph_[element.operand[dimension]];
    return index.op == Op::kVariable && index.variable() == name;
  };
  if (!is(rank - 2, Variable::kQ) || !is(rank - 1, Variable::kK)) return;
  for (size_t d = 0; d + 2 < rank; ++d)
    if ((ints_.place(sums_[element.operand[d]]) | Place::kHead) != Place::kHead) return;
  // The last step of the pointer adds the key.
  const StepId step =
      steps_.add(Kind::kLong, tensor_text(element.tensor()) + ".stride[" + std::to_string(rank - 2) + "]", {},
                 Range::of_int(0, std::numeric_limits<int64_t>::max()), Place::kHead);
  pair_elements_.push_back({id, steps_[pointer].operands[0], step, value, tensors_[element.tensor()].dtype});
}

ElementGradient CudaLowering::gradient(NodeId element, NodeId derivative) {
  const Node& node = graph_[element];
  const StepId wanted = steps_.add(Kind::kBool, tensor_text(node.tensor()) + ".gradient != nullptr", {},
                                   Range::of_bool(true, true), Place::kHead);
  return {wanted, valid_[element], pointer(node, true), score(derivative)};
}

}  // namespace fovea::expr
