// Wrong requests around expressions: to fovea_plan_create, which fovea_attend refuses as well, and to fovea_run.
#include <cstddef>
#include <memory>

#include "refused.hpp"

namespace fovea_test {
namespace {

/// Reads four tensors, of which two have gradients: bias (2, 4, 3, 5), table (4, 7), doc (2, 5) of ints and the number gain.
Request backward() {
  Request r = Request::backward();
  r.problem.score = "gain * s + bias[b, h, q, k] + table[h, clamp(k - q, -3, 3) + 3]";
  r.problem.sees = "doc[b, q] == doc[b, k]";
  r.add_named("bias", kFloat32, {2, 4, 3, 5});
  r.add_named("table", kFloat16, {4, 7});
  r.add_named("doc", kInt32, {2, 5});
  r.add_named("gain", kBFloat16, {});
  r.add_gradient("bias", kFloat32, {2, 4, 3, 5});
  r.add_gradient("gain", kFloat32, {});
  return r;
}
Request forward() {
  Request r = backward();
  for (const char* name : {"d_o", "dq", "dk", "dv", "named.bias.gradient", "named.gain.gradient"})
    r.remove(name);
  r.problem.pass = FOVEA_FORWARD;
  return r;
}
Request only_sees() {
  Request r = backward();
  r.problem.score = nullptr;
  r.remove("named.bias.gradient");
  r.remove("named.gain.gradient");
  return r;
}

class ExpressionErrors : public testing::TestWithParam<Case> {};

TEST_P(ExpressionErrors, AreReportedAndNothingIsWritten) {
  expect_refused(GetParam());
}

using Named = std::vector<fovea_named_tensor>;

const Case kCases[] = {
    // Names.
    {"name_missing", forward, [](Request& r) { r.spoil_named = [](Named& n) { n[1].name = nullptr; }; },
     "named.1", "no name (NULL)", "the name that expressions use"},
    {"name_empty", forward, [](Request& r) { r.spoil_named = [](Named& n) { n[1].name = ""; }; }, "named.1",
     "the name ''", "a letter or _"},
    {"name_with_digit_first", forward, [](Request& r) { r.add_named("2nd", kFloat32, {4}); }, "named.4",
     "the name '2nd'", "a letter or _"},
    {"name_with_dash", forward, [](Request& r) { r.add_named("a-b", kFloat32, {4}); }, "named.4",
     "the name 'a-b'", "a letter or _"},
    {"name_of_control_characters", forward, [](Request& r) { r.add_named("a\n\x1b", kFloat32, {4}); },
     "named.4", "the name 'a\\x0a\\x1b'", "a letter or _"},
    {"name_of_a_variable", forward, [](Request& r) { r.add_named("nk", kFloat32, {4}); }, "named.4",
     "the name 'nk'", "no name of the language"},
    {"name_of_a_function", forward, [](Request& r) { r.add_named("tanh", kFloat32, {4}); }, "named.4",
     "the name 'tanh'", "no name of the language"},
    {"name_of_a_constant", forward, [](Request& r) { r.add_named("true", kFloat32, {4}); }, "named.4",
     "the name 'true'", "no name of the language"},
    {"name_twice", forward, [](Request& r) { r.spoil_named = [](Named& n) { n[3].name = "table"; }; },
     "named.table", "two tensors of this name", "one name for each"},
    {"tensor_missing", forward, [](Request& r) { r.spoil_named = [](Named& n) { n[2].tensor = nullptr; }; },
     "named.doc", "no tensor (NULL)", "the tensor of this name"},

    // How many.
    {"too_many", forward, [](Request& r) { r.spoil_problem = [](fovea_problem& p) { p.num_named = 9; }; },
     "num_named", "9", "0 to 8"},
    {"negative", forward, [](Request& r) { r.spoil_problem = [](fovea_problem& p) { p.num_named = -1; }; },
     "num_named", "-1", "0 to 8"},
    {"no_array", forward, [](Request& r) { r.spoil_problem = [](fovea_problem& p) { p.named = nullptr; }; },
     "named", "NULL", "4 tensors"},
    {"no_expression", forward, [](Request& r) { r.problem.score = r.problem.sees = nullptr; }, "named.bias",
     "a tensor", "no expression"},
    {"empty_expressions", forward, [](Request& r) { r.problem.score = r.problem.sees = ""; }, "named.bias",
     "a tensor", "no expression"},

    // Each tensor by itself.
    {"type_float64", forward, [](Request& r) { r.set_dtype({"named.bias"}, kFloat64); }, "named.bias",
     "float64", "float32, float16, bfloat16, int32, uint8 or bool"},
    {"type_int64", forward, [](Request& r) { r.set_dtype({"named.doc"}, kInt64); }, "named.doc", "int64",
     "int32"},
    {"type_unknown", forward, [](Request& r) { r["named.bias"].c.dtype.code = 9; }, "named.bias", "code 9",
     "float16"},
    {"type_of_two_lanes", forward, [](Request& r) { r["named.bias"].c.dtype.lanes = 2; }, "named.bias",
     "2 lanes", "1 lane"},
    {"rank_5", forward, [](Request& r) { r["named.bias"].c.ndim = 5; }, "named.bias", "5 dimensions",
     "0 to 4"},
    {"rank_negative", forward, [](Request& r) { r["named.bias"].c.ndim = -1; }, "named.bias", "-1 dimensions",
     "0 to 4"},
    {"no_shape", forward, [](Request& r) { r["named.bias"].c.shape = nullptr; }, "named.bias", "no shape",
     "4 sizes"},
    {"negative_size", forward,
     [](Request& r) {
       r["named.table"].set_shape({4, -7});
     },
     "named.table", "(4, -7)", "sizes from 0"},
    {"negative_stride", forward,
     [](Request& r) {
       r["named.table"].set_strides({-7, 1});
     },
     "named.table", "(-7, 1)", "no negative stride"},
    {"strides_too_large", forward,
     [](Request& r) {
       r["named.table"].set_strides({INT64_MAX, 1});
     },
     "named.table", "9223372036854775807", "2^57 bytes"},
    {"misaligned", forward, [](Request& r) { r["named.bias"].c.byte_offset = 2; }, "named.bias",
     "no multiple of 4", "multiples of their size"},
    {"on_a_gpu", forward,
     [](Request& r) {
       r["named.bias"].c.device = {FOVEA_CUDA, 1};
     },
     "named.bias", "cuda:1", "memory of cpu"},
    {"device_type", forward, [](Request& r) { r["named.bias"].c.device.type = 7; }, "named.bias",
     "device type 7", "1 (CPU)"},

    // Dimensions that names index.
    {"too_few_batches", forward,
     [](Request& r) {
       r["named.doc"].set_shape({0, 5});
     },
     "named.doc", "(0, 5)", "at least 2 in dimension 0, which b indexes, or 1"},
    {"too_few_heads", forward,
     [](Request& r) {
       r["named.table"].set_shape({2, 7});
     },
     "named.table", "(2, 7)", "at least 4 in dimension 0, which h indexes, or 1"},
    {"too_few_queries", forward,
     [](Request& r) {
       r["named.bias"].set_shape({2, 4, 2, 5});
     },
     "named.bias", "(2, 4, 2, 5)", "at least 3 in dimension 2, which q indexes"},
    {"too_few_keys", forward,
     [](Request& r) {
       r["named.bias"].set_shape({2, 4, 3, 4});
     },
     "named.bias", "(2, 4, 3, 4)", "at least 5 in dimension 3, which k indexes"},
    {"too_few_positions", forward,
     [](Request& r) {
       r["named.doc"].set_shape({2, 3});
     },
     "named.doc", "(2, 3)", "at least 5 in dimension 1, which k indexes"},
    {"too_few_key_heads", forward,
     [](Request& r) {
       r.problem.score = "s + gains[hk]";
       r.add_named("gains", kFloat32, {0});
     },
     "named.gains", "(0)", "at least 2 in dimension 0, which hk indexes"},
    {"too_few_lengths", forward,
     [](Request& r) {
       r.problem.score = "s + lengths[nk, nq]";
       r.add_named("lengths", kFloat32, {5, 4});
     },
     "named.lengths", "(5, 4)", "at least 6 in dimension 0, which nk indexes"},

    // Gradients.
    {"gradient_in_forward", forward,
     [](Request& r) {
       r.add_gradient("table", kFloat32, {4, 7});
     },
     "named.table.gradient", "a tensor", "none in a forward problem"},
    {"gradient_of_ints", backward,
     [](Request& r) {
       r.add_gradient("doc", kFloat32, {2, 5});
     },
     "named.doc.gradient", "int32", "a float tensor"},
    {"gradient_of_another_type", backward,
     [](Request& r) {
       r.add_gradient("table", kFloat16, {4, 7});
     },
     "named.table.gradient", "float16", "float32"},
    {"gradient_of_another_shape", backward,
     [](Request& r) {
       r.add_gradient("table", kFloat32, {7, 4});
     },
     "named.table.gradient", "(7, 4)", "(4, 7), that of table"},
    {"gradient_of_another_rank", backward, [](Request& r) { r.add_gradient("table", kFloat32, {28}); },
     "named.table.gradient", "(28)", "(4, 7)"},
    {"gradient_of_rank_5", backward,
     [](Request& r) {
       r.add_gradient("table", kFloat32, {4, 7}).c.ndim = 5;
     },
     "named.table.gradient", "5 dimensions", "0 to 4"},
    {"gradient_without_score", only_sees,
     [](Request& r) {
       r.add_gradient("bias", kFloat32, {2, 4, 3, 5});
     },
     "named.bias.gradient", "a tensor", "there is no score"},
    {"gradient_that_broadcasts", backward,
     [](Request& r) {
       r["named.bias.gradient"].set_strides({0, 15, 5, 1});
     },
     "named.bias.gradient", "(0, 15, 5, 1)", "memory of its own for each element"},
    {"gradient_on_a_gpu", backward,
     [](Request& r) {
       r["named.bias.gradient"].c.device = {FOVEA_CUDA, 0};
     },
     "named.bias.gradient", "cuda:0", "memory of cpu"},
    {"gradient_misaligned", backward, [](Request& r) { r["named.bias.gradient"].c.byte_offset = 1; },
     "named.bias.gradient", "no multiple of 4", "multiples of their size"},
};

INSTANTIATE_TEST_SUITE_P(Each, ExpressionErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

// --- texts ---

struct Text {
  const char* name;
  const char* score;
  const char* sees;
  const char* message;  ///< whole, with the excerpt
};
void PrintTo(const Text& text, std::ostream* out) {
  *out << text.name;
}
class ExpressionTexts : public testing::TestWithParam<Text> {};

TEST_P(ExpressionTexts, AreReportedWithTheirPlaceAndNothingIsWritten) {
  const Text& t = GetParam();
  Request request = forward();
  request.problem.score = t.score;
  request.problem.sees = t.sees;
  expect_refused(request, [&] {
    EXPECT_STREQ(fovea_last_error_argument(), t.score ? "score" : "sees");
    EXPECT_STREQ(fovea_last_error(), t.message);
  });
}

const Text kTexts[] = {
    {"unknown_name", "s + foo", nullptr,
     "score, character 5: got 'foo', expected one of s, b, h, hk, q, k, nq, nk, bias, table, doc, gain; "
     "correct the name, or declare a tensor of this name\n"
     "  s + foo\n"
     "      ^"},
    {"syntax", "s + * 2", nullptr,
     "score, character 5: got '*', expected a number, a name, a function or '('; complete the expression\n"
     "  s + * 2\n"
     "      ^"},
    {"unfinished", nullptr, "k <= (q",
     "sees, character 8: got the end of the text, expected an operator or ')'; close the '(' of "
     "character 6\n"
     "  k <= (q\n"
     "         ^"},
    {"on_the_second_line", "s +\n 2 *\n bias[b, h, q]", nullptr,
     "score, character 23: got ']', expected ',' and more, the 4 indices of bias; add 1\n"
     "   bias[b, h, q]\n"
     "               ^"},
    {"bool_score", "k <= q", nullptr,
     "score, character 1: got a bool, expected a float, the score; choose a number with where(condition, a, "
     "b)\n"
     "  k <= q\n"
     "  ^"},
    {"int_mask", nullptr, "q - k",
     "sees, character 1: got an int, expected a bool, whether the query sees the key; compare it, as in k <= "
     "q\n"
     "  q - k\n"
     "  ^"},
    {"index_of_floats", "s + bias[b, h, q, gain]", nullptr,
     "score, character 19: got a float, expected an int, an index of bias; index with ints, such as q or k / "
     "16\n"
     "  s + bias[b, h, q, gain]\n"
     "                    ^"},
    {"index_of_a_number", "s + gain[0]", nullptr,
     "score, character 9: got '[', expected an operator, as 'gain' has no dimensions; leave out the index\n"
     "  s + gain[0]\n"
     "          ^"},
};
INSTANTIATE_TEST_SUITE_P(Each, ExpressionTexts, testing::ValuesIn(kTexts),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(ExpressionText, SeesDoesNotKnowTheScore) {
  Request request = forward();
  request.problem.sees = "s > 0";
  expect_refused(request, [] {
    EXPECT_STREQ(fovea_last_error_argument(), "sees");
    const std::string message = fovea_last_error();
    EXPECT_EQ(message.find("sees, character 1: got 's', expected "), 0u) << message;
    EXPECT_NE(message.find("\n  s > 0\n  ^"), std::string::npos) << message;
  });
}
TEST(ExpressionText, ThatAreTooLong) {
  Request request = forward();
  const std::string text = "s" + std::string(5000, ' ');
  request.problem.score = text.c_str();
  expect_refused(request, [] {
    EXPECT_STREQ(fovea_last_error_argument(), "score");
    EXPECT_NE(
        std::string(fovea_last_error()).find("score: got a text of 5001 characters, expected at most 4096; "),
        std::string::npos)
        << fovea_last_error();
  });
}

// --- runs ---

struct RunCase {
  const char* name;
  Request (*make)();
  void (*spoil)(fovea_buffers&);
  const char* argument;
  const char* got;
  const char* expected;
};
void PrintTo(const RunCase& c, std::ostream* out) {
  *out << c.name;
}
class ExpressionRunErrors : public testing::TestWithParam<RunCase> {};

void* at(const void* p, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(p)) + bytes;
}

TEST_P(ExpressionRunErrors, AreReportedAndNothingIsWritten) {
  const RunCase& c = GetParam();
  Request request = c.make();
  PlannedRun run(request);
  ASSERT_TRUE(run.valid());
  const fovea_buffers good = run.buffers(request);
  fovea_buffers buffers = good;
  c.spoil(buffers);
  run.expect_refused(buffers, request, c.argument, c.got, c.expected);
  run.expect_ok(good);
}

const RunCase kRunCases[] = {
    {"no_tensor", forward, [](fovea_buffers& b) { b.named[1] = nullptr; }, "named.table", "a null pointer",
     "memory of the plan's tensor"},
    {"no_number", forward, [](fovea_buffers& b) { b.named[3] = nullptr; }, "named.gain", "a null pointer",
     "memory of the plan's tensor"},
    {"no_gradient", backward, [](fovea_buffers& b) { b.named_gradients[0] = nullptr; }, "named.bias.gradient",
     "a null pointer", "memory of the plan's tensor"},
    {"surplus_tensor", forward, [](fovea_buffers& b) { b.named[4] = b.q; }, "named.4", "a pointer",
     "no such tensor"},
    {"surplus_gradient", backward, [](fovea_buffers& b) { b.named_gradients[1] = b.named_gradients[0]; },
     "named.table.gradient", "a pointer", "no such tensor"},
    {"surplus_gradient_of_no_tensor", backward, [](fovea_buffers& b) { b.named_gradients[7] = b.dq; },
     "named.7.gradient", "a pointer", "no such tensor"},
    {"gradient_in_forward", forward, [](fovea_buffers& b) { b.named_gradients[0] = b.o; },
     "named.bias.gradient", "a pointer", "no such tensor"},
    {"without_expressions", Request::forward, [](fovea_buffers& b) { b.named[0] = b.q; }, "named.0",
     "a pointer", "no such tensor"},
    {"misaligned_tensor", forward, [](fovea_buffers& b) { b.named[0] = at(b.named[0], 2); }, "named.bias",
     "no multiple of 4", "multiples of their size"},
    {"misaligned_gradient", backward,
     [](fovea_buffers& b) { b.named_gradients[3] = at(b.named_gradients[3], 1); }, "named.gain.gradient",
     "no multiple of 4", "multiples of their size"},
    {"gradient_is_its_tensor", backward,
     [](fovea_buffers& b) { b.named_gradients[0] = const_cast<void*>(b.named[0]); }, "named.bias.gradient",
     "overlaps named.bias", "memory of its own"},
    {"gradient_over_q", backward, [](fovea_buffers& b) { b.named_gradients[3] = at(b.q, 8); },
     "named.gain.gradient", "overlaps q", "memory of its own"},
    {"gradient_over_dv", backward, [](fovea_buffers& b) { b.named_gradients[3] = at(b.dv, 8); }, "dv",
     "overlaps named.gain.gradient", "memory of its own"},
    {"gradient_in_gradient", backward,
     [](fovea_buffers& b) { b.named_gradients[3] = at(b.named_gradients[0], 476); }, "named.bias.gradient",
     "overlaps named.gain.gradient", "memory of its own"},
    {"o_over_tensor", forward, [](fovea_buffers& b) { b.o = const_cast<void*>(b.named[2]); }, "o",
     "overlaps named.doc", "memory of its own"},
    {"older_buffers", forward, [](fovea_buffers& b) { b.struct_size = offsetof(fovea_buffers, named); },
     "named.bias", "a null pointer", "memory of the plan's tensor"},
};
INSTANTIATE_TEST_SUITE_P(Each, ExpressionRunErrors, testing::ValuesIn(kRunCases),
                         [](const auto& test) { return std::string(test.param.name); });

// --- what is accepted ---

TEST(ExpressionsAccept, UnspoiltRequests) {
  for (Request (*make)() : {forward, backward, only_sees}) {
    Request request = make();
    EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
  }
}
TEST(ExpressionsAccept, TensorsThatNothingReads) {
  Request request = forward();
  request.problem.score = "s";
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
}
TEST(ExpressionsAccept, AnArrayOfNoTensors) {
  Request request = Request::forward();
  request.spoil_problem = [](fovea_problem& p) {
    static const fovea_named_tensor unused{};
    p.named = &unused;
    p.num_named = 0;
  };
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
}
TEST(ExpressionsAccept, SizesOfOneAndLargerOnesAndStridesOfZero) {
  Request request = backward();
  request["named.bias"].set_shape({1, 1, 3, 5});
  request["named.bias.gradient"].set_shape({1, 1, 3, 5});
  request["named.table"].set_shape({9, 7});
  request["named.doc"].set_strides({0, 3});
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
}
/// Two gradients as the slices of one array, of which one broadcasts.
TEST(ExpressionsAccept, InterleavedGradients) {
  Request request = backward();
  request.problem.score = "s + left[b, h] + right[b, h]";
  for (const char* name : {"left", "right"}) {
    request.add_named(name, kFloat32, {1, 4});
    request.add_gradient(name, kFloat32, {1, 4}).set_strides({8, 2});
  }
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK) << fovea_last_error();
  AlignedMemory workspace(fovea_plan_workspace_size(plan));
  fovea_buffers b = request.c_buffers();
  b.workspace = workspace.get();
  b.workspace_size = fovea_plan_workspace_size(plan);
  b.named_gradients[5] = at(b.named_gradients[4], 4);
  EXPECT_EQ(fovea_run(plan, &b), FOVEA_OK) << fovea_last_error();
  b.named_gradients[5] = at(b.named_gradients[4], 8);
  EXPECT_EQ(fovea_run(plan, &b), FOVEA_INVALID_ARGUMENT);
  expect_message("named.left.gradient", "overlaps named.right.gradient", "memory of its own");
  fovea_plan_destroy(plan);
}
/// What a header without expressions knew: behind its end nothing is read.
TEST(ExpressionsAccept, ProblemsOfOlderHeaders) {
  Request request = Request::forward();
  request.spoil_problem = [](fovea_problem& p) {
    p.struct_size = offsetof(fovea_problem, score);
    p.score = "nonsense";
    p.num_named = 77;
  };
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
}

TEST(ExpressionsAreUnsupported, WhereABackendSaysSo) {
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (fovea_backend_device_type(i) != FOVEA_CPU) continue;
    Request request = backward();
    request.options.backend = fovea_backend_name(i);
    fovea_plan* plan = nullptr;
    const fovea_status status = fovea_plan_create(&request.c_problem(), &request.options, &plan);
    EXPECT_TRUE(status == FOVEA_OK || status == FOVEA_UNSUPPORTED) << fovea_last_error();
    if (status == FOVEA_UNSUPPORTED) {
      EXPECT_STREQ(fovea_last_error_argument(), "backend");
    }
    fovea_plan_destroy(plan);
  }
}

}  // namespace
}  // namespace fovea_test
