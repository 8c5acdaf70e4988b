// .safetensors files, good and damaged.
#include "io/safetensors.hpp"

#include <algorithm>

#include "test_support.hpp"

namespace fovea::io {
namespace {

using testing::as_bytes;
using testing::as_text;
using testing::expect_file_error;
using testing::HostileCase;
using testing::kEveryType;
using testing::little_endian;
using testing::patterned_array;
using testing::TemporaryDirectory;

std::string safetensors_file(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}";
}

Safetensors parse(const std::string& content) {
  return parse_safetensors(as_bytes(content), "dir/m.safetensors");
}

class SafetensorsRoundTrip : public ::testing::TestWithParam<ElementType> {};

TEST_P(SafetensorsRoundTrip, EveryShapeComesBackTheSame) {
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{}, {1}, {5}, {0}, {2, 3}, {2, 0, 3}, {2, 3, 4, 5}}) {
    const Array array = patterned_array("q", GetParam(), shape);
    const Safetensors read = parse_safetensors(serialize_safetensors({&array, 1}), "m");
    ASSERT_EQ(read.arrays.size(), 1U);
    EXPECT_EQ(read.arrays[0], array);
    EXPECT_TRUE(read.metadata.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(EveryType, SafetensorsRoundTrip, ::testing::ValuesIn(kEveryType),
                         [](const auto& test) { return std::string(element_type_name(test.param)); });

TEST(Safetensors, BytesAreThoseOfTheSafetensorsLibrary) {
  const std::vector<Array> arrays{patterned_array("b", ElementType::u8, {3}),
                                  patterned_array("k", ElementType::f32, {1}),
                                  patterned_array("a", ElementType::f32, {1, 2})};
  std::string header = R"({"__metadata__":{"made by":"a test"},)"
                       R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
                       R"("k":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},)"
                       R"("b":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}})";
  while (header.size() % 8 != 0) header += ' ';
  const std::string data = as_text(arrays[2].bytes) + as_text(arrays[1].bytes) + as_text(arrays[0].bytes);
  EXPECT_EQ(as_text(serialize_safetensors(arrays, {{"made by", "a test"}})), safetensors_file(header, data));
}

TEST(Safetensors, FileKeepsTensorsAndMetadata) {
  const TemporaryDirectory directory;
  std::vector<Array> arrays;
  for (const ElementType type : kEveryType) {
    arrays.push_back(patterned_array("tensor " + std::string(element_type_name(type)), type, {3, 5}));
  }
  arrays.push_back(patterned_array("quote \" backslash \\ \xc3\xa9 \n", ElementType::f32, {2}));
  const Metadata metadata{{"", "empty key"}, {"format", "pt"}, {"quote \"", "\xe2\x82\xac"}};
  const auto path = directory / "m.safetensors";
  write_safetensors(path, arrays, metadata);
  EXPECT_EQ(testing::read_text(path), as_text(serialize_safetensors(arrays, metadata)));
  const Safetensors read = read_safetensors(path);
  EXPECT_EQ(read.metadata, metadata);
  ASSERT_EQ(read.arrays.size(), arrays.size());
  for (const Array& array : arrays) {
    ASSERT_NE(read.find(array.name), nullptr) << array.name;
    EXPECT_EQ(*read.find(array.name), array);
  }
  EXPECT_EQ(read.find("absent"), nullptr);
  EXPECT_EQ(directory.listing().size(), 1U);
}

TEST(Safetensors, SelectedNamesComeInTheOrderAsked) {
  const TemporaryDirectory directory;
  const std::vector<Array> arrays{patterned_array("q", ElementType::f16, {4}),
                                  patterned_array("k", ElementType::f16, {2}),
                                  patterned_array("v", ElementType::f64, {1})};
  const auto path = directory / "m.safetensors";
  write_safetensors(path, arrays);
  const std::vector<std::string> names{"v", "q"};
  const Safetensors read = read_safetensors(path, names);
  ASSERT_EQ(read.arrays.size(), 2U);
  EXPECT_EQ(read.arrays[0], arrays[2]);
  EXPECT_EQ(read.arrays[1], arrays[0]);
  EXPECT_TRUE(read_safetensors(path, std::vector<std::string>{}).arrays.empty());
  const std::vector<std::string> missing{"q", "bias"};
  expect_file_error([&] { read_safetensors(path, missing); }, path.string(),
                    "has no tensor 'bias'; it has 'v', 'k', 'q'");
}

TEST(Safetensors, TensorOfAnotherTypeIsPassedOverUnlessAsked) {
  const std::string file = safetensors_file("{" + entry("f8", "F8_E5M2", "[4]", "[0,4]") + "," +
                                                entry("new", "F2_FUTURE", "[4]", "[4,5]") + "," +
                                                entry("u", "U8", "[2]", "[5,7]") + "}",
                                            "1234567");
  const std::vector<std::string> supported{"u"};
  EXPECT_EQ(as_text(parse_safetensors(as_bytes(file), "m", supported).arrays.at(0).bytes), "67");
  const std::vector<std::string> future{"new"};
  expect_file_error([&] { parse_safetensors(as_bytes(file), "m", future); }, "m",
                    "tensor 'new' is of type 'F2_FUTURE'; supported are");
  expect_file_error([&] { parse_safetensors(as_bytes(file), "m"); }, "m", "tensor 'f8' is of type 'F8_E5M2'");
}

TEST(Safetensors, FileWithoutTensorsIsValid) {
  EXPECT_TRUE(parse(safetensors_file("{}", "")).arrays.empty());
  EXPECT_EQ(parse(safetensors_file(R"({"__metadata__":{"a":"b"}}  )", "")).metadata, (Metadata{{"a", "b"}}));
  EXPECT_TRUE(parse_safetensors(serialize_safetensors({}), "m").arrays.empty());
}

TEST(Safetensors, HeaderOrderNeedNotBeTheOrderOfTheData) {
  const Safetensors read = parse(safetensors_file(
      "{" + entry("b", "U8", "[1]", "[2,3]") + "," + entry("a", "U8", "[2]", "[0,2]") + "}", "xyz"));
  ASSERT_EQ(read.arrays.size(), 2U);
  EXPECT_EQ(read.arrays[0].name, "a");
  EXPECT_EQ(as_text(read.arrays[1].bytes), "z");
}

TEST(Safetensors, WhatCannotBeWrittenIsTheCallersMistake) {
  const Array q = make_array("q", ElementType::f32, {2});
  Array reserved = q;
  reserved.name = "__metadata__";
  Array not_utf8 = q;
  not_utf8.name = "\xff";
  Array short_of_bytes = q;
  short_of_bytes.bytes.pop_back();
  EXPECT_THROW(serialize_safetensors(std::vector<Array>{q, q}), std::invalid_argument);
  for (const Array* array : {&reserved, &not_utf8, &short_of_bytes}) {
    EXPECT_THROW(serialize_safetensors({array, 1}), std::invalid_argument);
  }
  EXPECT_THROW(serialize_safetensors({&q, 1}, {{"a", "\xff"}}), std::invalid_argument);
}

TEST(Safetensors, InputIsNotOverwritten) {
  const TemporaryDirectory directory;
  const std::vector<Array> arrays{patterned_array("q", ElementType::f32, {3})};
  const auto path = directory / "m.safetensors";
  write_safetensors(path, arrays);
  const std::string before = testing::read_text(path);
  const std::vector<std::filesystem::path> inputs{path};
  expect_file_error([&] { write_safetensors(path, {}, {}, inputs); }, path.string(),
                    "is the same file as the input");
  EXPECT_EQ(testing::read_text(path), before);
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const Array array = patterned_array("q", ElementType::f32, {2, 3});
  const std::string whole = as_text(serialize_safetensors({&array, 1}));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    expect_file_error(
        [&] { parse(whole.substr(0, size)); }, "dir/m.safetensors",
        size < whole.size() - array.bytes.size() ? "is truncated" : "reach past the end of the data");
  }
}

class SafetensorsHostile : public ::testing::TestWithParam<HostileCase> {};

TEST_P(SafetensorsHostile, IsRefusedByNameAndFault) {
  testing::expect_refused(
      GetParam(), "dir/m.safetensors", [](const std::string& content) { parse(content); },
      [](const std::filesystem::path& path) { read_safetensors(path); });
}

std::vector<HostileCase> hostile_cases() {
  const std::string four(4, '\0');
  const auto header = [&](const std::string& text) { return safetensors_file(text, four); };
  const auto one = [&](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return header("{" + entry("q", dtype, shape, offsets) + "}");
  };
  const auto two = [&](const std::string& first, const std::string& second) {
    return header("{" + entry("a", "U8", "[2]", first) + "," + entry("b", "U8", "[2]", second) + "}");
  };
  std::string many_dimensions = "[";
  for (std::size_t i = 0; i < kMaxRank; ++i) many_dimensions += "1,";
  many_dimensions += "1]";
  return {
      {"Empty", "", "is truncated: it has 0 bytes"},
      {"ShorterThanLength", "1234567", "is truncated: it has 7 bytes"},
      {"HugeHeaderLength", std::string(8, '\xff') + "{}",
       "its header should have 18446744073709551615 bytes, but only 2 follow"},
      {"HeaderLongerThanFile", little_endian(3, 8) + "{}",
       "its header should have 3 bytes, but only 2 follow"},
      {"EmptyHeader", header(""), "its header does not begin with '{'"},
      {"NotJson", header("hello"), "its header does not begin with '{'"},
      {"SpaceFirst", header(" {}"), "its header does not begin with '{'"},
      {"ByteOrderMark", header("\xef\xbb\xbf{}"), "its header does not begin with '{'"},
      {"JsonList", header("[]"), "its header does not begin with '{'"},
      {"BrokenJson", header("{\"q\":"), "the header is not valid JSON, at its byte 5"},
      {"SingleQuotes", header("{'q':1}"), "the header is not valid JSON, at its byte 1"},
      {"TrailingComma", header("{" + entry("q", "F32", "[1]", "[0,4]") + ",}"),
       "the header is not valid JSON"},
      {"Comment", header("{/**/}"), "the header is not valid JSON"},
      {"SecondObject", header("{}{}"), "the header is not valid JSON"},
      {"NulByte", header(std::string("{}\0garbage", 10)), "the header has a NUL byte"},
      {"InvalidUtf8", header("{" + entry("\xff", "F32", "[1]", "[0,4]") + "}"),
       "the header is not valid JSON"},
      {"LoneSurrogate", header("{" + entry("\\ud800", "F32", "[1]", "[0,4]") + "}"),
       "the header is not valid JSON"},
      {"DeepLists", header("{\"q\":" + std::string(200000, '[')),
       "tensor 'q': a list stands where an object was"},
      {"DeepObjects", header([] {
         std::string text;
         for (int i = 0; i < 50000; ++i) text += "{\"q\":";
         return text;
       }()),
       "tensor 'q': has the unknown key 'q'"},
      {"DeepShape", header("{\"q\":{\"shape\":" + std::string(200000, '[')),
       "tensor 'q': shape: a list stands where a whole number was expected"},
      {"TensorNumber", header("{\"q\":1}"), "tensor 'q': a number stands where an object was expected"},
      {"TensorNull", header("{\"q\":null}"), "tensor 'q': null stands where an object was expected"},
      {"TensorText", header("{\"q\":\"x\"}"), "tensor 'q': a string stands where an object was expected"},
      {"ControlCodesInName", header("{\"\\u001b[2J\":1}"), "tensor '\\x1b[2J': a number stands where"},
      {"NameTwice",
       header("{" + entry("q", "U8", "[2]", "[0,2]") + "," + entry("q", "U8", "[2]", "[2,4]") + "}"),
       "the header has 'q' twice"},
      {"NameTwiceEscaped",
       header("{" + entry("q", "U8", "[2]", "[0,2]") + "," + entry("\\u0071", "U8", "[2]", "[2,4]") + "}"),
       "the header has 'q' twice"},
      {"MetadataTwice", header("{\"__metadata__\":{},\"__metadata__\":{}}"),
       "the header has '__metadata__' twice"},
      {"MetadataKeyTwice", header("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}"),
       "__metadata__ has the key 'a' twice"},
      {"MetadataNumber", header("{\"__metadata__\":{\"a\":1}}"),
       "__metadata__ 'a': a number stands where a string was expected"},
      {"MetadataNested", header("{\"__metadata__\":{\"a\":{}}}"),
       "__metadata__ 'a': an object stands where a string was expected"},
      {"MetadataList", header("{\"__metadata__\":[]}"), "a list stands where an object was expected"},
      {"UnknownKey", header("{\"q\":{\"color\":\"red\"}}"), "tensor 'q': has the unknown key 'color'"},
      {"ObjectAsDtype", header("{\"q\":{\"dtype\":{}}}"),
       "tensor 'q': dtype: an object stands where a string was"},
      {"NoDtype", header("{\"q\":{\"shape\":[1],\"data_offsets\":[0,4]}}"), "tensor 'q': lacks dtype"},
      {"NoShape", header("{\"q\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}"), "tensor 'q': lacks shape"},
      {"NoOffsets", header("{\"q\":{\"dtype\":\"F32\",\"shape\":[1]}}"), "tensor 'q': lacks data_offsets"},
      {"DtypeTwice", header("{\"q\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}"), "tensor 'q': has dtype twice"},
      {"DtypeNumber", header("{\"q\":{\"dtype\":4}}"),
       "tensor 'q': dtype: a number stands where a string was"},
      {"DtypeUnsupported", one("I8", "[4]", "[0,4]"),
       "tensor 'q' is of type 'I8'; supported are F64 F32 F16"},
      {"DtypeUnknown", one("F33", "[1]", "[0,4]"), "tensor 'q' is of type 'F33'; supported are"},
      {"DtypeLowerCase", one("f32", "[1]", "[0,4]"), "tensor 'q' is of type 'f32'; supported are"},
      {"ShapeNumber", one("F32", "1", "[0,4]"),
       "tensor 'q': shape: a number stands where a list was expected"},
      {"ShapeText", one("F32", "[\"1\"]", "[0,4]"),
       "shape: a string stands where a whole number was expected"},
      {"ShapeBoolean", one("F32", "[true]", "[0,4]"),
       "shape: a boolean stands where a whole number was expected"},
      {"ShapeNegative", one("F32", "[-1]", "[0,4]"), "tensor 'q': shape has the negative number -1"},
      {"ShapeFraction", one("F32", "[1.5]", "[0,4]"), "shape has '1.5', which is not a 64-bit whole number"},
      {"ShapeWholeFraction", one("F32", "[1.0]", "[0,4]"),
       "shape has '1.0', which is not a 64-bit whole number"},
      {"ShapeExponent", one("F32", "[1e0]", "[0,4]"), "shape has '1e0', which is not a 64-bit whole number"},
      {"ShapeBeyond63Bits", one("F32", "[9223372036854775808]", "[0,4]"),
       "9223372036854775808, beyond 63 bits"},
      {"ShapeBeyond64Bits", one("F32", "[18446744073709551617]", "[0,4]"),
       "which is not a 64-bit whole number"},
      {"ShapeProductOverflow", one("F32", "[4294967296,4294967296]", "[0,4]"),
       "tensor 'q' has a shape whose size overflows: (4294967296, 4294967296)"},
      {"ShapeOverflowToRightSize", one("F32", "[4611686018427387905]", "[0,4]"),
       "has a shape whose size overflows"},
      {"ShapeOverflowBehindZero", one("F32", "[0,4294967296,4294967296]", "[0,0]"),
       "a shape whose size overflows"},
      {"ShapeOverflowOfUnknownType", one("F33", "[4294967296,4294967296]", "[0,4]"),
       "a shape whose size overflows"},
      {"TooManyDimensions", one("F32", many_dimensions, "[0,4]"), "shape has more than 64 dimensions"},
      {"HugeTensor", one("F32", "[1099511627776]", "[0,4398046511104]"),
       "data_offsets [0, 4398046511104] reach past the end of the data, which has 4 bytes"},
      {"SizeMismatch", one("F32", "[2]", "[0,4]"), "[0, 4] span 4 bytes, but F32 of shape (2,) takes 8"},
      {"SizeMismatchOtherType", one("I16", "[3]", "[0,4]"), "span 4 bytes, but I16 of shape (3,) takes 6"},
      {"OffsetsBackwards", one("F32", "[1]", "[4,0]"), "data_offsets [4, 0] end before they begin"},
      {"OffsetsNegative", one("F32", "[1]", "[-4,0]"), "tensor 'q': data_offsets has the negative number -4"},
      {"OffsetsFraction", one("F32", "[1]", "[0,4.0]"),
       "data_offsets has '4.0', which is not a 64-bit whole number"},
      {"OffsetsOne", one("F32", "[1]", "[0]"), "tensor 'q': data_offsets has not two numbers"},
      {"OffsetsThree", one("F32", "[1]", "[0,4,8]"), "tensor 'q': data_offsets has more than two numbers"},
      {"OffsetsObject", one("F32", "[1]", "{}"), "data_offsets: an object stands where a list was expected"},
      {"OffsetsPastEnd", one("F32", "[2]", "[0,8]"), "reach past the end of the data, which has 4 bytes"},
      {"OffsetsBeyond63Bits", one("F32", "[1]", "[18446744073709551612,18446744073709551615]"),
       "beyond 63 bits"},
      {"Overlap", two("[0,2]", "[1,3]"),
       "tensor 'b': data_offsets [1, 3] overlap the tensor before, which ends at 2"},
      {"SamePlace", two("[0,2]", "[0,2]"), "tensor 'b': data_offsets [0, 2] overlap the tensor before"},
      {"GapAtStart", one("U8", "[3]", "[1,4]"), "tensor 'q': data_offsets [1, 4] leave a gap after byte 0"},
      {"GapBetween",
       header("{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "U8", "[2]", "[2,4]") + "}"),
       "tensor 'b': data_offsets [2, 4] leave a gap after byte 1"},
      {"TrailingBytes", one("U8", "[3]", "[0,3]"), "has 1 trailing bytes that belong to no tensor"},
      {"DataWithoutTensors", header("{}"), "has 4 trailing bytes that belong to no tensor"},
      {"BooleanOfTwo", safetensors_file("{" + entry("m", "BOOL", "[2]", "[0,2]") + "}", "\1\2"),
       "tensor 'm' is boolean, but its element 1 is 2; expected 0 or 1"},
  };
}

INSTANTIATE_TEST_SUITE_P(Files, SafetensorsHostile, ::testing::ValuesIn(hostile_cases()),
                         [](const auto& test) { return test.param.label; });

TEST(Safetensors, HeaderBeyondTheLimitIsNotRead) {
  // A sparse file: it is long enough for the header it claims, yet takes no space.
  const TemporaryDirectory directory;
  const auto path = directory / "sparse.safetensors";
  testing::write_text(path, little_endian(100'000'001, 8) + "{");
  std::filesystem::resize_file(path, 200'000'000);
  expect_file_error([&] { read_safetensors(path); }, path.string(),
                    "has a header of 100000001 bytes; at most 100000000");
}

}  // namespace
}  // namespace fovea::io
