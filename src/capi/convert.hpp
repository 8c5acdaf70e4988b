// The structs of the C ABI as the types of the library.
#pragma once

#include "core/problem.hpp"
#include "fovea/fovea.h"

namespace fovea::capi {

/// A struct whose size the caller's header told, as the struct of this library. A smaller one comes from an
/// older header: fields beyond it take the defaults of the FOVEA_*_INIT macro. A larger one comes from a
/// newer header: taken when all that this library does not know is zero, since zero is the default of every
/// field added later. Throws RequestError(kInvalidArgument) when null or when the size makes no sense.
fovea_problem read_problem(const fovea_problem* problem);
fovea_options read_options(const fovea_options* options);  ///< null: defaults
PlanOptions to_plan_options(const fovea_options& options);
Buffers read_buffers(const fovea_buffers* buffers);

/// Throws RequestError(kInvalidArgument) for a type that is neither CPU nor CUDA.
DeviceType to_device_type(const char* argument, fovea_device device);

/// Throws RequestError(kInvalidArgument) for what no tensor can be: unknown types, no shape, too many dimensions.
TensorDesc to_tensor(const char* argument, const fovea_tensor& tensor);
/// The same for a tensor that expressions read, which may have no dimension.
TensorDesc to_named_tensor(const char* argument, const fovea_tensor& tensor);
ProblemDescription to_description(const fovea_problem& problem);

/// The tensors of a problem by role; null where there is none.
const fovea_tensor* tensor_of(const fovea_problem& problem, Role role);

}  // namespace fovea::capi
