// The oracle on slices of timed problems.
#include "cli/bench/verify.hpp"

#include <algorithm>
#include <cmath>

#include "cli/bench/shifted_text.hpp"
#include "cli/measure/measure.hpp"

namespace fovea::cli {
namespace {

/// The part of a problem that the oracle computes: the last `rows` queries of the heads that share one head of keys.
struct Slice {
  int64_t batch, head_kv, rows;
};

/// NaN wins.
double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// The problem of the slice, in float64, solved by the oracle.
void solve(BenchData& oracle, const BenchData& data, Pass pass, const Terms& terms, int64_t batch,
           IndexRange rows, IndexRange heads, IndexRange keys, IndexRange heads_kv) {
  const auto wide = [&](const HeadArray& from, HeadArray& to, IndexRange row_range, IndexRange head_range) {
    to.array() = converted(from.cut_out(batch, row_range, head_range), ElementType::f64);
  };
  const Options reference = {.backend = "reference"};
  wide(data.q, oracle.q, rows, heads);
  wide(data.k, oracle.k, keys, heads_kv);
  wide(data.v, oracle.v, keys, heads_kv);
  attend(oracle.problem(Pass::forward, terms), reference);
  if (pass == Pass::forward) return;
  wide(data.d_o, oracle.d_o, rows, heads);
  attend_backward(oracle.problem(Pass::backward, terms), reference);
}

double lse_error(const BenchData& data, const BenchData& oracle, int64_t batch, IndexRange rows,
                 IndexRange heads) {
  const auto all = data.lse.elements<float>(), expected_all = oracle.lse.elements<float>();
  std::vector<double> got, expected(expected_all.begin(), expected_all.end());
  for (int64_t head = heads.first; head < heads.second; ++head) {
    const int64_t first = (batch * data.shape.heads_q + head) * data.shape.seqlen_q;
    const auto begin = all.begin() + first;
    got.insert(got.end(), begin + rows.first, begin + rows.second);
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) got[i] = expected[i] = 0;  // also a row without keys: -inf less -inf is NaN
  }
  return error_between(got, expected).relative;
}

double error_of(const BenchData& data, Pass pass, const Terms& terms, const Slice& slice) {
  const Shape& s = data.shape;
  const int64_t group = s.heads_q / s.heads_kv;
  const IndexRange rows{s.seqlen_q - slice.rows, s.seqlen_q}, keys{0, s.seqlen_k};
  const IndexRange heads{slice.head_kv * group, (slice.head_kv + 1) * group},
      heads_kv{slice.head_kv, slice.head_kv + 1};
  Shape small = s;
  small.batch = 1;
  small.seqlen_q = slice.rows;
  small.heads_q = group;
  small.heads_kv = 1;
  small.type = ElementType::f64;
  BenchData oracle(
      small, pass == Pass::backward,
      shifted(data.expressions,
              {.b = slice.batch, .h = heads.first, .hk = slice.head_kv, .q = rows.first, .nq = s.seqlen_q}));
  solve(oracle, data, pass, terms, slice.batch, rows, heads, keys, heads_kv);
  const auto error = [&](const HeadArray& got, const HeadArray& expected, IndexRange row_range,
                         IndexRange head_range) {
    return error_between(to_doubles(got.cut_out(slice.batch, row_range, head_range)),
                         to_doubles(expected.array()))
        .relative;
  };
  if (pass == Pass::forward) {
    return larger(error(data.o, oracle.o, rows, heads), lse_error(data, oracle, slice.batch, rows, heads));
  }
  return larger(error(data.dq, oracle.dq, rows, heads),
                larger(error(data.dk, oracle.dk, keys, heads_kv), error(data.dv, oracle.dv, keys, heads_kv)));
}

}  // namespace

int64_t rows_for_oracle(const Shape& s, Pass pass) {
  constexpr double kOperations = 1e8;  // a tenth of a second
  const double row_operations = static_cast<double>(s.seqlen_k * (s.heads_q / s.heads_kv)) *
                                static_cast<double>(2 * (s.head_dim + s.head_dim_v)) *
                                (pass == Pass::forward ? 1 : 4);
  return std::clamp(static_cast<int64_t>(kOperations / std::max(row_operations, 1.0)),
                    std::min<int64_t>(s.seqlen_q, 1), s.seqlen_q);
}

double largest_error(const BenchData& data, Pass pass, const Terms& terms, int64_t rows) {
  const Shape& s = data.shape;
  if (s.batch == 0 || rows == 0 || s.seqlen_k == 0) return 0;
  const double first = error_of(data, pass, terms, {0, 0, rows});
  if (s.batch == 1 && s.heads_kv == 1) return first;
  return larger(error_of(data, pass, terms, {s.batch - 1, s.heads_kv - 1, rows}), first);
}

double allowed_error(ElementType type, Pass pass) {
  if (type == ElementType::f64) return 1e-6;  // lse is float32
  if (type == ElementType::f32) return 2e-5;
  if (type == ElementType::e4m3) return unit_roundoff(type);  // weights that are rounded to it, in sums
  return unit_roundoff(type) * (pass == Pass::forward ? 4 : 8);
}

}  // namespace fovea::cli
