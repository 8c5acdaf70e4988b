// Products of few rows with elements of 8 bits: each of the 256 codes, NaN in its place, columns and keys of any number. With tables of
// VPERMI2B and without.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpu_tables.hpp"

namespace fovea::cpu {
namespace {

constexpr int64_t kScores = 128;  // floats between rows of scores

std::vector<const Ops*> tables() {
  std::vector<const Ops*> found = tables_of_this_machine();
  const std::vector<const Ops*> all = found;
  for (const Ops* ops : all) {
    if (ops == avx512_bf16_ops()) found.push_back(avx512_bf16_ops_without_vbmi());
    if (ops == avx512_ops()) found.push_back(avx512_ops_without_vbmi());
  }
  return found;
}

/// Numbers that bfloat16 holds.
float small_number(int64_t i) {
  return static_cast<float>((i * 37 + 11) % 61 - 30) / 16;
}

/// n rows of d codes, all but NaN in turn.
struct CodeRows {
  int64_t n, d;
  std::vector<E4M3> codes;

  CodeRows(int64_t count, int64_t size) : n(count), d(size), codes(static_cast<size_t>(count * size)) {
    for (size_t i = 0; i < codes.size(); ++i) {
      const auto bits = static_cast<uint8_t>(i * 5);
      codes[i] = {(bits & 0x7f) == 0x7f ? uint8_t{0x81} : bits};
    }
  }
  E4M3& at(int64_t j, int64_t c) { return codes[static_cast<size_t>(j * d + c)]; }
  double value(int64_t j, int64_t c) const { return to_float(codes[static_cast<size_t>(j * d + c)]); }
};

void expect_near(float found, double expected, double size, const std::string& where) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(found)) << where;
  } else {
    EXPECT_NEAR(found, expected, 1e-5 * size + 1e-30) << where;
  }
}

void check_dots(const Ops& ops, int64_t rows, const CodeRows& keys) {
  const int64_t d = keys.d, n = keys.n;
  std::vector<float> q(static_cast<size_t>(rows * d)), s(static_cast<size_t>(rows * kScores), -1.0f);
  for (size_t i = 0; i < q.size(); ++i) q[i] = small_number(static_cast<int64_t>(i));
  std::vector<float> lanes(static_cast<size_t>((rows + 15) / 16 * lane_floats(d)));
  FewRows few{q.data(), d, rows};
  RowsAhead none;
  for (const bool on_lanes : {false, true}) {
    if (on_lanes) {
      if (ops.row_lanes == nullptr || !ops.row_lanes(q.data(), d, rows, d, DType::kE4M3, lanes.data()))
        return;
      few.lanes = lanes.data();
    }
    ops.row_dots(few, keys.codes.data(), DType::kE4M3, d, n, d, s.data(), kScores, none);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < d; ++c) {
          const double product = q[static_cast<size_t>(r * d + c)] * keys.value(j, c);
          sum += product;
          size += std::abs(product);
        }
        expect_near(s[static_cast<size_t>(r * kScores + j)], sum, size,
                    std::string(ops.name) + " dots, row " + std::to_string(r) + " of " +
                        std::to_string(rows) + ", key " + std::to_string(j) + ", size " + std::to_string(d));
      }
    }
  }
}

void check_sums(const Ops& ops, int64_t rows, const CodeRows& values) {
  const int64_t d = values.d, n = values.n;
  constexpr float kBehind = 77;  // what is behind the last column stays
  const int64_t ld = d + 1;
  std::vector<float> p(static_cast<size_t>(rows * kScores)), o(static_cast<size_t>(rows * ld), kBehind);
  for (size_t i = 0; i < p.size(); ++i) p[i] = small_number(static_cast<int64_t>(i) + 5);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < d; ++c) o[static_cast<size_t>(r * ld + c)] = small_number(r + c);
  RowsAhead none;
  ops.row_sums(p.data(), kScores, rows, values.codes.data(), DType::kE4M3, d, n, d, o.data(), ld, none);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < d; ++c) {
      double sum = small_number(r + c), size = std::abs(sum);
      for (int64_t j = 0; j < n; ++j) {
        const double product = p[static_cast<size_t>(r * kScores + j)] * values.value(j, c);
        sum += product;
        size += std::abs(product);
      }
      expect_near(o[static_cast<size_t>(r * ld + c)], sum, size,
                  std::string(ops.name) + " sums, row " + std::to_string(r) + " of " + std::to_string(rows) +
                      ", column " + std::to_string(c) + " of " + std::to_string(d));
    }
    EXPECT_EQ(o[static_cast<size_t>(r * ld + d)], kBehind);
  }
}

constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 11, 13, 17};

TEST(CodesOf8Bits, ProductsOfFewRows) {
  for (const Ops* ops : tables()) {
    for (const int64_t rows : kRowCounts) {
      for (const int64_t d : {1, 31, 64, 72, 128, 200, 320}) {
        for (const int64_t n : {1, 6, 21}) {
          check_dots(*ops, rows, CodeRows(n, d));
          check_sums(*ops, rows, CodeRows(n, d));
        }
      }
    }
  }
}

TEST(CodesOf8Bits, NanStaysInItsPlace) {
  for (const Ops* ops : tables()) {
    for (const int64_t rows : kRowCounts) {
      for (const int64_t n : {1, 7, 16}) {
        CodeRows of_nan(n, 136);
        of_nan.at(n - 1, 3) = {0x7f};
        of_nan.at(n / 2, 133) = {0xff};
        check_dots(*ops, rows, of_nan);
        check_sums(*ops, rows, of_nan);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::cpu
