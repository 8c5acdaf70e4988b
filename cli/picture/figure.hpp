// Pictures of attention weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/picture/attention_map.hpp"

namespace fovea::cli {

enum class PictureFormat { png, svg };

/// Endings of the names of picture files.
inline const std::vector<std::string> kPictureEndings = {".png", ".svg"};
inline PictureFormat picture_format(const std::filesystem::path& path) {
  return path.extension() == ".svg" ? PictureFormat::svg : PictureFormat::png;
}

/// A whole file of a picture; width and height in pixels (of CSS in an SVG).
struct Picture {
  int64_t width = 0, height = 0;
  std::vector<std::byte> file;
};

/// Throws Failure, which says what to install, when this build or this machine cannot draw.
void require_pictures();

/// All tokens at a glance, without their names.
struct Overview {
  std::string title, subtitle;
  WeightGrid grid;
  Range queries, keys;
};
/// The map's longer side has at most `size` pixels of a PNG; every cell is a square of whole pixels.
Picture draw_overview(const Overview& overview, int64_t size, PictureFormat format);

/// A large weight of the window.
struct Look {
  float weight = 0;
  int64_t query = 0, key = 0;  ///< tokens, counted from the first of the sequence
};

/// A window of tokens with their names, and where it lies among all tokens.
struct LabelledMap {
  std::string title, subtitle;
  std::vector<std::string> tokens;  ///< names in the window, for rows and columns alike
  WeightGrid window, overview;
  Range range;              ///< of the window
  int64_t seqlen = 0;       ///< of the overview
  std::vector<Look> looks;  ///< the strongest of the window, largest first
};
Picture draw_labelled_map(const LabelledMap& map, PictureFormat format);

}  // namespace fovea::cli
