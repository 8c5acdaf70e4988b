// Rungs of GPUs: in test_ladder_emulated on the emulated device, in test_ladder_gpu on a GPU.
#include "ladder/shapes.hpp"

namespace ladder {

#ifdef LADDER_EMULATED
extern const char* running_rung;
extern int running_capability;
#endif

namespace {

class GpuRung : public testing::TestWithParam<Rung> {
 protected:
  void SetUp() override {
    const Rung& rung = GetParam();
    std::string why;
    device_ = gpu_device(0, why);
    if (!device_) GTEST_SKIP() << why;
    if (!rung.runs_on(device_->capability()))
      GTEST_SKIP() << "needs " << rung.needs() << ", this is " << device_->text();
    if (rung.run == nullptr) GTEST_SKIP() << "this build has no code of it";
#ifdef LADDER_EMULATED
    running_rung = rung.name;
    running_capability = rung.capability;
#endif
  }

  std::unique_ptr<Device> device_;
};

TEST_P(GpuRung, AgreesWithFloat64) {
  expect_right(*device_, GetParam());
}

std::vector<Rung> lazy_rungs() {
  std::vector<Rung> found = rungs_of(Where::gpu);
  std::erase_if(found, [](const Rung& rung) {
    const Family family = rung.group->family;
    return (family != Family::attention && family != Family::causal) || rung.group->type != Type::bf16;
  });
  return found;
}

/// Scores of keys in the middle exceed all others by more than exponentials in float32 can hold, whichever end a
/// loop begins at: a maximum that lags too long shows.
class LazyRung : public GpuRung {};
TEST_P(LazyRung, AgreesWithFloat64WhereScoresLeap) {
  const Rung& rung = GetParam();
  const Shape shape = {3, 400, 128};
  std::vector<HostTensor> tensors = make_tensors(rung.group->family, rung.group->type, shape, 7);
  for (float& q : tensors[0].values) q *= 32;
  for (size_t row = 0; row < 3 * 400; ++row) {
    if (row % 400 / 100 != 1) continue;
    for (size_t c = 0; c < 128; ++c) tensors[1].values[row * 128 + c] *= 16;
  }
  Problem problem(*device_, rung, shape, tensors);
  expect_right(problem, rung);
}

TEST(LadderMemory, StandardAttentionHoldsTheMatrixAndTiledAttentionDoesNot) {
  std::string why;
  const auto device = gpu_device(0, why);
  if (!device) GTEST_SKIP() << why;
  const Shape shape{1, 2048, 32};
  constexpr size_t kMatrix = 2048 * 2048 * sizeof(float), kBlock = size_t{2} << 20;  // of CUDA's allocator
  const auto peak = [&](const char* name) {
    for (const Rung& rung : rungs()) {
      if (std::string(rung.name) == name)
        return device->peak_bytes([&] { const Problem problem(*device, rung, shape); });
    }
    return size_t{0};
  };
  const size_t standard = peak("30_attention_three_kernels"), tiled = peak("32_attention_flash2");
  EXPECT_GE(standard, kMatrix);
  EXPECT_LT(standard, kMatrix + 8 * kBlock);
  EXPECT_GT(tiled, 0u);
  EXPECT_LT(tiled, 8 * kBlock);
  EXPECT_LT(tiled, standard / 2 + kBlock);
}

INSTANTIATE_TEST_SUITE_P(Ladder, GpuRung, testing::ValuesIn(rungs_of(Where::gpu)), name_of);
INSTANTIATE_TEST_SUITE_P(Ladder, LazyRung, testing::ValuesIn(lazy_rungs()), name_of);

}  // namespace
}  // namespace ladder
