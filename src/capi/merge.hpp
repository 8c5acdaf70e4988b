// fovea_merge, in the types of the library.
#pragma once

#include "fovea/fovea.h"

namespace fovea::capi {

/// Checks and merges. Throws RequestError.
void merge(int32_t num_parts, const fovea_tensor* const* o_parts, const fovea_tensor* const* lse_parts,
           const fovea_tensor* o, const fovea_tensor* lse, void* stream);

}  // namespace fovea::capi
