// The colours of weights: anchors in Oklab, and what a screen shows between them.
#include "cli/picture/colors.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

namespace fovea::cli {
namespace {

/// A colour in Oklab, whose distances are about those that people see (Ottosson, 2020).
struct Oklab {
  double lightness, a, b;
};

uint8_t srgb(double linear) {
  const double x = std::clamp(linear, 0.0, 1.0);
  const double encoded = x <= 0.0031308 ? 12.92 * x : 1.055 * std::pow(x, 1 / 2.4) - 0.055;
  return static_cast<uint8_t>(std::lround(255 * encoded));
}

Color to_srgb(Oklab color) {
  const double l = std::pow(color.lightness + 0.3963377774 * color.a + 0.2158037573 * color.b, 3);
  const double m = std::pow(color.lightness - 0.1055613458 * color.a - 0.0638541728 * color.b, 3);
  const double s = std::pow(color.lightness - 0.0894841775 * color.a - 1.2914855480 * color.b, 3);
  return {srgb(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
          srgb(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
          srgb(-0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s)};
}

/// Lightness grows in equal steps; chroma stays inside what a screen can show at that lightness and hue.
struct Anchor {
  double lightness, chroma, hue_degrees;
};
constexpr std::array<Anchor, 7> kAnchors = {{{0.14, 0.030, 275},
                                             {0.28, 0.110, 288},
                                             {0.42, 0.155, 320},
                                             {0.56, 0.175, 8},
                                             {0.70, 0.165, 40},
                                             {0.84, 0.140, 78},
                                             {0.98, 0.060, 105}}};

Oklab oklab(const Anchor& anchor) {
  const double angle = anchor.hue_degrees * std::numbers::pi / 180;
  return {anchor.lightness, anchor.chroma * std::cos(angle), anchor.chroma * std::sin(angle)};
}

}  // namespace

Color colormap(double t) {
  const double place =
      std::clamp(std::isnan(t) ? 0.0 : t, 0.0, 1.0) * static_cast<double>(kAnchors.size() - 1);
  const size_t below = std::min(static_cast<size_t>(place), kAnchors.size() - 2);
  const double share = place - static_cast<double>(below);
  const Oklab from = oklab(kAnchors[below]), to = oklab(kAnchors[below + 1]);
  return to_srgb({std::lerp(from.lightness, to.lightness, share), std::lerp(from.a, to.a, share),
                  std::lerp(from.b, to.b, share)});
}

}  // namespace fovea::cli
