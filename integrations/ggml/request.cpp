// Plans by what names them, and their workspace.
#include "request.hpp"

#include <algorithm>

namespace fovea_ggml {
namespace {

template <class T>
void append(std::string& name, const T& value) {
  name.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

const fovea_tensor* Request::keep(fovea_dtype type, std::initializer_list<int64_t> shape,
                                  std::initializer_list<int64_t> strides) {
  Slot& slot = slots_.at(count_++);
  std::copy(shape.begin(), shape.end(), slot.shape);
  std::copy(strides.begin(), strides.end(), slot.strides);
  slot.tensor = {nullptr, {FOVEA_CPU, 0}, static_cast<int32_t>(shape.size()), type, slot.shape, slot.strides,
                 0};
  return &slot.tensor;
}

void Request::tensor(Field field, fovea_dtype type, std::initializer_list<int64_t> shape,
                     std::initializer_list<int64_t> strides) {
  problem.*field = keep(type, shape, strides);
}

void Request::named(const char* name, const void* data, fovea_dtype type,
                    std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
  buffers.named[problem.num_named] = data;
  named_[static_cast<size_t>(problem.num_named++)] = {name, keep(type, shape, strides), nullptr};
}

std::string Request::name_of_plan(int threads) const {
  std::string name;
  append(name, threads);
  append(name, problem.causal);
  append(name, problem.scale);
  append(name, problem.softcap);
  append(name, problem.window_left);
  append(name, problem.window_right);
  for (const void* data :
       {buffers.lse, const_cast<void*>(buffers.sink), const_cast<void*>(buffers.seqused_k)}) {
    append(name, data != nullptr);
  }
  for (size_t i = 0; i < count_; ++i) {
    const Slot& slot = slots_[i];
    append(name, slot.tensor.dtype);
    append(name, slot.tensor.ndim);
    append(name, slot.shape);
    append(name, slot.strides);
  }
  return name + score + "\n" + sees;
}

void* Memory::at_least(size_t bytes) {
  if (bytes <= size_) return memory_.get();
  memory_.reset();
  size_ = 0;
  void* memory = nullptr;
  if (fovea_workspace_create({FOVEA_CPU, 0}, bytes, &memory) != FOVEA_OK) return nullptr;
  memory_.reset(memory);
  size_ = bytes;
  return memory;
}

bool Plans::run(Request& request, int threads) {
  std::string name = request.name_of_plan(threads);
  auto found = plans_.find(name);
  if (found == plans_.end()) {
    fovea_problem& problem = request.problem;
    problem.score = request.score.empty() ? nullptr : request.score.c_str();
    problem.sees = request.sees.empty() ? nullptr : request.sees.c_str();
    problem.named = request.named_.data();
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.num_threads = threads;
    fovea_plan* plan = nullptr;
    if (fovea_plan_create(&problem, &options, &plan) != FOVEA_OK) return false;
    if (plans_.size() >= kMostPlans) plans_.clear();
    found = plans_.emplace(std::move(name), plan).first;
  }
  const size_t bytes = fovea_plan_workspace_size(found->second.get());
  request.buffers.workspace_size = bytes;
  request.buffers.workspace = workspace_.at_least(bytes);
  if (bytes > 0 && request.buffers.workspace == nullptr) return false;
  return fovea_run(found->second.get(), &request.buffers) == FOVEA_OK;
}

}  // namespace fovea_ggml
