// Writes pictures by libpng.
#include "io/png.hpp"

#include <stdexcept>
#include <string>
#include <vector>

#include "io/atomic_file.hpp"
#include "io/file_error.hpp"

#ifdef FOVEA_HAVE_PNG
#include <png.h>
#endif

namespace fovea::io {

namespace {

std::int64_t channels(PixelFormat format) {
  return format == PixelFormat::gray ? 1 : 3;
}

void validate(const ImageView& image) {
  const auto side_is_valid = [](std::int64_t side) { return side >= 1 && side <= kMaxImageSide; };
  if (!side_is_valid(image.width) || !side_is_valid(image.height)) {
    throw std::invalid_argument("an image of " + std::to_string(image.width) + " x " +
                                std::to_string(image.height) + " pixels: each side must be 1 to " +
                                std::to_string(kMaxImageSide));
  }
  const std::int64_t expected = image.width * image.height * channels(image.format);
  if (static_cast<std::uint64_t>(expected) != image.pixels.size()) {
    throw std::invalid_argument("an image of " + std::to_string(image.width) + " x " +
                                std::to_string(image.height) + " pixels takes " + std::to_string(expected) +
                                " bytes, not " + std::to_string(image.pixels.size()));
  }
}

}  // namespace

#ifdef FOVEA_HAVE_PNG

void write_png(const std::filesystem::path& path, const ImageView& image,
               std::span<const std::filesystem::path> inputs) {
  validate(image);
  AtomicFile file(path, inputs);

  // libpng's simplified interface reports errors by return values, so no longjmp crosses a C++ frame.
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.width = static_cast<png_uint_32>(image.width);
  header.height = static_cast<png_uint_32>(image.height);
  header.format = image.format == PixelFormat::gray ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  const auto row_stride = static_cast<png_int_32>(image.width * channels(image.format));

  std::vector<std::byte> encoded;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(header);
  encoded.resize(size);
  if (png_image_write_to_memory(&header, encoded.data(), &size, 0, image.pixels.data(), row_stride,
                                nullptr) == 0) {
    throw FileError(path.string(), std::string("libpng cannot encode the image: ") + header.message);
  }
  file.write(std::span(encoded).first(size));
  file.commit();
}

#else

void write_png(const std::filesystem::path& path, const ImageView& image,
               std::span<const std::filesystem::path>) {
  validate(image);
  throw FileError(path.string(), "cannot be written: this build of fovea has no libpng");
}

#endif

}  // namespace fovea::io
