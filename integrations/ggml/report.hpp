// What the backend has computed and declined, for who asks: FOVEA_GGML_REPORT=1 prints it when the program ends.
#pragma once

#include <ggml.h>

namespace fovea_ggml {

/// From any thread.
void report_computed();
void report_declined(const ggml_tensor& node, const char* rule);

}  // namespace fovea_ggml
