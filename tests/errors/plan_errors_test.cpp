// Wrong requests to fovea_plan_create. fovea_attend refuses the same, and writes nothing.
#include <array>
#include <limits>

#include "refused.hpp"

namespace fovea_test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

using Make = Request (*)();
constexpr Make kForward = Request::forward, kBackward = Request::backward, kPacked = Request::packed;

class PlanErrors : public testing::TestWithParam<Case> {};

TEST_P(PlanErrors, AreReportedAndNothingIsWritten) {
  expect_refused(GetParam());
}

const Case kCases[] = {
    // Presence.
    {"no_q", kForward, [](Request& r) { r.remove("q"); }, "q", "no tensor", "a tensor"},
    {"no_k", kForward, [](Request& r) { r.remove("k"); }, "k", "no tensor", "a tensor"},
    {"no_v", kForward, [](Request& r) { r.remove("v"); }, "v", "no tensor", "a tensor"},
    {"no_o", kForward, [](Request& r) { r.remove("o"); }, "o", "no tensor", "a tensor"},
    {"backward_without_o", kBackward, [](Request& r) { r.remove("o"); }, "o", "no tensor", "a tensor"},
    {"backward_without_lse", kBackward, [](Request& r) { r.remove("lse"); }, "lse", "no tensor", "backward"},
    {"backward_without_d_o", kBackward, [](Request& r) { r.remove("d_o"); }, "d_o", "no tensor", "backward"},
    {"backward_without_dq", kBackward, [](Request& r) { r.remove("dq"); }, "dq", "no tensor", "backward"},
    {"backward_without_dk", kBackward, [](Request& r) { r.remove("dk"); }, "dk", "no tensor", "backward"},
    {"backward_without_dv", kBackward, [](Request& r) { r.remove("dv"); }, "dv", "no tensor", "backward"},
    {"forward_with_dq", kForward, [](Request& r) { r.add("dq", kFloat32, {2, 3, 4, 8}); }, "dq", "a tensor",
     "none in a forward problem"},
    {"forward_with_dsink", kForward, [](Request& r) { r.add("dsink", kFloat32, {4}); }, "dsink", "a tensor",
     "none in a forward problem"},
    {"dbias_without_bias", kBackward, [](Request& r) { r.add("dbias", kFloat32, {2, 4, 3, 5}); }, "bias",
     "no tensor", "dbias"},
    {"dsink_without_sink", kBackward, [](Request& r) { r.add("dsink", kFloat32, {4}); }, "sink", "no tensor",
     "dsink"},
    {"pass", kForward, [](Request& r) { r.problem.pass = 2; }, "pass", "2", "FOVEA_BACKWARD (1)"},

    // Impossible tensors.
    {"rank_0", kForward, [](Request& r) { r["q"].c.ndim = 0; }, "q", "0 dimensions", "1 to 4"},
    {"rank_5", kForward, [](Request& r) { r["q"].c.ndim = 5; }, "q", "5 dimensions", "1 to 4"},
    {"rank_negative", kForward, [](Request& r) { r["k"].c.ndim = -1; }, "k", "-1 dimensions", "1 to 4"},
    {"no_shape", kForward, [](Request& r) { r["v"].c.shape = nullptr; }, "v", "no shape", "4 sizes"},
    {"dtype_code", kForward, [](Request& r) { r["q"].c.dtype.code = 9; }, "q", "code 9", "float16"},
    {"dtype_bits", kForward, [](Request& r) { r["q"].c.dtype.bits = 8; }, "q", "8 bits", "float16"},
    {"dtype_lanes", kForward, [](Request& r) { r["q"].c.dtype.lanes = 4; }, "q", "4 lanes", "1 lane"},
    {"device_type", kForward, [](Request& r) { r["q"].c.device.type = 7; }, "q", "device type 7", "1 (CPU)"},
    {"devices_mixed", kForward, [](Request& r) { r["v"].c.device = {FOVEA_CUDA, 1}; }, "v", "cuda:1", "cpu"},
    {"byte_offset", kForward, [](Request& r) { r["q"].c.byte_offset = UINT64_MAX; }, "q", "byte_offset",
     "within the memory"},
    {"misaligned", kForward, [](Request& r) { r["q"].c.byte_offset = 2; }, "q", "no multiple of 4",
     "multiples of their size"},

    // Rank of each role.
    {"q_rank", kForward, [](Request& r) { r["q"].set_shape({3, 4, 8}); }, "q", "3 dimensions", "4 dimensions"},
    {"k_rank", kForward, [](Request& r) { r["k"].set_shape({5, 2, 8}); }, "k", "3 dimensions", "4 dimensions"},
    {"packed_q_with_batch", kPacked, [](Request& r) { r["q"].set_shape({1, 6, 4, 8}); }, "q", "4 dimensions",
     "3 dimensions (total_q, heads_q, head size of q)"},
    {"packed_v_with_batch", kPacked, [](Request& r) { r["v"].set_shape({1, 6, 2, 6}); }, "v", "4 dimensions",
     "3 dimensions"},
    {"lse_rank", kForward, [](Request& r) { r["lse"].set_shape({4, 3}); }, "lse", "2 dimensions", "3 dimensions"},
    {"packed_lse_rank", kPacked, [](Request& r) { r["lse"].set_shape({3, 4, 4}); }, "lse", "3 dimensions",
     "(heads_q, total_q)"},
    {"bias_rank", kForward, [](Request& r) { r.add("bias", kFloat32, {3, 5}); }, "bias", "2 dimensions",
     "4 dimensions"},
    {"mask_rank", kForward, [](Request& r) { r.add("mask", kBool, {3, 5}); }, "mask", "2 dimensions",
     "4 dimensions"},
    {"block_mask_rank", kForward, [](Request& r) { r.add("block_mask", kBool, {3}); }, "block_mask",
     "1 dimensions", "4 dimensions"},
    {"alibi_rank", kForward, [](Request& r) { r.add("alibi", kFloat32, {1, 2, 4}); }, "alibi", "3 dimensions",
     "1 dimension (heads_q)"},
    {"sink_rank", kForward, [](Request& r) { r.add("sink", kFloat32, {1, 4}); }, "sink", "2 dimensions",
     "1 dimension (heads_q)"},
    {"cu_seqlens_rank", kPacked, [](Request& r) { r["cu_seqlens_q"].set_shape({1, 4}); }, "cu_seqlens_q",
     "2 dimensions", "1 dimension"},
    {"keys_rank", kForward, [](Request& r) { r.add("keys", kInt32, {2, 3, 4}); }, "keys", "3 dimensions",
     "4 dimensions (batch or 1, heads_kv or 1, seqlen_q, count)"},
    {"packed_keys_rank", kPacked, [](Request& r) { r.add("keys", kInt32, {1, 2, 6, 4}); }, "keys",
     "4 dimensions", "3 dimensions (heads_kv or 1, total_q, count)"},
    {"keys_type", kForward, [](Request& r) { r.add("keys", kInt64, {2, 2, 3, 4}); }, "keys", "int64",
     "int32"},
    {"keys_of_query_heads", kForward, [](Request& r) { r.add("keys", kInt32, {2, 4, 3, 4}); }, "keys",
     "shape (2, 4, 3, 4)", "(2, 2, 3, 4)"},
    {"keys_of_another_length", kForward, [](Request& r) { r.add("keys", kInt32, {2, 2, 1, 4}); }, "keys",
     "shape (2, 2, 1, 4)", "(2, 2, 3, 4)"},
    {"keys_not_contiguous", kForward,
     [](Request& r) { r.add("keys", kInt32, {2, 2, 3, 4}).set_strides({24, 12, 1, 3}); }, "keys", "stride",
     "1"},
    {"seqused_rank", kForward, [](Request& r) { r.add("seqused_q", kInt32, {2, 1}); }, "seqused_q",
     "2 dimensions", "1 dimension"},
    {"rng_state_rank", kForward, [](Request& r) { r.add("rng_state", kInt64, {1, 2}); }, "rng_state",
     "2 dimensions", "1 dimension"},

    // Types.
    {"q_int", kForward, [](Request& r) { r.set_dtype({"q"}, kInt32); }, "q", "int32", "bfloat16"},
    {"k_mixed", kForward, [](Request& r) { r.set_dtype({"k"}, kFloat16); }, "k", "float16", "float32"},
    {"v_mixed", kForward, [](Request& r) { r.set_dtype({"v"}, kBFloat16); }, "v", "bfloat16", "float32"},
    {"o_mixed", kForward, [](Request& r) { r.set_dtype({"o"}, kFloat16); }, "o", "float16", "float32"},
    {"o_of_another_half", kForward,
     [](Request& r) {
       r.set_dtype({"q", "k", "v"}, kFloat16);
       r.set_dtype({"o"}, kBFloat16);
     },
     "o", "bfloat16", "float16, the type of q, or float32"},
    {"lse_float16", kForward, [](Request& r) { r.set_dtype({"lse"}, kFloat16); }, "lse", "float16", "float32"},
    {"lse_float64", kForward, [](Request& r) { r.set_dtype({"lse"}, kFloat64); }, "lse", "float64", "float32"},
    {"d_o_mixed", kBackward, [](Request& r) { r.set_dtype({"d_o"}, kFloat16); }, "d_o", "float16", "float32"},
    {"dq_mixed", kBackward, [](Request& r) { r.set_dtype({"dq"}, kFloat16); }, "dq", "float16", "float32"},
    {"dk_mixed", kBackward, [](Request& r) { r.set_dtype({"dk"}, kFloat64); }, "dk", "float64", "float32"},
    {"dv_mixed", kBackward, [](Request& r) { r.set_dtype({"dv"}, kFloat16); }, "dv", "float16", "float32"},
    {"bias_type", kForward, [](Request& r) { r.add("bias", kFloat16, {2, 4, 3, 5}); }, "bias", "float16",
     "float32"},
    {"mask_type", kForward, [](Request& r) { r.add("mask", kFloat32, {2, 4, 3, 5}); }, "mask", "float32",
     "bool or uint8"},
    {"alibi_type", kForward, [](Request& r) { r.add("alibi", kFloat16, {4}); }, "alibi", "float16", "float32"},
    {"sink_type", kForward, [](Request& r) { r.add("sink", kFloat64, {4}); }, "sink", "float64", "float32"},
    {"cu_seqlens_type", kPacked, [](Request& r) { r.set_dtype({"cu_seqlens_q"}, kInt64); }, "cu_seqlens_q",
     "int64", "int32"},
    {"seqused_type", kForward, [](Request& r) { r.add("seqused_k", kInt64, {2}); }, "seqused_k", "int64",
     "int32"},
    {"rng_state_type", kForward, [](Request& r) { r.add("rng_state", kInt32, {2}); }, "rng_state", "int32",
     "int64"},

    // Sizes.
    {"negative_size", kForward, [](Request& r) { r["q"].set_shape({2, -3, 4, 8}); }, "q", "(2, -3, 4, 8)",
     "sizes from 0"},
    {"dimension_too_large", kForward, [](Request& r) { r["k"].set_shape({2, int64_t{1} << 31, 2, 8}); }, "k",
     "2147483648", "2147483647"},
    {"bytes_overflow", kForward,
     [](Request& r) { r["q"].set_shape({0x7fffffff, 0x7fffffff, 0x7fffffff, 8}); }, "q", "2147483647",
     "2^57 bytes"},
    {"bytes_too_many", kForward, [](Request& r) { r["q"].set_shape({0x7fffffff, 0x7fffffff, 1, 8}); }, "q",
     "float32", "2^57 bytes"},
    {"head_size_0", kForward,
     [](Request& r) {
       r["q"].set_shape({2, 3, 4, 0});
       r["k"].set_shape({2, 5, 2, 0});
     },
     "q", "head size 0", "1 to 576"},
    {"head_size_577", kForward,
     [](Request& r) {
       r["q"].set_shape({1, 1, 1, 577});
       r["k"].set_shape({1, 1, 1, 577});
     },
     "q", "head size 577", "1 to 576"},
    {"value_size_0", kForward, [](Request& r) { r["v"].set_shape({2, 5, 2, 0}); }, "v", "head size 0",
     "1 to 576"},
    {"value_size_600", kForward, [](Request& r) { r["v"].set_shape({1, 1, 1, 600}); }, "v", "head size 600",
     "1 to 576"},
    {"no_query_heads", kForward, [](Request& r) { r["q"].set_shape({2, 3, 0, 8}); }, "q", "0 heads",
     "at least 1"},
    {"no_key_heads", kForward, [](Request& r) { r["k"].set_shape({2, 5, 0, 8}); }, "k", "0 heads", "at least 1"},
    {"heads_do_not_divide", kForward, [](Request& r) { r["k"].set_shape({2, 5, 3, 8}); }, "k", "3 heads",
     "divides the 4 heads"},
    {"more_key_heads", kForward, [](Request& r) { r["k"].set_shape({2, 5, 8, 8}); }, "k", "8 heads",
     "divides the 4 heads"},

    // Shapes that do not agree.
    {"k_batch", kForward, [](Request& r) { r["k"].set_shape({1, 5, 2, 8}); }, "k", "(1, 5, 2, 8)",
     "(2, 5, 2, 8)"},
    {"k_size", kForward, [](Request& r) { r["k"].set_shape({2, 5, 2, 6}); }, "k", "(2, 5, 2, 6)",
     "(2, 5, 2, 8)"},
    {"v_length", kForward, [](Request& r) { r["v"].set_shape({2, 4, 2, 6}); }, "v", "(2, 4, 2, 6)",
     "(2, 5, 2, 6)"},
    {"v_heads", kForward, [](Request& r) { r["v"].set_shape({2, 5, 4, 6}); }, "v", "(2, 5, 4, 6)",
     "(2, 5, 2, 6)"},
    {"o_shape", kForward, [](Request& r) { r["o"].set_shape({2, 3, 4, 8}); }, "o", "(2, 3, 4, 8)",
     "(2, 3, 4, 6)"},
    {"lse_shape", kForward, [](Request& r) { r["lse"].set_shape({2, 3, 4}); }, "lse", "(2, 3, 4)",
     "(2, 4, 3)"},
    {"d_o_shape", kBackward, [](Request& r) { r["d_o"].set_shape({2, 3, 4, 8}); }, "d_o", "(2, 3, 4, 8)",
     "(2, 3, 4, 6)"},
    {"dlse_shape", kBackward, [](Request& r) { r.add("dlse", kFloat32, {2, 3, 4}); }, "dlse", "(2, 3, 4)",
     "(2, 4, 3)"},
    {"dq_shape", kBackward, [](Request& r) { r["dq"].set_shape({2, 3, 4, 6}); }, "dq", "(2, 3, 4, 6)",
     "the shape of q = (2, 3, 4, 8)"},
    {"dk_shape", kBackward, [](Request& r) { r["dk"].set_shape({2, 5, 4, 8}); }, "dk", "(2, 5, 4, 8)",
     "the shape of k = (2, 5, 2, 8)"},
    {"dv_shape", kBackward, [](Request& r) { r["dv"].set_shape({2, 5, 4, 6}); }, "dv", "(2, 5, 4, 6)",
     "the shape of v = (2, 5, 2, 6)"},
    {"packed_v_total", kPacked, [](Request& r) { r["v"].set_shape({5, 2, 6}); }, "v", "(5, 2, 6)", "(6, 2, 6)"},
    {"packed_o_total", kPacked, [](Request& r) { r["o"].set_shape({5, 4, 6}); }, "o", "(5, 4, 6)", "(6, 4, 6)"},
    {"packed_lse_shape", kPacked, [](Request& r) { r["lse"].set_shape({6, 4}); }, "lse", "(6, 4)", "(4, 6)"},

    // Strides.
    {"q_last_dimension", kForward, [](Request& r) { r["q"].set_strides({96, 32, 1, 4}); }, "q", "(96, 32, 1, 4)",
     "contiguous last dimension"},
    {"o_last_dimension", kForward, [](Request& r) { r["o"].set_strides({144, 48, 12, 2}); }, "o",
     "(144, 48, 12, 2)", "contiguous last dimension"},
    {"dk_last_dimension", kBackward, [](Request& r) { r["dk"].set_strides({160, 32, 16, 2}); }, "dk",
     "(160, 32, 16, 2)", "contiguous last dimension"},
    {"q_broadcast_last_dimension", kForward, [](Request& r) { r["q"].set_strides({96, 32, 8, 0}); }, "q",
     "(96, 32, 8, 0)", "contiguous last dimension"},
    {"sink_strided", kForward,
     [](Request& r) { r.add("sink", kFloat32, {4}).set_strides({2}); }, "sink", "(2)",
     "contiguous last dimension"},
    {"cu_seqlens_strided", kPacked, [](Request& r) { r["cu_seqlens_k"].set_strides({2}); }, "cu_seqlens_k",
     "(2)", "contiguous last dimension"},
    {"negative_stride", kForward, [](Request& r) { r["k"].set_strides({80, -16, 8, 1}); }, "k",
     "(80, -16, 8, 1)", "no negative stride"},
    {"stride_overflow", kForward, [](Request& r) { r["k"].set_strides({kHuge, 16, 8, 1}); }, "k",
     "9223372036854775807", "2^57 bytes"},
    {"stride_sum_overflow", kForward,
     [](Request& r) { r["k"].set_strides({kHuge / 2, kHuge / 5, kHuge / 2, 1}); }, "k", "strides",
     "2^57 bytes"},
    {"o_broadcast", kForward, [](Request& r) { r["o"].set_strides({0, 24, 6, 1}); }, "o", "(0, 24, 6, 1)",
     "memory of its own for each element"},
    {"o_overlapping", kForward, [](Request& r) { r["o"].set_strides({72, 24, 5, 1}); }, "o", "(72, 24, 5, 1)",
     "memory of its own for each element"},
    {"lse_broadcast", kForward, [](Request& r) { r["lse"].set_strides({12, 0, 1}); }, "lse", "(12, 0, 1)",
     "memory of its own for each element"},
    {"dq_overlapping", kBackward, [](Request& r) { r["dq"].set_strides({64, 32, 8, 1}); }, "dq",
     "(64, 32, 8, 1)", "memory of its own for each element"},
    {"dk_broadcast", kBackward, [](Request& r) { r["dk"].set_strides({80, 16, 0, 1}); }, "dk",
     "(80, 16, 0, 1)", "memory of its own for each element"},
    {"dbias_broadcast", kBackward,
     [](Request& r) {
       r.add("bias", kFloat32, {2, 4, 3, 5});
       r.add("dbias", kFloat32, {2, 4, 3, 5}).set_strides({0, 15, 5, 1});
     },
     "dbias", "(0, 15, 5, 1)", "memory of its own for each element"},

    // Packed sequences.
    {"cu_seqlens_q_alone", kPacked, [](Request& r) { r.remove("cu_seqlens_k"); }, "k", "3 dimensions",
     "4 dimensions (batch, seqlen_k, heads_kv, head size of q)"},
    {"cu_seqlens_k_alone", kPacked, [](Request& r) { r.remove("cu_seqlens_q"); }, "cu_seqlens_q", "no tensor",
     "cu_seqlens_k"},
    {"cu_seqlens_empty", kPacked, [](Request& r) { r["cu_seqlens_q"].set_shape({0}); }, "cu_seqlens_q", "(0)",
     "at least 1 element"},
    {"cu_seqlens_lengths_differ", kPacked, [](Request& r) { r["cu_seqlens_k"].set_shape({3}); }, "cu_seqlens_k",
     "(3)", "(4)"},
    {"cu_seqlens_start", kPacked, [](Request& r) { r["cu_seqlens_q"].fill<int32_t>({1, 2, 2, 6}); },
     "cu_seqlens_q", "first element 1", "0"},
    {"cu_seqlens_negative_start", kPacked, [](Request& r) { r["cu_seqlens_k"].fill<int32_t>({-1, 3, 5, 6}); },
     "cu_seqlens_k", "first element -1", "0"},
    {"cu_seqlens_decreasing", kPacked, [](Request& r) { r["cu_seqlens_q"].fill<int32_t>({0, 4, 2, 6}); },
     "cu_seqlens_q", "element 1 = 4 and then 2", "non-decreasing"},
    {"cu_seqlens_past_the_end", kPacked, [](Request& r) { r["cu_seqlens_k"].fill<int32_t>({0, 3, 5, 7}); },
     "cu_seqlens_k", "last element 7", "at most 6"},
    {"cu_seqlens_extremes", kPacked,
     [](Request& r) { r["cu_seqlens_k"].fill<int32_t>({0, 0x7fffffff, -0x7fffffff - 1, 6}); }, "cu_seqlens_k",
     "2147483647", "non-decreasing"},
    {"max_seqlen_too_small", kPacked, [](Request& r) { r.problem.max_seqlen_q = 3; }, "cu_seqlens_q",
     "length 4 at 2", "at most 3"},
    {"max_seqlen_negative", kPacked, [](Request& r) { r.problem.max_seqlen_k = -1; }, "max_seqlen_k", "-1",
     "0 to 2147483647"},
    {"max_seqlen_huge", kPacked, [](Request& r) { r.problem.max_seqlen_k = kHuge; }, "max_seqlen_k",
     "9223372036854775807", "0 to 2147483647"},
    {"max_seqlen_unpacked", kForward, [](Request& r) { r.problem.max_seqlen_q = 3; }, "max_seqlen_q", "3",
     "not packed"},
    {"seqused_shape", kForward, [](Request& r) { r.add("seqused_k", kInt32, {3}); }, "seqused_k", "(3)", "(2)"},
    {"seqused_negative", kForward,
     [](Request& r) { r.add("seqused_q", kInt32, {2}).fill<int32_t>({3, -1}); }, "seqused_q",
     "element 1 = -1", "0 to 3"},
    {"seqused_too_long", kForward,
     [](Request& r) { r.add("seqused_k", kInt32, {2}).fill<int32_t>({6, 5}); }, "seqused_k", "element 0 = 6",
     "0 to 5"},
    {"packed_seqused_too_long", kPacked,
     [](Request& r) { r.add("seqused_q", kInt32, {3}).fill<int32_t>({2, 1, 4}); }, "seqused_q",
     "element 1 = 1", "0 to 0"},
    {"packed_seqused_without_starts", kPacked,
     [](Request& r) {
       r.add("seqused_k", kInt32, {3}).fill<int32_t>({3, -7, 1});
       for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) r[name].c.data = nullptr;
     },
     "seqused_k", "element 1 = -7", "0 to 6"},
    {"rng_state_shape", kForward, [](Request& r) { r.add("rng_state", kInt64, {3}); }, "rng_state", "(3)",
     "(2)"},

    // Numbers.
    {"scale_nan", kForward, [](Request& r) { r.problem.scale = kNaN; }, "scale", "nan", "finite"},
    {"scale_infinite", kForward, [](Request& r) { r.problem.scale = -kInfinity; }, "scale", "-inf", "finite"},
    {"softcap_negative", kForward, [](Request& r) { r.problem.softcap = -0.5; }, "softcap", "-0.5", "0 or more"},
    {"softcap_nan", kForward, [](Request& r) { r.problem.softcap = kNaN; }, "softcap", "nan", "finite"},
    {"softcap_infinite", kForward, [](Request& r) { r.problem.softcap = kInfinity; }, "softcap", "inf",
     "finite"},
    {"dropout_negative", kForward, [](Request& r) { r.problem.dropout = -0.1; }, "dropout", "-0.1", "[0, 1)"},
    {"dropout_one", kForward, [](Request& r) { r.problem.dropout = 1; }, "dropout", "1", "[0, 1)"},
    {"dropout_nan", kForward, [](Request& r) { r.problem.dropout = kNaN; }, "dropout", "nan", "[0, 1)"},
    {"window_left", kForward, [](Request& r) { r.problem.window_left = -2; }, "window_left", "-2",
     "-1 or more"},
    {"window_right", kForward, [](Request& r) { r.problem.window_right = -kHuge; }, "window_right",
     "-9223372036854775807", "-1 or more"},

    // Terms of the score.
    {"bias_shape", kForward, [](Request& r) { r.add("bias", kFloat32, {2, 4, 3, 4}); }, "bias", "(2, 4, 3, 4)",
     "(2, 4, 3, 5)"},
    {"bias_heads", kForward, [](Request& r) { r.add("bias", kFloat32, {2, 2, 3, 5}); }, "bias", "(2, 2, 3, 5)",
     "(2, 4, 3, 5)"},
    {"bias_packed_shape", kPacked, [](Request& r) { r.add("bias", kFloat32, {1, 1, 6, 6}); }, "bias",
     "(1, 1, 6, 6)", "(3, 4, 4, 3)"},
    {"dbias_shape", kBackward,
     [](Request& r) {
       r.add("bias", kFloat32, {1, 4, 3, 5});
       r.add("dbias", kFloat32, {2, 4, 3, 5});
     },
     "dbias", "(2, 4, 3, 5)", "the shape of bias = (1, 4, 3, 5)"},
    {"dbias_type", kBackward,
     [](Request& r) {
       r.add("bias", kFloat32, {1, 4, 3, 5});
       r.add("dbias", kFloat16, {1, 4, 3, 5});
     },
     "dbias", "float16", "float32"},
    {"mask_shape", kForward, [](Request& r) { r.add("mask", kUInt8, {2, 4, 5, 3}); }, "mask", "(2, 4, 5, 3)",
     "(2, 4, 3, 5)"},
    {"block_mask_shape", kForward,
     [](Request& r) {
       r.add("block_mask", kBool, {1, 1, 2, 2});
       r.problem.block_q = 2;
       r.problem.block_k = 2;
     },
     "block_mask", "(1, 1, 2, 2)", "(2, 4, 2, 3)"},
    {"block_mask_does_not_broadcast_blocks", kForward,
     [](Request& r) {
       r.add("block_mask", kBool, {1, 1, 1, 3});
       r.problem.block_q = 2;
       r.problem.block_k = 2;
     },
     "block_mask", "(1, 1, 1, 3)", "(2, 4, 2, 3)"},
    {"block_q_missing", kForward,
     [](Request& r) {
       r.add("block_mask", kBool, {1, 1, 3, 3});
       r.problem.block_k = 2;
     },
     "block_q", "0", "there is block_mask"},
    {"block_k_negative", kForward,
     [](Request& r) {
       r.add("block_mask", kBool, {1, 1, 3, 3});
       r.problem.block_q = 1;
       r.problem.block_k = -2;
     },
     "block_k", "-2", "there is block_mask"},
    {"block_q_without_mask", kForward, [](Request& r) { r.problem.block_q = 16; }, "block_q", "16",
     "there is no block_mask"},
    {"alibi_heads", kForward, [](Request& r) { r.add("alibi", kFloat32, {2}); }, "alibi", "(2)", "(4)"},
    {"alibi_batch", kForward, [](Request& r) { r.add("alibi", kFloat32, {1, 4}); }, "alibi", "(1, 4)",
     "(2, 4)"},
    {"sink_heads", kForward, [](Request& r) { r.add("sink", kFloat32, {2}); }, "sink", "(2)", "(4)"},
    {"dsink_heads", kBackward,
     [](Request& r) {
       r.add("sink", kFloat32, {4});
       r.add("dsink", kFloat32, {2});
     },
     "dsink", "(2)", "(4)"},

    // Options and struct sizes.
    {"backend_unknown", kForward, [](Request& r) { r.options.backend = "abacus"; }, "backend", "\"abacus\"",
     "reference"},
    {"threads_negative", kForward, [](Request& r) { r.options.num_threads = -1; }, "num_threads", "-1",
     "0 to 4096"},
    {"threads_too_many", kForward, [](Request& r) { r.options.num_threads = 5000; }, "num_threads", "5000",
     "0 to 4096"},
    {"splits_negative", kForward, [](Request& r) { r.options.num_splits = -1; }, "num_splits", "-1",
     "0 or more"},
    {"sm_margin_negative", kForward, [](Request& r) { r.options.sm_margin = -1; }, "sm_margin", "-1",
     "0 or more"},
    {"batch_invariant_without_max_seqlen_q", kPacked,
     [](Request& r) {
       r.options.batch_invariant = 1;
       r.problem.max_seqlen_k = 8;
     },
     "max_seqlen_q", "0", "a length with batch_invariant, as cu_seqlens_q is given"},
    {"batch_invariant_without_max_seqlen_k", kPacked,
     [](Request& r) {
       r.options.batch_invariant = 1;
       r.problem.max_seqlen_q = 8;
     },
     "max_seqlen_k", "0", "a length with batch_invariant, as cu_seqlens_k is given"},
    {"problem_size_zero", kForward, [](Request& r) { r.problem.struct_size = 0; }, "problem", "struct_size 0",
     "another version"},
    {"problem_size_garbage", kForward, [](Request& r) { r.problem.struct_size = 1 << 20; }, "problem",
     "struct_size 1048576", "another version"},
    {"problem_size_odd", kForward, [](Request& r) { r.problem.struct_size -= 1; }, "problem", "struct_size",
     "another version"},
    {"options_size_zero", kForward, [](Request& r) { r.options.struct_size = 0; }, "options", "struct_size 0",
     "another version"},
};

