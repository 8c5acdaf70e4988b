// The plain implementation: the textbook loop in the precision in which a user would write it. Its error sets the
// bound for backends. Arithmetic in float32; for 16-bit types P (and in the backward P and
// dS) is rounded to the type before it enters a product, and outputs are rounded once.
// Beside a q of 8 bits P is rounded to float8_e4m3fn as tensor cores of that type take it: relative to the largest weight of the
// row, times 2^8, which is undone behind; its sum is that of weights that are not rounded.
//
// Beside each output it adds up magnitudes in float64: the output with every term of its sums replaced by a bound
// of its absolute value. An output whose magnitude is 0 has no terms, so it must be exactly 0; otherwise the
// magnitude times a unit roundoff bounds the effect of one rounding of one factor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "verify/owned_problem.hpp"

namespace fovea::verify {

/// The probability of dropout that is in effect: a multiple of 2^-23.
inline double effective_dropout(double p) {
  return std::min(std::floor(std::ldexp(p, 23) + 0.5), std::ldexp(1.0, 23) - 1) / std::ldexp(1.0, 23);
}

/// Philox4x32 with a key of 0, from its paper.
inline void philox(uint32_t (&c)[4], int rounds) {
  for (uint32_t round = 0; round < static_cast<uint32_t>(rounds); ++round) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ (round * 0x9E3779B9u), static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ (round * 0xBB67AE85u), static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
  }
}

/// The dropout decision, written from the description of the stream in docs/semantics.md.
inline bool dropout_keeps(double p, uint64_t seed, uint64_t offset, int64_t head, int64_t i, int64_t j) {
  uint32_t start[4] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                       static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
  philox(start, 10);
  const auto column = static_cast<uint32_t>(2 * (j / 16) + j % 8 / 4),
             row = static_cast<uint32_t>(8 * (i / 16) + i % 8), h = static_cast<uint32_t>(head);
  uint32_t c[4] = {column ^ start[0], row ^ start[1], h ^ start[2], start[3]};
  philox(c, 7);
  const uint32_t random = c[2 * (j / 8 % 2) + i / 8 % 2] >> (8 * (j % 4)) & 127;
  const double place = (start[3] + 53685 * column + 43977 * row + 36025 * h) % 65536 / 65536.0;
  const double dropped = effective_dropout(p) * 128, whole = std::floor(dropped);
  return random >= whole + (place < dropped - whole ? 1 : 0);
}

struct PlainOutput {
  std::vector<double> values;      ///< rounded to the type of the output
  std::vector<double> magnitudes;  ///< see the head of this file
  /// Of these, what comes of weights that need no rounding in a row of several keys; all 0 when empty.
  std::vector<double> exact = {};
};

class Plain {
 public:
  explicit Plain(const OwnedProblem& problem) : x_(problem), s_(problem.spec) {
    q_ = x_[Role::kQ].floats();
    k_ = x_[Role::kK].floats();
    v_ = x_[Role::kV].floats();
    if (x_.has(Role::kQV)) qv_ = x_[Role::kQV].floats();
    if (x_.has(Role::kBias)) bias_ = x_[Role::kBias].floats();
    if (x_.has(Role::kMask)) mask_ = x_[Role::kMask].floats();
    if (x_.has(Role::kBlockMask)) block_mask_ = x_[Role::kBlockMask].floats();
    if (x_.has(Role::kAlibi)) alibi_ = x_[Role::kAlibi].floats();
    if (x_.has(Role::kSink)) sink_ = x_[Role::kSink].floats();
    if (x_.has(Role::kKeys)) lists_ = x_[Role::kKeys].values();
    if (s_.score) read_tensors(*s_.score, score_values_, score_roles_);
    if (s_.sees) read_tensors(*s_.sees, sees_values_, sees_roles_);
    k_bound_ = row_bounds(k_, s_.head_dim);
    k_norm_ = row_norms(k_, s_.head_dim);
    v_bound_ = row_bounds(v_, s_.head_dim_v);
    v_norm_ = row_norms(v_, s_.head_dim_v);
    allow_for_scores_of("");
  }
  /// Sets what a backend may do to scores.
  void allow_for_scores_of(const std::string& backend) {
    const bool of_8_bits = s_.e4m3_keys && backend == "cuda_sm90";
    score_roundings = of_8_bits ? 0x1p-13 / unit_roundoff(Type::kF32)
                                : std::max(8.0, static_cast<double>(s_.score_dim()) / 16);
    tanh_step = backend == "cuda_sm90" ? s_.softcap * 0x1p-22 : 0;
  }

