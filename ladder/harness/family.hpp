// The problems of the ladder: their tensors, their costs, and their solution in float64.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ladder/harness/rung.hpp"

namespace ladder {

/// A tensor of a problem, on the host: rows of `width` values. Values are exact in the type of the problem.
struct HostTensor {
  std::string name;
  int64_t rows = 0, width = 0;
  bool is_output = false;
  Type type = Type::f32;
  std::vector<float> values;  ///< empty for outputs

  int64_t count() const { return rows * width; }
};

/// Names of the sizes of a shape, as in "100x4096x32".
const char* shape_words(Family family);
/// Reads a text such as "100x4096x32", or for softmax "1024x1024". Throws std::invalid_argument.
Shape parse_shape(Family family, const std::string& text);
std::string shape_text(Family family, Shape shape);

/// Inputs are normal random numbers; those of the gradient hold the output and lse of the forward as well.
std::vector<HostTensor> make_tensors(Family family, Type type, Shape shape, uint64_t seed);

/// Row `row` of each output, in float64. All outputs of a problem have the same number of rows.
std::vector<std::vector<double>> reference_row(Family family, Shape shape,
                                               const std::vector<HostTensor>& tensors, int64_t row);

/// Floating-point operations: 2 m n k, 4 b n^2 d forward (causal: of visible pairs,
/// 2 b n (n + 1) d) and 10 b n^2 d backward; softmax 4 a value.
double flops_of(Family family, Shape shape);
/// The least bytes to move: each input and output once.
double bytes_of(Family family, Type type, Shape shape);

float round_to_bf16(float x);
uint16_t bf16_bits(float x);
float bf16_value(uint16_t bits);

}  // namespace ladder
