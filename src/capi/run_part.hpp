// A run of a problem that is a part of a larger one, for src/distributed: the C ABI has no word for it.
#pragma once

#include "core/dropout_place.hpp"
#include "fovea/fovea.h"

namespace fovea::capi {

/// fovea_run, with dropout as the larger problem has it. Throws what fovea_run turns into a status.
void run_part(const fovea_plan& plan, const fovea_buffers& buffers, const DropoutPlace& place);

}  // namespace fovea::capi
