// Wrong requests that only exist with GPUs. Each is refused before anything is launched, with a message that
// names the argument, and no byte of any output changes.
#include <cstdint>
#include <cstdlib>
#include <functional>

#include "device_problem.hpp"
#include "errors/request.hpp"

namespace fovea_test {
namespace {

ProblemSpec small() {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seqlen_q = 2;
  spec.seqlen_k = 2000;  // few queries and many keys: both passes need a workspace
  spec.head_dim = spec.head_dim_v = 64;
  spec.bias = spec.sink = true;
  return spec;
}

class CudaErrors : public testing::Test {
 protected:
  void SetUp() override { FOVEA_SKIP_WITHOUT_CUDA_BACKEND(); }
};

/// Checks that runs with buffers changed by `spoil` are refused and that the outputs keep their pattern.
void expect_refusal(DeviceProblem& x, const std::function<void(fovea_buffers&)>& spoil, const char* argument,
                    const char* got, const char* expected) {
  SCOPED_TRACE(std::string(argument) + " got " + got);
  x.upload();
  const Bytes before = x.outputs();
  fovea_buffers b = x.buffers(nullptr);
  spoil(b);
  ASSERT_EQ(fovea_run(x.plan(), &b), FOVEA_INVALID_ARGUMENT) << fovea_last_error();
  expect_message(argument, got, expected);
  EXPECT_EQ(x.outputs(), before) << "an output was written";
}
void* moved(const void* pointer, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(pointer)) + bytes;
}

TEST_F(CudaErrors, HostPointersAreRefused) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec& spec,
                               fovea_pass pass) {
    OwnedProblem& host = x.host();
    const auto data = [&](Role role) { return host[role].data(); };
    expect_refusal(
        x, [&](fovea_buffers& b) { b.q = data(Role::kQ); }, "q", "memory of the CPU", "cuda:0");
    expect_refusal(
        x, [&](fovea_buffers& b) { b.v = data(Role::kV); }, "v", "memory of the CPU", "cuda:0");
    if (spec.bias) {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.bias = data(Role::kBias); }, "bias", "memory of the CPU", "cuda:0");
    }
    expect_refusal(
        x, [&](fovea_buffers& b) { b.sink = data(Role::kSink); }, "sink", "memory of the CPU", "cuda:0");
    if (pass == FOVEA_FORWARD) {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.o = data(Role::kO); }, "o", "memory of the CPU", "cuda:0");
      expect_refusal(
          x, [&](fovea_buffers& b) { b.lse = data(Role::kLse); }, "lse", "memory of the CPU", "cuda:0");
    } else {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.d_o = data(Role::kDO); }, "d_o", "memory of the CPU", "cuda:0");
      expect_refusal(
          x, [&](fovea_buffers& b) { b.dk = data(Role::kDK); }, "dk", "memory of the CPU", "cuda:0");
    }
    AlignedMemory workspace(x.workspace_size());
    if (x.workspace_size() > 0) {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.workspace = workspace.get(); }, "workspace", "memory of the CPU",
          "cuda:0");
    }
  });
}

TEST_F(CudaErrors, PageLockedPointersAreRefused) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    void* pinned = nullptr;
    cuda_ok(cudaMallocHost(&pinned, x.host()[Role::kQ].memory().size()));
    expect_refusal(
        x, [&](fovea_buffers& b) { b.q = pinned; }, "q", "page-locked", "cuda:0");
    cuda_ok(cudaFreeHost(pinned));
  });
}

TEST_F(CudaErrors, ManagedMemoryIsAccepted) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    const Bytes alone = x.outputs_alone();
    const size_t size = x.host()[Role::kQ].memory().size();
    void* managed = nullptr;
    cuda_ok(cudaMallocManaged(&managed, size));
    std::memcpy(managed, x.host()[Role::kQ].data(), size);
    x.upload();
    fovea_buffers b = x.buffers(nullptr);
    b.q = managed;
    EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(x.outputs(), alone);
    cuda_ok(cudaFree(managed));
  });
}

/// The reverse: a plan for the CPU.
TEST_F(CudaErrors, CpuPlansRefuseDevicePointers) {
  ProblemSpec spec = small();
  const OwnedProblem x(spec);
  const auto description = x.description(FOVEA_FORWARD);
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&description->problem, nullptr, &plan), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(fovea_plan_device(plan).type, FOVEA_CPU);
  AlignedMemory workspace(fovea_plan_workspace_size(plan));
  fovea_buffers good = x.buffers(FOVEA_FORWARD);
  good.workspace = workspace.get();
  good.workspace_size = fovea_plan_workspace_size(plan);
  const DeviceBytes device(x[Role::kK].memory().size());
  fovea_buffers b = good;
  b.k = device.get();
  EXPECT_EQ(fovea_run(plan, &b), FOVEA_INVALID_ARGUMENT);
  expect_message("k", "memory of cuda:0", "memory of the CPU");
  b = good;
  b.o = device.get();
  EXPECT_EQ(fovea_run(plan, &b), FOVEA_INVALID_ARGUMENT);
  expect_message("o", "memory of cuda:0", "memory of the CPU");
  EXPECT_EQ(fovea_run(plan, &good), FOVEA_OK) << fovea_last_error();
  fovea_plan_destroy(plan);
}

