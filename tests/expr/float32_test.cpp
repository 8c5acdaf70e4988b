// Ranges contain what float32 makes of an expression, so that a kernel may skip what they exclude.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "expr/blocks.hpp"
#include "expr/evaluate.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

/// Every float rounded to float32 after every operation, and small ones flushed to 0, as kernels compute.
class Float32Evaluator {
 public:
  Float32Evaluator(const Expression& expression, const TensorReader& tensors)
      : expression_(expression), exact_(expression, &tensors), values_(expression.graph.size()) {}

  bool sees(const Pair& pair) {
    for (NodeId id = 0; id <= expression_.root; ++id) {
      const Node& node = expression_.graph[id];
      if (node.operand_count == 0 || node.op == Op::kTensor) {  // indices here do not depend on floats
        values_[id] = exact_.value(id, pair);
      } else {
        std::array<Value, kMaxRank> operands;
        for (size_t i = 0; i < operands.size() && i < node.operand_count; ++i)
          operands[i] = values_[node.operand[i]];
        const Type type = expression_.graph[node.operand[0]].type;
        values_[id] = apply(node.op, type, {operands.data(), node.operand_count});
      }
      values_[id].number = static_cast<double>(static_cast<float>(values_[id].number));
      if (std::fabs(values_[id].number) < 0x1p-126)
        values_[id].number = std::copysign(0.0, values_[id].number);
    }
    const Value& result = values_[expression_.root];
    return result.valid && result.integer != 0;
  }

 private:
  const Expression& expression_;
  Evaluator exact_;
  std::vector<Value> values_;
};

TEST(Float32, BlocksAreNeverWrong) {
  const MadeUpTensors tensors;
  int decided = 0;
  for (uint64_t seed = 0; seed < 12000; ++seed) {
    RandomText random(seed, Use::kSees);
    const std::string text = random.of(Type::kFloat, 2) + " <= " + random.of(Type::kFloat, 2);
    const Expression sees = parsed(text, Use::kSees);
    Float32Evaluator evaluator(sees, tensors);
    BlockAnalysis analysis(sees);
    for (int i = 0; i < 4; ++i) {
      const int64_t q = random.below(14), k = random.below(14);
      const Block block{q, q + 2, k, k + 2, 1, 1, 0, 16, 12};
      const Seen seen = analysis.seen(block);
      if (seen == Seen::kSome) continue;
      ++decided;
      for (int64_t j = 0; j < 4; ++j) {
        const Pair pair{0, 1, 1, 0, q + j / 2, k + j % 2, 16, 12};
        ASSERT_EQ(evaluator.sees(pair), seen == Seen::kAll) << text << " at " << pair.q << ", " << pair.k;
      }
    }
  }
  EXPECT_GT(decided, 4000);
}

}  // namespace
}  // namespace fovea::expr
