// From a problem and the pointers of one run to what kernels are passed. Plain C++: no CUDA.
#pragma once

#include <array>
#include <cstdint>

#include "core/problem.hpp"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// All but pointers, seed and offset. `aligned16` holds the bits that sizes and strides allow.
tile::AttentionParams params_of(const AttentionProblem& problem);

/// Where among Buffers::data runs bring the pointers of named tensors: those of the user, and those of terms that are parts of an
/// expression (expr/problem_terms.hpp).
using NamedPlaces = std::array<uint8_t, kMaxNamedTensors>;
NamedPlaces named_places_of(const AttentionProblem& problem);

/// The bits of tile::AlignedBit of the tensors that kernels read in tiles.
inline uint32_t input_bits(const AttentionProblem& problem) {
  return tile::kAlignedQ | tile::kAlignedK | tile::kAlignedV |
         (problem.pass == Pass::kBackward ? uint32_t{tile::kAlignedDO} : 0u) |
         (problem.has(Role::kQV) ? uint32_t{tile::kAlignedQV} : 0u);
}

/// Fills in what a run brings, and clears the bits of `aligned16` whose tensor starts elsewhere.
void bind(tile::AttentionParams& params, const Buffers& buffers, const NamedPlaces& named);

}  // namespace fovea::cuda
