// The handler runs on XLA's threads, without the GIL, so it keeps no plans: fovea_attend makes one, which
// costs microseconds of a call that XLA has scheduled.
#include "xla.hpp"

#include <fovea/fovea.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "plans.hpp"
#include "xla_ffi.hpp"

namespace fovea::python {
namespace {

constexpr size_t kMostBuffers = 32;

struct Call {
  std::array<fovea_tensor, kMostBuffers> tensors{};
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_options options = FOVEA_OPTIONS_INIT;
  uint64_t seed = 0, offset = 0;
  std::string backend;
};

fovea_dtype dtype_of(xla::DataType dtype) {
  switch (dtype) {
    case xla::kBool:
      return {FOVEA_CODE_BOOL, 8, 1};
    case xla::kInt32:
      return {FOVEA_CODE_INT, 32, 1};
    case xla::kInt64:
      return {FOVEA_CODE_INT, 64, 1};
    case xla::kUint8:
      return {FOVEA_CODE_UINT, 8, 1};
    case xla::kFloat16:
      return {FOVEA_CODE_FLOAT, 16, 1};
    case xla::kFloat32:
      return {FOVEA_CODE_FLOAT, 32, 1};
    case xla::kFloat64:
      return {FOVEA_CODE_FLOAT, 64, 1};
    case xla::kBfloat16:
      return {FOVEA_CODE_BFLOAT, 16, 1};
    case xla::kFloat8E4M3FN:
      return {FOVEA_CODE_FLOAT8_E4M3FN, 8, 1};
  }
  return {0xff, 0, 1};  // no type of the library: it says so
}

const void* attribute(const xla::Attributes& attributes, std::string_view name, xla::AttributeType type) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const xla::Text& given = *attributes.names[i];
    if (std::string_view(given.data, given.size) == name && attributes.types[i] == type)
      return attributes.items[i];
  }
  return nullptr;
}

/// The `count` elements of an attribute, or NULL where it is another.
template <class T>
const T* elements(const xla::Attributes& attributes, const char* name, xla::DataType dtype, size_t count) {
  const auto* found =
      static_cast<const xla::ArrayAttribute*>(attribute(attributes, name, xla::kArrayAttribute));
  const bool fits = found != nullptr && found->dtype == dtype && found->size == count;
  return fits ? static_cast<const T*>(found->data) : nullptr;
}

void set_tensor(fovea_problem& problem, int64_t role, const fovea_tensor* tensor) {
  switch (static_cast<Tensor>(role)) {
#define FOVEA_PYTHON_SET(name, Name, forward, backward, meaning) \
  case Tensor::name:                                             \
    problem.name = tensor;                                       \
    break;
    FOVEA_TENSORS(FOVEA_PYTHON_SET)
#undef FOVEA_PYTHON_SET
    case Tensor::count:
      break;
  }
}

/// False where the frame is not what fovea/jax.py makes.
bool read(const xla::CallFrame& frame, fovea_device device, Call& call) {
  const auto arguments = static_cast<size_t>(frame.arguments.size);
  const size_t buffers = arguments + static_cast<size_t>(frame.results.size);
  const auto* roles = elements<int64_t>(frame.attributes, "roles", xla::kInt64, buffers);
  const auto* numbers = elements<double>(frame.attributes, "numbers", xla::kFloat64, 3);
  const auto* integers = elements<int64_t>(frame.attributes, "integers", xla::kInt64, 15);
  const auto* backend =
      static_cast<const xla::Text*>(attribute(frame.attributes, "backend", xla::kTextAttribute));
  if (!roles || !numbers || !integers || !backend || buffers > kMostBuffers) return false;

  for (size_t i = 0; i < buffers; ++i) {
    const auto* buffer = static_cast<const xla::Buffer*>(i < arguments ? frame.arguments.items[i]
                                                                       : frame.results.items[i - arguments]);
    call.tensors[i] = {.data = buffer->data,
                       .device = device,
                       .ndim = static_cast<int32_t>(buffer->rank),
                       .dtype = dtype_of(buffer->dtype),
                       .shape = buffer->shape,
                       .strides = nullptr,
                       .byte_offset = 0};
    set_tensor(call.problem, roles[i], &call.tensors[i]);
  }
  fovea_problem& p = call.problem;
  p.scale = numbers[0];
  p.softcap = numbers[1];
  p.dropout = numbers[2];
  p.pass = static_cast<int32_t>(integers[0]);
  p.causal = static_cast<int32_t>(integers[1]);
  p.window_left = integers[2];
  p.window_right = integers[3];
  p.block_q = integers[4];
  p.block_k = integers[5];
  p.max_seqlen_q = integers[6];
  p.max_seqlen_k = integers[7];
  call.seed = static_cast<uint64_t>(integers[8]);
  call.offset = static_cast<uint64_t>(integers[9]);
  call.options.deterministic = static_cast<int32_t>(integers[10]);
  call.options.num_threads = static_cast<int32_t>(integers[11]);
  call.options.num_splits = static_cast<int32_t>(integers[12]);
  call.options.batch_invariant = static_cast<int32_t>(integers[13]);
  call.options.sm_margin = static_cast<int32_t>(integers[14]);
  call.backend.assign(backend->data, backend->size);
  if (!call.backend.empty()) call.options.backend = call.backend.c_str();
  return true;
}

xla::Error* error(const xla::Api& api, xla::ErrorCode code, const char* message) {
  xla::ErrorArguments arguments = {sizeof(arguments), nullptr, message, code};
  return api.create_error(&arguments);
}

template <fovea_device_type kDevice>
xla::Error* handle(xla::CallFrame* frame) {
  if (frame->extensions != nullptr && frame->extensions->type == xla::kMetadataExtension) {
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = 1;  // the oldest that has what is used here, but for the number of a GPU
    metadata.traits = 0;
    return nullptr;
  }
  const xla::Api& api = *frame->api;
  Call call;
  fovea_device device = {kDevice, 0};
  if constexpr (kDevice == FOVEA_CUDA) {
    xla::StreamArguments stream = {sizeof(stream), nullptr, frame->context, nullptr};
    if (xla::Error* failed = api.stream(&stream)) return failed;
    call.options.stream = stream.stream;
    if (api.struct_size >= sizeof(xla::Api)) {
      xla::DeviceArguments which = {sizeof(which), nullptr, frame->context, 0};
      if (xla::Error* failed = api.device(&which)) return failed;
      device.id = which.device;
    }
  }
  if (!read(*frame, device, call)) {
    return error(api, xla::kInternal, "fovea: the custom call does not come from this version of fovea.jax");
  }
  switch (fovea_attend(&call.problem, &call.options, call.seed, call.offset)) {
    case FOVEA_OK:
      return nullptr;
    case FOVEA_INVALID_ARGUMENT:
      return error(api, xla::kInvalidArgument, fovea_last_error());
    case FOVEA_UNSUPPORTED:
      return error(api, xla::kUnimplemented, fovea_last_error());
    case FOVEA_OUT_OF_MEMORY:
      return error(api, xla::kResourceExhausted, fovea_last_error());
    default:
      return error(api, xla::kInternal, fovea_last_error());
  }
}

}  // namespace

void* xla_handler(const char* platform) {
  if (std::strcmp(platform, "cpu") == 0) return reinterpret_cast<void*>(handle<FOVEA_CPU>);
  if (std::strcmp(platform, "cuda") == 0) return reinterpret_cast<void*>(handle<FOVEA_CUDA>);
  return nullptr;
}

}  // namespace fovea::python
