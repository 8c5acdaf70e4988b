// Every CPU rung against float64, over shapes with tails.
#include "ladder/shapes.hpp"

namespace ladder {
namespace {

class CpuRung : public testing::TestWithParam<Rung> {};

TEST_P(CpuRung, AgreesWithFloat64) {
  const auto device = host_device();
  expect_right(*device, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ladder, CpuRung, testing::ValuesIn(rungs_of(Where::cpu)), name_of);

}  // namespace
}  // namespace ladder
