// A problem of src/verify whose tensors stay in device memory, for tests of streams, graphs and pointers, which need
// lasting addresses. (The suite itself places tensors anew for each run.)
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "verify/check.hpp"

namespace fovea_test {

using namespace fovea::verify;

/// CUDA backends that this machine can run, in the library's order.
inline std::vector<std::string> cuda_backends() {
  std::vector<std::string> names;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (is_cuda(fovea_backend_name(i)) && *fovea_backend_unavailable_because(i) == '\0') {
      names.emplace_back(fovea_backend_name(i));
    }
  }
  return names;
}
/// The fastest backend of this machine's processor.
inline std::string cpu_backend() {
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    const std::string name = fovea_backend_name(i);
    if (name.starts_with("cpu_") && *fovea_backend_unavailable_because(i) == '\0') return name;
  }
  return kOracle;
}
/// Why the first CUDA backend is unavailable, or that there is none.
inline std::string why_no_cuda_backend() {
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (is_cuda(fovea_backend_name(i))) return fovea_backend_unavailable_because(i);
  }
  return "this library has no CUDA backends";
}
#define FOVEA_SKIP_WITHOUT_CUDA_BACKEND() \
  if (cuda_backends().empty()) GTEST_SKIP() << why_no_cuda_backend()

inline int gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
#define FOVEA_SKIP_WITHOUT_TWO_GPUS() \
  if (gpus() < 2) GTEST_SKIP() << "needs two GPUs, this machine has " << gpus()

inline void cuda_ok(cudaError_t status, const std::source_location& where = std::source_location::current()) {
  ASSERT_STREQ(cudaGetErrorString(status), "no error") << where.file_name() << ":" << where.line();
}

