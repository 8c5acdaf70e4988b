// Shapes and text by Cairo and Pango, which this file loads.
#include "cli/picture/drawing.hpp"

#include <cairo-svg.h>
#include <dlfcn.h>
#include <fmt/core.h>
#include <pango/pangocairo.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "cli/terminal/failure.hpp"

namespace fovea::cli {
namespace {

// Cairo, Pango and what they need are 35 shared libraries. They are loaded when the first picture is drawn: all other
// commands start without them, and the Python package runs where they are missing. The pointers below have the names
// of the functions, which they hide in this file.
#define FOVEA_FUNCTIONS(X)                    \
  X(cairo_create)                             \
  X(cairo_destroy)                            \
  X(cairo_fill)                               \
  X(cairo_font_options_create)                \
  X(cairo_font_options_destroy)               \
  X(cairo_font_options_set_antialias)         \
  X(cairo_font_options_set_hint_metrics)      \
  X(cairo_font_options_set_hint_style)        \
  X(cairo_get_source)                         \
  X(cairo_image_surface_create)               \
  X(cairo_image_surface_get_data)             \
  X(cairo_image_surface_get_stride)           \
  X(cairo_move_to)                            \
  X(cairo_pattern_set_filter)                 \
  X(cairo_recording_surface_create)           \
  X(cairo_recording_surface_ink_extents)      \
  X(cairo_rectangle)                          \
  X(cairo_restore)                            \
  X(cairo_rotate)                             \
  X(cairo_save)                               \
  X(cairo_scale)                              \
  X(cairo_set_source_rgb)                     \
  X(cairo_set_source_surface)                 \
  X(cairo_status)                             \
  X(cairo_status_to_string)                   \
  X(cairo_surface_destroy)                    \
  X(cairo_surface_finish)                     \
  X(cairo_surface_mark_dirty)                 \
  X(cairo_surface_status)                     \
  X(cairo_surface_write_to_png_stream)        \
  X(cairo_svg_surface_create_for_stream)      \
  X(cairo_svg_surface_set_document_unit)      \
  X(cairo_translate)                          \
  X(g_object_unref)                           \
  X(pango_cairo_context_set_font_options)     \
  X(pango_cairo_create_layout)                \
  X(pango_cairo_font_map_get_default)         \
  X(pango_cairo_show_layout)                  \
  X(pango_font_description_free)              \
  X(pango_font_description_new)               \
  X(pango_font_description_set_absolute_size) \
  X(pango_font_description_set_family_static) \
  X(pango_font_description_set_weight)        \
  X(pango_font_map_create_context)            \
  X(pango_layout_get_baseline)                \
  X(pango_layout_get_context)                 \
  X(pango_layout_get_size)                    \
  X(pango_layout_get_unknown_glyphs_count)    \
  X(pango_layout_new)                         \
  X(pango_layout_set_ellipsize)               \
  X(pango_layout_set_font_description)        \
  X(pango_layout_set_single_paragraph_mode)   \
  X(pango_layout_set_text)                    \
  X(pango_layout_set_width)
#define FOVEA_POINTER(name) decltype(&::name) name = nullptr;
FOVEA_FUNCTIONS(FOVEA_POINTER)
#undef FOVEA_POINTER

bool load_libraries() {
  // dlsym also looks into the libraries that this one needs: Cairo, Pango and GObject.
  void* const library = dlopen("libpangocairo-1.0.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure(
        Exit::resources,
        fmt::format("pictures need Cairo and Pango, which cannot be loaded ({}); install them (Debian: "
                    "libpangocairo-1.0-0)",
                    dlerror()));
  }
  const auto find = [&](auto& pointer, const char* name) {
    void* const address = dlsym(library, name);
    if (address == nullptr) {
      throw Failure(Exit::resources,
                    fmt::format("pictures need Cairo 1.16 and Pango 1.50, and those here have no {}", name));
    }
    std::memcpy(&pointer, &address, sizeof address);
  };
#define FOVEA_FIND(name) find(name, #name);
  FOVEA_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  return true;
}

void check(cairo_status_t status) {
  if (status == CAIRO_STATUS_SUCCESS) return;
  if (status == CAIRO_STATUS_NO_MEMORY) throw std::bad_alloc();
  throw Failure(Exit::resources,
                fmt::format("Cairo cannot draw the picture: {}", cairo_status_to_string(status)));
}

template <auto* release>
struct Release {
  void operator()(auto* object) const { (*release)(object); }
};
using Surface = std::unique_ptr<cairo_surface_t, Release<&cairo_surface_destroy>>;
using Context = std::unique_ptr<cairo_t, Release<&cairo_destroy>>;
using TextContext = std::unique_ptr<PangoContext, Release<&g_object_unref>>;
using Layout = std::unique_ptr<PangoLayout, Release<&g_object_unref>>;
using FontDescription = std::unique_ptr<PangoFontDescription, Release<&pango_font_description_free>>;
using FontOptions = std::unique_ptr<cairo_font_options_t, Release<&cairo_font_options_destroy>>;

/// Without any font, Pango draws each letter as an empty box.
void require_fonts() {
  const TextContext context(pango_font_map_create_context(pango_cairo_font_map_get_default()));
  const Layout layout(pango_layout_new(context.get()));
  pango_layout_set_text(layout.get(), "0", 1);
  if (pango_layout_get_unknown_glyphs_count(layout.get()) > 0) {
    throw Failure(Exit::resources,
                  "pictures need a font, and there is none; install one (Debian: fonts-dejavu-core)");
  }
}

Surface checked(cairo_surface_t* surface) {
  Surface owner(surface);
  check(cairo_surface_status(surface));
  return owner;
}

Surface new_image(int64_t width, int64_t height) {
  // Sizes beyond what Cairo takes become an error of Cairo, not another size.
  const auto side = [](int64_t pixels) { return static_cast<int>(std::min<int64_t>(pixels, 1 << 20)); };
  return checked(cairo_image_surface_create(CAIRO_FORMAT_RGB24, side(width), side(height)));
}

void set_color(cairo_t* context, Color color) {
  cairo_set_source_rgb(context, color.red / 255.0, color.green / 255.0, color.blue / 255.0);
}

/// The callback of Cairo's writers. No exception may pass through them.
cairo_status_t append(void* file, const unsigned char* data, unsigned length) noexcept {
  const auto bytes = std::as_bytes(std::span(data, length));
  try {
    auto& all = *static_cast<std::vector<std::byte>*>(file);
    all.insert(all.end(), bytes.begin(), bytes.end());
  } catch (const std::bad_alloc&) {
    return CAIRO_STATUS_NO_MEMORY;
  }
  return CAIRO_STATUS_SUCCESS;
}

Layout new_layout(cairo_t* context, std::string_view text, const TextStyle& style) {
  Layout layout(pango_cairo_create_layout(context));
  // Letters keep their distances at every scale.
  const FontOptions options(cairo_font_options_create());
  cairo_font_options_set_antialias(options.get(), CAIRO_ANTIALIAS_GRAY);
  cairo_font_options_set_hint_style(options.get(), CAIRO_HINT_STYLE_NONE);
  cairo_font_options_set_hint_metrics(options.get(), CAIRO_HINT_METRICS_OFF);
  pango_cairo_context_set_font_options(pango_layout_get_context(layout.get()), options.get());
  const FontDescription font(pango_font_description_new());
  pango_font_description_set_family_static(font.get(), "sans-serif");
  pango_font_description_set_absolute_size(font.get(), style.size * PANGO_SCALE);
  if (style.bold) pango_font_description_set_weight(font.get(), PANGO_WEIGHT_BOLD);
  pango_layout_set_font_description(layout.get(), font.get());
  pango_layout_set_single_paragraph_mode(layout.get(), TRUE);
  pango_layout_set_text(layout.get(), text.data(), static_cast<int>(text.size()));
  int width = 0;
  pango_layout_get_size(layout.get(), &width, nullptr);
  if (style.longest > 0 && width > style.longest * PANGO_SCALE) {
    pango_layout_set_width(layout.get(), static_cast<int>(style.longest * PANGO_SCALE));
    pango_layout_set_ellipsize(layout.get(), PANGO_ELLIPSIZE_END);
  }
  return layout;
}

double width_of(PangoLayout* layout) {
  int width = 0;
  pango_layout_get_size(layout, &width, nullptr);
  return static_cast<double>(width) / PANGO_SCALE;
}

/// One image pixel for each pixel of a PNG.
Surface image_of(int64_t width, int64_t height, int64_t rows, int64_t columns,
                 const std::function<Color(int64_t row, int64_t column)>& color) {
  Surface image = new_image(width, height);
  unsigned char* const data = cairo_image_surface_get_data(image.get());
  const int64_t stride = cairo_image_surface_get_stride(image.get());
  int64_t row = -1;
  for (int64_t y = 0; y < height; ++y) {
    unsigned char* const line = data + y * stride;
    if (std::exchange(row, y * rows / height) == y * rows / height) {
      std::memcpy(line, line - stride, static_cast<size_t>(4 * width));
      continue;
    }
    uint32_t pixel = 0;
    for (int64_t x = 0, column = -1; x < width; ++x) {
      if (std::exchange(column, x * columns / width) != x * columns / width) {
        const Color c = color(row, column);
        pixel = uint32_t{c.red} << 16 | uint32_t{c.green} << 8 | c.blue;
      }
      std::memcpy(line + 4 * x, &pixel, sizeof pixel);
    }
  }
  cairo_surface_mark_dirty(image.get());
  return image;
}

}  // namespace