TEST_F(CudaErrors, MisalignedPointersAreRefused) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec& spec,
                               fovea_pass pass) {
    const std::string size = std::to_string(size_of(spec.type));
    const std::string got = "no multiple of " + size;
    expect_refusal(
        x, [&](fovea_buffers& b) { b.q = moved(b.q, 1); }, "q", got.c_str(), "multiples of their size");
    expect_refusal(
        x, [&](fovea_buffers& b) { b.lse = moved(b.lse, 2); }, "lse", "no multiple of 4",
        "multiples of their size");
    if (pass == FOVEA_BACKWARD) {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.dv = moved(b.dv, 1); }, "dv", got.c_str(), "multiples of their size");
    }
  });
}

TEST_F(CudaErrors, WorkspacesThatDoNotFitAreRefused) {
  int with_workspace = 0;
  for_each_backend(small(), [&](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    if (x.workspace_size() == 0) return;
    ++with_workspace;
    expect_refusal(
        x, [](fovea_buffers& b) { b.workspace = nullptr; }, "workspace", "null", "bytes");
    expect_refusal(
        x, [](fovea_buffers& b) { --b.workspace_size; }, "workspace_size", "", "at least");
    expect_refusal(
        x, [](fovea_buffers& b) { b.workspace = moved(b.workspace, 32); }, "workspace", "no multiple of 64",
        "FOVEA_WORKSPACE_ALIGNMENT");
    expect_refusal(
        x, [](fovea_buffers& b) { b.workspace = const_cast<void*>(b.k); }, "workspace", "overlaps ",
        "nothing else uses");
  });
  EXPECT_GT(with_workspace, 0);
}

TEST_F(CudaErrors, OverlappingTensorsAreRefused) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass pass) {
    if (pass == FOVEA_FORWARD) {
      expect_refusal(
          x, [](fovea_buffers& b) { b.o = const_cast<void*>(b.q); }, "o", "overlaps q", "memory of its own");
    } else {
      expect_refusal(
          x, [](fovea_buffers& b) { b.dk = b.dv; }, "dk", "overlaps dv", "memory of its own");
    }
  });
}

// ---- requests that plans refuse

/// The status of a plan for `x` with tensors changed by `spoil`.
fovea_status plan_status(const DeviceProblem& x, const std::function<void(OwnedProblem::Description&)>& spoil,
                         const char* backend = nullptr) {
  const auto description = x.description();
  spoil(*description);
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = backend;
  fovea_plan* plan = nullptr;
  const fovea_status status = fovea_plan_create(&description->problem, &options, &plan);
  EXPECT_EQ(plan == nullptr, status != FOVEA_OK);
  fovea_plan_destroy(plan);
  return status;
}

TEST_F(CudaErrors, UnknownDevicesAreRefused) {
  DeviceProblem x(small(), FOVEA_FORWARD, "cuda_sm80");
  for (const int id : {-1, gpus(), 1000}) {
    EXPECT_EQ(plan_status(x,
                          [id](OwnedProblem::Description& d) {
                            for (fovea_tensor& t : d.tensors) t.device.id = id;
                          }),
              FOVEA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fovea_last_error()).find("cuda:" + std::to_string(id)), std::string::npos)
        << fovea_last_error();
  }
}

TEST_F(CudaErrors, TensorsOfTwoDevicesAreRefused) {
  DeviceProblem x(small(), FOVEA_FORWARD, "cuda_sm80");
  const auto k_on_cpu = [](OwnedProblem::Description& d) { d.tensors[1].device = {FOVEA_CPU, 0}; };
  EXPECT_EQ(plan_status(x, k_on_cpu), FOVEA_INVALID_ARGUMENT);
  expect_message("k", "memory of cuda:0", "as the tensor says");
  const auto k_on_cpu_without_data = [](OwnedProblem::Description& d) {
    d.tensors[1].device = {FOVEA_CPU, 0};
    d.tensors[1].data = nullptr;
  };
  EXPECT_EQ(plan_status(x, k_on_cpu_without_data), FOVEA_INVALID_ARGUMENT);
  expect_message("k", "memory of cpu", "memory of cuda:0");
}

TEST_F(CudaErrors, BackendsOfTheOtherDeviceAreRefused) {
  DeviceProblem x(small(), FOVEA_FORWARD, "cuda_sm80");
  const auto untouched = [](OwnedProblem::Description&) {};
  EXPECT_EQ(plan_status(x, untouched, "reference"), FOVEA_UNSUPPORTED);
  EXPECT_EQ(std::string(fovea_last_error_argument()), "backend");
  const auto on_cpu = [](OwnedProblem::Description& d) {
    for (fovea_tensor& t : d.tensors) t = {nullptr, {FOVEA_CPU, 0}, t.ndim, t.dtype, t.shape, t.strides, 0};
  };
  for (const std::string& backend : cuda_backends()) {
    EXPECT_EQ(plan_status(x, on_cpu, backend.c_str()), FOVEA_UNSUPPORTED) << backend;
    EXPECT_EQ(std::string(fovea_last_error_argument()), "backend");
  }
}

