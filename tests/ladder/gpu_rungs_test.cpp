// Rungs of GPUs on the emulated device.
#include "ladder/shapes.hpp"

namespace ladder {

extern const char* running_rung;

namespace {

class GpuRung : public testing::TestWithParam<Rung> {};

TEST_P(GpuRung, AgreesWithFloat64) {
  std::string why;
  const auto device = gpu_device(0, why);
  running_rung = GetParam().name;
  expect_right(*device, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ladder, GpuRung, testing::ValuesIn(rungs_of(Where::gpu)), name_of);

}  // namespace
}  // namespace ladder