void require_pictures() {
  [[maybe_unused]] static const bool loaded = load_libraries();
  require_fonts();
}

struct Drawing::Canvas {
  explicit Canvas(cairo_surface_t* surface, bool measured)
      : context(cairo_create(surface)), only_measures(measured) {}
  Context context;
  bool only_measures;
};

void Drawing::fill(const Box& box, Color color) {
  cairo_t* const context = canvas_.context.get();
  set_color(context, color);
  cairo_rectangle(context, box.x, box.y, box.width, box.height);
  cairo_fill(context);
}

void Drawing::frame(const Box& box, Color color, double thickness) {
  const double t = thickness, width = box.width + 2 * t;
  fill({box.x - t, box.y - t, width, t}, color);
  fill({box.x - t, box.y + box.height, width, t}, color);
  fill({box.x - t, box.y, t, box.height}, color);
  fill({box.x + box.width, box.y, t, box.height}, color);
}

void Drawing::cells(const Box& box, int64_t rows, int64_t columns,
                    const std::function<Color(int64_t row, int64_t column)>& color) {
  if (canvas_.only_measures) return fill(box, {});
  const int64_t width = std::llround(box.width * kPixelsPerUnit),
                height = std::llround(box.height * kPixelsPerUnit);
  const Surface image = image_of(width, height, rows, columns, color);
  cairo_t* const context = canvas_.context.get();
  cairo_save(context);
  cairo_translate(context, box.x, box.y);
  cairo_scale(context, 1.0 / kPixelsPerUnit, 1.0 / kPixelsPerUnit);
  cairo_set_source_surface(context, image.get(), 0, 0);
  cairo_pattern_set_filter(cairo_get_source(context), CAIRO_FILTER_NEAREST);
  cairo_rectangle(context, 0, 0, static_cast<double>(width), static_cast<double>(height));
  cairo_fill(context);
  cairo_restore(context);
}

