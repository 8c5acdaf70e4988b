// Wrong requests to fovea_merge: status, argument, message, and no byte written.
#include <array>

#include "request.hpp"

namespace fovea_test {
namespace {

/// Two parts of B = 1, S = 3, H = 2, Dv = 4, and where to merge them.
struct Merge {
  Merge() {
    for (size_t i = 0; i < 2; ++i) {
      o_parts[i].set(kFloat32, {1, 3, 2, 4});
      lse_parts[i].set(kFloat32, {1, 2, 3});
    }
    o.set(kFloat32, {1, 3, 2, 4});
    lse.set(kFloat32, {1, 2, 3});
  }
  fovea_status run() {
    const fovea_tensor* os[] = {&o_parts[0].c, &o_parts[1].c};
    const fovea_tensor* lses[] = {&lse_parts[0].c, &lse_parts[1].c};
    return fovea_merge(num_parts, no_o_parts ? nullptr : os, no_lse_parts ? nullptr : lses,
                       no_o ? nullptr : &o.c, no_lse ? nullptr : &lse.c, nullptr);
  }
  std::vector<std::vector<unsigned char>> bytes() {
    std::vector<std::vector<unsigned char>> all = {o.memory(), lse.memory()};
    for (size_t i = 0; i < 2; ++i) {
      all.push_back(o_parts[i].memory());
      all.push_back(lse_parts[i].memory());
    }
    return all;
  }

  int32_t num_parts = 2;
  bool no_o_parts = false, no_lse_parts = false, no_o = false, no_lse = false;
  std::array<TestTensor, 2> o_parts, lse_parts;
  TestTensor o, lse;
};

struct Case {
  const char* name;
  void (*spoil)(Merge&);
  const char* argument;
  const char* got;
  const char* expected;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class MergeErrors : public testing::TestWithParam<Case> {};

TEST_P(MergeErrors, AreReportedAndNothingIsWritten) {
  const Case& c = GetParam();
  Merge merge;
  c.spoil(merge);
  const auto before = merge.bytes();
  EXPECT_EQ(merge.run(), FOVEA_INVALID_ARGUMENT);
  expect_message(c.argument, c.got, c.expected);
  EXPECT_TRUE(merge.bytes() == before) << "bytes were written";
}

const Case kCases[] = {
    {"no_parts", [](Merge& m) { m.num_parts = 0; }, "num_parts", "0", "1 or more"},
    {"negative_parts", [](Merge& m) { m.num_parts = -3; }, "num_parts", "-3", "1 or more"},
    {"o_parts_null", [](Merge& m) { m.no_o_parts = true; }, "o_parts", "NULL", "an array"},
    {"lse_parts_null", [](Merge& m) { m.no_lse_parts = true; }, "lse_parts", "NULL", "an array"},
    {"o_null", [](Merge& m) { m.no_o = true; }, "o", "NULL", "a tensor"},
    {"part_data_null", [](Merge& m) { m.o_parts[1].c.data = nullptr; }, "o_parts[1]", "a null data pointer",
     "memory"},
    {"part_rank",
     [](Merge& m) {
       m.o_parts[0].set_shape({3, 2, 4});
     },
     "o_parts[0]", "3 dimensions", "4 dimensions"},
    {"lse_rank",
     [](Merge& m) {
       m.lse.set_shape({2, 3});
     },
     "lse", "2 dimensions", "3 dimensions"},
    {"part_shape",
     [](Merge& m) {
       m.o_parts[1].set_shape({1, 3, 2, 5});
     },
     "o_parts[1]", "(1, 3, 2, 5)", "(1, 3, 2, 4)"},
    {"lse_part_shape",
     [](Merge& m) {
       m.lse_parts[1].set_shape({1, 3, 2});
     },
     "lse_parts[1]", "(1, 3, 2)", "(1, 2, 3)"},
    {"negative_size",
     [](Merge& m) {
       m.o.set_shape({1, -3, 2, 4});
     },
     "o", "(1, -3, 2, 4)", "sizes from 0"},
    {"o_dtype", [](Merge& m) { m.o.c.dtype = kFloat64; }, "o", "float64", "float32, float16 or bfloat16"},
    {"lse_dtype", [](Merge& m) { m.lse_parts[0].c.dtype = kFloat16; }, "lse_parts[0]", "float16", "float32"},
    {"part_on_another_device",
     [](Merge& m) {
       m.o_parts[0].c.device = {FOVEA_CUDA, 0};
     },
     "o_parts[0]", "cuda:0", "cpu, where o is"},
    {"lse_on_another_device",
     [](Merge& m) {
       m.lse.c.device = {FOVEA_CUDA, 1};
     },
     "lse", "cuda:1", "cpu, where o is"},
    {"negative_stride",
     [](Merge& m) {
       m.o_parts[0].set_strides({24, -8, 4, 1});
     },
     "o_parts[0]", "-8", "no negative stride"},
    {"last_dimension",
     [](Merge& m) {
       m.o.set_strides({48, 16, 8, 2});
     },
     "o", "(", "contiguous last dimension"},
    {"broadcast_output",
     [](Merge& m) {
       m.o.set_strides({24, 0, 4, 1});
     },
     "o", "strides", "memory of its own for each element"},
    {"strides_overflow",
     [](Merge& m) {
       m.o_parts[0].set_strides({1, INT64_MAX, 4, 1});
     },
     "o_parts[0]", "9223372036854775807", "2^57 bytes"},
    {"misaligned", [](Merge& m) { m.o.c.byte_offset = 2; }, "o", "no multiple of 4",
     "multiples of their size"},
    {"o_over_part", [](Merge& m) { m.o.c.data = static_cast<char*>(m.o_parts[1].c.data) + 16; }, "o",
     "overlaps o_parts[1]", "exactly that of one part"},
    {"o_over_lse_part", [](Merge& m) { m.o.c.data = m.lse_parts[0].c.data; }, "o", "overlaps lse_parts[0]",
     "memory of its own"},
    {"lse_over_part", [](Merge& m) { m.lse.c.data = m.o_parts[0].c.data; }, "lse", "overlaps o_parts[0]",
     "memory of its own"},
    {"o_over_lse", [](Merge& m) { m.o.c.data = m.lse.c.data; }, "o", "overlaps lse", "memory of its own"},
};

INSTANTIATE_TEST_SUITE_P(Each, MergeErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(MergeAccepts, APartInPlaceAndNoLse) {
  Merge merge;
  EXPECT_EQ(merge.run(), FOVEA_OK) << fovea_last_error();
  merge.no_lse = true;
  EXPECT_EQ(merge.run(), FOVEA_OK) << fovea_last_error();
  merge.no_lse = false;
  merge.o.c.data = merge.o_parts[0].c.data;
  merge.lse.c.data = merge.lse_parts[0].c.data;
  EXPECT_EQ(merge.run(), FOVEA_OK) << fovea_last_error();
}

}  // namespace
}  // namespace fovea_test
