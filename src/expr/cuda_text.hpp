// Expressions as CUDA: the text of a header that takes the place of cuda/warp/expression.cuh in kernels that are compiled at run time.
//
// What depends on the head, the query or the key alone is computed where Head, Query and Key are made. Ints have 32 bits
// where ranges prove that these suffice, and distances that only a float uses are floats from the start.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "expr/graph.hpp"

namespace fovea::expr {

/// Facts follow from bounds, extents and strides, and only facts enter the text: equal facts give equal texts.
struct CudaTextInput {
  const Expression* score = nullptr;  ///< null: s as it is
  const Expression* sees = nullptr;   ///< null: every key. Both have the same tensor declarations.
  bool has_terms = false;             ///< PairExpressions::has_terms
  /// Tensors whose gradient is asked for, by their place among the declarations.
  std::vector<bool> gradients;
  /// The tensor whose elements pair_row gives, where the score reads several pair by pair; left out: any.
  std::optional<size_t> pairs_of;

  /// Above q and k, at most nq and nk. Tiles may make a Query or a Key behind the end of a sequence; these count, too.
  int64_t positions = int64_t{1} << 30;
  /// Above b, h and hk.
  int64_t batch = int64_t{1} << 30, heads = int64_t{1} << 30;
  /// Of each tensor; -1 and tensors that are left out: not known. Known extents may prove that an index is inside, known
  /// strides that an offset has 32 bits or needs no product.
  std::vector<std::array<int64_t, kMaxRank>> extents, strides, gradient_strides;
};

/// The header. Its readers promise that a name of the pair that indexes a dimension alone is inside it: where kReadsByQuery
/// or kReadsByKey says so, a Query or a Key is only made for positions inside their sequence.
std::string cuda_text(const CudaTextInput& input);

}  // namespace fovea::expr
