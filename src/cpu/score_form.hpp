// Expressions of a form that needs no program for each pair.
//
//   score = s + f(k - q) + factor * element[.., k]     f is computed once for each distance, elements are read row by row
//   sees  = element[.., k] != 0, or == 0
//   sees  = class[.., q] == class[.., k]               two classes are compared for each pair, and their least and largest for each block
//
// ALiBi, T5's biases and every other function of the distance is f, a bias is a tensor that k indexes in its innermost dimension. The factor is
// the same for all queries and keys of a head.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/problem.hpp"
#include "expr/graph.hpp"

namespace fovea::cpu {

/// A tensor whose elements for neighbouring keys are neighbours in memory.
struct KeyElements {
  size_t tensor = 0;
  DType dtype = DType::kF32;
  int64_t offset = 0;                   ///< elements, of indices that are constants
  int64_t b = 0, h = 0, hk = 0, q = 0;  ///< elements from one to the next

  /// The element of key 0, from the first of the tensor.
  int64_t row(int64_t batch, int64_t head, int64_t key_head, int64_t query) const {
    return offset + batch * b + head * h + key_head * hk + query * q;
  }
};

struct ScoreForm {
  /// f, or nothing. It has the value of any pair of the same distance, also of pairs that do not exist.
  std::optional<expr::Expression> of_distance;
  std::optional<KeyElements> elements;
  std::optional<expr::Expression> factor;  ///< of the elements, where it is not 1
};

/// Elements that say which keys are seen.
struct SeenElements {
  KeyElements elements;
  bool zeros;  ///< those that are 0; else the others
};

/// Classes of queries and of keys, 32-bit ints, the same for all heads of a key head: a query sees the keys of its own. Documents are such.
struct SeenClasses {
  KeyElements queries, keys;  ///< those of queries by q alone
};

/// The form of a score, if it has it.
std::optional<ScoreForm> form_of_score(const AttentionProblem& problem, const expr::Expression& score);
/// Where the gradient of a tensor lies that has an element of its own for each pair of each head, which is added to the score: that of a bias
/// which nothing broadcasts. Nothing for other tensors.
std::optional<KeyElements> form_of_gradient(const AttentionProblem& problem, const expr::Expression& score,
                                            size_t tensor);
/// The elements that `sees` compares with 0, if it says no more.
std::optional<SeenElements> form_of_sees(const AttentionProblem& problem, const expr::Expression& sees);
/// The classes that `sees` compares, if it says no more.
std::optional<SeenClasses> classes_of_sees(const AttentionProblem& problem, const expr::Expression& sees);

}  // namespace fovea::cpu
