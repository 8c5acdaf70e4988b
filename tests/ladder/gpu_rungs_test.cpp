// Rungs of GPUs: in test_ladder_emulated on the emulated device, in test_ladder_gpu on a GPU.
#include "ladder/shapes.hpp"

namespace ladder {

#ifdef LADDER_EMULATED
extern const char* running_rung;
#endif

namespace {

class GpuRung : public testing::TestWithParam<Rung> {};

TEST_P(GpuRung, AgreesWithFloat64) {
  const Rung& rung = GetParam();
  std::string why;
  const auto device = gpu_device(0, why);
  if (!device) GTEST_SKIP() << why;
  if (device->capability() < rung.capability) {
    GTEST_SKIP() << "needs compute capability " << rung.capability / 10 << "." << rung.capability % 10
                 << ", this is " << device->text();
  }
#ifdef LADDER_EMULATED
  running_rung = rung.name;
#endif
  expect_right(*device, rung);
}

INSTANTIATE_TEST_SUITE_P(Ladder, GpuRung, testing::ValuesIn(rungs_of(Where::gpu)), name_of);

}  // namespace
}  // namespace ladder
