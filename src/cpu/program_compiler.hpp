// Values become instructions: fused, ordered by what they depend on, and given registers.
#pragma once

#include <span>
#include <vector>

#include "cpu/lowering.hpp"
#include "cpu/program.hpp"

namespace fovea::cpu {

/// A value that a program leaves in a tile.
struct ProgramOutput {
  ValueId value = kNoValue;
  ProgramTile tile = kScoreTile;
};

/// The program of `outputs`, and of `effects`: values that are kAddTo. The score's output, if any, is the last.
Program compile(Values values, std::span<const ProgramOutput> outputs, std::span<const ValueId> effects,
                bool keys_on_columns, int64_t width);

}  // namespace fovea::cpu
