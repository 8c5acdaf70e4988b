// Wrong caches: tensors that contradict each other, and contents that name what is not there, in plans and in runs.
#include <limits>
#include <string>

#include "refused.hpp"

namespace fovea_test {
namespace {

/// Two sequences over four pages of 2 rows, three pages each: 5 and 1 keys are used.
Request paged() {
  Request r = Request::forward();
  r.add("k", kFloat32, {4, 2, 2, 8});
  r.add("v", kFloat32, {4, 2, 2, 6});
  r.add("page_table", kInt32, {2, 3}).fill<int32_t>({3, 0, 1, 2, -1, 99});
  r.add("seqused_k", kInt32, {2}).fill<int32_t>({5, 1});
  return r;
}
/// Two sequences that read the same of three.
Request chosen() {
  Request r = Request::forward();
  r.add("k", kFloat32, {3, 5, 2, 8});
  r.add("v", kFloat32, {3, 5, 2, 6});
  r.add("cache_batch", kInt32, {2}).fill<int32_t>({2, 2});
  return r;
}
Request padded() {
  Request r = Request::forward();
  r.add("seqused_k", kInt32, {2}).fill<int32_t>({3, 5});
  r.add("leftpad_k", kInt32, {2}).fill<int32_t>({3, 0});
  return r;
}
Request packed_over_pages() {
  Request r = paged();
  r.add("q", kFloat32, {6, 4, 8});
  r.add("o", kFloat32, {6, 4, 6});
  r.add("lse", kFloat32, {4, 6});
  r.add("cu_seqlens_q", kInt32, {3}).fill<int32_t>({0, 2, 6});
  return r;
}

/// Two sequences of keys of 8 bits, with a factor for each key head.
Request of_8_bits() {
  Request r = Request::forward();
  r.add("k", kE4M3, {2, 5, 2, 8});
  r.add("v", kE4M3, {2, 5, 2, 6});
  r.add("k_descale", kFloat32, {2, 2}).fill<float>({1, 2, 3, 4});
  r.add("v_descale", kFloat32, {1, 2}).fill<float>({1, 2});
  return r;
}
/// Queries of 8 bits, too.
Request all_of_8_bits() {
  Request r = of_8_bits();
  r.set_dtype({"q"}, kE4M3);
  r.set_dtype({"o"}, kBFloat16);
  r.add("q_descale", kFloat32, {2, 1}).fill<float>({1, 2});
  return r;
}

class CacheErrors : public testing::TestWithParam<Case> {};

TEST_P(CacheErrors, AreReportedAndNothingIsWritten) {
  expect_refused(GetParam());
}

const Case kCases[] = {
    // Tensors together.
    {"pages_without_lengths", paged, [](Request& r) { r.remove("seqused_k"); }, "seqused_k", "no tensor",
     "page_table"},
    {"pages_of_packed_keys", packed_over_pages,
     [](Request& r) {
       r.add("cu_seqlens_k", kInt32, {3}).fill<int32_t>({0, 2, 3});
     },
     "page_table", "a tensor", "none, as there is cu_seqlens_k"},
    {"chosen_packed_keys", Request::packed, [](Request& r) { r.add("cache_batch", kInt32, {3}); },
     "cache_batch", "a tensor", "none, as there is cu_seqlens_k"},
    {"pages_and_chosen_sequences", paged, [](Request& r) { r.add("cache_batch", kInt32, {2}); },
     "cache_batch", "a tensor", "none, as there is page_table"},
    {"pages_in_the_backward", Request::backward,
     [](Request& r) {
       r.add("page_table", kInt32, {2, 3});
       r.add("seqused_k", kInt32, {2});
     },
     "page_table", "a tensor", "none in a backward problem"},
    {"chosen_in_the_backward", Request::backward, [](Request& r) { r.add("cache_batch", kInt32, {2}); },
     "cache_batch", "a tensor", "none in a backward problem"},
    {"padding_in_the_backward", Request::backward, [](Request& r) { r.add("leftpad_k", kInt32, {2}); },
     "leftpad_k", "a tensor", "none in a backward problem"},
    {"packed_queries_in_the_backward", Request::backward,
     [](Request& r) { r.add("cu_seqlens_q", kInt32, {3}); }, "cu_seqlens_k", "no tensor", "backward"},

    // Shapes and types.
    {"table_rank", paged, [](Request& r) { r["page_table"].set_shape({6}); }, "page_table", "1 dimensions",
     "2 dimensions (batch, most pages)"},
    {"table_batch", paged,
     [](Request& r) {
       r["page_table"].set_shape({3, 3});
     },
     "page_table", "(3, 3)", "(2, 3)"},
    {"table_type", paged, [](Request& r) { r.set_dtype({"page_table"}, kInt64); }, "page_table", "int64",
     "int32"},
    {"table_strided", paged,
     [](Request& r) {
       r["page_table"].set_strides({6, 2});
     },
     "page_table", "(6, 2)", "1 as the last stride"},
    {"pages_rank", paged,
     [](Request& r) {
       r["k"].set_shape({8, 2, 8});
     },
     "k", "3 dimensions", "(pages of k, page size of k, heads_kv, head size of q), as there is page_table"},
    {"pages_of_no_rows", paged,
     [](Request& r) {
       r["k"].set_shape({4, 0, 2, 8});
       r["v"].set_shape({4, 0, 2, 6});
     },
     "k", "pages of 0 rows", "1 row or more"},
    {"page_sizes_differ", paged,
     [](Request& r) {
       r["v"].set_shape({4, 3, 2, 6});
     },
     "v", "(4, 3, 2, 6)", "(4, 2, 2, 6)"},
    {"pages_differ", paged,
     [](Request& r) {
       r["v"].set_shape({5, 2, 2, 6});
     },
     "v", "(5, 2, 2, 6)", "(4, 2, 2, 6)"},
    {"table_for_too_many_rows", paged,
     [](Request& r) {
       r["page_table"].set_shape({2, 0x40000000});
       r["page_table"].c.data = nullptr;
     },
     "page_table", "1073741824 pages of 2 rows", "at most 2147483647 rows"},
    {"chosen_shape", chosen, [](Request& r) { r["cache_batch"].set_shape({3}); }, "cache_batch", "(3)",
     "(2)"},
    {"chosen_of_different_batches", chosen,
     [](Request& r) {
       r["v"].set_shape({2, 5, 2, 6});
     },
     "v", "(2, 5, 2, 6)", "(3, 5, 2, 6)"},
    {"padding_type", padded, [](Request& r) { r.set_dtype({"leftpad_k"}, kInt64); }, "leftpad_k", "int64",
     "int32"},
    {"batches_differ", packed_over_pages,
     [](Request& r) {
       r.remove("page_table");
       r["k"].set_shape({4, 5, 2, 8});
       r["v"].set_shape({4, 5, 2, 6});
     },
     "k", "(4, 5, 2, 8)", "(2, 5, 2, 8)"},
    {"longest_key_of_pages", packed_over_pages, [](Request& r) { r.problem.max_seqlen_k = 6; },
     "max_seqlen_k", "6", "not packed"},

    {"keys_of_8_bits_in_the_backward", Request::backward,
     [](Request& r) {
       r.set_dtype({"k", "v"}, kE4M3);
     },
     "k", "float8_e4m3fn", "the type of q in a backward problem"},
    {"keys_alone_of_8_bits", of_8_bits,
     [](Request& r) {
       r.add("v", kFloat32, {2, 5, 2, 6});
     },
     "v", "float32", "float8_e4m3fn, the type of k"},
    {"queries_alone_of_8_bits", all_of_8_bits,
     [](Request& r) {
       for (const char* factors : {"k_descale", "v_descale"}) r.remove(factors);
       r.add("k", kBFloat16, {2, 5, 2, 8});
     },
     "k", "bfloat16", "float8_e4m3fn, the type of q"},
    {"queries_of_8_bits_in_the_backward", Request::backward,
     [](Request& r) {
       r.set_dtype({"q", "k", "v"}, kE4M3);
     },
     "q", "float8_e4m3fn", "float32, float16, bfloat16 or float64 in a backward problem"},
    {"output_of_8_bits", all_of_8_bits, [](Request& r) { r.set_dtype({"o"}, kE4M3); }, "o", "float8_e4m3fn",
     "float32, float16, bfloat16 or float64"},
    {"bias_of_another_type_than_o", all_of_8_bits,
     [](Request& r) {
       r.add("bias", kFloat16, {2, 4, 3, 5});
     },
     "bias", "float16", "bfloat16, the type of o, or float32"},
    {"qv_of_8_bits", all_of_8_bits,
     [](Request& r) {
       r.add("qv", kE4M3, {2, 3, 4, 6});
     },
     "qv", "float8_e4m3fn", "bfloat16, the type of o"},
    {"factors_of_other_queries", all_of_8_bits,
     [](Request& r) {
       r.set_dtype({"q", "o"}, kFloat32);
     },
     "q_descale", "a tensor", "none, as q is float32"},
    {"factors_of_query_heads", all_of_8_bits,
     [](Request& r) {
       r["q_descale"].set_shape({2, 4});
     },
     "q_descale", "(2, 4)", "(batch or 1, heads_kv or 1) with the sizes (2, 2)"},
    {"factors_in_the_backward", Request::backward,
     [](Request& r) {
       r.add("q_descale", kFloat32, {1, 1}).fill<float>({1});
     },
     "q_descale", "a tensor", "none in a backward problem"},
    {"factors_of_other_keys", of_8_bits,
     [](Request& r) {
       r.add("k", kFloat32, {2, 5, 2, 8});
       r.add("v", kFloat32, {2, 5, 2, 6});
     },
     "k_descale", "a tensor", "none, as k is float32"},
    {"factors_shape", of_8_bits,
     [](Request& r) {
       r["k_descale"].set_shape({4, 1});
     },
     "k_descale", "(4, 1)", "(batch or 1, heads_kv or 1) with the sizes (2, 2)"},
    {"factors_rank", of_8_bits, [](Request& r) { r["v_descale"].set_shape({2}); }, "v_descale",
     "1 dimensions", "2 dimensions"},
    {"factors_type", of_8_bits, [](Request& r) { r.set_dtype({"v_descale"}, kBFloat16); }, "v_descale",
     "bfloat16", "float32"},

    // Contents.
    {"factor_of_q_negative", all_of_8_bits,
     [](Request& r) {
       r["q_descale"].fill<float>({1, -1});
     },
     "q_descale", "-1 for key head 0 of sequence 1", "a finite number above 0"},
    {"factor_of_zero", of_8_bits,
     [](Request& r) {
       r["k_descale"].fill<float>({1, 2, 0, 4});
     },
     "k_descale", "0 for key head 0 of sequence 1", "a finite number above 0"},
    {"factor_negative", of_8_bits,
     [](Request& r) {
       r["v_descale"].fill<float>({1, -2});
     },
     "v_descale", "-2 for key head 1 of sequence 0", "a finite number above 0"},
    {"factor_not_finite", of_8_bits,
     [](Request& r) {
       r["v_descale"].fill<float>({std::numeric_limits<float>::quiet_NaN(), 1});
     },
     "v_descale", "nan for key head 0 of sequence 0", "a finite number above 0"},
    {"page_too_large", paged,
     [](Request& r) {
       r["page_table"].fill<int32_t>({3, 0, 4});
     },
     "page_table", "4 at entry 2 of sequence 0", "0 to 3, the pages of k"},
    {"page_negative", paged,
     [](Request& r) {
       r["page_table"].fill<int32_t>({3, 0, 1, -1});
     },
     "page_table", "-1 at entry 0 of sequence 1", "0 to 3, the pages of k"},
    {"longer_than_the_table", paged,
     [](Request& r) {
       r["seqused_k"].fill<int32_t>({7, 1});
     },
     "seqused_k", "element 0 = 7", "0 to 6"},
    {"chosen_too_large", chosen,
     [](Request& r) {
       r["cache_batch"].fill<int32_t>({2, 3});
     },
     "cache_batch", "element 1 = 3", "0 to 2, the sequences of k"},
    {"chosen_negative", chosen,
     [](Request& r) {
       r["cache_batch"].fill<int32_t>({-1, 0});
     },
     "cache_batch", "element 0 = -1", "0 to 2"},
    {"padding_negative", padded,
     [](Request& r) {
       r["leftpad_k"].fill<int32_t>({0, -1});
     },
     "leftpad_k", "element 1 = -1", "0 to 5"},
    {"padding_longer_than_used", padded,
     [](Request& r) {
       r["leftpad_k"].fill<int32_t>({4, 0});
     },
     "leftpad_k", "element 0 = 4", "0 to 3, the used length"},
};

INSTANTIATE_TEST_SUITE_P(All, CacheErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

class CacheRunErrors : public testing::TestWithParam<Case> {};

TEST_P(CacheRunErrors, AreReportedAndNothingIsWritten) {
  expect_refused_by_a_run(GetParam(), {"page_table", "seqused_k", "cache_batch", "leftpad_k", "q_descale",
                                       "k_descale", "v_descale"});
}

INSTANTIATE_TEST_SUITE_P(Contents, CacheRunErrors, testing::ValuesIn(std::end(kCases) - 11, std::end(kCases)),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fovea_test
