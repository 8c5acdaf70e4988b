// The parts of DLPack 1.x that the module reads: what `__dlpack__` hands over, and the table of functions
// that some array types offer as `__dlpack_c_exchange_api__` (PyTorch since 2.10), which spares the Python
// objects in between. DLTensor itself has the layout of fovea_tensor.
#pragma once

#include <fovea/fovea.h>

#include <cstdint>

namespace fovea::python {

struct DLVersion {
  uint32_t major, minor;
};

/// In capsules named "dltensor".
struct DLManagedTensor {
  fovea_tensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

/// In capsules named "dltensor_versioned".
struct DLManagedTensorVersioned {
  DLVersion version;
  void* manager;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  fovea_tensor tensor;
};
constexpr uint64_t kDLReadOnly = 1;

/// In the capsule `__dlpack_c_exchange_api__` of a type, named "dlpack_exchange_api". Functions that are not
/// called here are void pointers.
struct DLExchangeApi {
  DLVersion version;
  const DLExchangeApi* previous;
  /// A new array of the prototype's shape, type and device. -1 where it fails; then it calls set_error, which
  /// must not need the GIL.
  int (*allocate)(fovea_tensor* prototype, DLManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  void* from_object;
  void* to_object;
  /// Describes an array without a reference: valid as long as the array is. -1 with a Python exception set.
  int (*describe)(void* object, fovea_tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};
constexpr uint32_t kDLMajor = 1;

}  // namespace fovea::python