INSTANTIATE_TEST_SUITE_P(Each, PlanErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

fovea_status create(Request& request) {
  fovea_plan* plan = nullptr;
  const fovea_status status = fovea_plan_create(&request.c_problem(), &request.options, &plan);
  EXPECT_EQ(plan != nullptr, status == FOVEA_OK) << fovea_last_error();
  fovea_plan_destroy(plan);
  return status;
}

/// The requests are valid before the cases spoil them.
TEST(PlanAccepts, UnspoiltRequests) {
  for (const Make make : {kForward, kBackward, kPacked}) {
    Request request = make();
    EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
    EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
  }
}

TEST(PlanAccepts, EveryTensorAtOnce) {
  Request request = Request::backward();
  request.add("dlse", kFloat32, {2, 4, 3});
  request.add("bias", kFloat32, {1, 4, 1, 5});
  request.add("dbias", kFloat32, {1, 4, 1, 5});
  request.add("mask", kBool, {2, 1, 3, 5});
  request.add("block_mask", kUInt8, {1, 4, 2, 2});
  request.problem.block_q = 2;
  request.problem.block_k = 4;
  request.add("alibi", kFloat32, {2, 4});
  request.add("sink", kFloat32, {4});
  request.add("dsink", kFloat32, {4});
  request.add("seqused_q", kInt32, {2}).fill<int32_t>({3, 1});
  request.add("seqused_k", kInt32, {2}).fill<int32_t>({0, 5});
  request.add("rng_state", kInt64, {2});
  request.problem.dropout = 0.5;
  request.problem.softcap = 30;
  request.problem.scale = -1;
  request.problem.window_left = kHuge;
  request.problem.window_right = 0;
  EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_OK) << fovea_last_error();
}

