// Plans and runs of a problem that is a part of a larger one, for src/distributed: the C ABI has no word for it.
#pragma once

#include <memory>

#include "core/arriving_keys.hpp"
#include "core/dropout_place.hpp"
#include "fovea/fovea.h"

namespace fovea::capi {

/// fovea_plan_create, for calls of one rank among several.
std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan_part(const fovea_problem& problem,
                                                             const fovea_options* options);

/// The same for a forward whose first `keys` keys lie elsewhere, and may arrive while it runs, `heads` key heads at a time; all pointers of a
/// run are multiples of 16 bytes. Null where no backend waits for keys.
std::unique_ptr<fovea_plan, void (*)(fovea_plan*)> plan_part_with_arriving(const fovea_problem& problem,
                                                                           const fovea_options* options,
                                                                           int64_t keys, int64_t heads);

/// fovea_run, with dropout as the larger problem has it. Throws what fovea_run turns into a status.
void run_part(const fovea_plan& plan, const fovea_buffers& buffers, const DropoutPlace& place,
              const ArrivingKeys& arriving = {});

}  // namespace fovea::capi
