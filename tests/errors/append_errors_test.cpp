// Wrong appending: tensors that lack each other, new rows that do not fit, positions without angles, in plans and in runs.
#include <string>

#include "refused.hpp"

namespace fovea_test {
namespace {

/// Two sequences of 2 and 0 keys with room for 5 append 3 rows each, which are rotated.
Request growing() {
  Request r = Request::forward();
  r.add("seqused_k", kInt32, {2}).fill<int32_t>({2, 0});
  r.add("k_new", kFloat32, {2, 3, 2, 8});
  r.add("v_new", kFloat32, {2, 3, 2, 6});
  r.add("rotary_cos", kFloat32, {5, 4});
  r.add("rotary_sin", kFloat32, {5, 4});
  return r;
}
Request growing_pages() {
  Request r = growing();
  r.add("k", kFloat32, {4, 2, 2, 8});
  r.add("v", kFloat32, {4, 2, 2, 6});
  r.add("page_table", kInt32, {2, 3}).fill<int32_t>({3, 0, 1, 2, 1, 99});
  return r;
}
Request growing_packed() {
  Request r = growing();
  r.add("k_new", kFloat32, {4, 2, 8});
  r.add("v_new", kFloat32, {4, 2, 6});
  r.add("cu_seqlens_k_new", kInt32, {3}).fill<int32_t>({0, 1, 4});
  return r;
}
Request growing_at_positions() {
  Request r = growing();
  r.problem.causal = 1;
  r.add("rotary_positions", kInt32, {2}).fill<int32_t>({0, 2});
  return r;
}

class AppendErrors : public testing::TestWithParam<Case> {};

TEST_P(AppendErrors, AreReportedAndNothingIsWritten) {
  expect_refused(GetParam());
}

const Case kCases[] = {
    // Tensors together.
    {"keys_without_values", growing, [](Request& r) { r.remove("v_new"); }, "v_new", "no tensor", "k_new"},
    {"values_without_keys", growing, [](Request& r) { r.remove("k_new"); }, "k_new", "no tensor", "v_new"},
    {"without_lengths", growing, [](Request& r) { r.remove("seqused_k"); }, "seqused_k", "no tensor",
     "k_new"},
    {"cosines_without_sines", growing, [](Request& r) { r.remove("rotary_sin"); }, "rotary_sin", "no tensor",
     "rotary_cos"},
    {"sines_without_cosines", growing, [](Request& r) { r.remove("rotary_cos"); }, "rotary_cos", "no tensor",
     "rotary_sin"},
    {"positions_without_angles", growing_at_positions,
     [](Request& r) {
       r.remove("rotary_cos");
       r.remove("rotary_sin");
     },
     "rotary_cos", "no tensor", "rotary_positions"},
    {"angles_without_rows", growing,
     [](Request& r) {
       r.remove("k_new");
       r.remove("v_new");
     },
     "k_new", "no tensor", "rotary_cos"},
    {"starts_without_rows", growing_packed,
     [](Request& r) {
       for (const char* name : {"k_new", "v_new", "rotary_cos", "rotary_sin"}) r.remove(name);
     },
     "k_new", "no tensor", "cu_seqlens_k_new"},
    {"to_packed_keys", Request::packed,
     [](Request& r) {
       r.add("k_new", kFloat32, {3, 1, 2, 8});
       r.add("v_new", kFloat32, {3, 1, 2, 6});
     },
     "k_new", "a tensor", "none, as there is cu_seqlens_k"},
    {"in_the_backward", Request::backward,
     [](Request& r) {
       r.add("k_new", kFloat32, {2, 1, 2, 8});
     },
     "k_new", "a tensor", "none in a backward problem"},

    // Shapes and types.
    {"rank", growing,
     [](Request& r) {
       r["k_new"].set_shape({6, 2, 8});
     },
     "k_new", "3 dimensions", "4 dimensions (batch, new rows, heads_kv, head size of q)"},
    {"packed_rank", growing_packed,
     [](Request& r) {
       r["v_new"].set_shape({2, 2, 2, 6});
     },
     "v_new", "4 dimensions", "as there is cu_seqlens_k_new"},
    {"rows_differ", growing,
     [](Request& r) {
       r["v_new"].set_shape({2, 2, 2, 6});
     },
     "v_new", "(2, 2, 2, 6)", "(2, 3, 2, 6)"},
    {"heads_differ", growing,
     [](Request& r) {
       r["k_new"].set_shape({2, 3, 4, 8});
     },
     "k_new", "(2, 3, 4, 8)", "(2, 3, 2, 8)"},
    {"type", growing, [](Request& r) { r.set_dtype({"k_new"}, kFloat16); }, "k_new", "float16",
     "float32, the type of q"},
    {"type_of_angles", growing, [](Request& r) { r.set_dtype({"rotary_cos"}, kFloat16); }, "rotary_cos",
     "float16", "float32"},
    {"types_of_angles_differ", growing, [](Request& r) { r.set_dtype({"rotary_sin"}, kFloat16); },
     "rotary_sin", "float16", "float32, the type of rotary_cos"},
    {"shapes_of_angles_differ", growing,
     [](Request& r) {
       r["rotary_sin"].set_shape({4, 4});
     },
     "rotary_sin", "(4, 4)", "the shape of rotary_cos = (5, 4)"},
    {"more_angles_than_pairs", growing,
     [](Request& r) {
       r["rotary_cos"].set_shape({4, 5});
       r["rotary_sin"].set_shape({4, 5});
     },
     "rotary_cos", "(4, 5)", "1 to 4 columns"},
    {"rows_that_repeat", growing,
     [](Request& r) {
       r["k"].set_strides({80, 0, 8, 1});
     },
     "k", "strides", "memory of its own"},

    // The lengths, against shapes that a plan knows.
    {"behind_the_angles", growing,
     [](Request& r) {
       r["rotary_cos"].set_shape({4, 4});
       r["rotary_sin"].set_shape({4, 4});
     },
     "rotary_cos", "positions 2 to 4 in sequence 0", "0 to 3"},

    // Contents.
    {"do_not_fit", growing,
     [](Request& r) {
       r["seqused_k"].fill<int32_t>({2, 3});
     },
     "k_new", "3 rows behind the 3 of sequence 1", "at most 2"},
    {"packed_do_not_fit", growing_packed,
     [](Request& r) {
       r["seqused_k"].fill<int32_t>({2, 3});
     },
     "k_new", "3 rows behind the 3 of sequence 1", "at most 2"},
    {"starts_fall", growing_packed,
     [](Request& r) {
       r["cu_seqlens_k_new"].fill<int32_t>({0, 3, 1});
     },
     "cu_seqlens_k_new", "element 1 = 3", "non-decreasing"},
    {"page_of_new_rows", growing_pages,
     [](Request& r) {
       r["page_table"].fill<int32_t>({3, 0, 4});
     },
     "page_table", "4 at entry 2 of sequence 0", "0 to 3, the pages of k"},
    {"position_negative", growing_at_positions,
     [](Request& r) {
       r["rotary_positions"].fill<int32_t>({0, -1});
     },
     "rotary_positions", "positions -1 to 1 in sequence 1", "0 to 4"},
    {"position_behind_the_angles", growing_at_positions,
     [](Request& r) {
       r["rotary_positions"].fill<int32_t>({3, 0});
     },
     "rotary_positions", "positions 3 to 5 in sequence 0", "0 to 4"},
};
constexpr int kOfContents = 6;

INSTANTIATE_TEST_SUITE_P(All, AppendErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

class AppendRunErrors : public testing::TestWithParam<Case> {};

TEST_P(AppendRunErrors, AreReportedAndNothingIsWritten) {
  expect_refused_by_a_run(GetParam(), {"page_table", "seqused_k", "cu_seqlens_k_new", "rotary_positions"});
}

INSTANTIATE_TEST_SUITE_P(Contents, AppendRunErrors,
                         testing::ValuesIn(std::end(kCases) - kOfContents, std::end(kCases)),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fovea_test