TEST(PlanAccepts, SizesOfZero) {
  for (const auto& [batch, seqlen_q, seqlen_k] :
       std::initializer_list<std::array<int64_t, 3>>{{0, 3, 5}, {2, 0, 5}, {2, 3, 0}, {0, 0, 0}}) {
    Request request = Request::backward();
    for (const char* name : {"q", "dq"}) request[name].set_shape({batch, seqlen_q, 4, 8});
    for (const char* name : {"k", "dk"}) request[name].set_shape({batch, seqlen_k, 2, 8});
    for (const char* name : {"v", "dv"}) request[name].set_shape({batch, seqlen_k, 2, 6});
    for (const char* name : {"o", "d_o"}) request[name].set_shape({batch, seqlen_q, 4, 6});
    request["lse"].set_shape({batch, 4, seqlen_q});
    for (const int32_t causal : {0, 1}) {
      request.problem.causal = causal;
      EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
      EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 0, 0), FOVEA_OK) << fovea_last_error();
    }
  }
}

TEST(PlanAccepts, StridesOfDimensionsNeverSteppedAlong) {
  Request request = Request::forward();
  for (const char* name : {"q", "k", "v"}) request[name].set_shape({1, 5, 1, 8});
  request["o"].set_shape({1, 5, 1, 8});
  request["lse"].set_shape({1, 1, 5});
  for (const char* name : {"q", "k", "v", "o"}) request[name].set_strides({-7, 8, kHuge, 1});
  EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
}

