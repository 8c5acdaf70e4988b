// Pictures in a build without the headers of Cairo and Pango.
#include "cli/picture/figure.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

void require_pictures() {
  throw Failure(
      Exit::resources,
      "this build draws no pictures: Cairo and Pango were missing when it was compiled; install their "
      "headers (Debian: libcairo2-dev libpango1.0-dev pkg-config) and build again");
}

Picture draw_overview(const Overview&, int64_t, PictureFormat) {
  require_pictures();
  return {};
}

Picture draw_labelled_map(const LabelledMap&, PictureFormat) {
  require_pictures();
  return {};
}

}  // namespace fovea::cli
