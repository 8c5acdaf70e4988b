// Attention as a custom call of XLA, for JAX.
#pragma once

namespace fovea::python {

/// The address of the handler for "cpu" or "cuda", as jax.ffi registers it; NULL for another platform.
void* xla_handler(const char* platform);

}  // namespace fovea::python