TEST(PlanAccepts, BroadcastInputsAndPaddedOutputs) {
  Request request = Request::forward();
  request["k"].set_strides({0, 0, 8, 1});
  request["o"].set_strides({120, 40, 9, 1});
  request["lse"].set_strides({1, 2, 8});
  EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
}

TEST(PlanAccepts, HugeShapesWithoutData) {
  Request request = Request::forward();
  const int64_t length = 0x7fffffff;
  request["q"].set_shape({1, length, 4, 8});
  request["k"].set_shape({1, length, 2, 8});
  request["v"].set_shape({1, length, 2, 6});
  request["o"].set_shape({1, length, 4, 6});
  request["lse"].set_shape({1, 4, length});
  for (const char* name : {"q", "k", "v", "o", "lse"}) request[name].c.data = nullptr;
  request.problem.causal = 1;
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK) << fovea_last_error();
  const double n = 2147483647.0;
  EXPECT_DOUBLE_EQ(fovea_plan_flops(plan), 2 * (8 + 6) * 4 * (n * (n + 1) / 2));
  fovea_plan_destroy(plan);
}

TEST(PlanAccepts, PackedWithoutData) {
  Request request = Request::packed();
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) request[name].c.data = nullptr;
  EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
}

/// Counted pair by pair, by the definition in fovea.h.
double pairs_one_by_one(int64_t seqlen_q, int64_t seqlen_k, int64_t left, int64_t right) {
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    for (int64_t j = 0; j < seqlen_k; ++j) {
      const int64_t position = i + seqlen_k - seqlen_q;
      if ((left < 0 || j >= position - left) && (right < 0 || j <= position + right)) ++pairs;
    }
  }
  return pairs;
}

