// Options for the sizes of problems without tensors: single values, or lists of which every combination is made.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/data/elements.hpp"
#include "cli/options/cli11.hpp"
#include "cli/options/options.hpp"
#include "fovea/fovea.hpp"

namespace fovea::cli {

/// One problem by its sizes.
struct Shape {
  int64_t batch = 1, seqlen_q = 0, seqlen_k = 0, heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  ElementType type = ElementType::bf16;

  std::array<int64_t, 4> q() const { return {batch, seqlen_q, heads_q, head_dim}; }
  std::array<int64_t, 4> k() const { return {batch, seqlen_k, heads_kv, head_dim}; }
  std::array<int64_t, 4> v() const { return {batch, seqlen_k, heads_kv, head_dim_v}; }
  std::array<int64_t, 4> o() const { return {batch, seqlen_q, heads_q, head_dim_v}; }
  std::array<int64_t, 3> lse() const { return {batch, heads_q, seqlen_q}; }
};

/// Lists of sizes, from which every combination is made. A size of 0 stands for its default: seqlen_k that of
/// the queries, heads_kv that of the queries, head_dim_v the head size.
struct ShapeOptions {
  std::vector<int64_t> batch = {1}, seqlen = {1024}, seqlen_k = {0}, heads = {16}, heads_kv = {0},
                       head_dim = {64}, head_dim_v = {0};
  std::vector<std::string> dtype = {"bfloat16"};

  /// `with_type`: --dtype is one of them.
  void add_options(CLI::App& command, bool lists, bool with_type = true);
  bool given() const;
  /// Takes the sizes of `others` where none are given; heads of keys as those of the queries.
  void take_defaults(const ShapeOptions& others);
  std::vector<Shape> shapes() const;

 private:
  std::vector<CLI::Option*> options_;
};

/// Tensors without data, for a plan.
Tensor described(ElementType type, std::span<const int64_t> shape);
/// q, k, v, o, lse and, for the backward, the gradients, without data.
Problem described(const Shape& shape, Pass pass);
/// Tensors without data, as tensors of a GPU.
void move_to_gpu(Problem& problem, int id);

/// "forward", "fwd", "backward", "bwd".
Pass parse_pass(const std::string& text);

}  // namespace fovea::cli