/// Without a backend's name, a plan for tensors of a GPU takes a CUDA backend, for every feature, and says
/// which and why.
TEST_F(CudaErrors, PlansChooseABackendOfTheGpu) {
  for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
    for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
      ProblemSpec spec = small();
      spec.type = type;
      DeviceProblem x(spec, pass, "cuda_sm80");
      const auto description = x.description();
      fovea_plan* plan = nullptr;
      ASSERT_EQ(fovea_plan_create(&description->problem, nullptr, &plan), FOVEA_OK) << fovea_last_error();
      EXPECT_TRUE(is_cuda(fovea_plan_backend(plan))) << fovea_plan_reason(plan);
      EXPECT_EQ(fovea_plan_device(plan).type, FOVEA_CUDA);
      EXPECT_EQ(fovea_plan_device(plan).id, 0);
      EXPECT_NE(std::string(fovea_plan_reason(plan)).find("> cuda_"), std::string::npos)
          << fovea_plan_reason(plan);
      fovea_plan_destroy(plan);
    }
  }
}

TEST_F(CudaErrors, TheLibraryMakesWorkspaces) {
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    const Bytes alone = x.outputs_alone();
    void* workspace = nullptr;
    ASSERT_EQ(fovea_workspace_create(fovea_plan_device(x.plan()), x.workspace_size(), &workspace), FOVEA_OK)
        << fovea_last_error();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace) % FOVEA_WORKSPACE_ALIGNMENT, 0u);
    x.upload();
    fovea_buffers b = x.buffers(nullptr);
    b.workspace = workspace;
    EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(x.outputs(), alone);
    fovea_workspace_destroy(fovea_plan_device(x.plan()), workspace);
  });
  void* workspace = nullptr;
  EXPECT_EQ(fovea_workspace_create({FOVEA_CUDA, gpus()}, 64, &workspace), FOVEA_INVALID_ARGUMENT);
}

TEST_F(CudaErrors, OfAnotherGpu) {
  FOVEA_SKIP_WITHOUT_TWO_GPUS();
  for_each_backend(small(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    const DeviceBytes q(x.host()[Role::kQ].memory().size(), 1), workspace(x.workspace_size(), 1);
    expect_refusal(
        x, [&](fovea_buffers& b) { b.q = q.get(); }, "q", "cuda:1", "cuda:0");
    if (x.workspace_size() > 0) {
      expect_refusal(
          x, [&](fovea_buffers& b) { b.workspace = workspace.get(); }, "workspace", "cuda:1", "cuda:0");
    }
    const Stream stream(1);
    expect_refusal(
        x, [&](fovea_buffers& b) { b.stream = stream.get(); }, "stream", "cuda:1", "cuda:0");
  });
}

// ---- failures of the device: in a separate process, because they destroy its context

/// cu_seqlens_k places the keys (or queries) of the second sequence far behind the tensor: an illegal address
/// that only the device sees. The next run and the next request for a workspace must report it. Ends the
/// process: 0 when they do.
void run_into_nowhere(const std::string& backend) {
  ProblemSpec spec = small();
  spec.bias = false;
  spec.lengths_q = {2, 2};
  spec.lengths_k = {50, 70};
  int code = 2;  // the backend supports none of these problems
  for (const Type type : {Type::kF32, Type::kF16}) {
    spec.type = type;
    DeviceProblem x(spec, FOVEA_FORWARD, backend);
    if (!x.plan()) continue;
    fovea_buffers b = x.buffers(nullptr);
    // TMA reads nothing outside a tensor; but rows of o that do not fill a box are stored without TMA.
    const void* spoilt = backend == "cuda_sm90" ? b.cu_seqlens_q : b.cu_seqlens_k;
    const int32_t starts[] = {0, 1 << 30, (1 << 30) + 70};
    cuda_ok(cudaMemcpy(const_cast<void*>(spoilt), starts, sizeof starts, cudaMemcpyHostToDevice));
    if (fovea_run(x.plan(), &b) != FOVEA_OK) std::_Exit(3);
    if (cudaDeviceSynchronize() == cudaSuccess) std::_Exit(4);
    const fovea_status status = fovea_run(x.plan(), &b);
    std::fprintf(stderr, "told: %s: %s\n", fovea_status_name(status), fovea_last_error());
    code = status == FOVEA_CUDA_ERROR ? 0 : 5;
    break;
  }
  std::_Exit(code);
}

TEST_F(CudaErrors, DeviceFailuresAreReported) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process: CUDA does not work in a forked one
  for (const std::string& backend : cuda_backends()) {
    EXPECT_EXIT(run_into_nowhere(backend), testing::ExitedWithCode(0), "told: .*(earlier|illegal)")
        << backend;
  }
}

}  // namespace
}  // namespace fovea_test