TEST(PlanFlops, CountTheBand) {
  for (const int64_t seqlen_q : {0, 1, 3, 7}) {
    for (const int64_t seqlen_k : {0, 1, 4, 7}) {
      for (const int64_t left : {-1, 0, 1, 3, 9}) {
        for (const int64_t right : {-1, 0, 2, 9}) {
          Request request = Request::forward();
          request["q"].set_shape({2, seqlen_q, 4, 8});
          request["k"].set_shape({2, seqlen_k, 2, 8});
          request["v"].set_shape({2, seqlen_k, 2, 6});
          request["o"].set_shape({2, seqlen_q, 4, 6});
          request["lse"].set_shape({2, 4, seqlen_q});
          request.problem.window_left = left;
          request.problem.window_right = right;
          fovea_plan* plan = nullptr;
          ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK) << fovea_last_error();
          EXPECT_DOUBLE_EQ(fovea_plan_flops(plan),
                           2 * 4 * 2 * (8 + 6) * pairs_one_by_one(seqlen_q, seqlen_k, left, right))
              << seqlen_q << " " << seqlen_k << " " << left << " " << right;
          fovea_plan_destroy(plan);
        }
      }
    }
  }
}

TEST(PlanFlops, CountPackedAndUsedLengthsWhereKnown) {
  Request request = Request::packed();
  request.problem.causal = 1;
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK);
  const double known = pairs_one_by_one(2, 3, -1, 0) + pairs_one_by_one(4, 1, -1, 0);
  EXPECT_DOUBLE_EQ(fovea_plan_flops(plan), 4 * 2 * (8 + 6) * known);
  fovea_plan_destroy(plan);

  request.add("seqused_q", kInt32, {3}).fill<int32_t>({1, 0, 3});
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK);
  const double used = pairs_one_by_one(1, 3, -1, 0) + pairs_one_by_one(3, 1, -1, 0);
  EXPECT_DOUBLE_EQ(fovea_plan_flops(plan), 4 * 2 * (8 + 6) * used);
  fovea_plan_destroy(plan);

  request.remove("seqused_q");
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) request[name].c.data = nullptr;
  request.problem.max_seqlen_q = 4;
  request.problem.max_seqlen_k = 3;
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK);
  EXPECT_DOUBLE_EQ(fovea_plan_flops(plan), 4 * 2 * (8 + 6) * 3 * pairs_one_by_one(4, 3, -1, 0));
  fovea_plan_destroy(plan);
}

