// Reads the structs of fovea.h into C++: the definitions of convert.hpp.
#include "capi/convert.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "core/status.hpp"

namespace fovea::capi {
namespace {

/// Larger sizes are garbage, as of a struct that was never filled in.
constexpr size_t kMaxStructSize = 4096;

/// `smallest`: bytes that a caller of any version must have set.
template <class Struct>
Struct read_struct(const char* argument, const Struct* given, Struct defaults, size_t smallest) {
  const auto size = given->struct_size;
  if (size < smallest || size > kMaxStructSize || size % alignof(Struct) != 0) {
    throw_invalid(argument, "struct_size " + std::to_string(size),
                  std::to_string(sizeof(Struct)) + ", or the size in another version of the header",
                  "initialise the struct with its FOVEA_..._INIT macro");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](auto b) { return b != 0; })) {
    throw_invalid(argument, "a field that this version of the library does not know",
                  "zero beyond byte " + std::to_string(sizeof(Struct)),
                  "use a newer library, or leave out what the newer header added");
  }
  std::memcpy(&defaults, given, std::min(size, sizeof(Struct)));
  return defaults;
}

template <class Struct>
void require(const char* argument, const Struct* given) {
  if (given == nullptr) throw_invalid(argument, "NULL", "a struct", "pass its address");
}

DType to_dtype(const char* argument, fovea_dtype type) {
  for (const DTypeInfo& known : kDTypes) {
    if (type.code == known.code && type.bits == known.bits && type.lanes == 1) return known.type;
  }
  std::string names;
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    names += i == 0 ? "" : i + 1 == kDTypes.size() ? " or " : ", ";
    names += kDTypes[i].name;
  }
  throw_invalid(argument,
                "dtype code " + std::to_string(type.code) + ", " + std::to_string(type.bits) + " bits, " +
                    std::to_string(type.lanes) + " lanes",
                names + ", 1 lane", "convert the tensor");
}

}  // namespace

DeviceType to_device_type(const char* argument, fovea_device device) {
  if (device.type == FOVEA_CPU) return DeviceType::kCpu;
  if (device.type == FOVEA_CUDA) return DeviceType::kCuda;
  throw_invalid(argument, "device type " + std::to_string(device.type), "1 (CPU) or 2 (CUDA)",
                "set device.type, or copy the tensor");
}

fovea_problem read_problem(const fovea_problem* problem) {
  require("problem", problem);
  return read_struct<fovea_problem>("problem", problem, FOVEA_PROBLEM_INIT, offsetof(fovea_problem, lse));
}

fovea_options read_options(const fovea_options* options) {
  const fovea_options defaults = FOVEA_OPTIONS_INIT;
  return options ? read_struct("options", options, defaults, sizeof(size_t)) : defaults;
}

PlanOptions to_plan_options(const fovea_options& options) {
  return {.backend = options.backend,
          .num_threads = options.num_threads,
          .deterministic = options.deterministic != 0,
          .splits = {.most = options.num_splits, .batch_invariant = options.batch_invariant != 0},
          .sm_margin = options.sm_margin,
          .check_contents = options.check_contents != 0};
}

Buffers read_buffers(const fovea_buffers* buffers) {
  require("buffers", buffers);
  fovea_buffers copy;
  if (buffers->struct_size != sizeof(fovea_buffers)) {
    copy = read_struct("buffers", buffers, FOVEA_BUFFERS_INIT, offsetof(fovea_buffers, lse));
    buffers = &copy;
  }
  const fovea_buffers& b = *buffers;
  Buffers out;
  out.data = {
#define FOVEA_ROLE_POINTER(field, Name, forward, backward, meaning) \
  const_cast<void*>(static_cast<const void*>(b.field)),
      FOVEA_TENSORS(FOVEA_ROLE_POINTER)
#undef FOVEA_ROLE_POINTER
  };
  for (size_t i = 0; i < kMaxNamedTensors; ++i) {
    out.data[place_of_named(i)] = const_cast<void*>(b.named[i]);
    out.data[place_of_gradient(i)] = b.named_gradients[i];
  }
  out.seed = b.seed;
  out.offset = b.offset;
  out.workspace = b.workspace;
  out.workspace_size = b.workspace_size;
  out.stream = b.stream;
  return out;
}

const fovea_tensor* tensor_of(const fovea_problem& p, Role role) {
  constexpr std::array<const fovea_tensor * fovea_problem::*, kRoleCount> kFields = {
#define FOVEA_ROLE_FIELD(field, Name, forward, backward, meaning) &fovea_problem::field,
      FOVEA_TENSORS(FOVEA_ROLE_FIELD)
#undef FOVEA_ROLE_FIELD
  };
  return p.*kFields[index_of(role)];
}

