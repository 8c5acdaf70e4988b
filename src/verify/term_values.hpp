// What the tensors of random problems hold: of biases, masks and lists of keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "verify/owned_tensor.hpp"
#include "verify/problem_spec.hpp"
#include "verify/random.hpp"

namespace fovea::verify {

/// Normal numbers.
inline std::vector<double> normals(Random& random, int64_t count, double deviation) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& x : values) x = deviation * random.normal();
  return values;
}

/// Values for `bias` in its dense order, of which only the `distinct` ones differ.
inline std::vector<double> bias_values(Random& random, BiasValues kind, const Sizes& distinct,
                                       const OwnedTensor& bias) {
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  std::vector<double> chosen = normals(random, product(distinct), 1.0);
  const int64_t columns = distinct[3];
  for (size_t place = 0; place < chosen.size(); ++place) {
    const bool row_hit = (place / static_cast<size_t>(std::max<int64_t>(columns, 1))) % 3 == 1;
    if (kind == BiasValues::kSomeMinusInfinity && random.chance(0.33)) chosen[place] = minus_infinity;
    if (kind == BiasValues::kRowsMinusInfinity && row_hit) chosen[place] = minus_infinity;
  }
  if (bias.shape() == distinct) return chosen;
  const Sizes from = compact_strides(distinct);
  std::vector<double> dense(static_cast<size_t>(bias.count()));
  for (size_t place = 0; place < dense.size(); ++place) {
    auto rest = static_cast<int64_t>(place);
    int64_t source = 0;
    for (size_t axis = 4; axis-- > 0;) {
      const int64_t index = rest % bias.shape()[axis];
      rest /= bias.shape()[axis];
      if (distinct[axis] != 1) source += index * from[axis];
    }
    dense[place] = chosen[static_cast<size_t>(source)];
  }
  return dense;
}

/// Nonzero where queries see keys, of which there is a share of `density`.
inline std::vector<double> mask_values(Random& random, const OwnedTensor& mask, double density) {
  std::vector<double> values(static_cast<size_t>(mask.count()));
  for (double& x : values) {
    const double yes = mask.type() == Type::kBool ? 1.0 : static_cast<double>(random.between(1, 255));
    x = random.chance(density) ? yes : 0.0;
  }
  return values;
}

/// One list of keys: numbers below `keys`, and -1 for none.
inline void fill_list(Random& random, const ProblemSpec& spec, double* list, size_t size, int64_t keys) {
  const double density = random.chance(0.1) ? 0.0 : spec.list_density;
  int64_t next = 0;
  for (size_t n = 0; n < size; ++n) {
    const bool key = keys > next && random.chance(density);
    list[n] = static_cast<double>(!key ? -1 : spec.list_in_order ? next++ : random.between(0, keys - 1));
    if (spec.list_in_order && key && keys > static_cast<int64_t>(size))
      next += random.between(0, keys / static_cast<int64_t>(size) - 1);
  }
}

}  // namespace fovea::verify