  std::map<Role, PlainOutput> outputs;
  /// Largest sum of absolute terms of any score: float32 rounding errors of scores grow with it.
  double score_magnitude = 0;
  double score_roundings = 0;  ///< r of the floor (compare.hpp)
  /// Half of what a score may be off because q and k were rotated and rounded again, and because of the tanh of a softcap
  /// (compare.hpp).
  double score_step = 0, tanh_step = 0;
  /// Rows of queries that took part.
  double rows = 0;

  /// For a problem whose rows are rotated: a rounding of q and one of k may go the other way, each in an element of a score.
  void allow_for_rotation() {
    const auto largest = [](const std::vector<float>& values) {
      float most = 0;
      for (const float x : values) most = std::isfinite(x) ? std::max(most, std::abs(x)) : most;
      return static_cast<double>(most);
    };
    // An element of k of 8 bits has larger roundings, and a factor of at most 2.
    const double unit = s_.e4m3_keys ? 2 * unit_roundoff(Type::kE4M3) : unit_roundoff(s_.type);
    score_step = 4 * unit * std::abs(s_.resolved_scale()) * largest(q_) * largest(k_);
  }

  void forward() {
    o_.assign(static_cast<size_t>(x_[Role::kO].count()), 0.0f);
    o_magnitude_.assign(o_.size(), 0.0);
    std::vector<double> o_exact(o_.size(), 0.0);
    lse_.assign(static_cast<size_t>(x_[Role::kLse].count()), -kInfinity);
    for_each_row([&](const Row& row) {
      load_row(row);
      ++rows;
      lse_[row.statistic] = row_lse_;
      double bound = 0, exact = 0;
      const bool rounds = unit_roundoff(s_.weight_type()) > unit_roundoff(Type::kF32) && seen_.size() > 1;
      std::vector<float> sum(size_v(), 0.0f);
      const double value_scale =
          x_.descale(Role::kVDescale, row.batch, static_cast<int64_t>(row.head) / (s_.heads_q / s_.heads_kv));
      for (const Seen& seen : seen_) {
        if (seen.keep == 0) continue;
        const auto [weight, is_exact] = rounded_weight(seen);
        add(weight, v_.data() + seen.row * size_v(), sum);
        bound += weight_bound(seen) * v_bound_[seen.row];
        if (rounds && is_exact) exact += static_cast<double>(weight) * v_bound_[seen.row];
      }
      for (size_t c = 0; c < size_v(); ++c) {
        o_[row.q * size_v() + c] =
            static_cast<float>(rounded(static_cast<double>(sum[c]) * value_scale, x_[Role::kO].type()));
        o_magnitude_[row.q * size_v() + c] = bound * value_scale;
        o_exact[row.q * size_v() + c] = exact * value_scale;
      }
    });
    outputs[Role::kO] = {{o_.begin(), o_.end()}, o_magnitude_, std::move(o_exact)};
    outputs[Role::kLse] = {{lse_.begin(), lse_.end()}, std::vector<double>(lse_.size(), 1.0)};
  }

