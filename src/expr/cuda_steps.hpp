// The steps of CUDA text: what an expression computes, in the types of the device, and where each step belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "expr/range.hpp"

namespace fovea::expr {

using StepId = uint32_t;
inline constexpr StepId kNoStep = ~StepId{0};

/// What a step depends on, as bits, so that `|` joins places.
enum class Place : uint8_t { kConstant = 0, kHead = 1, kQuery = 1 | 2, kKey = 1 | 4, kPair = 1 | 2 | 4 };
constexpr Place operator|(Place a, Place b) {
  return static_cast<Place>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}

enum class Kind : uint8_t { kBool, kInt, kLong, kFloat, kPointer };

/// In `text`, %0 stands for the first operand, in parentheses where it is no name or call; $0 for the same without
/// parentheses; and @ for the way to the tensors, which differs between functions.
struct Step {
  std::string text;
  std::string type;  ///< in CUDA
  Kind kind = Kind::kInt;
  std::vector<StepId> operands;
  Place place = Place::kConstant;
  Range range;
  /// One instruction from one other step and constants: nobody keeps both in registers.
  bool cheap = false;

  bool constant() const { return place == Place::kConstant; }
  /// Read from the launch's parameters by whoever needs it.
  bool parameter() const { return operands.empty() && text.find('@') != std::string::npos; }
};

/// Equal steps are one. Operands stand before the steps that use them.
class Steps {
 public:
  const Step& operator[](StepId id) const { return steps_[id]; }
  size_t size() const { return steps_.size(); }

  /// `place` is joined with those of the operands. What has one value becomes that constant.
  StepId add(Kind kind, std::string text, std::vector<StepId> operands, const Range& range,
             Place place = Place::kConstant);
  StepId pointer(std::string type, std::string text, std::vector<StepId> operands,
                 Place place = Place::kConstant);

  StepId boolean(bool value);
  StepId integer(int64_t value);
  StepId number(double value);

  bool is(StepId id, bool value) const;
  /// Bools, without what constants make superfluous.
  StepId both(StepId a, StepId b);
  StepId either(StepId a, StepId b);
  StepId opposite(StepId a);
  /// Of any kind.
  StepId choice(StepId condition, StepId a, StepId b);

 private:
  StepId add(Step step);

  std::vector<Step> steps_;
  std::map<std::tuple<std::string, std::string, std::vector<StepId>>, StepId> places_;
};

constexpr bool fits_int(const IntRange& range) {
  return range.lowest >= std::numeric_limits<int32_t>::min() &&
         range.highest <= std::numeric_limits<int32_t>::max();
}
constexpr Kind kind_of(const IntRange& range) {
  return fits_int(range) ? Kind::kInt : Kind::kLong;
}

}  // namespace fovea::expr
