// Runs behind a launch that lets them begin early and writes lengths or pages later: what such a run has looked up before, it looks up again.
#include <cstdint>

#include "device_problem.hpp"
#include "write_late.hpp"

namespace fovea_test {
namespace {

/// A few queries of sequences of other lengths; of pages with `page_size`.
ProblemSpec decode(int64_t batch, int64_t head_dim, int64_t seqlen_q, int64_t page_size) {
  ProblemSpec spec;
  spec.type = Type::kBF16;
  spec.batch = batch;
  spec.heads_q = 8;
  spec.heads_kv = 2;
  spec.seqlen_q = seqlen_q;
  spec.seqlen_k = 1920;
  spec.head_dim = spec.head_dim_v = head_dim;
  spec.causal = true;
  for (int64_t b = 0; b < batch; ++b) spec.used_k.push_back(static_cast<int32_t>(1800 - 700 * b));
  if (page_size > 0) {
    spec.page_size = page_size;
    spec.caches = 2 * spec.seqlen_k / page_size;
  }
  return spec;
}

/// A tensor of int32 that runs read, and what stands there while they begin.
struct Late {
  Role role;
  const void* fovea_buffers::*address;
  std::vector<int32_t> before;
};

void expect_reads_behind(const DeviceProblem& x, const Bytes& alone, const Late& late) {
  const fovea_buffers b = x.buffers(nullptr);
  void* const at = const_cast<void*>(b.*late.address);
  const size_t size = late.before.size() * sizeof(int32_t);
  const DeviceBytes right(size);
  cuda_ok(cudaMemcpy(right.get(), at, size, cudaMemcpyDeviceToDevice));
  const Stream stream;
  for (int repeat = 0; repeat < 3; ++repeat) {
    cuda_ok(cudaMemcpy(at, late.before.data(), size, cudaMemcpyHostToDevice));
    cuda_ok(cudaDeviceSynchronize());
    write_late(stream.get(), at, right.get(), static_cast<int>(late.before.size()));
    ASSERT_EQ(x.run(stream.get()), FOVEA_OK) << fovea_last_error();
    ASSERT_TRUE(x.outputs() == alone)
        << describe(x.spec()) << ", " << name_of(late.role) << ", run " << repeat;
  }
}

/// The lengths and pages of one problem. Whether the backend can do it.
bool expect_late_writes_are_seen(const ProblemSpec& spec, const std::string& backend) {
  const DeviceProblem x(spec, FOVEA_FORWARD, backend);
  if (x.plan() == nullptr) return false;
  const Bytes alone = x.outputs_alone();
  const auto lengths = static_cast<size_t>(spec.batch);
  for (const int32_t before : {0, 900, 1920, -5, 1 << 30})
    expect_reads_behind(x, alone,
                        {Role::kSeqUsedK, &fovea_buffers::seqused_k, std::vector<int32_t>(lengths, before)});
  if (spec.page_size == 0) return true;
  const auto entries = static_cast<size_t>(spec.batch * spec.seqlen_k / spec.page_size);
  for (const int32_t before : {0, 3, -1, 1 << 30})
    expect_reads_behind(
        x, alone, {Role::kPageTable, &fovea_buffers::page_table, std::vector<int32_t>(entries, before)});
  return true;
}

class LateWrites : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { FOVEA_SKIP_WITHOUT_CUDA_BACKEND(); }
};

/// Of the first backend, by which launches begin early.
TEST_P(LateWrites, AreSeen) {
  int problems = 0;
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t seqlen_q : {1, 8}) {
      for (const int64_t page_size : {0, 64, 16, 1})
        problems += expect_late_writes_are_seen(decode(GetParam(), head_dim, seqlen_q, page_size),
                                                cuda_backends().front());
    }
  }
  EXPECT_GE(problems, 20);  // not 32 rows of head size 256 over pages of one row
}
INSTANTIATE_TEST_SUITE_P(Sequences, LateWrites, testing::Values(1, 2));

}  // namespace
}  // namespace fovea_test
