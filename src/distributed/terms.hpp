// The terms of a problem that depend on positions: ALiBi, bias, masks, expressions. They are those of the whole problem, and their
// tensors are whole on every rank; a call gets them as terms of its part.
//
//   tensors that names alone index   an address: the call reads bias[b, h, q, k] from its own first element on
//   other uses of names              q becomes q + part[3]: a few numbers for each call (expr/part.hpp)
//
// That is all a call needs, because its rows are side by side: it has some rows of one sequence, or whole sequences that follow each
// other (Call), for heads that follow each other. Whole sequences need addresses alone.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "distributed/local_problem.hpp"
#include "expr/part.hpp"

namespace fovea::distributed {

/// What a call computes of the whole problem.
struct PartOfProblem {
  Range batch, heads_q, heads_kv;
  Range queries, keys;  ///< positions within the sequence; of several sequences those of the longest
  bool is_cut = false;
  int64_t whole_q = 0, whole_k = 0;  ///< lengths of the sequence that is cut

  Range of(expr::Variable name) const;
  /// Names whose values in the call are others than in the whole problem.
  std::array<bool, expr::kVariableNames.size()> moved() const;
  std::array<int32_t, expr::kPartNumbers> numbers() const;
};

/// A tensor as fovea_tensor describes it, behind an address.
struct TensorPart {
  fovea_dtype type{};
  int ndim = 0;
  std::array<int64_t, kMaxRank> shape{}, strides{};  ///< in elements
  int64_t offset = 0;                                ///< in bytes

  int64_t elements() const;
  std::array<int64_t, kMaxRank> compact_strides() const;
};

/// A tensor of terms, and what a part has of it.
struct TermTensor {
  Place callers{}, calls{};  ///< where the caller has it, and where calls take it
  TensorDesc whole;
  expr::Dimensions dimensions{};
  std::array<int64_t, kMaxRank> block{1, 1, 1, 1};  ///< positions of an element

  TensorPart part(const PartOfProblem& part) const;
  TensorPart all() const;
  /// One of float32 with the same elements side by side.
  TermTensor compact() const;
};

/// The expressions of a call, and its tensors.
struct TermsOfCalls {
  expr::PairExpressions expressions;
  std::vector<expr::Dimensions> dimensions;  ///< of the tensors that the expressions declare
  std::vector<TermTensor> tensors;
};

struct Terms {
  /// ALiBi and block masks of whole sequences are terms of their own, which kernels know; those of cut ones are expressions.
  TermsOfCalls of_sequences, of_cuts;
  std::vector<TermTensor> gradients;  ///< whole, summed over calls and ranks
  std::vector<std::string> names;     ///< of the named tensors of calls: the caller's, then those of terms
  std::string numbers;                ///< the name of the numbers of a part
  std::array<int64_t, expr::kPartNumbers>
      limits{};  ///< powers of two less 1: texts are those of many lengths
  int64_t block_q = 0, block_k = 0;
  std::string text;  ///< all of it, the same on all ranks

  const TermsOfCalls& of(const PartOfProblem& part) const { return part.is_cut ? of_cuts : of_sequences; }
};

/// The texts of a call. The numbers of the part are the named tensor behind the others, where a text reads them.
struct TextsOfCall {
  std::optional<std::string> score, sees;
  bool reads_numbers = false;
};
TextsOfCall texts_of(const Terms& terms, const PartOfProblem& part);

/// Null for a problem without. Throws RequestError: what the whole problem on one device would be refused for, and more named tensors
/// than calls have room for.
std::shared_ptr<const Terms> read_terms(const fovea_problem& local, const LocalProblem& problem, bool packed);

}  // namespace fovea::distributed
