// Pictures as .png files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

namespace fovea::io {

enum class PixelFormat : std::uint8_t {
  gray,  ///< one byte a pixel, 0 is black
  rgb,   ///< three bytes a pixel: red, green, blue
};

/// An image in the caller's memory: 8-bit sRGB samples, rows from the top, pixels from the left, no padding,
/// so `pixels` has width * height * (1 or 3) bytes.
struct ImageView {
  std::int64_t width = 0;
  std::int64_t height = 0;
  PixelFormat format = PixelFormat::rgb;
  std::span<const std::uint8_t> pixels;
};

/// The longest side write_png takes, in pixels: what common PNG readers accept.
inline constexpr std::int64_t kMaxImageSide = 1'000'000;

/// Writes a PNG file atomically. Throws std::invalid_argument when a side is not in 1..kMaxImageSide or the
/// number of bytes is not what the size asks for; FileError when the file cannot be written, is one of
/// `inputs`, or when this build has no libpng.
void write_png(const std::filesystem::path& path, const ImageView& image,
               std::span<const std::filesystem::path> inputs = {});

}  // namespace fovea::io
