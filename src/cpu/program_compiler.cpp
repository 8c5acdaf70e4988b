// Values become instructions.
#include "cpu/program_compiler.hpp"

#include <algorithm>

#include "cpu/ops.hpp"

namespace fovea::cpu {
namespace {

bool is_tile(const ValueNode& node) {
  return node.code == Code::kMove && node.operand[0] == kNoValue;
}

/// Which values the roots need; operands stand before what uses them.
std::vector<int> uses_of(const Values& values, std::span<const ValueId> roots) {
  std::vector<int> uses(values.size(), 0);
  for (const ValueId root : roots) ++uses[root];
  for (ValueId id = static_cast<ValueId>(values.size()); id-- > 0;) {
    if (uses[id] == 0) continue;
    for (const ValueId operand : values[id].operand) {
      if (operand != kNoValue) ++uses[operand];
    }
  }
  return uses;
}

/// Sums with a product, and absolute values of a difference, that nothing else needs become one operation.
void fuse(Values& values, std::span<const ValueId> roots) {
  const std::vector<int> uses = uses_of(values, roots);
  const auto is_own = [&](ValueId id, Code code) {
    return id != kNoValue && values[id].code == code && values[id].shape == kByPair && uses[id] == 1;
  };
  const auto is_product = [&](ValueId id) { return is_own(id, Code::kMultiply); };
  for (ValueId id = 0; id < values.size(); ++id) {
    ValueNode& node = values.at(id);
    const auto [a, b, c, d] = node.operand;
    if (uses[id] > 0 && node.code == Code::kAbs && node.kind != Kind::kWide && is_own(a, Code::kSubtract)) {
      node.operand = values[a].operand;
      node.code = Code::kAbsDifference;
    }
    if (uses[id] == 0 || node.kind != Kind::kFloat) continue;
    if (node.code == Code::kAdd && (is_product(a) || is_product(b))) {
      const ValueNode& product = values[is_product(a) ? a : b];
      node.operand = {product.operand[0], product.operand[1], is_product(a) ? b : a, kNoValue};
      node.code = Code::kMultiplyAdd;
    } else if (node.code == Code::kSubtract && is_product(b)) {
      node.operand = {values[b].operand[0], values[b].operand[1], a, kNoValue};
      node.code = Code::kNegatedMultiplyAdd;
    } else if (node.code == Code::kSubtract && is_product(a)) {
      node.operand = {values[a].operand[0], values[a].operand[1], b, kNoValue};
      node.code = Code::kMultiplySubtract;
    }
  }
}

/// Registers of one space, by size: a register is free again after the last instruction that reads it.
class Registers {
 public:
  explicit Registers(uint32_t alignment_elements) : elements_(alignment_elements) {}
  uint32_t take(uint32_t element_bytes) {
    auto& free = free_[element_bytes == 8];
    if (free.empty()) {
      const uint32_t at = used_;
      used_ += elements_ * element_bytes;
      return at;
    }
    const uint32_t at = free.back();
    free.pop_back();
    return at;
  }
  void give(uint32_t at, uint32_t element_bytes) { free_[element_bytes == 8].push_back(at); }
  uint32_t used() const { return used_; }

 private:
  uint32_t elements_, used_ = 0;
  std::array<std::vector<uint32_t>, 2> free_;
};

uint32_t bytes_of(Kind kind) {
  return kind == Kind::kWide ? 8 : 4;
}

class Compiler {
 public:
  Compiler(const Values& values, std::span<const ProgramOutput> outputs, std::span<const ValueId> roots,
           bool keys_on_columns, int64_t width)
      : values_(values),
        outputs_(outputs),
        uses_(uses_of(values, roots)),
        place_(values.size()),
        last_use_(values.size(), 0),
        spread_(values.size()),
        registers_{Registers(kProgramWidth), Registers(kProgramWidth),
                   Registers(static_cast<uint32_t>(kStripRows * kPanel))} {
    program_.width = width;
    program_.keys_on_columns = keys_on_columns;
  }

  Program run() {
    collect();
    find_last_uses();
    for (size_t i = 0; i < order_.size(); ++i) emit(order_[i], i);
    write_outputs();
    program_.column_bytes = registers_[0].used();
    program_.row_bytes = registers_[1].used();
    program_.pair_bytes = registers_[2].used();
    return std::move(program_);
  }

 private:
  /// Uniform and column values first, then those of rows, then pairs.
  static int phase_of(const ValueNode& node) {
    if (node.code == Code::kAddTo || node.shape == kByPair) return 2;
    return node.shape == kByRow ? 1 : 0;
  }
  void collect() {
    for (int phase = 0; phase < 3; ++phase) {
      for (ValueId id = 0; id < values_.size(); ++id) {
        const ValueNode& node = values_[id];
        if (uses_[id] == 0 || phase_of(node) != phase) continue;
        if (is_tile(node)) {
          place_[id] = {Space::kTile, static_cast<uint32_t>(node.payload)};
        } else {
          order_.push_back(id);
        }
      }
    }
  }
  void find_last_uses() {
    for (size_t i = 0; i < order_.size(); ++i) {
      for (const ValueId operand : values_[order_[i]].operand) {
        if (operand != kNoValue) last_use_[operand] = i;
      }
    }
    for (const ProgramOutput& output : outputs_) last_use_[output.value] = order_.size();
  }

