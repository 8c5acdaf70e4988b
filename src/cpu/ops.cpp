// The tables of vector operations. They are written once, with Highway, and compiled once per instruction set:
// foreach_target.h includes this file again for each.
#include "cpu/ops.hpp"

// Leaves out targets that bring nothing over their neighbours here, and those whose vectors have a size that the compiler does not know.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ops.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "cpu/ops_dropout-inl.hpp"
#include "cpu/ops_e4m3_tables-inl.hpp"
#include "cpu/ops_products-inl.hpp"
#include "cpu/ops_program-inl.hpp"
#include "cpu/ops_row_elements-inl.hpp"
#include "cpu/ops_rows-inl.hpp"
#include "cpu/ops_rows_lanes-inl.hpp"
#include "cpu/ops_rows_tables-inl.hpp"
#include "cpu/ops_softmax-inl.hpp"
#include "cpu/ops_terms-inl.hpp"
#include "cpu/ops_tiles-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

/// `kTables`: elements of 8 bits are looked up where the target has such instructions.
template <class Words, bool kPairs, bool kTables>
constexpr Ops make_ops(const char* name) {
  Ops ops{};
  ops.name = name;
  ops.word_elements = kPairs ? 2 : 1;
  ops.row_multiple = 1;
  ops.k_multiple = 1;
  ops.attend_parts = 1;
  // Q and O of a panel are 48 KB at head size 128 in float32; a second-level cache has 1 MB where there is AVX-512, else half of it or less.
  // Keys are staged once for all panels: of pairs, which mostly lie in place, more gain nothing.
  ops.max_panels = HWY_TARGET == HWY_AVX3 && !kPairs ? 8 : 4;
  ops.scores = scores<Words>;
  ops.accumulate = accumulate<Words>;
  ops.accumulate_strided = accumulate_strided<Words>;
  ops.update = update<Words>;
  ops.softmax = softmax;
  ops.gradients = gradients<kPairs>;
  ops.gradients_float = gradients_float;
  ops.store_gradients = store_gradients<kPairs>;
  ops.multiply_gradients = multiply_gradients;
  ops.mask_range = mask_range;
  ops.column_max = column_max;
  ops.dropout_bits = dropout_bits;
  ops.multiply_kept = multiply_kept;
  ops.keep_pairs = keep_pairs;
  ops.run_program = run_program;
  ops.key_elements = key_elements;
  ops.store_key_elements = store_key_elements;
  ops.store_key_pairs = store_key_pairs;
  ops.end_streams = end_streams;
  ops.seen_of_elements = seen_of_elements;
  ops.seen_of_classes = seen_of_classes;
  ops.seen_of_scores = seen_of_scores;
  ops.add_terms = add_terms;
  ops.scores_and_term = scores_and_term<Words>;
  ops.end_rows = end_rows;
  ops.transpose = transpose;
  ops.finite = finite;
  ops.sum_of_squares = sum_of_squares;
  ops.to_float = to_float_any;
  ops.from_float = from_float_any;
  ops.interleave = interleave;
  // Where more rows than these meet 256 keys or more, panels of 48 lanes take less time. On NEON that was not measured.
  ops.few_rows = HWY_TARGET == HWY_AVX3 ? 48 : HWY_TARGET == HWY_AVX2 ? 32 : 16;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  ops.row_lanes = row_lanes<Words, kTables>;
#endif
  ops.row_dots = row_dots<Words, kTables>;
  ops.row_sums = row_sums<Words, kTables>;
  ops.row_softmax = row_softmax;
  ops.row_exp2 = row_exp2;
  return ops;
}

// Tables are constants: code that fills one takes instructions of its target, and every processor asks for every table.
template <bool kTables = false>
const Ops* float_table() {
#if HWY_TARGET == HWY_AVX3
  static constexpr Ops kOps = make_ops<FloatWords, false, kTables>("avx512");
#elif HWY_TARGET == HWY_AVX2
  static constexpr Ops kOps = make_ops<FloatWords, false, kTables>("avx2");
#else
  static constexpr Ops kOps = make_ops<FloatWords, false, kTables>("neon");
#endif
  return &kOps;
}
const Ops* generic_table() {
  static constexpr Ops kOps = make_ops<FloatWords, false, false>("generic");
  return &kOps;
}

#if HWY_TARGET == HWY_AVX3
template <bool kTables>
const Ops* bf16_table() {
  static constexpr Ops kOps = make_ops<Bf16Words, true, kTables>("avx512_bf16");
  return &kOps;
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::cpu {

#if HWY_ARCH_X86
namespace {

bool has_vbmi() {
  return __builtin_cpu_supports("avx512vbmi");
}

}  // namespace

const Ops* avx2_ops() {
  return N_AVX2::float_table();
}
const Ops* avx512_ops() {
  return has_vbmi() ? N_AVX3::float_table<true>() : avx512_ops_without_vbmi();
}
const Ops* avx512_ops_without_vbmi() {
  return N_AVX3::float_table<false>();
}
const Ops* avx512_bf16_ops() {
  return has_vbmi() ? N_AVX3::bf16_table<true>() : avx512_bf16_ops_without_vbmi();
}
const Ops* avx512_bf16_ops_without_vbmi() {
  return N_AVX3::bf16_table<false>();
}
const Ops* neon_ops() {
  return nullptr;
}
const Ops* generic_ops() {
  return HWY_STATIC_DISPATCH(generic_table)();
}
#else
const Ops* avx2_ops() {
  return nullptr;
}
const Ops* avx512_ops() {
  return nullptr;
}
const Ops* avx512_bf16_ops() {
  return nullptr;
}
const Ops* avx512_ops_without_vbmi() {
  return nullptr;
}
const Ops* avx512_bf16_ops_without_vbmi() {
  return nullptr;
}
const Ops* amx_bf16_ops() {
  return nullptr;
}
const Ops* amx_f16_ops() {
  return nullptr;
}
const Ops* amx_f32_ops() {
  return nullptr;
}
#if HWY_ARCH_ARM
const Ops* neon_ops() {
  return HWY_STATIC_DISPATCH(float_table)();
}
const Ops* generic_ops() {
  return nullptr;
}
#else
const Ops* neon_ops() {
  return nullptr;
}
const Ops* generic_ops() {
  return HWY_STATIC_DISPATCH(generic_table)();
}
#endif
#endif

}  // namespace fovea::cpu
#endif
