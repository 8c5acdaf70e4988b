// Rungs of GPUs: in test_ladder_emulated on the emulated device, in test_ladder_gpu on a GPU.
#include "ladder/shapes.hpp"

namespace ladder {

#ifdef LADDER_EMULATED
extern const char* running_rung;
extern int running_capability;
#endif

namespace {

class GpuRung : public testing::TestWithParam<Rung> {};

TEST_P(GpuRung, AgreesWithFloat64) {
  const Rung& rung = GetParam();
  std::string why;
  const auto device = gpu_device(0, why);
  if (!device) GTEST_SKIP() << why;
  if (!rung.runs_on(device->capability()))
    GTEST_SKIP() << "needs " << rung.needs() << ", this is " << device->text();
  if (rung.run == nullptr) GTEST_SKIP() << "this build has no code of it";
#ifdef LADDER_EMULATED
  running_rung = rung.name;
  running_capability = rung.capability;
#endif
  expect_right(*device, rung);
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

}  // namespace
}  // namespace ladder
