// The oracle: attention and its gradients in float64, row by row.
//
// For query row i of one head and the keys j that it sees, of all or, with lists, of its list:
//
//   z_j  = scale * q_i . k_j
//   t_j  = cap(z_j) - slope * |i + sk - sq - j| + bias_ij     cap(z) = c tanh(z / c), or z without softcap
//   s_j  = f(t_j)                                             f: the problem's expression, or t_j without
//   lse  = log(exp(sink) + sum_j exp(s_j))
//   p_j  = exp(s_j - lse)
//   m_j  = keep_j / (1 - dropout), or 1 without dropout
//   o    = sum_j p_j m_j v_j
//
//   dp_j  = m_j dO . v_j                    delta   = dO . o - dlse
//   ds_j  = p_j (dp_j - delta)              dt_j    = ds_j f'(t_j)             dz_j = dt_j cap'(z_j)
//   dv_j += p_j m_j dO                      dq_i   += scale dz_j k_j         dk_j += scale dz_j q_i
//   dbias_ij += dt_j                        dsink  -= exp(sink - lse) delta
//   dx       += ds_j df / dx  for an element x of a tensor that f reads
//
// A key that is masked, or whose score is -inf, is left out: its K and V are not read into the row, so their
// NaN cannot reach it. The same holds for the V of a dropped key.
#include "cpu/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cpu/backends.hpp"
#include "cpu/expression.hpp"
#include "cpu/sequence.hpp"
#include "tile/philox.hpp"

namespace fovea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A strided run of elements of any type, as doubles.
struct Elements {
  char* data = nullptr;
  int64_t stride = 1;
  DType dtype = DType::kF64;
  double factor = 1;  ///< of what is read

  template <class Visit>
  void visit(Visit&& with_pointer) const {
    switch (dtype) {
      case DType::kF64:
        return with_pointer(reinterpret_cast<double*>(data));
      case DType::kF32:
        return with_pointer(reinterpret_cast<float*>(data));
      case DType::kF16:
        return with_pointer(reinterpret_cast<F16*>(data));
      case DType::kBF16:
        return with_pointer(reinterpret_cast<Bf16*>(data));
      case DType::kE4M3:
        return with_pointer(reinterpret_cast<E4M3*>(data));
      case DType::kI64:
      case DType::kI32:
      case DType::kU8:
      case DType::kBool:
        return;  // no tensor of real numbers has these
    }
  }
  double get(int64_t index) const {
    double value = 0;
    visit([&](auto* x) { value = factor * as_double(x[index * stride]); });
    return value;
  }
  void set(int64_t index, double value) const {
    visit([&]<class T>(T* x) { x[index * stride] = from_double<T>(value); });
  }
  void fill(int64_t count, double value) const {
    for (int64_t c = 0; c < count; ++c) set(c, value);
  }
  void write(std::span<const double> values) const {
    visit([&]<class T>(T* x) {
      for (size_t c = 0; c < values.size(); ++c)
        x[static_cast<int64_t>(c) * stride] = from_double<T>(values[c]);
    });
  }
  /// The elements as doubles: in place when they are contiguous doubles, else copied to `scratch`.
  std::span<const double> read(std::vector<double>& scratch) const {
    if (dtype == DType::kF64 && stride == 1) return {reinterpret_cast<const double*>(data), scratch.size()};
    visit([&](auto* x) {
      for (size_t c = 0; c < scratch.size(); ++c)
        scratch[c] = factor * as_double(x[static_cast<int64_t>(c) * stride]);
    });
    return scratch;
  }

 private:
  static double as_double(double x) { return x; }
  template <class T>
  static double as_double(T x) {
    return static_cast<double>(to_float(x));
  }
};

