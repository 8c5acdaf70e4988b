// Shapes, inputs, float64 references and costs of each family: the definitions of family.hpp.

#include "ladder/harness/family.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ladder/harness/parallel.hpp"

namespace ladder {
namespace {

/// Nearly normal numbers of variance 1, the same on every machine.
class Normal {
 public:
  explicit Normal(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  float next() {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      state_ ^= state_ << 13;  // xorshift64 (Marsaglia 2003)
      state_ ^= state_ >> 7;
      state_ ^= state_ << 17;
      sum += static_cast<double>(state_ >> 11) * 0x1p-53;
    }
    return static_cast<float>((sum - 2) * 1.7320508075688772);
  }

 private:
  uint64_t state_;
};

HostTensor input(const char* name, int64_t rows, int64_t width, Type type, uint64_t seed) {
  HostTensor t{name, rows, width, false, type, {}};
  t.values.resize(static_cast<size_t>(t.count()));
  Normal normal(seed);
  for (float& x : t.values) x = type == Type::bf16 ? round_to_bf16(normal.next()) : normal.next();
  return t;
}
HostTensor output(const char* name, int64_t rows, int64_t width, Type type) {
  return {name, rows, width, true, type, {}};
}

double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

const float* row_of(const HostTensor& t, int64_t row) {
  return t.values.data() + row * t.width;
}
double scale_of(Shape shape) {
  return 1 / std::sqrt(static_cast<double>(shape.c));
}

using Rows = std::vector<std::vector<double>>;

Rows matmul_row(Shape s, const std::vector<HostTensor>& t, int64_t row) {
  std::vector<double> c(static_cast<size_t>(s.b));
  for (int p = 0; p < s.c; ++p) {
    const double a = row_of(t[0], row)[p];
    const float* b = row_of(t[1], p);
    for (int j = 0; j < s.b; ++j) c[static_cast<size_t>(j)] += a * static_cast<double>(b[j]);
  }
  return {c};
}

Rows softmax_row(Shape s, const std::vector<HostTensor>& t, int64_t row) {
  const float* x = row_of(t[0], row);
  const double largest = *std::max_element(x, x + s.b);
  std::vector<double> y(static_cast<size_t>(s.b));
  double sum = 0;
  for (size_t j = 0; j < y.size(); ++j) sum += y[j] = std::exp(static_cast<double>(x[j]) - largest);
  for (double& value : y) value /= sum;
  return {y};
}

Rows attention_row(Shape s, const std::vector<HostTensor>& t, int64_t row, bool causal) {
  const int64_t first_key = row / s.b * s.b;
  const int keys = causal ? static_cast<int>(row - first_key) + 1 : s.b;
  std::vector<double> weights(static_cast<size_t>(keys)), o(static_cast<size_t>(s.c));
  for (int j = 0; j < keys; ++j)
    weights[static_cast<size_t>(j)] = scale_of(s) * dot(row_of(t[0], row), row_of(t[1], first_key + j), s.c);
  const double largest = *std::max_element(weights.begin(), weights.end());
  double sum = 0;
  for (double& w : weights) sum += w = std::exp(w - largest);
  for (int j = 0; j < keys; ++j) {
    const float* v = row_of(t[2], first_key + j);
    const double w = weights[static_cast<size_t>(j)] / sum;
    for (int c = 0; c < s.c; ++c) o[static_cast<size_t>(c)] += w * static_cast<double>(v[c]);
  }
  return {o, {largest + std::log(sum)}};
}

/// dS_ij = P_ij (dO_i . v_j - D_i) with D_i = dO_i . O_i; dq_i = scale sum_j dS_ij k_j,
/// dk_j = scale sum_i dS_ij q_i, dv_j = sum_i P_ij dO_i.
Rows gradient_row(Shape s, const std::vector<HostTensor>& t, int64_t row) {
  const HostTensor &q = t[0], &k = t[1], &v = t[2], &o = t[3], &lse = t[4], &d_o = t[5];
  const int64_t first = row / s.b * s.b;
  const double scale = scale_of(s);
  const auto weight = [&](int64_t i, int64_t j) {
    return std::exp(scale * dot(row_of(q, i), row_of(k, j), s.c) - static_cast<double>(*row_of(lse, i)));
  };
  const auto add = [&](std::vector<double>& to, double factor, const float* x) {
    for (int c = 0; c < s.c; ++c) to[static_cast<size_t>(c)] += factor * static_cast<double>(x[c]);
  };
  Rows found(3, std::vector<double>(static_cast<size_t>(s.c)));
  const double own_d = dot(row_of(d_o, row), row_of(o, row), s.c);
  for (int64_t other = first; other < first + s.b; ++other) {
    const double ds_row = weight(row, other) * (dot(row_of(d_o, row), row_of(v, other), s.c) - own_d);
    add(found[0], scale * ds_row, row_of(k, other));
    const double p = weight(other, row);
    const double d = dot(row_of(d_o, other), row_of(o, other), s.c);
    add(found[1], scale * p * (dot(row_of(d_o, other), row_of(v, row), s.c) - d), row_of(q, other));
    add(found[2], p, row_of(d_o, other));
  }
  return found;
}

}  // namespace

uint16_t bf16_bits(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}
float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x = 0;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
float round_to_bf16(float x) {
  return bf16_value(bf16_bits(x));
}

const char* shape_words(Family family) {
  switch (family) {
    case Family::matmul:
      return "MxNxK";
    case Family::softmax:
      return "ROWSxCOLUMNS";
    case Family::attention:
    case Family::causal:
    case Family::gradient:
      break;
  }
  return "BATCHxLENGTHxSIZE";
}

Shape parse_shape(Family family, const std::string& text) {
  const size_t wanted = family == Family::softmax ? 2 : 3;
  std::vector<int> sizes;
  const char *at = text.data(), *end = at + text.size();
  while (sizes.size() < wanted) {
    int value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value <= 0) break;
    sizes.push_back(value);
    at = next;
    if (at == end || *at != 'x') break;
    ++at;
  }
  if (sizes.size() != wanted || at != end) {
    throw std::invalid_argument("--shape: got '" + text + "', expected " + shape_words(family) +
                                ", whole numbers above 0");
  }
  return {sizes[0], sizes[1], wanted > 2 ? sizes[2] : 1};
}

