// Timed results beside the oracle: what is wrong has no time.
#pragma once

#include "cli/bench/data.hpp"

namespace fovea::cli {

/// How many of the last queries the oracle computes in a moment.
int64_t rows_for_oracle(const Shape& shape, Pass pass);

/// The largest relative error (Frobenius norm) of an output of `pass`: over the last `rows` queries, for which a slice keeps the
/// diagonal where it is, of the first and the last head of keys. For the backward, d_o has to be 0 in all other queries: then they
/// add nothing to dk and dv. NaN where an output is NaN; 0 where there is nothing to compare.
double largest_error(const BenchData& data, Pass pass, const Terms& terms, int64_t rows);

/// What rounding explains: a few roundings to the type, and for float32 those of long sums.
double allowed_error(ElementType type, Pass pass);

}  // namespace fovea::cli
