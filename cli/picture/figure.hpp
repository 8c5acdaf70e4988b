// Pictures of attention.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/picture/attention_map.hpp"
#include "cli/picture/canvas.hpp"

namespace fovea::cli {

/// All tokens at a glance, without labels: as many pixels a cell as fit into `size`.
struct Overview {
  std::string title, subtitle;
  WeightGrid grid;
  Range queries, keys;
  std::string unit;  ///< what the colour stands for
};
Canvas draw_overview(const Overview& overview, int64_t size);

/// A window of tokens with their names, and where it lies in an overview of all.
struct LabelledMap {
  std::string title, subtitle;
  std::vector<std::string> tokens;  ///< of the window, for rows and columns
  WeightGrid window, overview;
  Range range;                       ///< of the window
  int64_t seqlen = 0;                ///< of the overview
  std::vector<std::string> remarks;  ///< lines below the overview
};
Canvas draw_labelled_map(const LabelledMap& map);

}  // namespace fovea::cli