/// The tensors of a forward, described as on a GPU. Without data, because the library would see that it is not there.
Request on_gpu(int id) {
  Request request = Request::forward();
  for (const char* name : {"q", "k", "v", "o", "lse"}) {
    request[name].c.device = {FOVEA_CUDA, id};
    request[name].c.data = nullptr;
  }
  return request;
}

TEST(PlanUnsupported, TensorsOfAGpuWithoutAGpu) {
  if (fovea_cuda_device_count() > 0) GTEST_SKIP() << "here is " << fovea_cuda_device(0);
  Request request = on_gpu(0);
  EXPECT_EQ(create(request), FOVEA_UNSUPPORTED);
  EXPECT_STREQ(fovea_last_error_argument(), "backend");
  const std::string message = fovea_last_error();
  int of_gpus = 0;
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    const std::string line = std::string(fovea_backend_name(i)) + ": passed over: ";
    if (fovea_backend_device_type(i) == FOVEA_CUDA) {
      ++of_gpus;
      EXPECT_NE(*fovea_backend_unavailable_because(i), '\0');
      EXPECT_NE(message.find(line + fovea_backend_unavailable_because(i)), std::string::npos) << message;
      request.options.backend = fovea_backend_name(i);
      EXPECT_EQ(create(request), FOVEA_UNSUPPORTED);
      EXPECT_NE(std::string(fovea_last_error()).find(fovea_backend_unavailable_because(i)),
                std::string::npos);
      request.options.backend = nullptr;
    } else {
      EXPECT_NE(message.find(line + "computes on the CPU, and the tensors are in memory of cuda:0"),
                std::string::npos)
          << message;
    }
  }
  EXPECT_GT(of_gpus, 0) << "every build lists them";
}

