// Shapes that tensors of a problem must have, from the table of roles, and the wording of errors about them.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.hpp"

namespace fovea::plan {

/// What `size` is in a problem whose numbers are known.
int64_t value_of(const AttentionProblem& problem, Size size);

/// The dimensions that the spec of a tensor asks for beside the tensors that there are: in pages, packed, plain, or
/// shorter, whichever has its rank. Null where none has.
const Dims* dims_of(const TensorSpec& spec, const TensorDescs& tensors);

/// Throws RequestError(kInvalidArgument) for a rank that the spec does not have.
void check_rank(const TensorSpec& spec, const TensorDescs& tensors);

/// Throws RequestError(kInvalidArgument) for an element type that the spec does not have.
void check_dtype(const TensorSpec& spec, const TensorDescs& tensors);

/// Throws RequestError(kInvalidArgument) for a tensor whose sizes are not those of the problem.
void check_shape(const AttentionProblem& problem, Role role);

/// Rewrites a tensor to the common form of AttentionProblem: a dimension for the batch in front where it has none
/// (stride 0), and the problem's sizes where it broadcasts (stride 0).
void to_common_form(const AttentionProblem& problem, Role role, TensorDesc& tensor);

}  // namespace fovea::plan
