// What a problem that appends is compared with: the same problem once its new rows are written to k and v and its q is rotated,
// worked out in float64 and rounded once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "verify/owned_problem.hpp"
#include "verify/rotary.hpp"

namespace fovea::verify {

/// A new row of one key head as a cache of `type` is to hold it, before the last rounding: turned, and divided by the factor of its
/// sequence and head.
struct StoredRow {
  std::vector<double> values;
  std::vector<double> slack;  ///< how far the roundings of a rotation may take each value
};
inline StoredRow stored_row(const double* row, int64_t size, const Rotary& rotary, int64_t position,
                            double factor, Type type) {
  const double unit = unit_roundoff(type), subnormal = type == Type::kF16    ? 0x1p-24
                                                       : type == Type::kE4M3 ? 0x1p-9
                                                                             : 0;
  StoredRow stored;
  stored.values = rotary.turned(row, size, position, &stored.slack);
  const auto divisor = static_cast<float>(factor);
  for (double& value : stored.values) value = static_cast<double>(static_cast<float>(value) / divisor);
  for (double& off : stored.slack) off = 2 * unit * off / static_cast<double>(divisor) + subnormal;
  return stored;
}

namespace detail {

inline Rotary rotary_of(const OwnedProblem& x) {
  if (x.spec.rotary == 0) return {};
  return {x[Role::kRotaryCos].values(), x[Role::kRotarySin].values(), x.spec.rotary / 2,
          x.spec.rotary_interleaved};
}

/// The values of a cache with its new rows. `slack`, where it is not null: see once_appended().
inline std::vector<double> appended(const OwnedProblem& x, Role role, Role new_role, const Rotary& rotary,
                                    std::vector<double>* slack) {
  const Role factors = role == Role::kK ? Role::kKDescale : Role::kVDescale;
  const int64_t heads = x.spec.heads_kv, size = x[role].shape().back();
  std::vector<double> cache = x[role].values();
  const std::vector<double> rows = x[new_role].values();
  if (slack) slack->assign(cache.size(), 0);
  int64_t row = 0;
  for (int64_t b = 0; b < x.spec.batch; ++b) {
    const auto at = static_cast<size_t>(b);
    for (int64_t i = 0; i < x.spec.lengths_new[at]; ++i, ++row) {
      const int64_t to = x.key_row(b, x.sequence(b).used_k + i);
      for (int64_t h = 0; h < heads; ++h) {
        const StoredRow stored =
            stored_row(rows.data() + (row * heads + h) * size, size, rotary, x.spec.first_position(at) + i,
                       x.descale(factors, b, h), x[role].type());
        const auto place = static_cast<std::ptrdiff_t>((to * heads + h) * size);
        std::copy(stored.values.begin(), stored.values.end(), cache.begin() + place);
        if (slack) std::copy(stored.slack.begin(), stored.slack.end(), slack->begin() + place);
      }
    }
  }
  return cache;
}

inline std::vector<double> rotated_queries(const OwnedProblem& x, const Rotary& rotary) {
  const ProblemSpec& s = x.spec;
  std::vector<double> q = x[Role::kQ].values();
  for (int64_t b = 0; b < s.batch; ++b) {
    const OwnedProblem::Sequence sequence = x.sequence(b);
    for (int64_t i = 0; i < sequence.used_q; ++i) {
      const int64_t position = s.first_position(static_cast<size_t>(b)) + (s.rotary_by_row() ? i : 0);
      for (int64_t h = 0; h < s.heads_q; ++h) {
        double* row = q.data() + ((sequence.row_q + i) * s.heads_q + h) * s.head_dim;
        const double factor = x.descale(Role::kQDescale, b, h / (s.heads_q / s.heads_kv));
        const std::vector<double> turned = rotary.turned(row, s.head_dim, position, nullptr);
        std::transform(turned.begin(), turned.end(), row, [&](double value) { return value * factor; });
      }
    }
  }
  return q;
}

}  // namespace detail

/// Shares the tensors that stay as they are. A problem that appends nothing stays as it is. `slack`, where it is not null, gets for
/// each element of k how far rounding may take it from the one here.
inline OwnedProblem once_appended(const OwnedProblem& x, std::vector<double>* slack = nullptr) {
  if (!x.spec.appends()) return x;
  ProblemSpec s = x.spec;
  for (size_t b = 0; b < s.used_k.size(); ++b) s.used_k[b] += s.lengths_new[b];
  s.lengths_new.clear();
  s.rotary = 0;
  s.rotary_positions.clear();
  std::map<Role, std::shared_ptr<OwnedTensor>> changed;
  for (const Role role : {Role::kKNew, Role::kVNew, Role::kCuSeqlensKNew, Role::kRotaryCos, Role::kRotarySin,
                          Role::kRotaryPositions})
    changed[role] = nullptr;
  const auto change_to = [&](Type type, Role role, const std::vector<double>& values) {
    const Sizes& shape = x[role].shape();
    changed[role] = std::make_shared<OwnedTensor>(type, shape, compact_strides(shape));
    changed[role]->assign(values);
  };
  const auto change = [&](Role role, const std::vector<double>& values) {
    change_to(x[role].type(), role, values);
  };
  const Rotary rotary = detail::rotary_of(x);
  change(Role::kSeqUsedK, {s.used_k.begin(), s.used_k.end()});
  change(Role::kK, detail::appended(x, Role::kK, Role::kKNew, rotary, slack));
  change(Role::kV, detail::appended(x, Role::kV, Role::kVNew, {}, nullptr));
  if (x.spec.rotary > 0) {
    // Its factors are in it, and it has no longer 8 bits.
    s.e4m3_queries = false;
    changed[Role::kQDescale] = nullptr;
    change_to(s.type, Role::kQ, detail::rotated_queries(x, rotary));
  }
  return x.with(s, changed);
}

}  // namespace fovea::verify
