// The last failure of each thread, and the wrapper that turns exceptions into status codes.
#pragma once

#include <exception>
#include <new>
#include <string_view>

#include "core/status.hpp"
#include "fovea/fovea.h"

namespace fovea::capi {

/// Remembers a failure. Texts that are too long are cut; never throws, never allocates.
void set_last_error(std::string_view argument, std::string_view message) noexcept;
const char* last_error_message() noexcept;
const char* last_error_argument() noexcept;

/// Runs `body`; what it throws becomes a status and the last error.
template <class Body>
fovea_status guarded(Body&& body) noexcept {
  try {
    body();
    return FOVEA_OK;
  } catch (const RequestError& error) {
    set_last_error(error.argument(), error.what());
    return static_cast<fovea_status>(error.status());
  } catch (const std::bad_alloc&) {
    set_last_error("", "out of memory");
    return FOVEA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error("", error.what());
    return FOVEA_INTERNAL;
  } catch (...) {
    set_last_error("", "unknown exception");
    return FOVEA_INTERNAL;
  }
}

static_assert(static_cast<int>(Status::kOk) == FOVEA_OK);
static_assert(static_cast<int>(Status::kInvalidArgument) == FOVEA_INVALID_ARGUMENT);
static_assert(static_cast<int>(Status::kUnsupported) == FOVEA_UNSUPPORTED);
static_assert(static_cast<int>(Status::kOutOfMemory) == FOVEA_OUT_OF_MEMORY);
static_assert(static_cast<int>(Status::kInternal) == FOVEA_INTERNAL);
static_assert(static_cast<int>(Status::kCudaError) == FOVEA_CUDA_ERROR);

}  // namespace fovea::capi
