// Wrong queries of values.
#include <string>

#include "refused.hpp"

namespace fovea_test {
namespace {

Request queries_of_values() {
  Request r = Request::forward();
  r.add("qv", kFloat32, {2, 3, 4, 6});
  return r;
}
Request packed_queries_of_values() {
  Request r = Request::packed();
  r.add("qv", kFloat32, {6, 4, 6});
  return r;
}
/// Beside keys of 8 bits and lists of keys: both are allowed.
Request over_lists_of_8_bits() {
  Request r = queries_of_values();
  r.add("k", kE4M3, {2, 5, 2, 8});
  r.add("v", kE4M3, {2, 5, 2, 6});
  r.add("keys", kInt32, {1, 1, 3, 2}).fill<int32_t>({0, 1, 2, 3, 4, -1});
  return r;
}

class QvErrors : public testing::TestWithParam<Case> {};

TEST_P(QvErrors, AreReportedAndNothingIsWritten) {
  expect_refused(GetParam());
}

const Case kCases[] = {
    {"head_size_of_q", queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({2, 3, 4, 8});
     },
     "qv", "(2, 3, 4, 8)", "(batch, seqlen_q, heads_q, head size of v) = (2, 3, 4, 6)"},
    {"heads_of_k", queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({2, 3, 2, 6});
     },
     "qv", "(2, 3, 2, 6)", "(2, 3, 4, 6)"},
    {"shared_by_the_batch", queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({1, 3, 4, 6});
     },
     "qv", "(1, 3, 4, 6)", "(2, 3, 4, 6)"},
    {"rank", queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({6, 4, 6});
     },
     "qv", "3 dimensions", "4 dimensions (batch, seqlen_q, heads_q, head size of v)"},
    {"rank_of_packed", packed_queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({1, 6, 4, 6});
     },
     "qv", "4 dimensions", "3 dimensions (total_q, heads_q, head size of v), as there is cu_seqlens_q"},
    {"rows_of_packed", packed_queries_of_values,
     [](Request& r) {
       r["qv"].set_shape({7, 4, 6});
     },
     "qv", "(7, 4, 6)", "(6, 4, 6)"},
    {"type", queries_of_values, [](Request& r) { r.set_dtype({"qv"}, kBFloat16); }, "qv", "bfloat16",
     "float32, the type of q"},
    {"type_of_v", over_lists_of_8_bits, [](Request& r) { r.set_dtype({"qv"}, kE4M3); }, "qv", "float8_e4m3fn",
     "float32, the type of q"},
    {"columns_apart", queries_of_values,
     [](Request& r) {
       r["qv"].set_strides({144, 48, 12, 2});
     },
     "qv", "strides (144, 48, 12, 2)", "1 as the last stride"},
    {"on_another_device", queries_of_values,
     [](Request& r) {
       r["qv"].c.device = {FOVEA_CUDA, 0};
     },
     "qv", "cuda:0", "cpu"},
    {"in_the_backward", Request::backward,
     [](Request& r) {
       r.add("qv", kFloat32, {2, 3, 4, 6});
     },
     "qv", "a tensor", "none in a backward problem"},
};

INSTANTIATE_TEST_SUITE_P(All, QvErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(QvErrors, AValidProblemTakesThem) {
  for (const auto make : {queries_of_values, packed_queries_of_values, over_lists_of_8_bits}) {
    Request request = make();
    EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
  }
}

TEST(QvErrors, TheBackwardSaysWhatHasGradients) {
  Request request = Request::backward();
  request.add("qv", kFloat32, {2, 3, 4, 6});
  fovea_plan* plan = nullptr;
  EXPECT_EQ(fovea_plan_create(&request.c_problem(), &request.options, &plan), FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fovea_last_error()).find("give rows [q | qv] as q and rows [k | v] as k"),
            std::string::npos);
}

TEST(QvErrors, ARunWithoutTheirPointer) {
  Request request = queries_of_values();
  PlannedRun run(request);
  ASSERT_TRUE(run.valid());
  fovea_buffers buffers = run.buffers(request);
  run.expect_ok(buffers);
  buffers.qv = nullptr;
  run.expect_refused(buffers, request, "qv", "a null pointer", "the memory of the plan's tensor");
}

}  // namespace
}  // namespace fovea_test