void Drawing::text(double x, double y, std::string_view text, Align align, const TextStyle& style) {
  constexpr double kCapitalMiddle = 0.36;  // above the baseline, in sizes of the font
  cairo_t* const context = canvas_.context.get();
  const Layout layout = new_layout(context, text, style);
  const double share = align == Align::start ? 0 : align == Align::middle ? 0.5 : 1;
  const double baseline = static_cast<double>(pango_layout_get_baseline(layout.get())) / PANGO_SCALE;
  cairo_save(context);
  cairo_translate(context, x, y);
  if (style.upwards) cairo_rotate(context, -std::numbers::pi / 2);
  cairo_move_to(context, -share * width_of(layout.get()), kCapitalMiddle * style.size - baseline);
  set_color(context, style.color);
  pango_cairo_show_layout(context, layout.get());
  cairo_restore(context);
}

double Drawing::text_width(std::string_view text, const TextStyle& style) const {
  return width_of(new_layout(canvas_.context.get(), text, style).get());
}

namespace {

/// What is drawn, and a margin, in whole units, so that pixels of cells stay pixels of the picture.
Box measured(double margin, const std::function<void(Drawing&)>& draw) {
  const Surface surface = checked(cairo_recording_surface_create(CAIRO_CONTENT_COLOR_ALPHA, nullptr));
  Drawing::Canvas canvas(surface.get(), true);
  Drawing drawing(canvas);
  draw(drawing);
  check(cairo_status(canvas.context.get()));
  double x = 0, y = 0, width = 0, height = 0;
  cairo_recording_surface_ink_extents(surface.get(), &x, &y, &width, &height);
  const double left = std::floor(x - margin), top = std::floor(y - margin);
  return {left, top, std::ceil(x + width + margin) - left, std::ceil(y + height + margin) - top};
}

/// The part `box` of what is drawn, on a surface with `scale` pixels a unit.
void draw_on(cairo_surface_t* surface, double scale, const Box& box, Color background,
             const std::function<void(Drawing&)>& draw) {
  Drawing::Canvas canvas(surface, false);
  cairo_scale(canvas.context.get(), scale, scale);
  cairo_translate(canvas.context.get(), -box.x, -box.y);
  Drawing drawing(canvas);
  drawing.fill(box, background);
  draw(drawing);
  check(cairo_status(canvas.context.get()));
}

}  // namespace

Picture make_picture(PictureFormat format, Color background, double margin,
                     const std::function<void(Drawing&)>& draw) {
  require_pictures();
  const Box box = measured(margin, draw);
  const int64_t scale = format == PictureFormat::png ? kPixelsPerUnit : 1;
  Picture picture = {std::llround(box.width) * scale, std::llround(box.height) * scale, {}};
  if (format == PictureFormat::png) {
    const Surface surface = new_image(picture.width, picture.height);
    draw_on(surface.get(), static_cast<double>(scale), box, background, draw);
    check(cairo_surface_write_to_png_stream(surface.get(), append, &picture.file));
  } else {
    const Surface surface =
        checked(cairo_svg_surface_create_for_stream(append, &picture.file, box.width, box.height));
    cairo_svg_surface_set_document_unit(surface.get(), CAIRO_SVG_UNIT_PX);
    draw_on(surface.get(), 1, box, background, draw);
    cairo_surface_finish(surface.get());
    check(cairo_surface_status(surface.get()));
  }
  return picture;
}

}  // namespace fovea::cli
