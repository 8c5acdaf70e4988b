// What is seen in seen_blocks_test.cpp: of alike queries and keys, of groups of these, or of none, as the tensors have it.
#pragma once

namespace fovea::emulation {

inline constexpr const char* kSeesOfSeenBlocks = "group[b, q] + shift[h] == mark[b, k]";

}  // namespace fovea::emulation
