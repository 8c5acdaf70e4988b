// Arrays: sizes, shapes, alignment.
#include "io/array.hpp"

#include <cstdint>
#include <limits>

#include "test_support.hpp"

namespace fovea::io {
namespace {

using testing::kEveryType;

TEST(ElementType, NamesAndSizesAreThoseOfSafetensors) {
  EXPECT_EQ(element_type_name(ElementType::bf16), "BF16");
  EXPECT_EQ(element_type_name(ElementType::boolean), "BOOL");
  EXPECT_EQ(element_size(ElementType::f16), 2U);
  EXPECT_EQ(element_size(ElementType::i64), 8U);
  for (const ElementType type : kEveryType) EXPECT_EQ(element_type_from_name(element_type_name(type)), type);
  EXPECT_FALSE(element_type_from_name("f32"));
  EXPECT_FALSE(element_type_from_name(""));
}

TEST(Array, BufferStandsOnA64ByteBoundary) {
  for (const std::int64_t extent : {1, 3, 100, 4097}) {
    const Array array = make_array("a", ElementType::u8, {extent});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(array.bytes.data()) % 64, 0U);
  }
}

TEST(Array, ElementsAreViewedInTheirOwnSizeOnly) {
  Array array = make_array("a", ElementType::f32, {2, 2});
  array.elements<float>()[3] = 1.5F;
  const Array& constant = array;
  EXPECT_EQ(constant.elements<float>().size(), 4U);
  EXPECT_EQ(constant.elements<float>()[3], 1.5F);
  EXPECT_THROW(constant.elements<double>(), std::invalid_argument);
}

TEST(Array, ByteCountKnowsScalarsEmptyArraysAndOverflow) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(byte_count({}, 8), 8U);
  EXPECT_EQ(byte_count(std::vector<std::int64_t>{3, 4}, 2), 24U);
  EXPECT_EQ(byte_count(std::vector<std::int64_t>{3, 0}, 2), 0U);
  EXPECT_FALSE(byte_count(std::vector<std::int64_t>{kHuge, 2}, 1));
  EXPECT_FALSE(byte_count(std::vector<std::int64_t>{kHuge}, 2));
  EXPECT_FALSE(byte_count(std::vector<std::int64_t>{kHuge, 0, kHuge}, 1));
  EXPECT_FALSE(byte_count(std::vector<std::int64_t>{-1}, 1));
}

TEST(Array, ValidateNamesArrayAndSizes) {
  Array array = make_array("weights", ElementType::f16, {3});
  EXPECT_NO_THROW(validate(array));
  array.bytes.pop_back();
  try {
    validate(array);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "array 'weights' holds 5 bytes; F16 of shape (3,) takes 6");
  }
  EXPECT_THROW(make_array("a", ElementType::u8, std::vector<std::int64_t>(kMaxRank + 1, 1)),
               std::invalid_argument);
  EXPECT_THROW(make_array("a", ElementType::u8, {-1}), std::invalid_argument);
}

TEST(FileError, PrintableTextHasNoControlCodes) {
  EXPECT_EQ(printable("a b"), "'a b'");
  EXPECT_EQ(printable(std::string_view("\x1b[2J\0\xff", 6)), "'\\x1b[2J\\x00\\xff'");
  EXPECT_EQ(printable(std::string(1000, 'x')), "'" + std::string(64, 'x') + "...'");
}

}  // namespace
}  // namespace fovea::io
