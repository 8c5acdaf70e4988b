// The ggml backend: one device of type ACCEL that shares ggml's own buffers in main memory, takes FLASH_ATTN_EXT, and leaves
// everything else to the CPU backend. llama.cpp loads the library from GGML_BACKEND_PATH.
#include <ggml-backend-impl.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "attention.hpp"
#include "operation.hpp"
#include "report.hpp"

namespace fovea_ggml {
namespace {

constexpr char kName[] = "Fovea";

// --- a backend: plans and memory of one stream of work ---

const char* backend_name(ggml_backend_t) {
  return kName;
}

void backend_free(ggml_backend_t backend) {
  delete static_cast<Attention*>(backend->context);
  delete backend;
}

bool is_view(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
         op == GGML_OP_TRANSPOSE;
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  auto* attention = static_cast<Attention*>(backend->context);
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || is_view(node->op)) continue;
    try {
      if (node->op == GGML_OP_FLASH_ATTN_EXT && attention->compute(*node)) {
        report_computed();
        continue;
      }
      std::fprintf(
          stderr, "fovea: %s of '%s': %s\n", ggml_op_name(node->op), node->name,
          node->op == GGML_OP_FLASH_ATTN_EXT ? attention->error().c_str() : "only FLASH_ATTN_EXT is taken");
      return GGML_STATUS_FAILED;
    } catch (const std::bad_alloc&) {
      return GGML_STATUS_ALLOC_FAILED;
    }
  }
  return GGML_STATUS_SUCCESS;
}

ggml_guid_t backend_guid() {
  static ggml_guid guid = {0x66, 0x6f, 0x76, 0x65, 0x61, 0x2d, 0x67, 0x67,
                           0x6d, 0x6c, 0xa3, 0x1c, 0x58, 0x07, 0xe2, 0x9d};
  return &guid;
}

bool is_fovea(ggml_backend_t backend) {
  return backend != nullptr && ggml_guid_matches(backend->guid, backend_guid());
}

void set_threads(ggml_backend_t backend, int threads) {
  if (is_fovea(backend)) static_cast<Attention*>(backend->context)->set_threads(threads);
}

// --- the device ---

const char* device_name(ggml_backend_dev_t) {
  return kName;
}

const char* device_description(ggml_backend_dev_t) {
  return fovea_machine();
}

/// Its memory is that of the CPU backend.
void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) {
  *free = *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
  return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
  *props = {};
  props->name = device_name(device);
  props->description = device_description(device);
  props->type = device_type(device);
  props->caps.buffer_from_host_ptr = true;
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char*) {
  ggml_backend_i calls = {};
  calls.get_name = backend_name;
  calls.free = backend_free;
  calls.graph_compute = backend_compute;
  return new ggml_backend{backend_guid(), calls, device, new Attention};
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
  return ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t device_buffer_from(ggml_backend_dev_t, void* data, size_t size, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, size);
}

bool device_takes(ggml_backend_dev_t, const ggml_tensor* node) {
  if (is_view(node->op)) return true;
  if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
  const char* const rule = declined_because(*node);
  if (rule != nullptr) report_declined(*node, rule);
  return rule == nullptr;
}

bool device_reads(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return ggml_backend_buft_is_host(type);
}

// --- the registration ---

const char* registered_name(ggml_backend_reg_t) {
  return kName;
}

size_t device_count(ggml_backend_reg_t) {
  return 1;
}

ggml_backend_dev_t device_at(ggml_backend_reg_t registration, size_t) {
  static ggml_backend_device device = [&] {
    ggml_backend_device_i calls = {};
    calls.get_name = device_name;
    calls.get_description = device_description;
    calls.get_memory = device_memory;
    calls.get_type = device_type;
    calls.get_props = device_props;
    calls.init_backend = device_init;
    calls.get_buffer_type = device_buffer_type;
    calls.buffer_from_host_ptr = device_buffer_from;
    calls.supports_op = device_takes;
    calls.supports_buft = device_reads;
    return ggml_backend_device{calls, registration, nullptr};
  }();
  return &device;
}

void* function_named(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void*>(set_threads);
  return nullptr;
}

/// Whether a node that the loading ggml makes is what the headers say that the library was built with. The number of the
/// backend interface, which ggml itself compares, covers neither the tensors nor the numbers of the operations.
bool nodes_are_known() {
  // An older ggml (that of llama_cpp_python 0.3.12) ends the program where a mask has fewer rows: it wants a multiple of this.
  constexpr int64_t kMaskRows = 64;
  ggml_init_params params = {};
  params.mem_size = 16 * ggml_tensor_overhead();
  params.no_alloc = true;
  ggml_context* context = ggml_init(params);
  if (context == nullptr) return false;
  ggml_tensor* q = ggml_new_tensor_4d(context, GGML_TYPE_F32, 32, 5, 6, 1);
  ggml_tensor* k = ggml_new_tensor_4d(context, GGML_TYPE_Q8_0, 32, 7, 3, 1);
  ggml_tensor* m = ggml_new_tensor_4d(context, GGML_TYPE_F16, 7, kMaskRows, 1, 1);
  const ggml_tensor* node = ggml_flash_attn_ext(context, q, k, k, m, 0.5f, 8.0f, 30.0f);
  const Operation a(*node);
  const bool known = node->op == GGML_OP_FLASH_ATTN_EXT && a.q == q && a.k == k && a.v == k && a.mask == m &&
                     a.sinks == nullptr && a.scale == 0.5f && a.max_bias == 8.0f && a.softcap == 30.0f &&
                     a.queries() == 5 && a.keys() == 7 && a.heads() == 6 && a.key_heads() == 3 &&
                     node->type == GGML_TYPE_F32 && k->type == GGML_TYPE_Q8_0 && m->type == GGML_TYPE_F16 &&
                     k->nb[1] == ggml_type_size(GGML_TYPE_Q8_0);
  ggml_free(context);
  return known;
}

bool same_ggml() {
  if (nodes_are_known()) return true;
  std::fprintf(stderr, "fovea: declined: built for ggml %s, loaded by ggml %s, whose tensors are others\n",
               FOVEA_GGML_VERSION, ggml_version());
  return false;
}

ggml_backend_reg_t registration() {
  if (!same_ggml()) return nullptr;
  static ggml_backend_reg reg = [] {
    ggml_backend_reg_i calls = {};
    calls.get_name = registered_name;
    calls.get_device_count = device_count;
    calls.get_device = device_at;
    calls.get_proc_address = function_named;
    return ggml_backend_reg{GGML_BACKEND_API_VERSION, calls, nullptr};
  }();
  return &reg;
}

}  // namespace
}  // namespace fovea_ggml

GGML_BACKEND_DL_IMPL(fovea_ggml::registration)