/// The dot product, in four partial sums so that the additions do not wait for each other.
double dot(std::span<const double> a, std::span<const double> b) {
  double sums[4] = {0, 0, 0, 0};
  size_t c = 0;
  for (; c + 4 <= a.size(); c += 4) {
    for (size_t lane = 0; lane < 4; ++lane) sums[lane] += a[c + lane] * b[c + lane];
  }
  for (; c < a.size(); ++c) sums[0] += a[c] * b[c];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add_scaled(double factor, std::span<const double> x, std::span<double> sum) {
  for (size_t c = 0; c < x.size(); ++c) sum[c] += factor * x[c];
}

/// One key as one query row sees it.
struct SeenKey {
  int64_t j = 0;
  double score = 0;
  double cap_slope = 1;  ///< d before / d (scale * q.k)
  double before = 0;     ///< the score before the expression
  double slope = 1;      ///< d score / d before
  double keep = 1;       ///< dropout's factor: 0 or 1 / (1 - p)
  double weight = 0;     ///< softmax, before dropout
};

class Oracle {
 public:
  Oracle(const AttentionProblem& problem, const Buffers& buffers)
      : p_(problem),
        buffers_(buffers),
        terms_(problem, buffers),
        q_scratch_(static_cast<size_t>(problem.head_dim)),
        qv_scratch_(problem.has(Role::kQV) ? static_cast<size_t>(problem.head_dim_v) : 0),
        k_scratch_(static_cast<size_t>(problem.head_dim)),
        v_scratch_(static_cast<size_t>(problem.head_dim_v)),
        do_scratch_(static_cast<size_t>(problem.head_dim_v)),
        o_(static_cast<size_t>(problem.head_dim_v)) {
    uint64_t seed = buffers.seed, offset = buffers.offset;
    if (auto* state = p_.has(Role::kRngState) ? buffers.get<int64_t>(Role::kRngState) : nullptr) {
      if (p_.pass == Pass::kForward) {
        state[0] = static_cast<int64_t>(seed);
        state[1] = static_cast<int64_t>(offset);
      } else {
        seed = static_cast<uint64_t>(state[0]);
        offset = static_cast<uint64_t>(state[1]);
      }
    }
    if (p_.dropout > 0) dropout_ = tile::Dropout(p_.dropout, seed, offset);
    dropout_.begin_at(buffers.dropout.first_query, buffers.dropout.first_key);
  }

  void forward() {
    for (int64_t batch = 0; batch < p_.batch; ++batch) {
      const SequenceSpan span = sequence_span(p_, buffers_, batch);
      for (int64_t head = 0; head < p_.heads_q; ++head) {
        for (int64_t i = 0; i < span.used_q; ++i) forward_row(span, batch, head, i);
        for (int64_t i = span.used_q; i < span.length_q; ++i) write_empty_row(batch, head, span.row_q + i);
      }
    }
    for_each_row_outside([&](int64_t head, int64_t row) { write_empty_row(0, head, row); }, Role::kCuSeqlensQ,
                         p_.total_q, p_.heads_q);
  }

  void backward() {
    clear_dbias();
    std::vector<double> dsink(static_cast<size_t>(p_.heads_q), 0.0);
    std::vector<double> dq(static_cast<size_t>(p_.head_dim));
    for (int64_t batch = 0; batch < p_.batch; ++batch) {
      const SequenceSpan span = sequence_span(p_, buffers_, batch);
      for (int64_t head_kv = 0; head_kv < p_.heads_kv; ++head_kv) {
        dk_.assign(static_cast<size_t>(span.length_k * p_.head_dim), 0.0);
        dv_.assign(static_cast<size_t>(span.length_k * p_.head_dim_v), 0.0);
        for (int64_t head = head_kv * p_.group(); head < (head_kv + 1) * p_.group(); ++head) {
          for (int64_t i = 0; i < span.length_q; ++i) {
            std::fill(dq.begin(), dq.end(), 0.0);
            if (i < span.used_q) backward_row(span, batch, head, i, dq, dsink[static_cast<size_t>(head)]);
            row_of(Role::kDQ, batch, head, span.row_q + i).write(dq);
          }
        }
        for (int64_t j = 0; j < span.length_k; ++j) {
          row_of(Role::kDK, batch, head_kv, span.row_k + j).write(row_in(dk_, j, p_.head_dim));
          row_of(Role::kDV, batch, head_kv, span.row_k + j).write(row_in(dv_, j, p_.head_dim_v));
        }
      }
    }
    for_each_row_outside(
        [&](int64_t head, int64_t row) { row_of(Role::kDQ, 0, head, row).fill(p_.head_dim, 0.0); },
        Role::kCuSeqlensQ, p_.total_q, p_.heads_q);
    for_each_row_outside(
        [&](int64_t head, int64_t row) {
          row_of(Role::kDK, 0, head, row).fill(p_.head_dim, 0.0);
          row_of(Role::kDV, 0, head, row).fill(p_.head_dim_v, 0.0);
        },
        Role::kCuSeqlensK, p_.total_k, p_.heads_kv);
    if (p_.has(Role::kDSink)) per_head(Role::kDSink).write(dsink);
    write_dbias();
    terms_.write_gradients();
  }

 private:
  Elements elements(Role role, int64_t offset, int64_t stride) const {
    const DType dtype = p_[role].dtype;
    return {buffers_.get<char>(role) + offset * size_of(dtype), stride, dtype};
  }
  /// One row of a (batch, seqlen, heads, size) tensor.
  Elements row_of(Role role, int64_t batch, int64_t head, int64_t row) const {
    const auto& stride = p_[role].stride;
    return elements(role, batch * stride[0] + row * stride[1] + head * stride[2], stride[3]);
  }
  /// Row `row` of the keys or values of a sequence, wherever a cache has it.
  Elements key_row(Role role, int64_t batch, int64_t head, int64_t row) const {
    int64_t place = batch;
    if (p_.has(Role::kCacheBatch)) place = buffers_.get<const int32_t>(Role::kCacheBatch)[batch];
    if (p_.has(Role::kPageTable)) {
      const auto* pages =
          buffers_.get<const int32_t>(Role::kPageTable) + batch * p_[Role::kPageTable].stride[0];
      place = pages[row / p_.cache_rows];
      row %= p_.cache_rows;
    }
    Elements elements = row_of(role, place, head, row);
    elements.factor =
        descale_of(p_, buffers_, role == Role::kK ? Role::kKDescale : Role::kVDescale, batch, head);
    return elements;
  }
  /// One element of a (batch, heads, seqlen) tensor.
  Elements statistic(Role role, int64_t batch, int64_t head, int64_t row) const {
    const auto& stride = p_[role].stride;
    return elements(role, batch * stride[0] + head * stride[1] + row * stride[2], 1);
  }
  Elements per_head(Role role) const { return elements(role, 0, p_[role].stride[0]); }

  static std::span<double> row_in(std::vector<double>& matrix, int64_t row, int64_t columns) {
    return std::span(matrix).subspan(static_cast<size_t>(row * columns), static_cast<size_t>(columns));
  }

  /// Visits the rows of a packed tensor behind its last sequence.
  template <class Visit>
  void for_each_row_outside(Visit&& visit, Role cu_seqlens, int64_t total, int64_t heads) const {
    if (!p_.has(cu_seqlens)) return;
    for (int64_t row = buffers_.get<const int32_t>(cu_seqlens)[p_.batch]; row < total; ++row) {
      for (int64_t head = 0; head < heads; ++head) visit(head, row);
    }
  }

  bool mask_allows(Role role, int64_t batch, int64_t head, int64_t row, int64_t column) const {
    if (!p_.has(role)) return true;
    const auto& stride = p_[role].stride;
    return buffers_.get<const uint8_t>(
               role)[batch * stride[0] + head * stride[1] + row * stride[2] + column * stride[3]] != 0;
  }

  bool sees(const SequenceSpan& span, int64_t batch, int64_t head, int64_t i, int64_t j) {
    const int64_t position = i + span.used_k - span.used_q;
    if (p_.causal && j > position) return false;
    if (p_.window_left >= 0 && j < position - p_.window_left) return false;
    if (p_.window_right >= 0 && j > position + p_.window_right) return false;
    if (!mask_allows(Role::kMask, batch, head, i, j)) return false;
    if (p_.has(Role::kBlockMask) &&
        !mask_allows(Role::kBlockMask, batch, head, i / p_.block_q, j / p_.block_k)) {
      return false;
    }
    return terms_.sees(pair(span, batch, head, i, j, 0));
  }

  /// The keys of a query, in a problem with lists that are not empty.
  const int32_t* list_of(const SequenceSpan& span, int64_t batch, int64_t head_kv, int64_t i) const {
    const auto* lists = buffers_.get<const int32_t>(Role::kKeys);
    const auto& stride = p_[Role::kKeys].stride;
    if (lists == nullptr) return nullptr;
    return lists + batch * stride[0] + head_kv * stride[1] + (span.row_q + i) * stride[2];
  }

  expr::Pair pair(const SequenceSpan& span, int64_t batch, int64_t head, int64_t i, int64_t j,
                  double s) const {
    return {s, batch, head, head / p_.group(), i, j, span.used_q, span.used_k};
  }

  /// Fills keys_ with the keys that take part in the row and their weights, lse_ and sink_weight_.
  void compute_weights(const SequenceSpan& span, int64_t batch, int64_t head, int64_t i) {
    const int64_t head_kv = head / p_.group();
    Elements queries = row_of(Role::kQ, batch, head, span.row_q + i);
    queries.factor = descale_of(p_, buffers_, Role::kQDescale, batch, head_kv);
    const std::span<const double> q = queries.read(q_scratch_);
    std::span<const double> qv;
    if (p_.has(Role::kQV)) qv = row_of(Role::kQV, batch, head, span.row_q + i).read(qv_scratch_);
    double slope = 0;
    if (p_.has(Role::kAlibi)) {
      const auto& stride = p_[Role::kAlibi].stride;
      slope = elements(Role::kAlibi, batch * stride[0] + head * stride[1], 1).get(0);
    }

    keys_.clear();
    const int32_t* list = list_of(span, batch, head_kv, i);
    const int64_t candidates = p_.has(Role::kKeys) ? p_.list_size : span.used_k;
    for (int64_t n = 0; n < candidates; ++n) {
      const int64_t j = list != nullptr ? list[n] : n;
      if (j < 0 || j >= span.used_k || !sees(span, batch, head, i, j)) continue;
      SeenKey key;
      key.j = j;
      key.score = dot(q, key_row(Role::kK, batch, head_kv, span.row_k + j).read(k_scratch_));
      if (!qv.empty())
        key.score += dot(qv, key_row(Role::kV, batch, head_kv, span.row_k + j).read(v_scratch_));
      key.score *= p_.scale;
      if (p_.softcap > 0) {
        const double t = std::tanh(key.score / p_.softcap);
        key.score = p_.softcap * t;
        key.cap_slope = 1 - t * t;
      }
      if (p_.has(Role::kAlibi)) {
        key.score -= slope * static_cast<double>(std::abs(i + span.used_k - span.used_q - j));
      }
      if (p_.has(Role::kBias)) {
        const auto& stride = p_[Role::kBias].stride;
        key.score +=
            elements(Role::kBias, batch * stride[0] + head * stride[1] + i * stride[2], stride[3]).get(j);
      }
      if (terms_.has_score()) {
        key.before = key.score;
        const expr::Pair here = pair(span, batch, head, i, j, key.before);
        key.score = terms_.score(here);
        if (p_.pass == Pass::kBackward) key.slope = terms_.slope(here);
      }
      if (key.score == -kInfinity) continue;
      if (p_.dropout > 0) {
        const auto dropout_head =
            static_cast<uint32_t>(buffers_.dropout.head_number(p_.heads_q, batch, head));
        const bool kept = dropout_.keep(dropout_head, static_cast<uint32_t>(i), static_cast<uint32_t>(j));
        key.keep = kept ? static_cast<double>(dropout_.keep_scale) : 0.0;
      }
      keys_.push_back(key);
    }

    const double sink = p_.has(Role::kSink) ? per_head(Role::kSink).get(head) : -kInfinity;
    double largest = sink;
    for (const SeenKey& key : keys_) largest = std::max(largest, key.score);
    double sum = sink == -kInfinity ? 0.0 : std::exp(sink - largest);
    for (const SeenKey& key : keys_) sum += std::exp(key.score - largest);
    lse_ = keys_.empty() ? sink : largest + std::log(sum);
    for (SeenKey& key : keys_) key.weight = std::exp(key.score - largest) / sum;
    sink_weight_ = sink == -kInfinity ? 0.0 : std::exp(sink - largest) / sum;
  }

  /// o_ of the row whose weights were computed last.
  void compute_output(const SequenceSpan& span, int64_t batch, int64_t head) {
    std::fill(o_.begin(), o_.end(), 0.0);
    for (const SeenKey& key : keys_) {
      if (key.keep == 0) {
        // The V of a dropped key is not read, but a row whose softmax is NaN is NaN whatever was dropped.
        if (std::isnan(key.weight)) std::fill(o_.begin(), o_.end(), key.weight);
        continue;
      }
      const auto v = key_row(Role::kV, batch, head / p_.group(), span.row_k + key.j).read(v_scratch_);
      add_scaled(key.weight * key.keep, v, o_);
    }
  }

  void forward_row(const SequenceSpan& span, int64_t batch, int64_t head, int64_t i) {
    compute_weights(span, batch, head, i);
    compute_output(span, batch, head);
    row_of(Role::kO, batch, head, span.row_q + i).write(o_);
    if (p_.has(Role::kLse)) statistic(Role::kLse, batch, head, span.row_q + i).set(0, lse_);
  }

  void write_empty_row(int64_t batch, int64_t head, int64_t row) const {
    row_of(Role::kO, batch, head, row).fill(p_.head_dim_v, 0.0);
    if (p_.has(Role::kLse)) statistic(Role::kLse, batch, head, row).set(0, -kInfinity);
  }

  void backward_row(const SequenceSpan& span, int64_t batch, int64_t head, int64_t i, std::span<double> dq,
                    double& dsink) {
    compute_weights(span, batch, head, i);
    if (lse_ == -kInfinity) return;
    compute_output(span, batch, head);
    const int64_t head_kv = head / p_.group();
    const auto d_o = row_of(Role::kDO, batch, head, span.row_q + i).read(do_scratch_);
    const auto q = row_of(Role::kQ, batch, head, span.row_q + i).read(q_scratch_);
    double delta = dot(d_o, o_);
    if (p_.has(Role::kDLse)) delta -= statistic(Role::kDLse, batch, head, span.row_q + i).get(0);

    for (const SeenKey& key : keys_) {
      double d_weight = 0;
      if (key.keep != 0) {
        const auto v = row_of(Role::kV, batch, head_kv, span.row_k + key.j).read(v_scratch_);
        d_weight = key.keep * dot(d_o, v);
        add_scaled(key.weight * key.keep, d_o, row_in(dv_, key.j, p_.head_dim_v));
      }
      const double d_score = key.weight * (d_weight - delta);
      if (terms_.has_score()) terms_.add_gradients(pair(span, batch, head, i, key.j, key.before), d_score);
      const double d_before = key.slope * d_score;
      add_to_dbias(batch, head, i, key.j, d_before);
      const double d_dot = p_.scale * key.cap_slope * d_before;
      add_scaled(d_dot, row_of(Role::kK, batch, head_kv, span.row_k + key.j).read(k_scratch_), dq);
      add_scaled(d_dot, q, row_in(dk_, key.j, p_.head_dim));
    }
    dsink -= sink_weight_ * delta;
  }

  // dbias is summed in double, in a compact tensor of the shape of bias, then written.

  void clear_dbias() {
    if (!p_.has(Role::kDBias)) return;
    const std::array<int64_t, 4> full = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k};
    int64_t count = 1;
    for (size_t axis = 4; axis-- > 0;) {
      const bool broadcast = p_[Role::kDBias].stride[axis] == 0;
      dbias_extent_[axis] = broadcast ? 1 : full[axis];
      dbias_stride_[axis] = broadcast ? 0 : count;
      count *= dbias_extent_[axis];
    }
    dbias_.assign(static_cast<size_t>(count), 0.0);
  }
  void add_to_dbias(int64_t batch, int64_t head, int64_t i, int64_t j, double value) {
    if (dbias_.empty()) return;
    const auto& stride = dbias_stride_;
    dbias_[static_cast<size_t>(batch * stride[0] + head * stride[1] + i * stride[2] + j * stride[3])] +=
        value;
  }
  void write_dbias() {
    if (dbias_.empty()) return;
    const auto& stride = p_[Role::kDBias].stride;
    for (int64_t batch = 0; batch < dbias_extent_[0]; ++batch) {
      for (int64_t head = 0; head < dbias_extent_[1]; ++head) {
        for (int64_t i = 0; i < dbias_extent_[2]; ++i) {
          const Elements row =
              elements(Role::kDBias, batch * stride[0] + head * stride[1] + i * stride[2], stride[3]);
          const int64_t from = batch * dbias_stride_[0] + head * dbias_stride_[1] + i * dbias_stride_[2];
          row.write(
              std::span(dbias_).subspan(static_cast<size_t>(from), static_cast<size_t>(dbias_extent_[3])));
        }
      }
    }
  }

  const AttentionProblem& p_;
  const Buffers& buffers_;
  PairTerms terms_;
  tile::Dropout dropout_;

  // The current row.
  std::vector<SeenKey> keys_;
  double lse_ = 0, sink_weight_ = 0;
  std::vector<double> q_scratch_, qv_scratch_, k_scratch_, v_scratch_, do_scratch_, o_;

  // The current (sequence, key head).
  std::vector<double> dk_, dv_;

  std::vector<double> dbias_;
  std::array<int64_t, 4> dbias_extent_{}, dbias_stride_{};
};

class Reference final : public Prepared {
 public:
  explicit Reference(const AttentionProblem& problem) : problem_(problem) {}
  void run(const Buffers& buffers) const override { run_reference(problem_, buffers); }

 private:
  AttentionProblem problem_;
};

std::string always() {
  return {};
}
Preparation try_prepare(const AttentionProblem& problem, const PrepareOptions&) {
  return {std::make_unique<Reference>(problem), ""};
}

}  // namespace

const Backend kReferenceBackend = {
    .name = "reference",
    .unavailable_because = always,
    .try_prepare = try_prepare,
    .prepare_append = prepare_append,
    .as_asked = true,
};

void run_reference(const AttentionProblem& problem, const Buffers& buffers) {
  Oracle oracle(problem, buffers);
  if (problem.pass == Pass::kForward) {
    oracle.forward();
  } else {
    oracle.backward();
  }
}

}  // namespace fovea::cpu