  /// After forward().
  void backward() {
    d_o_ = x_[Role::kDO].floats();
    if (x_.has(Role::kDLse)) dlse_ = x_[Role::kDLse].floats();
    std::vector<float> dq(q_.size()), dk(k_.size()), dv(v_.size());
    std::vector<double> dq_bound(q_.size()), dk_bound(k_.size() / size()), dv_bound(v_.size() / size_v());
    std::vector<float> dbias(x_.has(Role::kDBias) ? bias_.size() : 0), dsink(sink_.size());
    std::vector<double> dbias_bound(dbias.size()), dsink_bound(sink_.size());
    clear_named_gradients();
    const auto scale = static_cast<float>(s_.resolved_scale());

    for_each_row([&](const Row& row) {
      load_row(row);
      if (seen_.empty() && sink_.empty()) return;
      const float* d_o = d_o_.data() + row.q * size_v();
      const float* q = q_.data() + row.q * size();
      float delta = 0, do_bound = 0, q_bound = 0;
      double delta_bound = 0, do_norm = 0;
      for (size_t c = 0; c < size_v(); ++c) {
        delta += d_o[c] * o_[row.q * size_v() + c];
        delta_bound += std::abs(static_cast<double>(d_o[c])) * o_magnitude_[row.q * size_v() + c];
        do_bound = std::max(do_bound, std::abs(d_o[c]));
        do_norm += static_cast<double>(d_o[c]) * static_cast<double>(d_o[c]);
      }
      for (size_t c = 0; c < size(); ++c) q_bound = std::max(q_bound, std::abs(q[c]));
      do_norm = std::sqrt(do_norm);
      if (!dlse_.empty()) {
        delta -= dlse_[row.statistic];
        delta_bound += std::abs(static_cast<double>(dlse_[row.statistic]));
      }
      std::vector<float> dq_row(size(), 0.0f);
      double dq_row_bound = 0;
      for (const Seen& seen : seen_) {
        float d_weight = 0;
        if (seen.keep > 0) {
          const float* v = v_.data() + seen.row * size_v();
          for (size_t c = 0; c < size_v(); ++c) d_weight += d_o[c] * v[c];
          d_weight *= seen.keep;
          add(to_type(seen.weight * seen.keep), d_o, dv.data() + seen.row * size_v(), size_v());
          dv_bound[seen.row] += weight_bound(seen) * static_cast<double>(do_bound);
        }
        const float d_result = seen.weight * (d_weight - delta);
        const double result_bound =
            weight_bound(seen) * (static_cast<double>(seen.keep) * do_norm * v_norm_[seen.row] + delta_bound);
        add_named_gradients(seen, d_result, result_bound);
        const float d_score = seen.result_slope * d_result;
        const double bound = result_bound * slope_bound(seen.result_slope);
        if (!dbias.empty()) {
          dbias[seen.bias] += d_score;
          dbias_bound[seen.bias] += bound;
        }
        const float d_dot = to_type(seen.cap_slope * d_score);
        // The slope of a cap is 1 - tanh^2: near the cap the difference has few correct digits.
        const double d_dot_bound = std::abs(s_.resolved_scale()) * bound *
                                   std::min(1.0, static_cast<double>(seen.cap_slope) + 0x1p-8);
        add(d_dot, k_.data() + seen.row * size(), dq_row.data(), size());
        dq_row_bound += d_dot_bound * k_bound_[seen.row];
        add(d_dot * scale, q, dk.data() + seen.row * size(), size());
        dk_bound[seen.row] += d_dot_bound * static_cast<double>(q_bound);
      }
      for (size_t c = 0; c < size(); ++c) {
        dq[row.q * size() + c] = scale * dq_row[c];
        dq_bound[row.q * size() + c] = dq_row_bound;
      }
      if (!sink_.empty() && row_lse_ != -kInfinity) {
        const float weight = std::exp(sink_[row.head] - row_lse_);
        dsink[row.head] -= weight * delta;
        dsink_bound[row.head] += static_cast<double>(weight) * delta_bound;
      }
    });
    finish(Role::kDQ, dq, std::move(dq_bound));
    finish(Role::kDK, dk, repeated(dk_bound, size()));
    finish(Role::kDV, dv, repeated(dv_bound, size_v()));
    if (x_.has(Role::kDBias)) finish(Role::kDBias, dbias, std::move(dbias_bound));
    if (x_.has(Role::kDSink)) finish(Role::kDSink, dsink, std::move(dsink_bound));
    for (auto& [role, sums] : named_sums_) finish(role, sums, std::move(named_bounds_[role]));
  }

 private:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  struct Row {
    int64_t batch;
    size_t head;
    int64_t i;
    OwnedProblem::Sequence sequence;
    size_t q;          ///< index of the row of head vectors in q and o
    size_t statistic;  ///< index in lse
  };
  struct Seen {
    size_t row;   ///< index of the row of head vectors in k and v
    size_t bias;  ///< index in bias
    float score, cap_slope, weight, keep;
    float result_slope = 1;  ///< d (result of the expression) / d (score before it)
    std::array<Scored::Element, 2> elements{};
  };

  size_t size() const { return static_cast<size_t>(s_.head_dim); }
  size_t size_v() const { return static_cast<size_t>(s_.head_dim_v); }