TEST(PlanUnsupported, ABackendThatCannotNamesTheClause) {
  Request request = on_gpu(0);
  request.options.backend = "reference";
  EXPECT_EQ(create(request), FOVEA_UNSUPPORTED);
  EXPECT_STREQ(fovea_last_error_argument(), "backend");
  const std::string message = fovea_last_error();
  EXPECT_NE(message.find("\"reference\""), std::string::npos) << message;
  EXPECT_NE(message.find("in memory of cuda:0"), std::string::npos) << message;
}

TEST(PlanUnsupported, TheGradientOfABiasWithLists) {
  Request request = Request::backward();
  request.add("keys", kInt32, {1, 2, 3, 4});
  request.add("bias", kFloat32, {1, 1, 3, 5});
  EXPECT_EQ(create(request), FOVEA_OK) << fovea_last_error();
  request.add("dbias", kFloat32, {1, 1, 3, 5});
  EXPECT_EQ(create(request), FOVEA_OK) << "the reference can: " << fovea_last_error();
  request.options.backend = "cpu_generic";
  EXPECT_EQ(create(request), FOVEA_UNSUPPORTED);
  EXPECT_NE(std::string(fovea_last_error()).find("computes no dbias where queries have lists of keys"),
            std::string::npos)
      << fovea_last_error();
}

