// Plans, kept by everything that decides them: a second problem of the same shapes, strides, types and
// numbers costs a look-up. The GIL guards them.
#pragma once

#include <fovea/fovea.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "arrays.hpp"

namespace fovea::python {

/// The tensors of a call, in the order of FOVEA_TENSORS.
enum class Tensor : uint8_t {
#define FOVEA_PYTHON_ENUMERATOR(field, Name, forward, backward, meaning) field,
  FOVEA_TENSORS(FOVEA_PYTHON_ENUMERATOR)
#undef FOVEA_PYTHON_ENUMERATOR
      count
};
constexpr size_t kTensors = static_cast<size_t>(Tensor::count);

/// The tensors that expressions read, in the order of their dict, and the arrays that their gradients go to.
struct NamedArrays {
  struct One {
    std::string name;
    Array tensor, gradient;
    Ref kept;  ///< the tensor, which its dict may lose while the library works
  };
  std::array<One, FOVEA_MAX_NAMED_TENSORS> list;
  size_t count = 0;
};

/// One call: arrays and numbers. `problem` and `options` hold the numbers and the texts only.
struct Request {
  std::array<Array, kTensors> arrays;
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_options options = FOVEA_OPTIONS_INIT;
  uint64_t seed = 0, offset = 0;
  std::unique_ptr<NamedArrays> named;  ///< none for most problems
  bool is_traced = true;               ///< whether score and sees are texts, as the library wants them

  std::span<const NamedArrays::One> named_list() const {
    if (!named) return {};
    return {named->list.data(), named->count};
  }
  const Array& at(Tensor t) const { return arrays[static_cast<size_t>(t)]; }
};

struct DestroyPlan {
  void operator()(fovea_plan* plan) const { fovea_plan_destroy(plan); }
};

struct Plan {
  std::unique_ptr<fovea_plan, DestroyPlan> handle;
  size_t workspace_size = 0;
  fovea_device device{};
};

/// The plan for `request`; made where there is none yet. PythonError where the library refuses.
std::shared_ptr<const Plan> plan_for(Request& request);

/// Where the longest sequences of a request with cu_seqlens end, if they can be read and are not given.
void find_longest(Request& request);

/// One query head of one sequence, in blocks.
struct BlockGrid {
  int64_t batch = 0, head = 0, block_q = 0, block_k = 0, rows = 0, columns = 0;
};
/// fovea_seen of each block, row after row.
std::vector<uint8_t> seen_blocks(Request& request, const BlockGrid& grid);

/// What fovea_compile says of the kernels of `request` on a chip. `folder`: NULL is the user's cache.
std::string compile(Request& request, const char* chip, int32_t num_sms, const char* folder);

/// Runs it, with the GIL released.
void run(const Plan& plan, const Request& request);

size_t plan_count();
void forget_plans();

/// Sets the Python exception for a status that is not FOVEA_OK, with the library's message, and throws PythonError.
void check(fovea_status status);

}  // namespace fovea::python
