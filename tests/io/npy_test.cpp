// .npy files, good and damaged.
#include "io/npy.hpp"

#include <sys/stat.h>

#include <tuple>

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

/// A .npy file with this header text, unpadded, as the format allows.
std::string npy_file(const std::string& header, const std::string& data, int version = 1) {
  return std::string("\x93NUMPY") + static_cast<char>(version) + '\0' +
         little_endian(header.size(), version == 1 ? 2 : 4) + header + data;
}

std::string dictionary(const std::string& descr, const std::string& shape,
                       const std::string& order = "False") {
  return "{'descr': " + descr + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

Array parse(const std::string& content) {
  return parse_npy(as_bytes(content), "dir/q.npy");
}

class NpyRoundTrip : public ::testing::TestWithParam<std::tuple<ElementType, int>> {};

TEST_P(NpyRoundTrip, EveryShapeComesBackTheSame) {
  const auto [type, version] = GetParam();
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{}, {1}, {5}, {0}, {2, 3}, {2, 0, 3}, {2, 3, 4, 5}}) {
    const Array array = patterned_array("q", type, shape);
    const std::vector<std::byte> content = serialize_npy(array, version);
    EXPECT_EQ((content.size() - array.bytes.size()) % 64, 0U);
    EXPECT_EQ(std::to_integer<int>(content[6]), version);
    EXPECT_EQ(parse_npy(content, "q.npy"), array);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryType, NpyRoundTrip,
                         ::testing::Combine(::testing::ValuesIn(kEveryType), ::testing::Values(1, 2, 3)),
                         [](const auto& test) {
                           return std::string(element_type_name(std::get<0>(test.param))) + "_v" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST(Npy, BytesAreThoseOfNumpySave) {
  // numpy.save of numpy.array([[1, 2, 3], [4, 5, 6]], '<f4'): the dictionary with sorted keys, 20 spaces of
  // room for the first dimension to grow to 21 digits, padding to 127 and a newline.
  std::string expected("\x93NUMPY\x01\x00\x76\x00", 10);
  expected += "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
  expected += std::string(127 - expected.size(), ' ') + "\n";
  for (const char* element : {"\x80\x3f", "\x00\x40", "\x40\x40", "\x80\x40", "\xa0\x40", "\xc0\x40"}) {
    expected += std::string(2, '\0') + std::string(element, 2);
  }
  ASSERT_EQ(expected.size(), 128U + 24U);

  Array array = make_array("q", ElementType::f32, {2, 3});
  for (std::size_t i = 0; i < 6; ++i) array.elements<float>()[i] = static_cast<float>(i + 1);
  EXPECT_EQ(as_text(serialize_npy(array)), expected);
  EXPECT_EQ(parse(expected), array);
}

TEST(Npy, HeaderThatFillsItsLineIsPaddedByAnotherAsNumpyDoes) {
  // 10 bytes before the header, 97 of dictionary, 20 of room and a newline end on byte 128: numpy then
  // adds 64.
  Array array = make_array("q", ElementType::u8, {0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 100});
  const std::string content = as_text(serialize_npy(array));
  EXPECT_EQ(content.size(), 192U);
  EXPECT_EQ(content.substr(8, 2), little_endian(182, 2));
  EXPECT_EQ(content.back(), '\n');
}

TEST(Npy, OneByteOfNoTypeIsFloat8) {
  for (const char* descr : {"'<V1'", "'|V1'"}) {
    const Array array = parse(npy_file(dictionary(descr, "(2,)"), "\x38\xb8"));
    EXPECT_EQ(array.type, ElementType::e4m3);
    EXPECT_EQ(as_text(array.bytes), "\x38\xb8");
  }
  EXPECT_NE(as_text(serialize_npy(make_array("q", ElementType::e4m3, {2}))).find("'descr': '<V1'"),
            std::string::npos);
}

TEST(Npy, BfloatIsReadUnderEverySpelling) {
  for (const char* descr : {"'<V2'", "'|V2'", "'bfloat16'"}) {
    const Array array = parse(npy_file(dictionary(descr, "(2,)"), std::string("\x80\x3f\x00\x40", 4)));
    EXPECT_EQ(array.type, ElementType::bf16);
    EXPECT_EQ(array.elements<std::uint16_t>()[0], 0x3f80);
  }
  const std::string written = as_text(serialize_npy(make_array("q", ElementType::bf16, {2})));
  EXPECT_NE(written.find("'descr': '<V2'"), std::string::npos);
}

TEST(Npy, OtherSpacingQuotesAndOrderOfKeysAreRead) {
  const Array array =
      parse(npy_file("{\"shape\":(2L , 1L),\"fortran_order\" :False,\"descr\":\"|u1\"}  ", "ab", 2));
  EXPECT_EQ(array.shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(array.type, ElementType::u8);
}

TEST(Npy, ArrayIsNamedAfterTheFile) {
  const TemporaryDirectory directory;
  const Array array = patterned_array("key.cache", ElementType::f64, {3});
  write_npy(directory / "key.cache.npy", array);
  EXPECT_EQ(read_npy(directory / "key.cache.npy"), array);
  EXPECT_EQ(directory.listing().size(), 1U);
}

TEST(Npy, InvalidArrayOrVersionIsTheCallersMistake) {
  Array array = make_array("q", ElementType::f32, {2});
  EXPECT_THROW(serialize_npy(array, 0), std::invalid_argument);
  EXPECT_THROW(serialize_npy(array, 4), std::invalid_argument);
  array.bytes.resize(7);
  EXPECT_THROW(serialize_npy(array), std::invalid_argument);
  const TemporaryDirectory directory;
  EXPECT_THROW(write_npy(directory / "q.npy", array), std::invalid_argument);
  EXPECT_TRUE(directory.listing().empty());
}

TEST(Npy, InputIsNotOverwritten) {
  const TemporaryDirectory directory;
  const Array array = patterned_array("q", ElementType::f32, {3});
  write_npy(directory / "q.npy", array);
  const std::vector<std::filesystem::path> inputs{directory / "q.npy"};
  expect_file_error([&] { write_npy(directory / "q.npy", make_array("o", ElementType::f32, {1}), inputs); },
                    (directory / "q.npy").string(), "is the same file as the input");
  EXPECT_EQ(read_npy(directory / "q.npy"), array);
}

TEST(Npy, MissingFileDirectoryAndPipeAreNamed) {
  const TemporaryDirectory directory;
  const auto missing = directory / "missing.npy";
  expect_file_error([&] { read_npy(missing); }, missing.string(), "cannot open: No such file or directory");
  expect_file_error([&] { read_npy(directory / ""); }, (directory / "").string(), "is not a regular file");
  const auto pipe = directory / "pipe.npy";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_file_error([&] { read_npy(pipe); }, pipe.string(), "is not a regular file");
}

TEST(Npy, EveryTruncationIsRefused) {
  const std::string whole = as_text(serialize_npy(patterned_array("q", ElementType::f32, {2, 3})));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE(size);
    expect_file_error([&] { parse(whole.substr(0, size)); }, "dir/q.npy",
                      size == 0 ? "is empty" : "is truncated");
  }
}

class NpyHostile : public ::testing::TestWithParam<HostileCase> {};

TEST_P(NpyHostile, IsRefusedByNameAndFault) {
  testing::expect_refused(
      GetParam(), "dir/q.npy", [](const std::string& content) { parse(content); },
      [](const std::filesystem::path& path) { read_npy(path); });
}

std::vector<HostileCase> hostile_cases() {
  const std::string four(4, '\0');
  const auto with = [&](const std::string& descr, const std::string& shape,
                        const std::string& order = "False") {
    return npy_file(dictionary(descr, shape, order), four);
  };
  std::string many_dimensions = "(";
  for (std::size_t i = 0; i <= kMaxRank; ++i) many_dimensions += "1,";
  many_dimensions += ")";
  return {
      {"OtherFormat", "PK\x03\x04 a zip file", "is not a .npy file"},
      {"OneWrongByte", "X", "is not a .npy file"},
      {"Version4", npy_file(dictionary("'<f4'", "(1,)"), four, 4), "has the .npy version 4.0; supported are"},
      {"Version0", npy_file(dictionary("'<f4'", "(1,)"), four, 0), "has the .npy version 0.0; supported are"},
      {"MinorVersion", std::string("\x93NUMPY\x01\x01\x00\x00", 10), "has the .npy version 1.1"},
      {"HugeHeaderLength", std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{}", 14),
       "its header should have 4294967295 bytes, but only 2 follow"},
      {"HeaderBeyondLimit", npy_file(std::string((1 << 20) + 1, ' '), "", 2),
       "has a header of 1048577 bytes"},
      {"EmptyHeader", npy_file("", ""), "the header ends where '{' was expected"},
      {"SpacesOnly", npy_file("    \n", ""), "the header ends where '{' was expected"},
      {"NotADictionary", npy_file("[1, 2]", ""), "the header has '[' at its byte 0 where '{' was expected"},
      {"NulHeader", npy_file(std::string(16, '\0'), ""), "the header has '\\x00' at its byte 0"},
      {"EmptyDictionary", npy_file("{}", ""), "the header lacks the key 'descr'"},
      {"NoOrder", npy_file("{'descr': '<f4', 'shape': (1,)}", four), "lacks the key 'fortran_order'"},
      {"NoShape", npy_file("{'descr': '<f4', 'fortran_order': False}", four), "lacks the key 'shape'"},
      {"UnknownKey", npy_file("{'color': 'red'}", ""), "the header has the unknown key 'color'"},
      {"EscapesInKey", npy_file("{'\x1b[2J': 'red'}", ""), "the header has the unknown key '\\x1b[2J'"},
      {"KeyTwice", npy_file("{'descr': '<f4', 'descr': '<f8'}", ""), "the header has the key 'descr' twice"},
      {"UnclosedDictionary", npy_file("{'descr': '<f4'", ""), "the header ends where '}' was expected"},
      {"UnclosedString", npy_file("{'descr': '<f4", ""), "has a string without an end, at its byte 10"},
      {"EscapedString", npy_file("{'descr': '<\\x664'}", ""), "has an escape in the string"},
      {"NoColon", npy_file("{'descr' '<f4'}", ""), "where ':' was expected"},
      {"AfterDictionary", npy_file(dictionary("'<f4'", "(1,)") + "x", four), "goes on after the dictionary"},
      {"DescrNumber", with("4", "(1,)"), "where a string was expected"},
      {"DescrEmpty", with("''", "(1,)"), "has elements of type ''"},
      {"FortranOrder", with("'<f4'", "(1,)", "True"), "is in Fortran order; save it in C order: numpy.save"},
      {"OrderNumber", with("'<f4'", "(1,)", "0"), "where True or False was expected"},
      {"OrderMisspelt", with("'<f4'", "(1,)", "Truth"), "where True or False was expected"},
      {"BigEndian", with("'>f4'", "(1,)"),
       "big-endian elements ('>f4'); save it in little endian: array.astype('<f4')"},
      {"NativeOrder", with("'=f4'", "(1,)"), "has elements of type '=f4'"},
      {"NoOrderCharacter", with("'|f4'", "(1,)"), "has elements of type '|f4'"},
      {"Objects", with("'|O'", "(1,)"), "holds Python objects ('|O'), which only pickle could read"},
      {"Structured", with("[('a', '<f4')]", "(1,)"), "has structured elements"},
      {"Subarray", with("('<f4', (2,))", "(1,)"), "has structured elements"},
      {"Complex", with("'<c8'", "(1,)"), "has elements of type '<c8'; supported are"},
      {"Text", with("'<U1'", "(1,)"), "has elements of type '<U1'; supported are"},
      {"Signed8", with("'|i1'", "(4,)"), "has elements of type '|i1'; supported are"},
      {"OtherVoid", with("'|V4'", "(1,)"), "has elements of type '|V4'; supported are"},
      {"ShapeNumber", with("'<f4'", "1"), "where '(' was expected"},
      {"ShapeInParentheses", with("'<f4'", "(1)"), "has a number as 'shape' where a tuple was expected"},
      {"ShapeList", with("'<f4'", "[1]"), "where '(' was expected"},
      {"ShapeNested", with("'<f4'", "((1,),)"), "where a whole number was expected"},
      {"ShapeDeeplyNested", with("'<f4'", std::string(60000, '(')), "where a whole number was expected"},
      {"ShapeNegative", with("'<f4'", "(-1,)"), "has a negative dimension in 'shape'"},
      {"ShapeFraction", with("'<f4'", "(1.0,)"), "that is not a whole number"},
      {"ShapeExponent", with("'<f4'", "(1e0,)"), "that is not a whole number"},
      {"ShapeText", with("'<f4'", "('1',)"), "where a whole number was expected"},
      {"ShapeLeadingZero", with("'<f4'", "(01,)"), "with a leading zero"},
      {"ShapeHexadecimal", with("'<f4'", "(0x1,)"), "where ',' or ')' was expected"},
      {"ShapeTwoCommas", with("'<f4'", "(1,,)"), "where a whole number was expected"},
      {"ShapeOnlyComma", with("'<f4'", "(,)"), "where a whole number was expected"},
      {"ShapeNoComma", with("'<f4'", "(1 1)"), "where ',' or ')' was expected"},
      {"ShapeUnclosed", npy_file("{'shape': (1, ", ""), "ends where a whole number was expected"},
      {"ShapeBeyond64Bits", with("'<f4'", "(18446744073709551617,)"),
       "has a dimension in 'shape' beyond 64 bits"},
      {"ShapeBeyond63Bits", with("'<f4'", "(9223372036854775808,)"),
       "has a dimension in 'shape' beyond 64 bits"},
      {"ShapeProductOverflow", with("'<f4'", "(4294967296, 4294967296)"), "has a shape whose size overflows"},
      {"ShapeBytesOverflow", with("'<f8'", "(9223372036854775807,)"), "has a shape whose size overflows"},
      {"ShapeOverflowBehindZero", with("'<f4'", "(0, 4294967296, 4294967296)"),
       "has a shape whose size overflows"},
      {"TooManyDimensions", with("'<f4'", many_dimensions), "has more than 64 dimensions in 'shape'"},
      {"HugeShape", with("'<f4'", "(1099511627776,)"),
       "is truncated: F32 of shape (1099511627776,) takes 4398046511104 bytes, but only 4 follow the header"},
      {"TrailingBytes", with("'<f2'", "(1,)"),
       "has 2 trailing bytes: F16 of shape (1,) takes 2 bytes, but 4 follow"},
      {"BooleanOfTwo", npy_file(dictionary("'|b1'", "(3,)"), std::string("\0\1\2", 3)),
       "the array is boolean, but its element 2 is 2; expected 0 or 1"},
  };
}

INSTANTIATE_TEST_SUITE_P(Files, NpyHostile, ::testing::ValuesIn(hostile_cases()),
                         [](const auto& test) { return test.param.label; });

}  // namespace
}  // namespace fovea::io