namespace {

TensorDesc to_tensor(const char* argument, const fovea_tensor& tensor, int smallest_rank) {
  TensorDesc t;
  t.present = true;
  t.dtype = to_dtype(argument, tensor.dtype);
  t.device = to_device_type(argument, tensor.device);
  t.device_id = t.device == DeviceType::kCpu ? 0 : tensor.device.id;
  if (tensor.ndim < smallest_rank || tensor.ndim > kMaxRank) {
    throw_invalid(argument, std::to_string(tensor.ndim) + " dimensions",
                  std::to_string(smallest_rank) + " to " + std::to_string(kMaxRank),
                  "set ndim, or reshape the tensor");
  }
  if (tensor.ndim > 0 && tensor.shape == nullptr) {
    throw_invalid(argument, "no shape (NULL)", std::to_string(tensor.ndim) + " sizes", "set shape");
  }
  t.ndim = tensor.ndim;
  uint64_t compact = 1;  // wraps for sizes that validation refuses
  for (size_t i = static_cast<size_t>(t.ndim); i-- > 0;) {
    t.shape[i] = tensor.shape[i];
    t.stride[i] = tensor.strides ? tensor.strides[i] : static_cast<int64_t>(compact);
    compact *= static_cast<uint64_t>(tensor.shape[i]);
  }
  if (tensor.data != nullptr) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    if (tensor.byte_offset > UINTPTR_MAX - address) {
      throw_invalid(argument, "byte_offset " + std::to_string(tensor.byte_offset),
                    "an offset within the memory", "set byte_offset, mostly 0");
    }
    t.data = reinterpret_cast<void*>(address + tensor.byte_offset);
  }
  return t;
}

/// The named tensors of a problem, as they are given.
std::vector<NamedTensor> to_named(const fovea_problem& p) {
  if (p.num_named < 0 || p.num_named > FOVEA_MAX_NAMED_TENSORS) {
    throw_invalid("num_named", std::to_string(p.num_named), "0 to " + std::to_string(FOVEA_MAX_NAMED_TENSORS),
                  "put several tensors into one, with an index that chooses");
  }
  if (p.num_named > 0 && p.named == nullptr) {
    throw_invalid("named", "NULL", std::to_string(p.num_named) + " tensors, as num_named says",
                  "pass their address");
  }
  std::vector<NamedTensor> out;
  for (int64_t i = 0; i < p.num_named; ++i) {
    const fovea_named_tensor& given = p.named[i];
    const std::string argument =
        "named." + (given.name != nullptr ? std::string(given.name) : std::to_string(i));
    if (given.name == nullptr)
      throw_invalid(argument, "no name (NULL)", "the name that expressions use", "set name");
    if (given.tensor == nullptr)
      throw_invalid(argument, "no tensor (NULL)", "the tensor of this name", "set tensor");
    NamedTensor named;
    named.name = given.name;
    named.tensor = to_named_tensor(argument.c_str(), *given.tensor);
    if (given.gradient != nullptr)
      named.gradient = to_named_tensor((argument + ".gradient").c_str(), *given.gradient);
    out.push_back(std::move(named));
  }
  return out;
}

}  // namespace

TensorDesc to_tensor(const char* argument, const fovea_tensor& tensor) {
  return to_tensor(argument, tensor, 1);
}
TensorDesc to_named_tensor(const char* argument, const fovea_tensor& tensor) {
  return to_tensor(argument, tensor, 0);
}

ProblemDescription to_description(const fovea_problem& p) {
  ProblemDescription out;
  if (p.pass != FOVEA_FORWARD && p.pass != FOVEA_BACKWARD) {
    throw_invalid("pass", std::to_string(p.pass), "FOVEA_FORWARD (0) or FOVEA_BACKWARD (1)", "set pass");
  }
  out.pass = p.pass == FOVEA_FORWARD ? Pass::kForward : Pass::kBackward;
  for (size_t i = 0; i < out.tensors.size(); ++i) {
    const Role role = static_cast<Role>(i);
    if (const fovea_tensor* t = tensor_of(p, role)) out.tensors[i] = to_tensor(name_of(role), *t);
  }
  out.scale = p.scale;
  out.causal = p.causal != 0;
  out.window_left = p.window_left;
  out.window_right = p.window_right;
  out.softcap = p.softcap;
  out.dropout = p.dropout;
  out.rotary_interleaved = p.rotary_interleaved != 0;
  out.block_q = p.block_q;
  out.block_k = p.block_k;
  out.max_seqlen_q = p.max_seqlen_q;
  out.max_seqlen_k = p.max_seqlen_k;
  if (p.score != nullptr) out.score = p.score;
  if (p.sees != nullptr) out.sees = p.sees;
  out.named = to_named(p);
  return out;
}

}  // namespace fovea::capi
