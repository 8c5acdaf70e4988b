// A problem for Fovea, and the plans made for such problems: one serves all layers of a model.
#pragma once

#include <fovea/fovea.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <unordered_map>

namespace fovea_ggml {

inline constexpr fovea_dtype kFloat32 = {FOVEA_CODE_FLOAT, 32, 1}, kFloat16 = {FOVEA_CODE_FLOAT, 16, 1},
                             kBfloat16 = {FOVEA_CODE_BFLOAT, 16, 1}, kInt32 = {FOVEA_CODE_INT, 32, 1},
                             kUint8 = {FOVEA_CODE_UINT, 8, 1};

/// Tensors on the CPU with their pointers, scalars and texts; everything but the pointers names the plan.
class Request {
 public:
  Request() = default;
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  using Field = const fovea_tensor* fovea_problem::*;
  /// Strides in elements.
  void tensor(Field field, fovea_dtype type, std::initializer_list<int64_t> shape,
              std::initializer_list<int64_t> strides);
  /// `name` lives as long as the program.
  void named(const char* name, const void* data, fovea_dtype type, std::initializer_list<int64_t> shape,
             std::initializer_list<int64_t> strides);

  fovea_problem problem = FOVEA_PROBLEM_INIT;  ///< its scalars; tensors and texts are set by the functions
  fovea_buffers buffers = FOVEA_BUFFERS_INIT;
  std::string score, sees;  ///< "" where there is none

 private:
  friend class Plans;
  struct Slot {
    fovea_tensor tensor;
    int64_t shape[4], strides[4];
  };
  const fovea_tensor* keep(fovea_dtype type, std::initializer_list<int64_t> shape,
                           std::initializer_list<int64_t> strides);
  std::string name_of_plan(int threads) const;

  std::array<Slot, 16> slots_{};
  size_t count_ = 0;
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named_{};
};

struct DestroyPlan {
  void operator()(fovea_plan* plan) const { fovea_plan_destroy(plan); }
};

/// Memory that grows and stays.
class Memory {
 public:
  /// `bytes` of it, aligned to a cache line; what it held is lost. Null when there is not as much.
  void* at_least(size_t bytes);

 private:
  struct Destroy {
    void operator()(void* memory) const { fovea_workspace_destroy({FOVEA_CPU, 0}, memory); }
  };
  std::unique_ptr<void, Destroy> memory_;
  size_t size_ = 0;
};

class Plans {
 public:
  /// Computes the request. False when Fovea refuses it: fovea_last_error() says why.
  bool run(Request& request, int threads);

 private:
  // A model has a few kinds of layers, and chunks of a long cache a plan each.
  static constexpr size_t kMostPlans = 64;
  std::unordered_map<std::string, std::unique_ptr<fovea_plan, DestroyPlan>> plans_;
  Memory workspace_;
};

}  // namespace fovea_ggml