/// Makes `device` current until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cuda_ok(cudaGetDevice(&before_));
    cuda_ok(cudaSetDevice(device));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// Device memory of one GPU, freed at the end of the scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t size, int device = 0) {
    const OnDevice scope(device);
    cuda_ok(cudaMalloc(&data_, size > 0 ? size : 1));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  explicit Stream(int device = 0) {
    const OnDevice scope(device);
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void wait() const { cuda_ok(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

using Bytes = std::map<Role, std::vector<unsigned char>>;

struct DeviceProblemOptions {
  int device = 0;
  std::string forward_backend = kOracle;  ///< whose o and lse a backward reads
  bool deterministic = true;
  bool check_contents = false;
};

/// The tensors of `spec` on a GPU, a plan for one backend and a workspace.
class DeviceProblem {
 public:
  DeviceProblem(const ProblemSpec& spec, fovea_pass pass, const std::string& backend,
                const DeviceProblemOptions& options = {})
      : spec_(spec), x_(spec), pass_(pass), device_(options.device) {
    if (pass == FOVEA_BACKWARD) {
      const RunResult forward = run_pass(x_, FOVEA_FORWARD, {options.forward_backend});
      EXPECT_EQ(forward.failure, "");
    }
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      if (!x_.takes_part(role, pass) || x_[role].data() == nullptr) continue;
      memory_[r] = std::make_unique<DeviceBytes>(x_[role].memory().size(), device_);
      addresses_[r] = memory_[r]->get();
    }
    upload();
    plan_for(backend, options);
  }

  /// Null where the backend cannot do the problem.
  const fovea_plan* plan() const { return plan_.get(); }
  OwnedProblem& host() { return x_; }
  const ProblemSpec& spec() const { return spec_; }
  std::unique_ptr<OwnedProblem::Description> description() const {
    return x_.description(pass_, &addresses_, {FOVEA_CUDA, device_});
  }
  size_t workspace_size() const { return fovea_plan_workspace_size(plan()); }
  int device() const { return device_; }

  fovea_buffers buffers(void* stream) const {
    fovea_buffers buffers = x_.buffers(pass_, &addresses_);
    buffers.workspace = workspace_ ? workspace_->get() : nullptr;
    buffers.workspace_size = workspace_ ? workspace_size() : 0;
    buffers.stream = stream;
    return buffers;
  }
  fovea_status run(void* stream) const {
    const fovea_buffers b = buffers(stream);
    return fovea_run(plan(), &b);
  }

  /// Copies the inputs from the host, and fills outputs and workspace with a pattern. Waits for the device.
  void upload() const {
    const OnDevice scope(device_);
    for (size_t r = 0; r < kRoles; ++r) {
      if (!memory_[r]) continue;
      const auto role = static_cast<Role>(r);
      if (OwnedProblem::is_output(role, pass_)) x_[role].poison();
      cuda_ok(cudaMemcpy(addresses_[r], x_[role].data(), x_[role].memory().size(), cudaMemcpyHostToDevice));
    }
    if (workspace_) cuda_ok(cudaMemset(workspace_->get(), kPattern, workspace_size()));
    cuda_ok(cudaDeviceSynchronize());
  }
  /// The same inputs as another problem of the same shapes, in the memory of this one.
  void take_inputs_of(const DeviceProblem& other) const {
    upload();
    for (size_t r = 0; r < kRoles; ++r) {
      if (!memory_[r] || OwnedProblem::is_output(static_cast<Role>(r), pass_)) continue;
      ASSERT_EQ(other.x_[static_cast<Role>(r)].memory().size(), x_[static_cast<Role>(r)].memory().size());
      cuda_ok(cudaMemcpy(addresses_[r], other.addresses_[r], x_[static_cast<Role>(r)].memory().size(),
                         cudaMemcpyDeviceToDevice));
    }
    cuda_ok(cudaDeviceSynchronize());
  }
  /// The elements of the outputs, and of a cache that grows. Waits for the device.
  Bytes outputs() const {
    const OnDevice scope(device_);
    cuda_ok(cudaDeviceSynchronize());
    Bytes bytes;
    for (size_t r = 0; r < kRoles; ++r) {
      const auto role = static_cast<Role>(r);
      const bool grows = spec_.appends() && (role == Role::kK || role == Role::kV);
      if (!memory_[r] || !(grows || OwnedProblem::is_output(role, pass_))) continue;
      if (grows) {
        std::vector<unsigned char>& rows = bytes[role];
        rows.resize(x_[role].memory().size());
        cuda_ok(cudaMemcpy(rows.data(), addresses_[r], rows.size(), cudaMemcpyDeviceToHost));
        continue;
      }
      cuda_ok(cudaMemcpy(x_[role].data(), addresses_[r], x_[role].memory().size(), cudaMemcpyDeviceToHost));
      bytes[role] = x_[role].bytes();
    }
    return bytes;
  }
  /// Outputs of a run that has the device to itself.
  Bytes outputs_alone() const {
    upload();
    EXPECT_EQ(run(nullptr), FOVEA_OK) << fovea_last_error();
    return outputs();
  }

 private:
  void plan_for(const std::string& backend, const DeviceProblemOptions& of_problem) {
    const auto d = description();
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = backend.c_str();
    options.deterministic = of_problem.deterministic ? 1 : 0;
    options.check_contents = of_problem.check_contents ? 1 : 0;
    fovea_plan* made = nullptr;
    const fovea_status status = fovea_plan_create(&d->problem, &options, &made);
    if (status == FOVEA_UNSUPPORTED) return;
    EXPECT_EQ(status, FOVEA_OK) << fovea_last_error();
    plan_.reset(made);
    if (made && workspace_size() > 0) {
      const OnDevice scope(device_);
      workspace_ = std::make_unique<DeviceBytes>(workspace_size(), device_);
      cuda_ok(cudaMemset(workspace_->get(), kPattern, workspace_size()));
      cuda_ok(cudaDeviceSynchronize());
    }
  }

  struct Destroy {
    void operator()(fovea_plan* plan) const { fovea_plan_destroy(plan); }
  };

  ProblemSpec spec_;
  OwnedProblem x_;
  fovea_pass pass_;
  int device_;
  std::array<std::unique_ptr<DeviceBytes>, kRoles> memory_;
  OwnedProblem::Addresses addresses_{};
  std::unique_ptr<fovea_plan, Destroy> plan_;
  std::unique_ptr<DeviceBytes> workspace_;
};

/// The same without the terms that only general kernels support.
inline ProblemSpec without_terms(ProblemSpec spec) {
  spec.bias = spec.dbias = spec.mask = spec.block_mask = spec.alibi = spec.rng_state = false;
  spec.dropout = 0;
  return spec;
}

/// Calls test(backend, type, pass) for each backend, pass and type that the backend can do. `all` gives the
/// rest of the problem, or without_terms(all) for a backend that supports no terms.
template <class Test>
void for_each_backend(const ProblemSpec& all, Test&& test) {
  for (const std::string& backend : cuda_backends()) {
    int done = 0;
    ProblemSpec spec = all;
    spec.type = Type::kF16;
    if (backend == "cuda_sm90" && !DeviceProblem(spec, FOVEA_FORWARD, backend).plan())
      spec = without_terms(all);
    for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
      for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
        if (pass == FOVEA_BACKWARD && spec.forward_only()) continue;
        spec.type = type;
        DeviceProblem problem(spec, pass, backend);
        if (!problem.plan()) continue;
        ++done;
        SCOPED_TRACE(backend + (pass == FOVEA_FORWARD ? " forward " : " backward ") + describe(spec));
        test(problem, backend, spec, pass);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    EXPECT_GT(done, 0) << backend << " can do nothing of " << describe(spec) << ": " << fovea_last_error();
  }
}

}  // namespace fovea_test