std::string shape_text(Family family, Shape s) {
  const std::string two = std::to_string(s.a) + "x" + std::to_string(s.b);
  return family == Family::softmax ? two : two + "x" + std::to_string(s.c);
}

std::vector<HostTensor> make_tensors(Family family, Type type, Shape s, uint64_t seed) {
  const int64_t rows = static_cast<int64_t>(s.a) * s.b;
  switch (family) {
    case Family::matmul:
      return {input("a", s.a, s.c, type, seed), input("b", s.c, s.b, type, seed + 1),
              output("c", s.a, s.b, type)};
    case Family::softmax:
      return {input("x", s.a, s.b, type, seed), output("y", s.a, s.b, type)};
    case Family::attention:
    case Family::causal:
    case Family::gradient:
      break;
  }
  std::vector<HostTensor> t = {input("q", rows, s.c, type, seed), input("k", rows, s.c, type, seed + 1),
                               input("v", rows, s.c, type, seed + 2), output("o", rows, s.c, type),
                               output("lse", rows, 1, Type::f32)};
  if (family != Family::gradient) return t;
  t[3].values.resize(static_cast<size_t>(t[3].count()));
  t[4].values.resize(static_cast<size_t>(t[4].count()));
  parallel_for(rows, [&](int64_t row) {
    const Rows forward = attention_row(s, t, row, false);
    for (size_t c = 0; c < forward[0].size(); ++c) {
      const auto x = static_cast<float>(forward[0][c]);
      t[3].values[static_cast<size_t>(row * s.c) + c] = type == Type::bf16 ? round_to_bf16(x) : x;
    }
    t[4].values[static_cast<size_t>(row)] = static_cast<float>(forward[1][0]);
  });
  t[3].is_output = t[4].is_output = false;
  t.push_back(input("d_o", rows, s.c, type, seed + 3));
  for (const char* name : {"dq", "dk", "dv"}) t.push_back(output(name, rows, s.c, Type::f32));
  return t;
}

std::vector<std::vector<double>> reference_row(Family family, Shape shape,
                                               const std::vector<HostTensor>& tensors, int64_t row) {
  switch (family) {
    case Family::matmul:
      return matmul_row(shape, tensors, row);
    case Family::softmax:
      return softmax_row(shape, tensors, row);
    case Family::attention:
      return attention_row(shape, tensors, row, false);
    case Family::causal:
      return attention_row(shape, tensors, row, true);
    case Family::gradient:
      break;
  }
  return gradient_row(shape, tensors, row);
}

double flops_of(Family family, Shape s) {
  const double product = static_cast<double>(s.a) * s.b * s.c;
  switch (family) {
    case Family::matmul:
      return 2 * product;
    case Family::softmax:
      return 4 * product;
    case Family::attention:
      return 4 * product * s.b;
    case Family::causal:
      return 2 * product * (s.b + 1.0);
    case Family::gradient:
      break;
  }
  return 10 * product * s.b;
}

double bytes_of(Family family, Type type, Shape s) {
  const double element = type == Type::f32 ? 4 : 2, a = s.a, b = s.b, c = s.c;
  switch (family) {
    case Family::matmul:
      return element * (a * c + c * b + a * b);
    case Family::softmax:
      return element * 2 * a * b;
    case Family::attention:
    case Family::causal:
      return element * 4 * a * b * c + 4 * a * b;
    case Family::gradient:
      break;
  }
  return element * 5 * a * b * c + 4 * a * b + 4 * 3 * a * b * c;
}

}  // namespace ladder