  /// A tile that the value may be computed into: one that nothing reads, or any for the last instruction.
  Place output_place(ValueId id, size_t at) const {
    bool score_is_output = false;  // as it came, of another tile
    for (const ProgramOutput& output : outputs_) {
      score_is_output = score_is_output || (is_tile(values_[output.value]) && output.tile != kScoreTile);
    }
    for (const ProgramOutput& output : outputs_) {
      const bool may = output.tile != kScoreTile || (at + 1 == order_.size() && !score_is_output);
      if (output.value == id && values_[id].shape == kByPair && may) return {Space::kTile, output.tile};
    }
    return {};
  }

  /// Whether the executor takes a value of each row as this operand of a pair.
  static bool takes_rows(const ValueNode& node, size_t operand) {
    switch (node.code) {
      case Code::kLoad:
      case Code::kAddTo:
        return operand == 1;
      case Code::kSelect:
      case Code::kToFloat:
      case Code::kToInt:
      case Code::kToWide:
        return false;
      default:
        return node.kind != Kind::kWide;
    }
  }

  Place operand_of(const ValueNode& node, size_t i) {
    const ValueId id = node.operand[i];
    if (id == kNoValue) return {};
    if (phase_of(node) != 2 || values_[id].shape != kByRow) return place_[id];
    if (takes_rows(node, i)) return {Space::kEachRow, place_[id].offset};
    return spread(id);
  }

  /// A row's value for each pair; kept to the end, since few programs have one.
  Place spread(ValueId id) {
    Place& pairs = spread_[id];
    if (pairs.space == Space::kNone) {
      const Kind kind = values_[id].result;
      pairs = {Space::kPair, registers_[2].take(bytes_of(kind))};
      Instruction i{Code::kSpread, kind};
      i.operand[0] = {Space::kEachRow, place_[id].offset};
      i.to = pairs;
      program_.pairs.push_back(i);
    }
    return pairs;
  }

  void emit(ValueId id, size_t at) {
    const ValueNode& node = values_[id];
    const int phase = phase_of(node);
    Instruction i{node.code, node.kind, node.dtype, node.wide_offsets, node.everywhere};
    i.payload = node.payload;
    for (size_t x = 0; x < 4; ++x) i.operand[x] = operand_of(node, x);
    for (const ValueId operand : node.operand) release(operand, phase, at);
    if (node.code != Code::kAddTo) {
      place_[id] = output_place(id, at);
      if (place_[id].space == Space::kNone) {
        constexpr std::array kSpaces = {Space::kColumn, Space::kRow, Space::kPair};
        place_[id] = {kSpaces[static_cast<size_t>(phase)],
                      registers_[static_cast<size_t>(phase)].take(bytes_of(node.result))};
      }
      i.to = place_[id];
    }
    if (phase == 0) i.count = static_cast<int32_t>(node.shape == kUniform ? kProgramWidth : program_.width);
    if (phase == 1) i.count = program_.keys_on_columns ? 16 : kProgramWidth;
    (phase == 0 ? program_.columns : phase == 1 ? program_.rows : program_.pairs).push_back(i);
  }

  /// Frees the register of an operand that nothing reads later. Each strip begins anew, so what an earlier phase made
  /// stays.
  void release(ValueId id, int phase, size_t at) {
    if (id == kNoValue || last_use_[id] != at || phase_of(values_[id]) != phase) return;
    const Space space = place_[id].space;
    if (space != Space::kColumn && space != Space::kRow && space != Space::kPair) return;
    registers_[static_cast<size_t>(phase)].give(place_[id].offset, bytes_of(values_[id].result));
    last_use_[id] = order_.size() + 1;  // once, also where it is two operands
  }

  void write_outputs() {
    for (const ProgramOutput& output : outputs_) {
      Place from = place_[output.value];
      if (from.space == Space::kTile && from.offset == output.tile) continue;
      if (values_[output.value].shape == kByRow) from.space = Space::kEachRow;
      Instruction i{from.space == Space::kEachRow ? Code::kSpread : Code::kMove, Kind::kFloat};
      i.operand[0] = from;
      i.to = {Space::kTile, output.tile};
      program_.pairs.push_back(i);
    }
  }

  const Values& values_;
  std::span<const ProgramOutput> outputs_;
  std::vector<int> uses_;
  std::vector<Place> place_;
  std::vector<size_t> last_use_;
  std::vector<Place> spread_;
  std::array<Registers, 3> registers_;
  std::vector<ValueId> order_;
  Program program_;
};

}  // namespace

Program compile(Values values, std::span<const ProgramOutput> outputs, std::span<const ValueId> effects,
                bool keys_on_columns, int64_t width) {
  std::vector<ValueId> roots(effects.begin(), effects.end());
  for (const ProgramOutput& output : outputs) roots.push_back(output.value);
  fuse(values, roots);
  return Compiler(values, outputs, roots, keys_on_columns, width).run();
}

}  // namespace fovea::cpu
