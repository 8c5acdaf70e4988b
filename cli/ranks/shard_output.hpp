// Results that stay with the ranks, as a set of .safetensors files: one for each run of rows, written by the rank that has it, and an index.
#pragma once

#include <filesystem>
#include <span>

#include "cli/data/elements.hpp"
#include "cli/data/output.hpp"
#include "cli/ranks/rank_group.hpp"

namespace fovea::cli {

/// Writes `outputs`, whose arrays have no elements, from what the ranks keep; on all processes. All files appear, the index last, or none; shards
/// of an older run under the same names are replaced. Throws Failures as other outputs do. Returns the number of shards; 0: none, because a
/// rank of another process failed, which says so.
size_t write_shards(const std::filesystem::path& index, std::span<const Array> outputs,
                    const io::Metadata& metadata, const RankGroup& group, const RankFiles& files,
                    const Paths& inputs);

}  // namespace fovea::cli