  template <class Visit>
  void for_each_row(Visit&& visit) {
    for (int64_t batch = 0; batch < s_.batch; ++batch) {
      const OwnedProblem::Sequence sequence = x_.sequence(batch);
      for (int64_t head = 0; head < s_.heads_q; ++head) {
        for (int64_t i = 0; i < sequence.used_q; ++i) {
          const int64_t q = (sequence.row_q + i) * s_.heads_q + head;
          const int64_t statistic = s_.packed() ? head * x_[Role::kLse].shape()[1] + sequence.row_q + i
                                                : (batch * s_.heads_q + head) * s_.seqlen_q + i;
          visit(Row{batch, static_cast<size_t>(head), i, sequence, static_cast<size_t>(q),
                    static_cast<size_t>(statistic)});
        }
      }
    }
  }

  /// Index in the dense values of a broadcast tensor.
  static size_t place(const Sizes& shape, const Sizes& index) {
    int64_t at = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis)
      at = at * shape[axis] + (shape[axis] == 1 ? 0 : index[axis]);
    return static_cast<size_t>(at);
  }

  /// Entry n of the row's list.
  int64_t entry(const Row& row, int64_t head_kv, int64_t n) const {
    const Sizes& shape = x_[Role::kKeys].shape();
    const Sizes index =
        s_.packed() ? Sizes{head_kv, row.sequence.row_q + row.i, n} : Sizes{row.batch, head_kv, row.i, n};
    return static_cast<int64_t>(lists_[place(shape, index)]);
  }

  bool sees(const Pair& p) {
    const int64_t diagonal = p.q + p.nk - p.nq;
    if (s_.causal && p.k > diagonal) return false;
    if (s_.window_left >= 0 && p.k + s_.window_left < diagonal) return false;
    if (s_.window_right >= 0 && p.k - s_.window_right > diagonal) return false;
    if (!mask_.empty() && mask_[place(x_[Role::kMask].shape(), {p.b, p.h, p.q, p.k})] == 0) return false;
    if (!block_mask_.empty()) {
      const Sizes block = {p.b, p.h, p.q / s_.block_q, p.k / s_.block_k};
      if (block_mask_[place(x_[Role::kBlockMask].shape(), block)] == 0) return false;
    }
    if (!s_.sees) return true;
    const bool seen = s_.sees->sees(sees_values_, p);
    return sees_values_.take_valid() && seen;
  }

  static float dot(const float* a, const float* b, size_t count) {
    float sum = 0;
    for (size_t c = 0; c < count; ++c) sum += a[c] * b[c];
    return sum;
  }
  static double norm_of(const float* x, size_t count) {
    double squares = 0;
    for (size_t c = 0; c < count; ++c) squares += static_cast<double>(x[c]) * static_cast<double>(x[c]);
    return std::sqrt(squares);
  }

  void load_row(const Row& row) {
    const auto scale = static_cast<float>(s_.resolved_scale());
    const auto head = static_cast<int64_t>(row.head);
    const int64_t head_kv = head / (s_.heads_q / s_.heads_kv);
    const float* q = q_.data() + row.q * size();
    const double q_norm = norm_of(q, size()) * std::abs(s_.resolved_scale());
    const float* qv = qv_.empty() ? nullptr : qv_.data() + row.q * size_v();
    const double qv_norm = qv == nullptr ? 0 : norm_of(qv, size_v()) * std::abs(s_.resolved_scale());
    const auto value_scale = static_cast<float>(x_.descale(Role::kVDescale, row.batch, head_kv));
    const auto product_scale = static_cast<float>(x_.descale(Role::kQDescale, row.batch, head_kv) *
                                                  x_.descale(Role::kKDescale, row.batch, head_kv));
    float slope = 0;
    if (!alibi_.empty())
      slope = alibi_[(s_.alibi_by_batch ? static_cast<size_t>(row.batch * s_.heads_q) : 0) + row.head];
    const float keep_scale = static_cast<float>(1 / (1 - effective_dropout(s_.dropout)));

    seen_.clear();
    float largest = sink_.empty() ? -kInfinity : sink_[row.head];
    const int64_t diagonal = row.i + row.sequence.used_k - row.sequence.used_q;
    const int64_t candidates = s_.has_lists() ? s_.list_size : row.sequence.used_k;
    for (int64_t n = 0; n < candidates; ++n) {
      const int64_t j = s_.has_lists() ? entry(row, head_kv, n) : n;
      if (j < 0 || j >= row.sequence.used_k) continue;
      const Pair pair = {row.batch, head, head_kv, row.i, j, row.sequence.used_q, row.sequence.used_k};
      if (!sees(pair)) continue;
      Seen seen{static_cast<size_t>(x_.key_row(row.batch, j) * s_.heads_kv + head_kv), 0, 0, 1, 0, 1, 1, {}};
      float score = dot(q, k_.data() + seen.row * size(), size()) * product_scale;
      double magnitude = q_norm * k_norm_[seen.row] * static_cast<double>(product_scale);
      if (qv != nullptr) {
        score += dot(qv, v_.data() + seen.row * size_v(), size_v()) * value_scale;
        magnitude += qv_norm * v_norm_[seen.row] * static_cast<double>(value_scale);
      }
      score *= scale;
      if (s_.softcap > 0) {
        const auto cap = static_cast<float>(s_.softcap);
        const float t = std::tanh(score / cap);
        score = cap * t;
        seen.cap_slope = 1 - t * t;
      }
      if (!alibi_.empty()) {
        const float penalty = slope * static_cast<float>(std::abs(diagonal - j));
        score -= penalty;
        magnitude += std::abs(static_cast<double>(penalty));
      }
      if (!bias_.empty()) {
        seen.bias = place(x_[Role::kBias].shape(), {row.batch, head, row.i, j});
        score += bias_[seen.bias];
        if (std::isfinite(bias_[seen.bias])) magnitude += std::abs(static_cast<double>(bias_[seen.bias]));
      }
      if (s_.score) score = apply_expression(pair, score, seen, magnitude);
      if (score == -kInfinity) continue;
      if (std::isfinite(magnitude)) score_magnitude = std::max(score_magnitude, magnitude);
      if (s_.dropout > 0) {
        const bool keeps =
            dropout_keeps(s_.dropout, s_.seed, s_.offset, row.batch * s_.heads_q + head, row.i, j);
        seen.keep = keeps ? keep_scale : 0.0f;
      }
      seen.score = score;
      largest = std::max(largest, score);
      seen_.push_back(seen);
    }

    float sum = 0;
    for (Seen& seen : seen_) {
      seen.weight = std::exp(seen.score - largest);
      sum += seen.weight;
    }
    if (!sink_.empty()) sum += std::exp(sink_[row.head] - largest);
    largest_score_ = -kInfinity;
    for (Seen& seen : seen_) {
      seen.weight /= sum;
      largest_score_ = std::max(largest_score_, seen.score);
    }
    largest_weight_ = std::exp(largest_score_ - largest) / sum;
    row_lse_ = seen_.empty() ? largest : largest + std::log(sum);
  }

  // Expressions.

  void read_tensors(const KnownExpression& expression, NamedValues& values, std::vector<Role>& roles) const {
    for (const KnownTensor& tensor : expression.tensors) {
      roles.push_back(x_.named(tensor.name));
      values.add(x_[roles.back()]);
    }
  }
  /// The result for the score so far, whose rounding error grows by the slope; the expression's own terms are at most
  /// about as large as its result and what it changes.
  float apply_expression(const Pair& pair, float score, Seen& seen, double& magnitude) {
    const Scored scored = s_.score->score(score_values_, pair, score);
    const bool valid = score_values_.take_valid();
    seen.result_slope = scored.slope;
    seen.elements = scored.elements;
    magnitude = std::max(1.0, std::abs(static_cast<double>(scored.slope))) * magnitude +
                std::abs(static_cast<double>(scored.value)) +
                std::abs(static_cast<double>(scored.value) - static_cast<double>(score));
    return valid ? scored.value : std::numeric_limits<float>::quiet_NaN();
  }
  /// A slope that is a difference, as 1 - tanh^2 is, has few correct digits where it is small.
  static double slope_bound(float slope) {
    return slope == 1 ? 1.0 : std::abs(static_cast<double>(slope)) + 0x1p-8;
  }
  void clear_named_gradients() {
    for (size_t i = 0; i < x_.named().size(); ++i) {
      const Role role = gradient_role(i);
      if (!x_.has(role)) continue;
      named_sums_[role].assign(static_cast<size_t>(x_[role].count()), 0.0f);
      named_bounds_[role].assign(static_cast<size_t>(x_[role].count()), 0.0);
    }
  }
  /// d_result times the derivative by each element. A derivative like s has the error of a score, which the floor allows to a
  /// magnitude that is not near 0.
  void add_named_gradients(const Seen& seen, float d_result, double bound) {
    for (const Scored::Element& element : seen.elements) {
      if (element.slope == 0) continue;
      const int64_t at = score_values_.place(element.tensor, element.index);
      const Role role = gradient_role(static_cast<size_t>(score_roles_[element.tensor]) - kFirstNamed);
      if (at < 0 || !x_.has(role)) continue;
      named_sums_[role][static_cast<size_t>(at)] += d_result * element.slope;
      named_bounds_[role][static_cast<size_t>(at)] +=
          bound * std::max(std::abs(static_cast<double>(element.slope)), 0.125);
    }
  }

  /// A weight as it enters a product with v, and whether it is what it was before.
  struct Rounded {
    float weight;
    bool is_exact;
  };
  Rounded rounded_weight(const Seen& seen) const {
    const float whole = seen.weight * seen.keep;
    if (s_.weight_type() != Type::kE4M3) return {to_type(whole), to_type(whole) == whole};
    const float of_largest = 256 * std::exp(seen.score - largest_score_);
    const auto weight = static_cast<float>(rounded(static_cast<double>(of_largest), Type::kE4M3));
    return {weight / 256 * largest_weight_ * seen.keep, weight == of_largest};
  }
  float to_type(float x) const {
    return s_.type == Type::kF16 || s_.type == Type::kBF16
               ? static_cast<float>(rounded(static_cast<double>(x), s_.type))
               : x;
  }
  /// A weight, and its loss when it falls below the smallest number of the type.
  double weight_bound(const Seen& seen) const {
    const double weight = static_cast<double>(seen.weight) * static_cast<double>(std::max(seen.keep, 1.0f));
    // The smallest step of a weight of 8 bits is 2^-17 of the largest.
    const bool loses = s_.weight_type() == Type::kF16 || s_.weight_type() == Type::kE4M3;
    return loses ? weight + 0x1p-14 : std::max(weight, 1e-40);
  }

  static void add(float factor, const float* from, float* to, size_t count) {
    for (size_t c = 0; c < count; ++c) to[c] += factor * from[c];
  }
  static void add(float factor, const float* from, std::vector<float>& to) {
    add(factor, from, to.data(), to.size());
  }

  /// Largest finite absolute value of each row.
  static std::vector<double> row_bounds(const std::vector<float>& matrix, int64_t columns) {
    std::vector<double> bounds(matrix.size() / static_cast<size_t>(columns), 0.0);
    for (size_t place = 0; place < matrix.size(); ++place) {
      double& bound = bounds[place / static_cast<size_t>(columns)];
      if (std::isfinite(matrix[place])) bound = std::max(bound, std::abs(static_cast<double>(matrix[place])));
    }
    return bounds;
  }
  static std::vector<double> row_norms(const std::vector<float>& matrix, int64_t columns) {
    std::vector<double> norms(matrix.size() / static_cast<size_t>(columns), 0.0);
    for (size_t place = 0; place < matrix.size(); ++place) {
      const auto x = static_cast<double>(matrix[place]);
      if (std::isfinite(x)) norms[place / static_cast<size_t>(columns)] += x * x;
    }
    for (double& norm : norms) norm = std::sqrt(norm);
    return norms;
  }
  static std::vector<double> repeated(const std::vector<double>& rows, size_t columns) {
    std::vector<double> all;
    all.reserve(rows.size() * columns);
    for (const double x : rows) all.insert(all.end(), columns, x);
    return all;
  }
  void finish(Role role, const std::vector<float>& sums, std::vector<double> magnitudes) {
    PlainOutput& out = outputs[role];
    out.values.assign(sums.begin(), sums.end());
    for (double& value : out.values) value = rounded(value, x_[role].type());
    out.magnitudes = std::move(magnitudes);
  }

  const OwnedProblem& x_;
  const ProblemSpec& s_;
  std::vector<float> q_, qv_, k_, v_, bias_, mask_, block_mask_, alibi_, sink_, d_o_, dlse_;
  std::vector<double> lists_;
  std::vector<double> k_bound_, k_norm_, v_bound_, v_norm_;
  std::vector<float> o_, lse_;
  std::vector<double> o_magnitude_;

  NamedValues score_values_, sees_values_;
  std::vector<Role> score_roles_, sees_roles_;
  std::map<Role, std::vector<float>> named_sums_;
  std::map<Role, std::vector<double>> named_bounds_;

  std::vector<Seen> seen_;  ///< of the current row
  float row_lse_ = 0;
  float largest_score_ = 0, largest_weight_ = 0;  ///< of the keys of the row
};

}  // namespace fovea::verify