TEST(PlanUnsupported, TensorsOfTheCpuOnABackendOfGpus) {
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (fovea_backend_device_type(i) != FOVEA_CUDA) continue;
    Request request = Request::forward();
    request.options.backend = fovea_backend_name(i);
    EXPECT_EQ(create(request), FOVEA_UNSUPPORTED);
    EXPECT_STREQ(fovea_last_error_argument(), "backend");
    EXPECT_NE(std::string(fovea_last_error()).find("computes on a GPU, and the tensors are in memory of cpu"),
              std::string::npos)
        << fovea_last_error();
  }
}

TEST(Devices, AreCountedAndDescribed) {
  EXPECT_NE(*fovea_cuda(), '\0') << "versions, or what is missing";
  const int32_t count = fovea_cuda_device_count();
  EXPECT_GE(count, 0);
  for (int32_t i = 0; i < count; ++i) EXPECT_NE(*fovea_cuda_device(i), '\0');
  EXPECT_STREQ(fovea_cuda_device(count), "");
  EXPECT_STREQ(fovea_cuda_device(-1), "");
  EXPECT_EQ(fovea_backend_device_type(-1), 0);
  EXPECT_EQ(fovea_backend_device_type(fovea_backend_count()), 0);
  EXPECT_EQ(fovea_backend_device_type(fovea_backend_count() - 1), FOVEA_CPU);
  if (count > 0) {
    Request request = on_gpu(count);
    EXPECT_EQ(create(request), FOVEA_INVALID_ARGUMENT);
    expect_message("q", ("cuda:" + std::to_string(count)).c_str(), "cuda:0");
  }
}

TEST(Workspaces, AreMadeWhereTheyAreAskedFor) {
  void* workspace = &workspace;
  ASSERT_EQ(fovea_workspace_create({FOVEA_CPU, 0}, 100, &workspace), FOVEA_OK) << fovea_last_error();
  ASSERT_NE(workspace, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace) % FOVEA_WORKSPACE_ALIGNMENT, 0u);
  fovea_workspace_destroy({FOVEA_CPU, 0}, workspace);
  EXPECT_EQ(fovea_workspace_create({FOVEA_CPU, 0}, 0, &workspace), FOVEA_OK);
  EXPECT_EQ(workspace, nullptr);
  fovea_workspace_destroy({FOVEA_CPU, 0}, workspace);

  EXPECT_EQ(fovea_workspace_create({FOVEA_CPU, 0}, 100, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_message("workspace", "NULL", "where to store");
  EXPECT_EQ(fovea_workspace_create({7, 0}, 100, &workspace), FOVEA_INVALID_ARGUMENT);
  expect_message("device", "device type 7", "2 (CUDA)");
  EXPECT_EQ(workspace, nullptr);
  if (fovea_cuda_device_count() == 0) {
    EXPECT_EQ(fovea_workspace_create({FOVEA_CUDA, 0}, 100, &workspace), FOVEA_UNSUPPORTED);
    EXPECT_STREQ(fovea_last_error_argument(), "device");
    EXPECT_EQ(workspace, nullptr);
  }
}

TEST(PlanReason, HasALineForEachBackend) {
  Request request = Request::forward();
  fovea_plan* plan = nullptr;
  request.options.backend = "reference";
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), &request.options, &plan), FOVEA_OK);
  const std::string reason = fovea_plan_reason(plan);
  EXPECT_STREQ(fovea_plan_backend(plan), "reference");
  EXPECT_EQ(std::count(reason.begin(), reason.end(), '\n') + 1, fovea_backend_count()) << reason;
  EXPECT_NE(reason.find("> reference: chosen, as asked for"), std::string::npos) << reason;
  fovea_plan_destroy(plan);
}

}  // namespace
}  // namespace fovea_test
