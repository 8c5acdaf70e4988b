#include "io/png.hpp"

#include <png.h>

#include "test_support.hpp"

namespace fovea::io {
namespace {

using testing::expect_file_error;
using testing::TemporaryDirectory;

struct Decoded {
  std::int64_t width = 0;
  std::int64_t height = 0;
  png_uint_32 stored_format = 0;
  std::vector<std::uint8_t> pixels;
};

Decoded decode(const std::filesystem::path& path, png_uint_32 format) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  EXPECT_NE(png_image_begin_read_from_file(&image, path.c_str()), 0) << image.message;
  Decoded decoded{image.width, image.height, image.format, {}};
  image.format = format;
  decoded.pixels.resize(PNG_IMAGE_SIZE(image));
  EXPECT_NE(png_image_finish_read(&image, nullptr, decoded.pixels.data(), 0, nullptr), 0) << image.message;
  return decoded;
}

std::vector<std::uint8_t> patterned_pixels(std::size_t count) {
  std::vector<std::uint8_t> pixels(count);
  for (std::size_t i = 0; i < count; ++i) pixels[i] = static_cast<std::uint8_t>(i * 37 + i / 7);
  return pixels;
}

class PngSizes : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(PngSizes, PixelsComeBackTheSame) {
  const auto [width, height] = GetParam();
  const TemporaryDirectory directory;
  const auto path = directory / "image.png";
  for (const PixelFormat format : {PixelFormat::rgb, PixelFormat::gray}) {
    const bool has_colour = format == PixelFormat::rgb;
    const int channels = has_colour ? 3 : 1;
    const auto pixels = patterned_pixels(static_cast<std::size_t>(width * height * channels));
    write_png(path, {width, height, format, pixels});
    const Decoded decoded = decode(path, has_colour ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY);
    EXPECT_EQ(decoded.width, width);
    EXPECT_EQ(decoded.height, height);
    EXPECT_EQ(decoded.stored_format & PNG_FORMAT_FLAG_COLOR, has_colour ? PNG_FORMAT_FLAG_COLOR : 0U);
    EXPECT_EQ(decoded.pixels, pixels);
  }
  EXPECT_EQ(directory.listing().size(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Images, PngSizes,
                         ::testing::Values(std::pair{1, 1}, std::pair{7, 3}, std::pair{256, 200},
                                           std::pair{1, 500}));

TEST(Png, WrongSizesAreTheCallersMistake) {
  const TemporaryDirectory directory;
  const auto path = directory / "image.png";
  const std::vector<std::uint8_t> pixels(12);
  EXPECT_THROW(write_png(path, {2, 3, PixelFormat::rgb, pixels}), std::invalid_argument);
  EXPECT_THROW(write_png(path, {0, 3, PixelFormat::gray, {}}), std::invalid_argument);
  EXPECT_THROW(write_png(path, {-2, -6, PixelFormat::gray, pixels}), std::invalid_argument);
  EXPECT_THROW(write_png(path, {kMaxImageSide + 1, 1, PixelFormat::gray, pixels}), std::invalid_argument);
  EXPECT_TRUE(directory.listing().empty());
}

TEST(Png, InputIsNotOverwritten) {
  const TemporaryDirectory directory;
  const auto path = directory / "image.png";
  testing::write_text(path, "precious");
  const std::vector<std::uint8_t> pixels(1);
  const std::vector<std::filesystem::path> inputs{path};
  expect_file_error(
      [&] {
        write_png(path, {1, 1, PixelFormat::gray, pixels}, inputs);
      },
      path.string(), "is the same file as the input");
  EXPECT_EQ(testing::read_text(path), "precious");
}

TEST(Png, UnwritablePlaceIsNamed) {
  const TemporaryDirectory directory;
  const auto path = directory / "missing/image.png";
  const std::vector<std::uint8_t> pixels(1);
  expect_file_error(
      [&] {
        write_png(path, {1, 1, PixelFormat::gray, pixels});
      },
      path.string(), "cannot create a file in its directory");
}

}  // namespace
}  // namespace fovea::io
