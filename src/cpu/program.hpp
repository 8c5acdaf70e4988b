// An expression as a linear program over a tile of scores: what the vector operations run (ops_program-inl.hpp) and what
// program_compiler.cpp makes.
//
// A tile has rows of `width` elements. In the tiled algorithms a row is a key and its elements are the query rows of a
// panel; where rows are few, a row is a query row and its elements are keys. So each value of a program has one of four
// shapes: uniform, one for each column, one for each row, or one for each pair. Only the last are computed for each pair,
// a strip of rows at a time, so that the registers of a strip stay in the first-level cache and the choice of an
// instruction is paid once for hundreds of elements.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.hpp"
#include "core/problem.hpp"

namespace fovea::cpu {

/// Rows of a strip, and the most elements that a row and a column have.
inline constexpr int64_t kStripRows = 16;
inline constexpr int64_t kProgramWidth = 128;

/// Elements of a value: float, int32_t, int64_t, or int32_t that is 0 or -1. Ints that ranges prove to fit are kInt.
enum class Kind : uint8_t { kFloat, kInt, kWide, kMask };
inline constexpr size_t kKindCount = 4;

/// `kind` of an instruction is that of its operands; of constants, variables and elements that of the result.
enum class Code : uint8_t {
  kConstant,  // payload: its bits
  kVariable,  // payload: an expr::Variable
  kLoad,      // payload: a named tensor; operands: offset of the column, of the row, of the pair, mask
  kSpread,    // a value of each row as one of each pair
  kMove,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kRemainder,
  kMin,
  kMax,
  kNegate,
  kAbs,
  kAbsDifference,       // |a - b|
  kShiftRight,          // payload: bits
  kLowBits,             // payload: mask
  kMultiplyAdd,         // a * b + c
  kNegatedMultiplyAdd,  // c - a * b
  kMultiplySubtract,    // a * b - c
  kExp,
  kLog,
  kTanh,
  kSqrt,
  kFloor,
  kLess,
  kLessEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  kNot,
  kSelect,  // operands: mask, where it is set, where it is not; kind of the choices
  kToFloat,
  kToWide,
  kToInt,
  kAddTo  // payload: a gradient, in the low kGradientBits, and what tells additions apart; operands: the three offsets, value
};
inline constexpr int kGradientBits = 4;
static_assert(kMaxTermTensors <= 1 << kGradientBits);
inline constexpr size_t kCodeCount = static_cast<size_t>(Code::kAddTo) + 1;

/// Where an operand lies. A row value that a pair reads is broadcast: kEachRow.
enum class Space : uint8_t { kNone, kColumn, kRow, kEachRow, kPair, kTile };
struct Place {
  Space space = Space::kNone;
  uint32_t offset = 0;  ///< bytes; of a tile its number
};

/// What the tiles of a program are. The first is read and written, kGradient only read.
enum ProgramTile : uint8_t { kScoreTile, kSlopeTile, kGradientTile, kTileCount };

struct Instruction {
  Code code = Code::kMove;
  Kind kind = Kind::kFloat;
  DType dtype = DType::kF32;  ///< of the tensor
  bool wide_offsets = false;  ///< of kLoad and kAddTo: int64_t
  bool everywhere = false;    ///< of kAddTo: each pair has an element, also those that add 0
  int32_t count = 0;          ///< elements; 0 for pairs
  int64_t payload = 0;
  Place to{};
  std::array<Place, 4> operand{};
};

struct Program {
  std::vector<Instruction> columns, rows, pairs;
  int64_t width = 0;
  bool keys_on_columns = false;
  uint32_t column_bytes = 0, row_bytes = 0, pair_bytes = 0;

  bool empty() const { return pairs.empty(); }
  int64_t scratch_bytes() const { return int64_t{column_bytes} + row_bytes + pair_bytes; }
  /// Operations on each pair.
  int64_t operations() const {
    return std::count_if(pairs.begin(), pairs.end(), [](const Instruction& i) {
      return i.code != Code::kMove && i.code != Code::kSpread;
    });
  }
};

/// Where gradients of one named tensor are added: sums in float64, or the output itself. An output that is not float32 has its elements
/// from one addition each.
struct GradientTarget {
  double* sums = nullptr;
  void* output = nullptr;
  DType dtype = DType::kF32;
};

/// What one run of a program reads: the pairs of `lanes` query rows with `keys` keys.
struct ProgramInputs {
  const int32_t *query = nullptr, *head = nullptr;  ///< by lane
  int64_t lanes = 0, first_key = 0, keys = 0;
  const int32_t* list =
      nullptr;  ///< the positions of the keys, where they are not neighbours from first_key on
  int32_t b = 0, hk = 0, nq = 0, nk = 0;
  std::array<const char*, kMaxTermTensors> tensors{};
  const GradientTarget* gradients = nullptr;
  std::array<float*, kTileCount> tiles{};  ///< rows of the program's width
  float* maxima = nullptr;                 ///< raised to the largest score of each column, where given
  char* scratch = nullptr;                 ///< scratch_bytes(), aligned
};

}  // namespace fovea::cpu
