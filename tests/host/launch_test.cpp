// The table of CUDA kernels and the schedule of launches on made-up GPUs: plain functions of plain data, which need
// neither a GPU nor a toolkit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <variant>
#include <vector>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/launch/decode_clusters.hpp"
#include "cuda/launch/kernel_choice.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/schedule.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/parse.hpp"
#include "expr/problem_terms.hpp"

namespace fovea::cuda {
namespace {

// Made-up kernels of a made-up build.
constexpr Kernel kPlain64 = {.name = "plain_d64",
                             .kind = KernelKind::kForward,
                             .family = Family::kMmaSm80,
                             .dtype = DType::kBF16,
                             .head_dim = 64,
                             .head_dim_v = 64,
                             .terms = kPlainTerms,
                             .tile_m = 128,
                             .tile_n = 64,
                             .threads = 128,
                             .shared_bytes = 48 << 10,
                             .min_capability = 80};
constexpr Kernel general64() {
  Kernel k = kPlain64;
  k.name = "general_d64";
  k.terms = kAllTerms;
  k.tile_m = 64;
  return k;
}
constexpr Kernel kGeneral64 = general64();
constexpr Kernel plain128() {
  Kernel k = kPlain64;
  k.name = "plain_d128";
  k.head_dim = k.head_dim_v = 128;
  k.shared_bytes = 160 << 10;
  return k;
}
constexpr Kernel kPlain128 = plain128();
constexpr Kernel plain64_of_older_chips() {
  Kernel k = kPlain64;
  k.name = "plain_d64_82k";
  k.max_capability = 80;
  return k;
}
constexpr Kernel kOlderPlain64 = plain64_of_older_chips();
constexpr Kernel kAnySize = {.name = "simt",
                             .kind = KernelKind::kForward,
                             .family = Family::kSimt,
                             .dtype = DType::kBF16,
                             .value_slice = 64,
                             .tile_m = 64,
                             .tile_n = 64,
                             .threads = 64};

}  // namespace

// What a generated unit and the list of units define.
namespace {
std::span<const Kernel> unit() {
  static const std::array<Kernel, 5> kernels = {kAnySize, kPlain128, kGeneral64, kPlain64, kOlderPlain64};
  return kernels;
}
}  // namespace
std::span<const KernelUnit> kernel_units() {
  static constexpr std::array<KernelUnit, 1> units = {unit};
  return units;
}
std::span<const char* const> kernel_names() {
  static constexpr std::array<const char*, 5> names = {kAnySize.name, kPlain128.name, kOlderPlain64.name,
                                                       kGeneral64.name, kPlain64.name};
  return names;
}

namespace {

DeviceProperties hopper() {
  DeviceProperties d;
  d.name = "NVIDIA H200";
  d.capability = 90;
  d.sm_count = 132;
  d.shared_per_sm = 228 << 10;
  d.shared_per_cta = 227 << 10;
  d.threads_per_sm = 2048;
  d.l2_bytes = 50 << 20;
  return d;
}
DeviceProperties turing() {
  DeviceProperties d = hopper();
  d.id = 1;
  d.name = "NVIDIA T4";
  d.capability = 75;
  d.sm_count = 40;
  d.shared_per_sm = d.shared_per_cta = 64 << 10;
  d.threads_per_sm = 1024;
  d.l2_bytes = 4 << 20;
  return d;
}

TensorDesc rows(int64_t batch, int64_t seqlen, int64_t heads, int64_t size, DType dtype = DType::kBF16) {
  TensorDesc t;
  t.present = true;
  t.dtype = dtype;
  t.device = DeviceType::kCuda;
  t.ndim = 4;
  t.shape = {batch, seqlen, heads, size};
  t.stride = {seqlen * heads * size, heads * size, size, 1};
  return t;
}
AttentionProblem problem(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads_q, int64_t heads_kv,
                         int64_t size) {
  AttentionProblem p;
  p.dtype = DType::kBF16;
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = size;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.total_q = batch * seqlen_q;
  p.total_k = batch * seqlen_k;
  p.tensors[index_of(Role::kQ)] = p.tensors[index_of(Role::kO)] = rows(batch, seqlen_q, heads_q, size);
  p.tensors[index_of(Role::kK)] = p.tensors[index_of(Role::kV)] = rows(batch, seqlen_k, heads_kv, size);
  return p;
}
void add(AttentionProblem& p, Role role) {
  p.tensors[index_of(role)].present = true;
}

std::string cannot(const Kernel& kernel, const AttentionProblem& p, const DeviceProperties& device,
                   bool any_address = false) {
  return cannot_because(kernel, KernelRequest(p, device, any_address));
}
const Kernel* chosen(Family family, const AttentionProblem& p, const DeviceProperties& device) {
  return choose_kernel(kernel_table(), KernelKind::kForward, family,
                       KernelRequest(p, device, false, kernel_name_pattern()))
      .kernel;
}
std::string clause(Family family, const AttentionProblem& p, const DeviceProperties& device) {
  return choose_kernel(kernel_table(), KernelKind::kForward, family,
                       KernelRequest(p, device, false, kernel_name_pattern()))
      .clause;
}

TEST(KernelTable, IsInOrderOfPreference) {
  std::vector<std::string> names;
  for (const Kernel* k : kernel_table()) names.push_back(k->name);
  // Of equals first what is listed first, wherever its unit is.
  EXPECT_EQ(names,
            (std::vector<std::string>{"plain_d64_82k", "plain_d64", "general_d64", "plain_d128", "simt"}));
}

TEST(KernelTable, TakesTheSmallestKernelThatCan) {
  EXPECT_STREQ(chosen(Family::kMmaSm80, problem(1, 8, 8, 2, 1, 40), hopper())->name, "plain_d64");
  EXPECT_STREQ(chosen(Family::kMmaSm80, problem(1, 8, 8, 2, 1, 72), hopper())->name, "plain_d128");
  AttentionProblem wide_v = problem(1, 8, 8, 2, 1, 40);
  wide_v.head_dim_v = 128;
  EXPECT_STREQ(chosen(Family::kMmaSm80, wide_v, hopper())->name, "plain_d128");
  EXPECT_STREQ(chosen(Family::kSimt, problem(1, 8, 8, 2, 1, 576), turing())->name, "simt");
}

TEST(KernelTable, TermsNeedAKernelThatKnowsThem) {
  for (const Role role : {Role::kBias, Role::kMask, Role::kBlockMask, Role::kAlibi, Role::kRngState}) {
    AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
    add(p, role);
    EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64") << name_of(role);
  }
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  p.softcap = 30;
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64");
  p = problem(1, 8, 8, 2, 1, 64);
  p.dropout = 0.1;
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64");
  p = problem(1, 8, 8, 2, 1, 64);
  p.scale = -1;
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64");
  p.scale = 1e-60;  // 0 in float32
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64");
  // A sink costs nothing, nor do windows.
  p = problem(1, 8, 8, 2, 1, 64);
  add(p, Role::kSink);
  p.window_left = 3;
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "plain_d64");
}

/// Tiles of 192, 128 and 64 rows of one kernel.
std::vector<Kernel> tiles_of_three_sizes() {
  std::vector<Kernel> kernels(3, kPlain128);
  for (size_t i = 0; i < 3; ++i) {
    kernels[i].tile_m = static_cast<int>(192 - 64 * i);
    kernels[i].tile_n = 80;
    kernels[i].tma = kernels[i].persistent = kernels[i].aligned_only = true;
    kernels[i].group_divides = kTmaRowsQ;
  }
  kernels[0].rate = 100;
  kernels[1].rate = 95;
  kernels[2].rate = 65;
  return kernels;
}
int rows_of_chosen_tile(const AttentionProblem& p) {
  const std::vector<Kernel> kernels = tiles_of_three_sizes();
  const std::vector<const Kernel*> table = {&kernels[0], &kernels[1], &kernels[2]};
  const DeviceProperties device = hopper();
  const Choice choice =
      choose_kernel(table, KernelKind::kForward, Family::kMmaSm80, KernelRequest(p, device));
  return choice.kernel ? choice.kernel->tile_m : 0;
}

TEST(KernelTable, TilesAreChosenByTheTimeTheyWouldTake) {
  EXPECT_EQ(rows_of_chosen_tile(problem(1, 512, 512, 16, 16, 128)), 64);     // 48, 64 or 128 tiles on 132 SMs
  EXPECT_EQ(rows_of_chosen_tile(problem(1, 2048, 2048, 16, 16, 128)), 128);  // 176, 256 or 512
  EXPECT_EQ(rows_of_chosen_tile(problem(4, 4096, 4096, 16, 16, 128)), 192);
  EXPECT_EQ(rows_of_chosen_tile(problem(1, 1, 4096, 16, 16, 128)), 64);
  AttentionProblem causal = problem(1, 16384, 16384, 16, 16, 128);
  causal.window_right = 0;
  EXPECT_EQ(rows_of_chosen_tile(causal), 192);
  AttentionProblem last_rows = problem(1, 2048, 8192, 16, 16, 128);
  last_rows.window_right = 0;
  EXPECT_EQ(rows_of_chosen_tile(last_rows), 128)
      << "176 tiles of 192 rows, the shortest of 6,144 keys: two turns";
}

TEST(KernelTable, KeysThatArriveNeedAKernelThatWaits) {
  Kernel plain = kPlain64, waits = kPlain64;
  plain.tma = waits.tma = true;
  waits.name = "waits", waits.terms = kArrivingTerms;
  const std::array<const Kernel*, 2> table = {&waits, &plain};
  const DeviceProperties device = hopper();
  const auto choice = [&](int64_t arriving) {
    AttentionProblem p = problem(1, 512, 1024, 16, 16, 64);
    p.arriving_keys = arriving;
    p.arriving_heads = 8;
    return choose_kernel(table, KernelKind::kForward, Family::kMmaSm80, KernelRequest(p, device));
  };
  EXPECT_EQ(choice(0).kernel, &plain) << "others are faster";
  EXPECT_EQ(choice(512).kernel, &waits);
  EXPECT_EQ(choice(24).kernel, &waits) << "boxes of 8 keys";
  EXPECT_EQ(choice(36).kernel, nullptr);
  EXPECT_NE(choice(36).clause.find("divide those that arrive, 36 allow 4"), std::string::npos)
      << choice(36).clause;
}

TEST(Schedule, TilesWaitForTheHeadsThatArriveFirst) {
  Kernel stays = kPlain64;
  stays.persistent = true;
  AttentionProblem p = problem(1, 2048, 8192, 16, 16, 128);
  p.window_right = 0;
  EXPECT_EQ(forward_layout(p, stays, hopper(), 1, false).tile_counter, -1) << "two tiles for each CTA";
  p.arriving_keys = 4096;
  p.arriving_heads = 8;
  const ForwardLayout layout = forward_layout(p, stays, hopper(), 1, false);
  EXPECT_EQ(layout.arriving_keys, 4096);
  EXPECT_NE(layout.tile_counter, -1) << "CTAs that waited take no further tile";
  EXPECT_EQ(8 % layout.args.heads_at_once, 0);
  EXPECT_EQ(layout.args.whole_sections * layout.args.heads_at_once, 8)
      << "the end has the last arrival alone";
}

TEST(KernelTable, RatesOfTilesOfManyLengthsAreTheirOwn) {
  Kernel even = kPlain64, queued = kPlain64;
  even.name = "even", even.rate = 100;
  queued.name = "queued", queued.rate = 90, queued.unequal_rate = 104;
  const std::array<const Kernel*, 2> table = {&even, &queued};
  const DeviceProperties device = hopper();
  const auto choice = [&](bool causal) {
    AttentionProblem p = problem(32, 512, 512, 16, 16, 64);
    if (causal) p.window_right = 0;
    return choose_kernel(table, KernelKind::kForward, Family::kMmaSm80, KernelRequest(p, device)).kernel;
  };
  EXPECT_EQ(choice(false), &even);
  EXPECT_EQ(choice(true), &queued);
}

TEST(KernelTable, TmaTakesNoOddStridesAndNothingEmpty) {
  const Kernel kernel = tiles_of_three_sizes()[0];
  AttentionProblem p = problem(2, 512, 512, 16, 16, 128);
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
  p.tensors[index_of(Role::kK)].stride[2] = 0;  // one head, expanded
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
  p.tensors[index_of(Role::kK)].stride[2] = -128;
  EXPECT_NE(cannot(kernel, p, hopper()).find("k has one of -256"), std::string::npos);
  p = problem(2, 512, 512, 16, 16, 128);
  p.tensors[index_of(Role::kQ)].stride[0] = int64_t{1} << 40;
  EXPECT_NE(cannot(kernel, p, hopper()).find("strides from 0 to 2^40 bytes"), std::string::npos);
  EXPECT_EQ(cannot(kernel, problem(2, 512, 0, 16, 16, 128), hopper()),
            "copies by TMA, which takes no empty tensors");
}

TEST(KernelTable, KeysOfCachesNeedAKernelThatFindsThem) {
  std::vector<Kernel> kernels = tiles_of_three_sizes();
  Kernel& tma = kernels[0];
  AttentionProblem p = problem(2, 512, 512, 16, 16, 128);
  add(p, Role::kLeftPadK);
  EXPECT_EQ(cannot(tma, p, hopper()), "") << "a row and a length";
  tma.bf16x3 = true;
  EXPECT_NE(cannot(tma, p, hopper()).find("does not know keys of a cache"), std::string::npos);
  tma.bf16x3 = false;
  p = problem(2, 512, 512, 16, 16, 128);
  add(p, Role::kPageTable);
  p.caches = 9;
  p.cache_rows = 48;
  EXPECT_EQ(cannot(tma, p, hopper()), "does not know page_table");
  tma.pages = true;
  EXPECT_EQ(cannot(tma, p, hopper()), "");  // boxes of 16: tiles of 80
  p.cache_rows = 12;
  EXPECT_EQ(
      cannot(tma, p, hopper()),
      "copies pages by TMA in boxes of a multiple of 8 keys that divide a page and its tile of 80, pages of "
      "12 allow 4");
  tma.tma = false;
  EXPECT_EQ(cannot(tma, p, hopper()), "");
  tma.tma = true;
  p.cache_rows = 16;
  add(p, Role::kLeftPadK);
  EXPECT_EQ(cannot(tma, p, hopper()), "copies pages by TMA from their first row on: not with leftpad_k");
}

TEST(KernelTable, QueriesOfValuesNeedAKernelThatMultipliesThem) {
  Kernel kernel = kGeneral64;
  AttentionProblem p = problem(2, 512, 512, 16, 16, 64);
  add(p, Role::kQV);
  EXPECT_EQ(cannot(kernel, p, hopper()), "does not know qv");
  kernel.multiplies_qv = true;
  kernel.head_dim = 576;
  kernel.head_dim_v = 512;
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
  p.head_dim = 64;
  p.head_dim_v = 512;
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
  p.head_dim = 65;  // qv starts with a strip of 64 columns of its own
  EXPECT_EQ(cannot(kernel, p, hopper()),
            "takes head sizes of q and qv together up to 576, this problem has 640");
  kernel.head_dim = kernel.head_dim_v = 0;
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
}

TEST(KernelTable, ValuesInKeysNeedAProblemThatHasThem) {
  Kernel kernel = kGeneral64;
  kernel.values_in_keys = kernel.multiplies_qv = true;
  kernel.head_dim = 576;
  kernel.head_dim_v = 512;
  kernel.tile_m = 64;
  AttentionProblem p = problem(2, 1, 512, 128, 1, 576);
  p.head_dim_v = 512;
  const DeviceProperties device = hopper();
  const auto because = [&](bool values_in_keys) {
    KernelRequest request(p, device);
    request.values_in_keys = values_in_keys;
    return cannot_because(kernel, request);
  };
  EXPECT_EQ(because(false), "is for values that are the first columns of keys");
  EXPECT_EQ(because(true), "is for queries of a key head that fit a tile of 64 rows, this problem has 128");
  kernel.cluster = 2;
  kernel.tile_m = 128;
  EXPECT_EQ(because(true), "");
  p.seqlen_q = 2;
  EXPECT_EQ(because(true), "is for queries of a key head that fit a tile of 128 rows, this problem has 256");
  kernel.pages = true;
  add(p, Role::kPageTable);
  p.cache_rows = 64;
  EXPECT_EQ(because(true), "");
  add(p, Role::kQV);
  p.head_dim = 64;
  EXPECT_EQ(because(false), "") << "qv has rows [K | V]";
  p.head_dim = 65;
  p.head_dim_v = 128;
  EXPECT_EQ(because(false), "takes head sizes of q up to 64 beside qv, this problem has 65");
}

TEST(KernelTable, ValuesMayBeTheFirstColumnsOfKeysWhereRowsLieTheSame) {
  AttentionProblem p = problem(2, 1, 512, 16, 1, 576);
  EXPECT_TRUE(values_may_be_in_keys(p)) << "all columns";
  p.head_dim_v = 512;
  EXPECT_TRUE(values_may_be_in_keys(p));
  p.head_dim_v = 511;
  EXPECT_FALSE(values_may_be_in_keys(p)) << "65 columns of keys alone";
  p.head_dim_v = 512;
  p.tensors[index_of(Role::kV)].stride[1] = 512;
  EXPECT_FALSE(values_may_be_in_keys(p)) << "rows of their own";
  EXPECT_FALSE(values_may_be_in_keys(problem(2, 1, 512, 16, 1, 256))) << "other kernels hold all of it";
}

TEST(KernelTable, QueriesOf8BitsNeedAKernelThatReadsThem) {
  Kernel kernel = kGeneral64;
  kernel.e4m3_keys = true;
  AttentionProblem p = problem(2, 512, 512, 16, 16, 64);
  p.tensors[index_of(Role::kK)].dtype = p.tensors[index_of(Role::kV)].dtype = DType::kE4M3;
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
  p.tensors[index_of(Role::kQ)].dtype = DType::kE4M3;
  EXPECT_EQ(cannot(kernel, p, hopper()), "does not know queries of 8 bits");
  kernel.e4m3_queries = true;
  EXPECT_EQ(cannot(kernel, p, hopper()), "");
}

TEST(Schedule, GroupsThatFillBoxesOfTmaArePacked) {
  const Kernel kernel = tiles_of_three_sizes()[0];
  EXPECT_TRUE(packs_group(problem(1, 4, 512, 32, 4, 128), kernel));
  EXPECT_FALSE(
      packs_group(problem(1, 4, 512, 24, 4, 128), kernel));  // 6 heads a group: 64 rows are no multiple
}

TEST(KernelTable, TheEnvironmentAsksForKernelsByName) {
  const AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  ASSERT_EQ(setenv("FOVEA_KERNEL", "general_*", 1), 0);
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "general_d64");
  ASSERT_EQ(setenv("FOVEA_KERNEL", "another", 1), 0);
  EXPECT_EQ(chosen(Family::kMmaSm80, p, hopper()), nullptr);
  EXPECT_EQ(clause(Family::kMmaSm80, p, hopper()),
            "is not of the name that the environment asks for (FOVEA_KERNEL=another)");
  ASSERT_EQ(unsetenv("FOVEA_KERNEL"), 0);
  EXPECT_STREQ(chosen(Family::kMmaSm80, p, hopper())->name, "plain_d64");
}

TEST(KernelTable, KernelsForListsAreForThemAlone) {
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  Kernel for_lists = kAnySize;
  for_lists.terms |= kTermLists;
  EXPECT_EQ(cannot(for_lists, p, turing()), "is for lists of keys");
  add(p, Role::kKeys);
  EXPECT_EQ(cannot(for_lists, p, turing()), "");
  AttentionProblem many = problem(1, (1 << 29) + 1, 8, 2, 1, 64);
  add(many, Role::kKeys);
  EXPECT_EQ(cannot(for_lists, many, turing()),
            "takes up to 1073741824 rows of a group, this problem has 536870913 x 2");
  Kernel combine = kPlain64;
  combine.kind = KernelKind::kCombine;
  EXPECT_EQ(cannot(combine, p, hopper()), "") << "looks at no keys";
  EXPECT_EQ(clause(Family::kMmaSm80, p, hopper()), "does not know lists of keys");
  EXPECT_EQ(clause(Family::kSimt, p, turing()), "does not know lists of keys");
}

TEST(KernelTable, KernelsOfExpressionsNeedOne) {
  Kernel of_expression = kPlain64;
  of_expression.terms |= kTermScore | kTermSees | kTermNegativeScale;
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  EXPECT_EQ(cannot(of_expression, p, hopper()), "is compiled for an expression, which this problem lacks");
  p.scale = -1;
  EXPECT_EQ(cannot(of_expression, p, hopper()), "is compiled for an expression, which this problem lacks");
}

TEST(KernelTable, KernelsThatReadVectorsAreNotForAnyAddress) {
  Kernel aligned = kPlain64;
  aligned.aligned_only = true;
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  EXPECT_EQ(cannot(aligned, p, hopper()), "");
  const std::string clause = "needs rows of q, k and v that start at multiples of 16 bytes";
  EXPECT_EQ(cannot(aligned, p, hopper(), true), clause);
  EXPECT_EQ(cannot(kPlain64, p, hopper(), true), "");
  p.tensors[index_of(Role::kK)].stride[1] += 1;
  EXPECT_EQ(cannot(aligned, p, hopper()), clause);
}

TEST(KernelTable, SaysWhatIsMissing) {
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  EXPECT_EQ(clause(Family::kMmaSm80, p, turing()),
            "needs compute capability 8.0 or newer, cuda:1 (NVIDIA T4) has 7.5");
  EXPECT_EQ(clause(Family::kTf32, p, hopper()), "has no forward kernel in this build");
  p.dtype = DType::kF32;
  EXPECT_EQ(clause(Family::kMmaSm80, p, hopper()), "computes bfloat16, this problem is float32");
  p = problem(1, 8, 8, 2, 1, 320);
  EXPECT_EQ(clause(Family::kMmaSm80, p, hopper()), "takes head sizes of q up to 128, this problem has 320");
  p = problem(1, 8, 8, 2, 1, 128);
  add(p, Role::kBias);
  p.softcap = 2;
  EXPECT_EQ(clause(Family::kMmaSm80, p, hopper()), "does not know softcap, bias");
  p = problem(1, int64_t{1} << 31, 8, 2, 1, 64);
  EXPECT_EQ(clause(Family::kSimt, p, hopper()),
            "takes sequences up to 1073741824, this problem has 2147483648");
  DeviceProperties small = hopper();
  small.shared_per_cta = 99 << 10;
  EXPECT_EQ(clause(Family::kMmaSm80, problem(1, 8, 8, 2, 1, 128), small),
            "needs 163840 bytes of shared memory, cuda:0 (NVIDIA H200) gives a CTA 101376");
}

TEST(KernelTable, SupportAndChoiceAgree) {
  for (const int64_t size : {1, 64, 65, 128, 129, 576}) {
    for (const DeviceProperties& device : {hopper(), turing()}) {
      for (const Family family : {Family::kMmaSm80, Family::kSimt}) {
        const AttentionProblem p = problem(2, 8, 8, 2, 1, size);
        const Kernel* kernel = chosen(family, p, device);
        bool any = false;
        for (const Kernel* k : kernel_table()) {
          if (k->family != family || !cannot(*k, p, device).empty()) continue;
          EXPECT_TRUE(any || k == kernel);
          any = true;
        }
        EXPECT_EQ(any, kernel != nullptr);
        EXPECT_EQ(any, clause(family, p, device).empty());
      }
    }
  }
}

TEST(Parameters, AlignmentIsThatOfSizesStridesAndPointers) {
  AttentionProblem p = problem(2, 8, 8, 2, 1, 64);
  tile::AttentionParams a = params_of(p);
  EXPECT_EQ(a.aligned16, tile::kAlignedQ | tile::kAlignedK | tile::kAlignedV | tile::kAlignedO);
  Buffers buffers;
  alignas(16) static std::array<char, 64> memory;
  for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kO}) {
    buffers.data[index_of(role)] = memory.data();
  }
  buffers.data[index_of(Role::kK)] = memory.data() + 8;
  buffers.seed = 3;
  buffers.offset = 5;
  cuda::bind(a, buffers, named_places_of(p));
  EXPECT_EQ(a.aligned16, tile::kAlignedQ | tile::kAlignedV | tile::kAlignedO);
  EXPECT_EQ(a.q.data, memory.data());
  EXPECT_EQ(a.seed, 3u);
  EXPECT_EQ(a.offset, 5u);

  p.tensors[index_of(Role::kQ)].stride[1] += 4;  // 8 bytes
  EXPECT_EQ(params_of(p).aligned16 & tile::kAlignedQ, 0u);
  p = problem(2, 8, 8, 2, 1, 68);
  EXPECT_EQ(params_of(p).aligned16, 0u);
  // A stride that is never stepped along does not matter.
  p = problem(1, 8, 8, 2, 1, 64);
  p.tensors[index_of(Role::kQ)].stride[0] = 1;
  EXPECT_NE(params_of(p).aligned16 & tile::kAlignedQ, 0u);
  // o in float32: 4 columns are 16 bytes.
  p = problem(1, 8, 8, 2, 1, 4);
  p.tensors[index_of(Role::kO)].dtype = DType::kF32;
  EXPECT_EQ(params_of(p).aligned16, static_cast<uint32_t>(tile::kAlignedO));
  EXPECT_TRUE(params_of(p).o_is_f32());
}

TEST(Parameters, DropoutIsThatOfTheCpu) {
  AttentionProblem p = problem(1, 8, 8, 2, 1, 64);
  p.dropout = 0.3;
  tile::AttentionParams a = params_of(p);
  Buffers buffers;
  buffers.seed = 0x123456789abcdef0;
  buffers.offset = 0xfedcba9876543210;
  cuda::bind(a, buffers, named_places_of(p));
  const tile::Dropout here = tile::dropout_of(a), cpu(0.3, buffers.seed, buffers.offset);
  EXPECT_EQ(here.threshold, cpu.threshold);
  EXPECT_EQ(here.keep_scale, cpu.keep_scale);
  EXPECT_EQ(here.start, cpu.start);
}

TEST(Schedule, GroupsArePackedWhereRowsAreFew) {
  EXPECT_TRUE(packs_group(problem(4, 1, 4096, 32, 8, 64), kPlain64));
  EXPECT_TRUE(packs_group(problem(4, 16, 4096, 32, 8, 64), kPlain64));
  EXPECT_FALSE(packs_group(problem(4, 4096, 4096, 32, 8, 64), kPlain64));
  EXPECT_FALSE(packs_group(problem(4, 1, 4096, 8, 8, 64), kPlain64)) << "no group";
  Kernel cannot = kPlain64;
  cannot.can_pack = false;
  EXPECT_FALSE(packs_group(problem(4, 1, 4096, 32, 8, 64), cannot));

  // The division by multiplication that kernels use.
  for (const int64_t group : {2, 3, 7, 64}) {
    const AttentionProblem p = problem(1, 40, 4096, group, 1, 64);
    const ForwardLayout layout = forward_layout(p, kPlain64, hopper(), 2, true);
    ASSERT_TRUE(layout.args.pack_group);
    for (uint64_t row = 0; row < 40 * static_cast<uint64_t>(group); ++row) {
      ASSERT_EQ(row * layout.args.query_magic >> 32, row / static_cast<uint64_t>(group));
    }
  }
}

TEST(Schedule, KeysAreSplitWhereSmsWouldIdle) {
  const int64_t slots = 264;
  EXPECT_EQ(best_num_splits(4096, 64, slots, 1000), 1) << "enough CTAs";
  EXPECT_EQ(best_num_splits(0, 64, slots, 1000), 1);
  EXPECT_EQ(best_num_splits(1, 1, slots, 1000), 1);
  EXPECT_GT(best_num_splits(8, 1024, slots, 1000), 16);
  EXPECT_EQ(best_num_splits(8, 1024, slots, 3), 3) << "as memory allows";
  for (int64_t ctas = 1; ctas < 600; ctas += 7) {
    for (const int64_t steps : {1, 2, 3, 17, 64, 1000}) {
      const int64_t splits = best_num_splits(ctas, steps, slots, 1000);
      ASSERT_GE(splits, 1);
      ASSERT_LE(splits, steps);
      const int64_t share = (steps + splits - 1) / splits;
      EXPECT_LT((splits - 1) * share, steps) << "the last part is empty";
    }
  }
}

TEST(Schedule, ManyWavesAreNotSplit) {
  // 10.3 waves: the last one is a third full, but splitting the keys of all would cost more.
  EXPECT_EQ(best_num_splits(4096, 86, 396, 1000), 1);
  EXPECT_GT(best_num_splits(400, 86, 396, 1000), 1) << "the second of two waves is nearly empty";
}

TEST(Schedule, KeysOfManyRowsAreSplitWhereMergingThemPays) {
  const Kernel kernel = tiles_of_three_sizes()[1];  // of 128 rows
  const auto splits = [&](const AttentionProblem& p) {
    return forward_layout(p, kernel, hopper(), 1, true).args.num_splits;
  };
  EXPECT_EQ(splits(problem(1, 512, 16384, 16, 16, 128)), 2) << "64 tiles on 132 SMs, 8,192 keys saved";
  EXPECT_EQ(splits(problem(1, 256, 32768, 16, 16, 128)), 4);
  EXPECT_EQ(splits(problem(1, 2048, 2048, 16, 16, 128)), 1)
      << "256 tiles leave 8 SMs idle, and merging 32,768 rows takes longer than a third turn";
  EXPECT_EQ(splits(problem(1, 512, 512, 16, 16, 128)), 1) << "384 keys take less than a launch";
}

TEST(Schedule, CtasHaveATileEachWhereAllAreThere) {
  const Kernel kernel = tiles_of_three_sizes()[1];
  const auto one_each = [&](const AttentionProblem& p, const KeySplits& asked = {.most = 1}) {
    return forward_layout(p, kernel, hopper(), 1, true, asked).args.one_tile_each;
  };
  EXPECT_TRUE(one_each(problem(1, 1024, 1024, 16, 16, 128))) << "128 tiles on 132 SMs";
  EXPECT_FALSE(one_each(problem(1, 1100, 1024, 16, 16, 128)));
  EXPECT_FALSE(one_each(problem(1, 512, 1024, 16, 16, 128), {.most = 2})) << "parts of a tile";
  AttentionProblem p = problem(1, 512, 512, 16, 16, 128);
  add(p, Role::kSeqUsedK);
  EXPECT_FALSE(one_each(p)) << "the GPU alone knows the lengths";
  p = problem(1, 512, 512, 16, 16, 128);
  p.packed = p.packed_k = true;
  EXPECT_FALSE(one_each(p));
}

TEST(KernelTable, SeveralCtasOfAnSmTakeManyShortTiles) {
  Kernel large = kPlain64, few = kPlain64;
  large.name = "large", large.rate = 100, large.tile_m = 192;
  few.name = "few", few.rate = 90, few.tile_m = 64, few.ctas_per_sm = 3, few.min_queries = 32;
  const std::array<const Kernel*, 2> table = {&large, &few};
  const auto choice = [&](const AttentionProblem& p) {
    const DeviceProperties device = hopper();
    return choose_kernel(table, KernelKind::kForward, Family::kMmaSm80, KernelRequest(p, device)).kernel;
  };
  EXPECT_EQ(choice(problem(16, 128, 128, 12, 12, 64)), &few) << "384 tiles, or 192 in two turns";
  EXPECT_EQ(choice(problem(4, 4096, 4096, 32, 32, 64)), &large);
  EXPECT_EQ(choice(problem(64, 31, 128, 12, 12, 64)), &large) << "too few queries";
}

/// Tiles of half as many keys where others leave SMs idle, or the longest would be waited for; not where more blocks of keys wait for each
/// other.
TEST(KernelTable, SmallTilesOfABackwardTakeFewHeads) {
  Kernel large = kPlain64, small = kPlain64;
  large.kind = small.kind = KernelKind::kBackward;
  large.rate = 100, large.tile_n = 128;
  small.rate = 72, small.tile_n = 64;
  const std::array<const Kernel*, 2> table = {&large, &small};
  const auto choice = [&](int64_t tokens, bool causal, int64_t heads_kv = 16, bool same_bits = false) {
    AttentionProblem p = problem(1, tokens, tokens, 16, heads_kv, 64);
    p.pass = Pass::kBackward;
    for (const Role role : {Role::kDQ, Role::kDK, Role::kDV}) p.tensors[index_of(role)].dtype = p.dtype;
    if (causal) p.window_right = 0;
    const DeviceProperties device = hopper();
    KernelRequest request(p, device);
    request.same_bits = same_bits;
    return choose_kernel(table, KernelKind::kBackward, Family::kMmaSm80, request).kernel;
  };
  EXPECT_EQ(choice(512, false), &small) << "128 tiles";
  EXPECT_EQ(choice(512, false, 16, true), &large);
  EXPECT_EQ(choice(1024, false), &large) << "256 tiles, or 128";
  EXPECT_EQ(choice(1024, false, 8), &small) << "of two heads each";
  EXPECT_EQ(choice(1024, true), &small) << "unequal ones";
  EXPECT_EQ(choice(2048, true), &large);
  EXPECT_EQ(choice(16384, false), &large);
}

TEST(Schedule, KeysAreSplitAsAskedFor) {
  const auto splits = [](const AttentionProblem& p, int most, bool invariant = false) {
    const KeySplits asked{.most = most, .batch_invariant = invariant};
    return forward_layout(p, kPlain64, hopper(), 2, true, asked).args.num_splits;
  };
  for (const bool invariant : {false, true}) {
    const AttentionProblem few = problem(2, 1, 65536, 8, 2, 64), many = problem(64, 512, 65536, 32, 32, 64);
    EXPECT_EQ(splits(few, 1, invariant), 1);
    EXPECT_EQ(splits(few, 5, invariant), 5);
    EXPECT_EQ(splits(many, 7, invariant), 3) << "as memory allows";
    EXPECT_EQ(splits(few, 1 << 30, invariant), 128) << "as many as the merge holds";
    EXPECT_EQ(splits(problem(2, 1, 300, 8, 2, 64), 1 << 30, invariant), 5) << "a block of keys each";
    EXPECT_EQ(splits(problem(2, 1, 0, 8, 2, 64), 4, invariant), 1);
  }
  EXPECT_EQ(forward_layout(problem(2, 1, 65536, 8, 2, 64), kPlain64, hopper(), 2, false, {.most = 4})
                .args.num_splits,
            1)
      << "nothing merges";
  Kernel cannot = kPlain64;
  cannot.can_split = false;
  EXPECT_EQ(
      forward_layout(problem(2, 1, 65536, 8, 2, 64), cannot, hopper(), 2, true, {.most = 4}).args.num_splits,
      1);
}

TEST(Schedule, LeavesMultiprocessorsToOthers) {
  const AttentionProblem p = problem(4, 4096, 4096, 16, 16, 64);
  const auto slots = [&](int margin) {
    return forward_layout(p, kPlain64, hopper().without_sms(margin), 2, true, {}).args.slots;
  };
  EXPECT_EQ(slots(8), slots(0) - 16);
  EXPECT_EQ(slots(1 << 30), 2) << "one is left";
}

TEST(Schedule, SplitsThatAreTheSameInAnyBatch) {
  const KeySplits invariant{.batch_invariant = true};
  DeviceProperties half = hopper();
  half.sm_count /= 2;
  for (const int64_t queries : {1, 16, 300}) {
    const auto splits = [&](int64_t batch, const DeviceProperties& device) {
      AttentionProblem p = problem(batch, queries, 20000, 8, 2, 64);
      p.packed = p.packed_k = batch % 2 == 1;
      p.total_q = p.total_k = 70 * batch;  // a packed batch has any
      return forward_layout(p, kPlain64, device, 2, true, invariant).args.num_splits;
    };
    const int alone = splits(1, hopper());
    EXPECT_GT(alone, queries == 1 ? 8 : 0);
    for (const int64_t batch : {2, 3, 17, 64, 500}) {
      EXPECT_EQ(splits(batch, hopper()), alone);
      EXPECT_EQ(splits(batch, half), alone) << "whatever the GPU has free";
    }
  }
}

TEST(KernelTable, TheSameKernelInAnyBatch) {
  Kernel large = kPlain64, small = kPlain64, stream = kPlain64;
  large.name = "large", large.rate = 100, large.tile_m = 256;
  small.name = "small", small.rate = 80, small.tile_m = 64;
  const std::array<const Kernel*, 2> table = {&large, &small};
  const auto choice = [&](int64_t batch, const KeySplits& splits) {
    const AttentionProblem p = problem(batch, 256, 256, 16, 16, 64);
    const DeviceProperties device = hopper();
    return choose_kernel(table, KernelKind::kForward, Family::kMmaSm80,
                         KernelRequest(p, device, false, nullptr, splits))
        .kernel;
  };
  EXPECT_NE(choice(1, {}), choice(64, {})) << "as the tiles fill the GPU";
  for (const int64_t batch : {2, 9, 64, 500})
    EXPECT_EQ(choice(batch, {.batch_invariant = true}), choice(1, {.batch_invariant = true}));

  stream.stream_k = stream.tma = true;
  AttentionProblem p = problem(8, 1, 4096, 16, 16, 64);
  add(p, Role::kSeqUsedK);
  const auto refusal = [&](const KeySplits& splits) {
    return cannot_because(stream, KernelRequest(p, hopper(), false, nullptr, splits));
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_NE(refusal({.batch_invariant = true}).find("others of the batch move the cuts"), std::string::npos);
  EXPECT_NE(refusal({.most = 2}).find("not those of a tile into parts"), std::string::npos);
}

TEST(KernelTable, WarpsCopyKeysThatTmaDoesNotReadAsFast) {
  Kernel stream = kPlain64;
  stream.stream_k = stream.pages = true;
  AttentionProblem p = problem(8, 1, 4096, 16, 16, 64);
  add(p, Role::kSeqUsedK);
  const auto leaves = [&] {
    const std::string refusal = cannot_because(stream, KernelRequest(p, hopper(), false, nullptr, {}));
    return refusal.find("leaves to TMA") != std::string::npos;
  };
  EXPECT_TRUE(leaves());
  p = problem(8, 1, 4096, 48, 16, 64);
  add(p, Role::kSeqUsedK);
  EXPECT_FALSE(leaves()) << "boxes of TMA take no groups of 3";
  p = problem(8, 1, 4096, 32, 16, 64);
  add(p, Role::kSeqUsedK);
  add(p, Role::kPageTable);
  for (const int rows : {16, 32}) {
    stream.tile_m = rows;
    p.cache_rows = 64;
    EXPECT_TRUE(leaves());
    p.cache_rows = 16;
    EXPECT_EQ(leaves(), rows == 32);
    p.cache_rows = 12;
    EXPECT_FALSE(leaves());
  }
}

/// (batch, heads, queries, keys) without gaps; one for all sequences with `shared`.
TensorDesc pairs(const AttentionProblem& p, bool shared) {
  TensorDesc t;
  t.present = true;
  t.dtype = p.dtype;
  t.ndim = 4;
  const int64_t plane = p.seqlen_q * p.seqlen_k;
  t.shape = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k};
  t.stride = {shared ? 0 : p.heads_q * plane, plane, p.seqlen_k, 1};
  return t;
}

TEST(Schedule, SequencesThatShareABiasAreNeighbours) {
  AttentionProblem p = problem(4, 512, 512, 16, 16, 64);
  const auto sequences_first = [&] {
    return forward_layout(p, kPlain64, hopper(), 2, true).args.sequences_first;
  };
  EXPECT_FALSE(sequences_first()) << "no bias";
  TensorDesc& bias = p.tensors[index_of(Role::kBias)];
  bias = pairs(p, true);
  EXPECT_TRUE(sequences_first());
  bias.stride[1] = 0;
  EXPECT_FALSE(sequences_first()) << "heads share it as well";
  bias = pairs(p, false);
  EXPECT_FALSE(sequences_first()) << "each sequence has its own";
}

/// Tiles are then of many lengths: a counter deals them out, the last heads first, sequences of a head side by side.
TEST(Schedule, LongSequencesUnderAlibiHaveAReach) {
  Kernel kernel = kPlain64;
  kernel.alibi_norms = kernel.persistent = true;
  const auto norms_of = [&](const AttentionProblem& p) {
    const ForwardLayout layout = forward_layout(p, kernel, hopper(), 2, true);
    EXPECT_EQ(layout.args.alibi_norms.wanted, layout.alibi_norms >= 0);
    EXPECT_EQ(layout.args.alibi_norms.wanted, layout.args.sequences_first);
    EXPECT_EQ(layout.args.alibi_norms.wanted, layout.tile_counter >= 0);
    return layout.args.alibi_norms.wanted;
  };
  const auto with_slopes = [](AttentionProblem p) {
    p.tensors[index_of(Role::kAlibi)].present = true;
    return p;
  };
  const AttentionProblem p = with_slopes(problem(4, 4096, 4096, 16, 16, 64));
  EXPECT_TRUE(norms_of(p));
  EXPECT_FALSE(norms_of(problem(4, 4096, 4096, 16, 16, 64))) << "no slopes";
  EXPECT_FALSE(norms_of(with_slopes(problem(16, 1024, 1024, 16, 16, 64)))) << "short sequences";
  EXPECT_FALSE(norms_of(with_slopes(problem(64, 1, 4096, 16, 16, 64)))) << "few queries";
  EXPECT_FALSE(norms_of(with_slopes(problem(1 << 17, 4096, 4096, 1, 1, 64))))
      << "more sequences than a grid has";
  kernel.alibi_norms = false;
  EXPECT_FALSE(norms_of(p)) << "a kernel that knows no reach";
}

/// Each sum is rounded to 16 bits, in any order.
TEST(KernelTable, MainKernelsAddFewSumsToTheGradientOfABias) {
  Kernel main = kPlain64;
  main.kind = KernelKind::kBackward;
  main.adds_dbias = true;
  const auto adds = [&](int64_t batch, int64_t keys, bool shared, bool deterministic) {
    AttentionProblem p = problem(batch, 64, keys, 2, 2, 64);
    p.pass = Pass::kBackward;
    p.tensors[index_of(Role::kBias)] = p.tensors[index_of(Role::kDBias)] = pairs(p, shared);
    return can_add_dbias(main, expr::with_terms_in_expressions(p).value(), deterministic);
  };
  EXPECT_TRUE(adds(8, 64, true, false));
  EXPECT_FALSE(adds(9, 64, true, false));
  EXPECT_TRUE(adds(9, 64, false, false)) << "one sum each";
  EXPECT_TRUE(adds(9, 64, false, true));
  EXPECT_FALSE(adds(2, 64, true, true)) << "their order is free";
  EXPECT_FALSE(adds(2, 61, true, false)) << "rows that are no multiples of 16 bytes";
  main.adds_dbias = false;
  EXPECT_FALSE(adds(1, 64, true, false));
}

TEST(KernelTable, GradientsOfABiasByAnExpressionGoWithAMainKernelOfTheSame) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kDBias;
  kernel.terms |= kTermBias | kTermScore | kTermSees;
  AttentionProblem p = problem(2, 64, 64, 2, 2, 64);
  p.pass = Pass::kBackward;
  p.tensors[index_of(Role::kBias)] = p.tensors[index_of(Role::kDBias)] = pairs(p, true);
  const AttentionProblem composed = expr::with_terms_in_expressions(p).value();
  const DeviceProperties device = hopper();
  KernelRequest request(composed, device, false, nullptr, {});
  EXPECT_EQ(cannot_because(kernel, request),
            "goes with a main kernel that is compiled for all terms as one expression");
  request.terms_in_expression = true;
  EXPECT_EQ(cannot_because(kernel, request), "");
}

/// Whose clusters share the keys of tiles of 16 rows, two CTAs an SM.
Kernel cluster_kernel() {
  Kernel kernel = kPlain64;
  kernel.splits_in_cluster = true;
  kernel.can_split = false;
  kernel.tile_m = 16;
  kernel.shared_bytes = 100 << 10;
  return kernel;
}

TEST(Schedule, ClustersShareTheKeysOfFewTiles) {
  Kernel cluster = cluster_kernel();
  const auto ctas = [&](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv, const Kernel& kernel) {
    return ctas_of_cluster(problem(batch, 1, keys, heads, heads_kv, 64), kernel, hopper());
  };
  EXPECT_EQ(ctas(1, 4096, 8, 1, cluster), 16);
  EXPECT_EQ(ctas(7, 4096, 8, 1, cluster), 16);
  EXPECT_EQ(ctas(8, 4096, 8, 1, cluster), 8) << "15 of 16 SMs lie so that clusters of 16 fill them";
  EXPECT_EQ(ctas(1, 4096, 16, 16, cluster), 8);
  EXPECT_EQ(ctas(4, 4096, 32, 8, cluster), 4);
  EXPECT_EQ(ctas(8, 4096, 32, 8, cluster), 2);
  EXPECT_EQ(ctas(9, 4096, 32, 8, cluster), 1);
  EXPECT_EQ(ctas(1, 100, 8, 1, cluster), 2) << "32 keys each at least";
  EXPECT_EQ(ctas(1, 1, 8, 1, cluster), 2);
  Kernel alone = cluster;
  alone.shared_bytes = 200 << 10;
  EXPECT_EQ(ctas(1, 4096, 16, 16, alone), 4) << "an SM for each CTA";

  const auto refusal = [&](AttentionProblem p, const KeySplits& splits = {}) {
    return cannot_because(cluster, KernelRequest(p, hopper(), false, nullptr, splits));
  };
  const auto says = [&](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  AttentionProblem p = problem(1, 1, 8192, 32, 8, 64);
  EXPECT_EQ(refusal(p), "");
  const ForwardLayout layout = forward_layout(p, cluster, hopper(), 2, true);
  EXPECT_EQ(layout.args.cluster_ctas, 8);
  EXPECT_EQ(layout.args.num_splits, 1);
  EXPECT_EQ(layout.workspace_size, 0) << "nothing goes through global memory";
  says(refusal(p, {.most = 2}), "others of the batch");
  says(refusal(p, {.batch_invariant = true}), "others of the batch");
  says(refusal(problem(1, 5, 8192, 32, 8, 64)), "fit a tile of 16 rows");
  EXPECT_EQ(refusal(problem(1, 1, 1 << 20, 32, 8, 64)), "") << "16 parts of each tile fill the SMs";
  says(refusal(problem(1, 1, 1 << 22, 8, 1, 64)), "elements of keys and values a CTA");
  cluster.pages = true;
  cluster.one_piece = false;
  p = problem(1, 1, 32768, 32, 8, 64);
  add(p, Role::kPageTable);
  p.cache_rows = 16;
  EXPECT_EQ(refusal(p), "");
  p = problem(1, 1, 1 << 22, 8, 1, 64);
  add(p, Role::kPageTable);
  p.cache_rows = 24;
  says(refusal(p), "is for up to 2097152 elements of keys and values a CTA, this problem has 4793490");
  EXPECT_EQ(refusal(problem(1, 1, 8192, 32, 8, 64)), "is for keys in pages");
  cluster.pages = false;
  cluster.one_piece = true;
  p = problem(1, 1, 131072, 32, 8, 64);
  p.window_left = 1023;
  p.window_right = 0;
  EXPECT_EQ(refusal(p), "") << "a window has few keys";
  p = problem(8, 1, 8192, 32, 8, 64);
  EXPECT_EQ(refusal(p), "");
  cluster.e4m3_keys = true;
  p.tensors[index_of(Role::kK)].dtype = p.tensors[index_of(Role::kV)].dtype = DType::kE4M3;
  add(p, Role::kSeqUsedK);
  says(refusal(p), "lengths the GPU alone knows to equal shares");
}

/// On Hopper keys of 8 bits in TMA's boxes have clusters whatever lengths the GPU knows, as long as SMs hold two CTAs a tile.
TEST(Schedule, ClustersShareKeysOf8Bits) {
  Kernel cluster = cluster_kernel();
  cluster.tile_m = 8;
  cluster.shared_bytes = 200 << 10;
  cluster.tma = cluster.e4m3_keys = true;
  const auto request = [&](int64_t batch, int64_t keys, bool lengths) {
    AttentionProblem p = problem(batch, 1, keys, 32, 8, 64);
    p.tensors[index_of(Role::kK)].dtype = p.tensors[index_of(Role::kV)].dtype = DType::kE4M3;
    if (lengths) add(p, Role::kSeqUsedK);
    return p;
  };
  const auto ctas = [&](const AttentionProblem& p) { return ctas_of_cluster(p, cluster, hopper()); };
  const auto takes = [&](const AttentionProblem& p) {
    return cannot_because(cluster, KernelRequest(p, hopper(), false, nullptr, {})).empty();
  };
  EXPECT_EQ(ctas(request(9, 1 << 20, false)), 1);
  EXPECT_TRUE(takes(request(9, 1 << 20, false)));
  EXPECT_TRUE(takes(request(33, 100, false)));
  EXPECT_FALSE(takes(request(34, 100, false))) << "equal shares do as well";
  EXPECT_TRUE(takes(request(34, 4096, true))) << "but not where lengths differ";
  EXPECT_EQ(ctas(request(34, 4096, true)), 1);
  EXPECT_EQ(ctas(request(2, 32768, true)), 4);
  EXPECT_TRUE(takes(request(2, 32768, true)));
  EXPECT_EQ(ctas(request(33, 4097, true)), 2);
  EXPECT_TRUE(takes(request(33, 4097, true)));
  EXPECT_FALSE(takes(request(34, 4097, true)));
  const ForwardArgs args = forward_layout(request(9, 32768, true), cluster, hopper(), 1, true).args;
  EXPECT_EQ(args.cluster_ctas, 2);
  EXPECT_FALSE(args.sharing.by_length);
}

TEST(Schedule, ManyRowsOfQueriesHaveClustersOverManyKeys) {
  Kernel cluster = cluster_kernel();
  cluster.tile_m = 32;
  cluster.shared_bytes = 200 << 10;
  const auto refusal = [&](int64_t batch, int64_t queries, int64_t keys, int64_t heads) {
    return cannot_because(
        cluster, KernelRequest(problem(batch, queries, keys, heads, 4, 64), hopper(), false, nullptr, {}));
  };
  EXPECT_EQ(refusal(1, 4, 1024, 32), "");
  EXPECT_EQ(refusal(1, 4, 1023, 32),
            "is for 1024 keys and more where a tile has more than 16 rows of queries");
  EXPECT_EQ(refusal(1, 4, 256, 28), "") << "no box of TMA has 7 heads";
  EXPECT_NE(refusal(1, 4, 255, 28), "");
  EXPECT_EQ(refusal(1, 2, 100, 32), "") << "16 rows";
  EXPECT_NE(refusal(17, 4, 4096, 32), "") << "a CTA each";
  EXPECT_EQ(refusal(1000, 4, 4096, 28), "") << "others read the keys 7 times";
}

/// A CTA for each tile as long as an SM holds two, else eight that take turns, if they are long.
TEST(Schedule, ManyTilesOfOneLengthHaveOneCtaOrEight) {
  Kernel cluster = cluster_kernel();
  const auto ctas = [&](int64_t batch, int64_t keys, int64_t heads) {
    return ctas_of_cluster(problem(batch, 1, keys, heads, 8, 64), cluster, hopper());
  };
  const auto refusal = [&](const AttentionProblem& p) {
    return cannot_because(cluster, KernelRequest(p, hopper(), false, nullptr, {}));
  };
  EXPECT_EQ(ctas(9, 1 << 20, 32), 1);
  EXPECT_EQ(refusal(problem(9, 1, 100, 32, 8, 64)), "");
  EXPECT_EQ(ctas(33, 8192, 32), 1) << "264 tiles";
  EXPECT_EQ(refusal(problem(33, 1, 8192, 32, 8, 64)), "");
  EXPECT_EQ(ctas(33, 16384, 32), 8) << "long";
  EXPECT_EQ(ctas(34, 8192, 32), 8);
  EXPECT_EQ(ctas(34, 8191, 32), 2) << "8 tiles more than SMs hold two of";
  EXPECT_EQ(ctas(34, 4095, 32), 1) << "short";
  EXPECT_EQ(ctas(42, 8191, 32), 1);
  EXPECT_NE(refusal(problem(42, 1, 8191, 32, 8, 64)).find("leave half of 132 SMs idle"), std::string::npos);
  EXPECT_EQ(refusal(problem(42, 1, 8191, 56, 8, 64)), "") << "no box of TMA has 7 heads";
  EXPECT_EQ(ctas(42, 16384, 64), 1) << "8 rows";
  EXPECT_EQ(ctas(42, 32768, 64), 8);
  const ForwardArgs args = forward_layout(problem(34, 1, 8192, 32, 8, 64), cluster, hopper(), 2, true).args;
  EXPECT_EQ(args.cluster_ctas, 8);
  EXPECT_EQ(args.num_splits, 1);
  EXPECT_FALSE(args.sharing.by_length);
  AttentionProblem padded = problem(34, 1, 8192, 32, 8, 64);
  add(padded, Role::kLeftPadK);
  EXPECT_NE(refusal(padded), "") << "may differ";
  cluster.shared_bytes = 200 << 10;
  EXPECT_NE(refusal(problem(9, 1, 8192, 32, 8, 64)), "") << "an SM holds one";
}

/// Four CTAs an SM hold all tiles at once, where others have two on some SMs and one on others, or take turns.
TEST(Schedule, SmallCtasTakeTilesThatLieUnevenlyAndThoseOfFewKeys) {
  Kernel cluster = cluster_kernel();
  cluster.shared_bytes = 54 << 10;
  const auto takes = [&](int64_t batch, int64_t keys, bool gpu_knows_lengths = false) {
    AttentionProblem p = problem(batch, 1, keys, 32, 8, 64);
    if (gpu_knows_lengths) add(p, Role::kSeqUsedK);
    return cannot_because(cluster, KernelRequest(p, hopper(), false, nullptr, {})).empty();
  };
  EXPECT_EQ(ctas_of_cluster(problem(1000, 1, 1 << 20, 32, 8, 64), cluster, hopper()), 1);
  EXPECT_FALSE(takes(16, 100)) << "128 tiles of 132 SMs";
  EXPECT_FALSE(takes(19, 4096)) << "152";
  EXPECT_TRUE(takes(20, 16383));
  EXPECT_FALSE(takes(20, 16384)) << "eight CTAs each";
  EXPECT_TRUE(takes(28, 4096)) << "224";
  EXPECT_FALSE(takes(29, 4096)) << "two on nearly all";
  EXPECT_TRUE(takes(34, 4096)) << "272";
  EXPECT_FALSE(takes(34, 4097));
  EXPECT_TRUE(takes(49, 4096));
  EXPECT_FALSE(takes(50, 4096));
  EXPECT_TRUE(takes(50, 2048)) << "three for each SM";
  EXPECT_TRUE(takes(66, 2048)) << "528, four";
  EXPECT_FALSE(takes(67, 2048)) << "a turn of few more";
  EXPECT_TRUE(takes(99, 2048)) << "half a turn more: three quarters of two";
  EXPECT_FALSE(takes(65536, 64)) << "more than a launch takes";
  EXPECT_TRUE(takes(33, 4096, true));
  EXPECT_FALSE(takes(20, 4097, true)) << "a long one would be waited for";
}

/// Some sequences, of whose lengths the host knows the largest.
AttentionProblem of_many_lengths(int64_t batch, int64_t keys, int64_t heads_kv = 8) {
  AttentionProblem p = problem(batch, 1, keys, 4 * heads_kv, heads_kv, 64);
  add(p, Role::kSeqUsedK);
  return p;
}

TEST(Schedule, ClustersAreForTheLongestOfLengthsThatTheGpuKnows) {
  const Kernel cluster = cluster_kernel();
  const auto ctas = [&](const AttentionProblem& p) { return ctas_of_cluster(p, cluster, hopper()); };
  const auto refusal = [&](const AttentionProblem& p) {
    return cannot_because(cluster, KernelRequest(p, hopper(), false, nullptr, {}));
  };
  EXPECT_EQ(ctas(of_many_lengths(4, 8192)), 8) << "32 tiles, of which most use four";
  EXPECT_EQ(refusal(of_many_lengths(4, int64_t{1} << 20)), "") << "however long";
  EXPECT_EQ(ctas(of_many_lengths(67, 8192, 1)), 1);
  EXPECT_NE(refusal(of_many_lengths(67, 8192, 1)), "") << "equal shares of all keys";
  EXPECT_EQ(ctas(of_many_lengths(25, 8192)), 2) << "400 CTAs take turns on 132 SMs";
  EXPECT_EQ(refusal(of_many_lengths(64, 8192)), "");
  EXPECT_NE(refusal(of_many_lengths(64, 4096)), "");
  EXPECT_EQ(ctas(of_many_lengths(8, 4096)), 2) << "as where the host knows them";
  EXPECT_NE(refusal(of_many_lengths(65536, 8192)), "") << "a grid has no place for so many";
  EXPECT_FALSE(cluster_lengths_differ(of_many_lengths(1, 8192), cluster));
  EXPECT_FALSE(cluster_lengths_differ(problem(8, 1, 8192, 32, 8, 64), cluster));
  const ForwardArgs args = forward_layout(of_many_lengths(4, 8192), cluster, hopper(), 2, true).args;
  EXPECT_EQ(args.slots, hopper().sm_count) << "by which the kernel knows how many CTAs find an SM each";
  EXPECT_EQ(args.num_splits, 1);
  EXPECT_TRUE(args.sharing.by_length);
  EXPECT_FALSE(args.sharing.heads) << "CTAs that a tile leaves end";
  EXPECT_EQ(args.sharing.log2_most, 3);
}

TEST(Schedule, HeadsOfSequencesShareClustersWhereTheyFillThem) {
  Kernel cluster = cluster_kernel();
  const auto shared = [&](int64_t batch, int64_t keys, int64_t heads_kv) {
    return ctas_of_shared_cluster(of_many_lengths(batch, keys, heads_kv), cluster, hopper());
  };
  EXPECT_EQ(shared(4, 8192, 8), 0) << "32 tiles of four CTAs";
  EXPECT_EQ(shared(5, 8192, 8), 8) << "40 of two";
  EXPECT_EQ(shared(5, 4096, 8), 0) << "short ones run at the same time";
  EXPECT_EQ(shared(9, 4096, 8), 8) << "72 of one";
  EXPECT_EQ(shared(24, 8192, 8), 8);
  EXPECT_EQ(shared(25, 8192, 8), 0) << "many take turns";
  EXPECT_EQ(shared(10, 8192, 4), 8) << "8 CTAs of 4 heads";
  EXPECT_EQ(shared(20, 8192, 4), 4);
  EXPECT_EQ(shared(20, 8192, 2), 4);
  EXPECT_EQ(shared(40, 8192, 2), 0);
  const auto layout = [&](int64_t batch) {
    return forward_layout(of_many_lengths(batch, 32768), cluster, hopper(), 2, true).args;
  };
  EXPECT_TRUE(layout(9).sharing.heads);
  EXPECT_EQ(layout(9).cluster_ctas, 8);
  EXPECT_EQ(layout(9).sharing.log2_elements, 19);
  EXPECT_EQ(layout(8).sharing.log2_elements, 20);
  const AttentionProblem p = of_many_lengths(9, 32768);
  EXPECT_FALSE(placement_of(p, cluster, layout(9), hopper(), 2).even) << "clusters would lie by twos on SMs";
  cluster.shared_bytes = 50 << 10;
  EXPECT_EQ(shared(9, 1024, 8), 0) << "of which an SM holds four";
  cluster.shared_bytes = 200 << 10;
  EXPECT_EQ(shared(9, 8192, 8), 0);
}

TEST(Schedule, WarpsThatCopyPiecesLeaveRowsThatAreApartAndLargeGroups) {
  Kernel kernel = cluster_kernel();
  kernel.tile_m = 4;
  kernel.copies_pieces = kernel.pages = kernel.e4m3_keys = kernel.e4m3_queries = true;
  kernel.head_dim = kernel.head_dim_v = 256;
  const auto refusal = [&](AttentionProblem p, DType queries = DType::kBF16) {
    p.tensors[index_of(Role::kQ)].dtype = queries;
    p.tensors[index_of(Role::kK)].dtype = p.tensors[index_of(Role::kV)].dtype = DType::kE4M3;
    return cannot_because(kernel, KernelRequest(p, hopper(), false, nullptr, {}));
  };
  const auto paged = [](int64_t rows) {
    AttentionProblem p = problem(1, 1, 8192, 32, 8, 64);
    add(p, Role::kPageTable);
    p.cache_rows = rows;
    return p;
  };
  EXPECT_EQ(refusal(problem(1, 1, 8192, 32, 8, 64)), "");
  EXPECT_EQ(refusal(paged(48)), "");
  EXPECT_EQ(refusal(paged(24)), "is for pages of multiples of 16 rows, without leftpad_k");
  AttentionProblem padded = paged(48);
  add(padded, Role::kLeftPadK);
  EXPECT_EQ(refusal(padded), "is for pages of multiples of 16 rows, without leftpad_k");

  const AttentionProblem rows_32 = problem(1, 4, 8192, 8, 1, 64), rows_64 = problem(1, 4, 8192, 16, 1, 64);
  EXPECT_NE(refusal(rows_32).find("to kernels of more"), std::string::npos)
      << "a tile of 32 rows reads keys once";
  EXPECT_EQ(refusal(problem(1, 4, 8192, 8, 1, 256)), "") << "no tile has 32 rows of 256 columns";
  EXPECT_EQ(refusal(rows_64), "") << "CUDA cores are what is left";
  EXPECT_NE(refusal(rows_64, DType::kE4M3).find("to kernels of more"), std::string::npos);
}

TEST(Schedule, FewClustersShareTheKeysOfATileWhereThereAreMany) {
  Kernel cluster = cluster_kernel();
  using Pair = std::pair<int, int>;  // CTAs of a cluster, clusters of a tile
  const auto splits = [&](int64_t keys, int64_t heads, int64_t heads_kv) {
    const ClusterSplits found = cluster_splits(problem(1, 1, keys, heads, heads_kv, 64), cluster, hopper());
    return Pair(found.ctas, found.splits);
  };
  EXPECT_EQ(splits(8192, 8, 1), Pair(16, 1));
  EXPECT_EQ(splits(32768, 8, 1), Pair(8, 14)) << "of 118 SMs";
  EXPECT_EQ(splits(32768, 32, 2), Pair(4, 14));
  EXPECT_EQ(splits(65536, 32, 8), Pair(8, 1)) << "half of the SMs read as fast as all";
  EXPECT_EQ(splits(131072, 32, 8), Pair(1, 16)) << "of 132 SMs";
  const AttentionProblem p = problem(1, 1, 32768, 8, 1, 64);
  const ForwardLayout layout = forward_layout(p, cluster, hopper(), 2, true);
  EXPECT_EQ(layout.args.cluster_ctas, 8);
  EXPECT_EQ(layout.args.num_splits, 14);
  const ForwardArgs whole = forward_layout(p, cluster, hopper(), 2, false).args;
  EXPECT_EQ(whole.num_splits, 1) << "nobody merges";
  EXPECT_EQ(whole.cluster_ctas, 16);
  EXPECT_GE(layout.workspace_size, 14 * 8 * 65 * 4) << "parts, which are merged by another launch";
  cluster.e4m3_keys = true;
  EXPECT_EQ(splits(131072, 32, 8), Pair(8, 1)) << "conversions bound it";
}

TEST(Schedule, CtasOfClustersLieEvenlyOrDoNotBeginEarly) {
  Kernel cluster = cluster_kernel();
  const auto placed = [&](int64_t batch, int64_t keys, int64_t heads, int64_t heads_kv, int ctas_per_sm) {
    const AttentionProblem p = problem(batch, 1, keys, heads, heads_kv, 64);
    return placement_of(p, cluster, forward_layout(p, cluster, hopper(), ctas_per_sm, true).args, hopper(),
                        ctas_per_sm);
  };
  const size_t half = hopper().shared_per_sm / 2, own = cluster.shared_bytes;
  for (const int64_t keys : {1024, 8192, 32768}) {
    EXPECT_EQ(placed(1, keys, 32, 8, 2).shared_bytes, own);
    EXPECT_TRUE(placed(1, keys, 32, 8, 2).even) << "64 CTAs of this launch and of the next, two an SM";
  }
  EXPECT_EQ(placed(1, 2048, 16, 16, 2).shared_bytes, own) << "16 clusters of 8 find room by twos alone";
  EXPECT_FALSE(placed(1, 2048, 16, 16, 2).even);
  EXPECT_EQ(placed(8, 8192, 32, 8, 2).shared_bytes, half) << "clusters of two lie anywhere";
  EXPECT_TRUE(placed(8, 8192, 32, 8, 2).even);
  cluster.shared_bytes = 200 << 10;
  EXPECT_TRUE(placed(1, 8192, 4, 4, 1).even) << "4 clusters of 8 of each launch, an SM for each CTA";
  EXPECT_FALSE(placed(1, 32768, 8, 8, 1).even) << "64 CTAs would lie in some parts of the GPU";
  EXPECT_TRUE(placed(1, 4096, 8, 8, 1).even) << "short";
  cluster.shared_bytes = 50 << 10;
  EXPECT_EQ(placed(64, 512, 32, 8, 4).shared_bytes, cluster.shared_bytes);
  EXPECT_TRUE(placed(64, 512, 32, 8, 4).even) << "512 CTAs fill 132 SMs";
  cluster.splits_in_cluster = false;
  EXPECT_EQ(placed(1, 32768, 32, 8, 2).shared_bytes, cluster.shared_bytes);
}

TEST(Schedule, TilesOfUnequalWorkAreTakenFromACounter) {
  Kernel stays = kPlain64;
  stays.persistent = true;
  const auto layout = [&](const AttentionProblem& p) { return forward_layout(p, stays, hopper(), 1, true); };
  const AttentionProblem dense = problem(4, 4096, 4096, 16, 16, 64);
  EXPECT_EQ(layout(dense).tile_counter, -1) << "all tiles take as long";
  AttentionProblem causal = dense;
  causal.window_right = 0;
  EXPECT_EQ(layout(causal).tile_counter, 0);
  EXPECT_GE(layout(causal).workspace_size, 4);
  EXPECT_EQ(forward_layout(causal, kPlain64, hopper(), 1, true).tile_counter, -1) << "a CTA for each tile";
  AttentionProblem few = problem(1, 512, 512, 2, 2, 64);
  few.window_right = 0;
  EXPECT_EQ(layout(few).tile_counter, -1) << "two tiles for each CTA at most, longest first";
  AttentionProblem used = dense;
  add(used, Role::kSeqUsedK);
  EXPECT_EQ(layout(used).tile_counter, 0);
  // A quarter of a wave of heads where all tiles take as long, otherwise as many as fit the cache.
  const int blocks = (4096 + stays.tile_m - 1) / stays.tile_m;
  EXPECT_EQ(layout(dense).args.heads_at_once, std::max(1, hopper().sm_count / (4 * blocks)));
  EXPECT_EQ(layout(causal).args.heads_at_once, heads_at_once(causal, false, hopper().l2_bytes));
  // The last section of causal tiles has three or more for each CTA.
  const ForwardArgs args = layout(causal).args;
  const int left = 4 * 16 - args.whole_sections * args.heads_at_once;
  EXPECT_GE(left * blocks, 3 * hopper().sm_count);
  EXPECT_LT((left - args.heads_at_once) * blocks, 3 * hopper().sm_count) << "no more than needed";
}

TEST(Schedule, TilesOfABackwardEndEvenly) {
  Kernel stays = kPlain64;
  stays.kind = KernelKind::kBackward;
  stays.persistent = true;
  const int slots = hopper().sm_count;
  for (const int group : {1, 4}) {
    for (const int64_t keys : {512, 1024, 2048, 4096, 8192, 16384}) {
      for (const bool deterministic : {false, true}) {
        AttentionProblem p = problem(16384 / keys, keys, keys, 16, 16 / group, 64);
        p.window_right = 0;
        const BackwardArgs args = backward_layout(p, stays, hopper(), 1, deterministic).args;
        const int64_t heads = p.batch * p.heads_kv, left = heads - args.whole_sections * args.heads_at_once;
        ASSERT_GT(left, 0) << "the last section has what is left, and there is one";
        EXPECT_GE(left * args.key_blocks, std::min<int64_t>(2 * slots, heads * args.key_blocks));
        if (args.whole_sections > 0) {
          EXPECT_GE(args.heads_at_once * args.key_blocks, slots) << "a section fills the GPU";
        }
      }
    }
  }
}

TEST(Schedule, ShortHeadsAreAddedUpInAFixedOrder) {
  Kernel stays = kPlain64;
  stays.kind = KernelKind::kBackward;
  stays.persistent = stays.first_stores = true;
  stays.last_queries_first = LastQueriesFirst::kAlways;
  const auto layout_of = [&](int tile_m, int64_t batch, int64_t keys, bool causal, bool deterministic) {
    stays.tile_m = tile_m, stays.tile_n = 128;
    // With 128 queries a step heads of no group would wait for the first block alone.
    AttentionProblem p = problem(batch, keys, keys, tile_m > 64 ? 32 : 16, 16, 64);
    p.window_right = causal ? 0 : -1;
    return backward_layout(p, stays, hopper(), 1, deterministic);
  };
  const auto in_turns = [&](int tile_m, int64_t batch, int64_t keys, bool causal) {
    const BackwardLayout layout = layout_of(tile_m, batch, keys, causal, false);
    EXPECT_EQ(layout.args.turn_rows, layout.dq_semaphore >= 0 ? tile_m : 0);
    return layout.dq_semaphore >= 0 && !layout.args.first_alone;
  };
  for (const bool causal : {false, true}) {
    EXPECT_TRUE(in_turns(128, 8, 2048, causal));
    EXPECT_FALSE(in_turns(128, 8, 2049, causal));
    EXPECT_EQ(in_turns(64, 16, 1024, causal), !causal);
    EXPECT_FALSE(in_turns(64, 16, 1025, causal));
  }
  EXPECT_TRUE(in_turns(64, 7, 1024, false)) << "6 tiles and more for each of 132 CTAs";
  EXPECT_FALSE(in_turns(64, 6, 1024, false));
  EXPECT_EQ(layout_of(64, 1, 8192, true, true).args.turn_rows, 64) << "as asked for";
  stays.seen_blocks = true;
  stays.last_queries_first = LastQueriesFirst::kNever;
  EXPECT_FALSE(in_turns(128, 8, 2048, true));
  stays.first_stores = false;
  const BackwardLayout adds = layout_of(64, 1, 8192, true, true);
  EXPECT_EQ(adds.args.turn_rows, 0);
  EXPECT_GE(adds.dq_semaphore, 0);
}

TEST(Schedule, OthersWaitForTheFirstBlockAlone) {
  Kernel stays = kPlain64;
  stays.kind = KernelKind::kBackward;
  stays.persistent = stays.first_stores = true;
  stays.last_queries_first = LastQueriesFirst::kAlways;
  stays.tile_n = 128;
  const auto first_alone = [&](int tile_m, AttentionProblem p, bool deterministic = false) {
    stays.tile_m = tile_m;
    const BackwardLayout layout = backward_layout(p, stays, hopper(), 1, deterministic);
    if (layout.args.first_alone) {
      EXPECT_GE(layout.dq_semaphore, 0);
      EXPECT_EQ(layout.args.turn_rows, tile_m);
      EXPECT_EQ(layout.args.heads_a_block.value, p.group()) << "no block gets to a head before the first";
    }
    return layout.args.first_alone;
  };
  const auto whole = [](int64_t batch, int64_t keys, bool causal) {
    AttentionProblem p = problem(batch, keys, keys, 16, 16, 64);
    p.window_right = causal ? 0 : -1;
    return p;
  };
  for (const bool causal : {false, true}) {
    EXPECT_TRUE(first_alone(64, whole(4, 4096, causal)));
    EXPECT_FALSE(first_alone(64, whole(4, 4097, causal)));
    EXPECT_FALSE(first_alone(64, whole(1, 4096, causal))) << "four tiles a CTA";
    EXPECT_EQ(first_alone(128, whole(4, 4096, causal)), causal);
    EXPECT_TRUE(first_alone(128, whole(8, 2048, causal)));
    EXPECT_FALSE(first_alone(128, problem(8, 2048, 2048, 32, 16, 64))) << "groups of heads add in order";
    EXPECT_FALSE(first_alone(64, whole(4, 4096, causal), true)) << "all in order";
  }
  AttentionProblem window = whole(2, 8192, true);
  window.window_left = 512;
  EXPECT_TRUE(first_alone(64, window));
  EXPECT_TRUE(first_alone(128, window));
  window.window_left = 4096;
  EXPECT_FALSE(first_alone(64, window)) << "as many keys as without";
  AttentionProblem capped = whole(4, 4096, true);
  capped.softcap = 30;
  EXPECT_FALSE(first_alone(64, capped));
  AttentionProblem grouped = problem(4, 2048, 2048, 64, 16, 64);
  EXPECT_TRUE(first_alone(64, grouped));
  AttentionProblem packed = whole(8, 1024, true);
  packed.packed = true;
  packed.total_q = packed.total_k = 6336;  // 49.5 blocks of 16 heads: six tiles for each of 132 CTAs
  EXPECT_TRUE(first_alone(64, packed));
  EXPECT_TRUE(first_alone(128, packed));
  packed.total_k = 6272;
  EXPECT_FALSE(first_alone(64, packed));
  stays.seen_blocks = true;
  EXPECT_FALSE(first_alone(64, whole(4, 4096, true)));
}

TEST(Schedule, MoreHeadsAtOnceWhereTilesOfOneWait) {
  Kernel stays = kPlain64;
  stays.kind = KernelKind::kBackward;
  stays.persistent = true;
  stays.tile_m = stays.tile_n = 64;
  const auto at_once = [&](int64_t keys, bool causal, bool deterministic, int64_t window_left = -1) {
    AttentionProblem p = problem(16384 / keys, keys, keys, 8, 8, 64);
    p.window_left = window_left;
    p.window_right = causal ? 0 : -1;
    return backward_layout(p, stays, hopper(), 1, deterministic).args.heads_at_once;
  };
  EXPECT_EQ(at_once(1024, false, false), 9) << "of 16 blocks for 132 CTAs";
  EXPECT_EQ(at_once(1024, false, true), 13);
  EXPECT_EQ(at_once(4096, false, true), 4);
  EXPECT_EQ(at_once(512, false, true), 17);
  EXPECT_EQ(at_once(1024, true, true), 9);
  EXPECT_EQ(at_once(1024, false, true, 256), 9) << "tiles begin at different queries";
  stays.first_stores = true;
  EXPECT_EQ(at_once(1024, false, true), 9);
}

TEST(Schedule, TilesThatWaitForOneAnotherBeginApart) {
  Kernel stays = kPlain64;
  stays.kind = KernelKind::kBackward;
  stays.persistent = true;
  stays.tile_m = 64, stays.tile_n = 128;
  const auto args_of = [&](LastQueriesFirst when, int64_t keys, int group, bool causal, int left,
                           bool deterministic) {
    AttentionProblem p = problem(1, keys, keys, 16, 16 / group, 64);
    p.window_right = causal ? 0 : -1, p.window_left = left;
    stays.last_queries_first = when;
    return backward_layout(p, stays, hopper(), 1, deterministic).args;
  };
  using enum LastQueriesFirst;
  const BackwardArgs causal = args_of(kAlways, 8192, 1, true, -1, true);
  EXPECT_TRUE(causal.last_queries_first);
  EXPECT_EQ(causal.key_rounds, 2) << "a step and a half apart, of two steps that a tile is shorter";
  EXPECT_EQ(causal.heads_a_block.value, 1);
  EXPECT_GT(causal.heads_at_once, args_of(kAlways, 8192, 1, true, -1, false).heads_at_once);
  const BackwardArgs groups = args_of(kAlways, 8192, 4, true, -1, true);
  EXPECT_EQ(groups.heads_a_block.value, 4);
  EXPECT_EQ(groups.key_rounds, 1);
  EXPECT_EQ(args_of(kAlways, 8192, 1, false, -1, true).key_rounds, 1) << "all tiles are as long";
  EXPECT_EQ(args_of(kAlways, 8192, 1, true, 512, true).key_rounds, 1) << "with a window, too";
  // Eight blocks of 1,024 keys: 17 heads fill 132 SMs. Rows of 64 columns take 512 bytes, of 128 twice as many.
  stays.last_queries_first = kAlways;
  for (const int64_t columns : {64, 128}) {
    AttentionProblem p = problem(64, 1024, 1024, 16, 16, columns);
    p.window_right = 0;
    stays.head_dim = stays.head_dim_v = static_cast<int>(columns);
    EXPECT_EQ(backward_layout(p, stays, hopper(), 1, true).args.heads_at_once,
              columns == 64 ? 4 * 17 : 2 * 17)
        << "as long as they stay in L2";
  }
  for (const int group : {1, 4}) {
    const BackwardArgs fast = args_of(kAlways, 8192, group, true, -1, false);
    EXPECT_TRUE(fast.last_queries_first);
    EXPECT_EQ(fast.key_rounds, 1) << "nobody waits";
    EXPECT_EQ(fast.heads_a_block.value, 1);
    EXPECT_FALSE(args_of(kInTurns, 8192, group, true, -1, false).last_queries_first);
    EXPECT_TRUE(args_of(kInTurns, 8192, group, true, -1, true).last_queries_first);
    EXPECT_FALSE(args_of(kInTurns, 8192, group, false, -1, true).last_queries_first);
    EXPECT_EQ(args_of(kInTurns, 4096, group, true, -1, true).last_queries_first, group > 1) << "32 blocks";
    const BackwardArgs never = args_of(kNever, 8192, group, true, -1, true);
    EXPECT_FALSE(never.last_queries_first);
    EXPECT_EQ(never.key_rounds, 1);
    EXPECT_EQ(never.heads_a_block.value, 1);
  }
}

TEST(Launch, KernelsThatAddInAnyOrderAreNotForTheSameBits) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  kernel.any_order = true;
  const AttentionProblem p = problem(2, 300, 300, 6, 6, 64);
  const DeviceProperties device = hopper();
  KernelRequest request(p, device);
  EXPECT_EQ(cannot_because(kernel, request), "");
  request.same_bits = true;
  EXPECT_EQ(cannot_because(kernel, request), "adds to dq in any order, not with the same bits each time");
}

Kernel last_writes() {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  kernel.persistent = kernel.first_stores = kernel.fixed_order = kernel.last_writes = true;
  kernel.last_queries_first = LastQueriesFirst::kAlways;
  kernel.tile_m = kernel.tile_n = 128;
  kernel.most_keys = 1024;
  return kernel;
}

TEST(KernelChoice, TheLastBlockWritesDqOfShortCausalHeads) {
  const auto why_not = [](const AttentionProblem& p) { return cannot(last_writes(), p, hopper()); };
  const auto causal = [](int64_t batch, int64_t queries, int64_t keys) {
    AttentionProblem p = problem(batch, queries, keys, 16, 16, 64);
    p.pass = Pass::kBackward;
    p.window_right = 0;
    for (const Role role : {Role::kDQ, Role::kDK, Role::kDV})
      add(p, role), p.tensors[index_of(role)] = p[Role::kQ];
    return p;
  };
  const AttentionProblem p = causal(7, 1024, 1024);
  EXPECT_EQ(why_not(p), "") << "six tiles for each of 132 SMs";
  EXPECT_NE(why_not(causal(6, 1024, 1024)).find("is for many heads"), std::string::npos);
  const AttentionProblem one = causal(1, 1024, 1024);
  const DeviceProperties device = hopper();
  KernelRequest same_bits(one, device);
  same_bits.same_bits = true;
  EXPECT_EQ(cannot_because(last_writes(), same_bits), "");
  EXPECT_NE(why_not(causal(7, 1024, 1025)).find("up to 1024 keys"), std::string::npos);
  EXPECT_NE(why_not(causal(7, 1024, 1023)).find("all see a key"), std::string::npos);
  AttentionProblem full = p;
  full.window_right = -1;
  EXPECT_NE(why_not(full).find("causal masks"), std::string::npos);
  AttentionProblem left = p;
  left.window_left = 100;
  EXPECT_NE(why_not(left).find("windows to the left"), std::string::npos);
  AttentionProblem used = p;
  add(used, Role::kSeqUsedQ);
  EXPECT_NE(why_not(used).find("sequences of one length"), std::string::npos);
  AttentionProblem odd = p;
  odd.tensors[index_of(Role::kDQ)].stride[1] += 1;
  EXPECT_NE(why_not(odd).find("multiples of 16 bytes"), std::string::npos);
  AttentionProblem f32 = p;
  f32.tensors[index_of(Role::kDQ)].dtype = DType::kF32;
  EXPECT_NE(why_not(f32).find("writes dq in the type of q"), std::string::npos);
}

/// Of head sizes above 128, where a warpgroup of its own adds dQ.
TEST(KernelChoice, AFixedOrderWithoutAMaskIsForFewKeys) {
  Kernel writes = last_writes(), stores = last_writes();
  writes.last_queries_first = stores.last_queries_first = LastQueriesFirst::kNever;
  stores.last_writes = false;
  const auto of_keys = [](int64_t keys) {
    AttentionProblem p = problem(16, keys, keys, 16, 16, 64);
    p.pass = Pass::kBackward;
    for (const Role role : {Role::kDQ, Role::kDK, Role::kDV})
      add(p, role), p.tensors[index_of(role)] = p[Role::kQ];
    return p;
  };
  const AttentionProblem p = of_keys(512);
  EXPECT_EQ(cannot(writes, p, hopper()), "");
  EXPECT_NE(cannot(stores, p, hopper()).find("or the same bits each time"), std::string::npos);
  const DeviceProperties device = hopper();
  KernelRequest same_bits(p, device);
  same_bits.same_bits = true;
  EXPECT_EQ(cannot_because(stores, same_bits), "");
  AttentionProblem causal = p;
  causal.window_right = 0;
  EXPECT_EQ(cannot(stores, causal, hopper()), "");
  causal.tensors[index_of(Role::kDQ)].dtype = DType::kF32;
  EXPECT_EQ(cannot(stores, causal, hopper()), "") << "bwd_postprocess writes dq";
  EXPECT_NE(cannot(writes, of_keys(600), hopper()).find("up to 512 keys"), std::string::npos);
}

TEST(Schedule, HeadsAtOnceWhereTheFirstStores) {
  Kernel kernel = last_writes();
  kernel.last_queries_first = LastQueriesFirst::kNever;
  kernel.tile_n = 64;
  AttentionProblem p = problem(16, 512, 512, 16, 16, 192);
  EXPECT_EQ(backward_layout(p, kernel, hopper(), 1, false).args.heads_at_once, 25) << "half again 17";
  p.window_right = 0;
  EXPECT_EQ(backward_layout(p, kernel, hopper(), 1, false).args.heads_at_once, 17);
}

TEST(Schedule, TheLastWritesInAFixedOrder) {
  AttentionProblem p = problem(16, 1024, 1024, 16, 16, 64);
  p.window_right = 0;
  for (const bool deterministic : {false, true}) {
    const BackwardLayout layout = backward_layout(p, last_writes(), hopper(), 1, deterministic);
    EXPECT_GE(layout.dq_semaphore, 0);
    EXPECT_EQ(layout.args.turn_rows, 128);
    EXPECT_TRUE(layout.args.last_queries_first);
    EXPECT_TRUE(layout.args.dq_in_vectors);
  }
}

Kernel chain() {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  kernel.persistent = kernel.writes_dq = kernel.chain = true;
  kernel.tile_m = 64;
  kernel.tile_n = 128;
  return kernel;
}

TEST(Schedule, OfAChainIsAClusterForEachHead) {
  AttentionProblem p = problem(2, 300, 400, 6, 6, 64);
  const BackwardLayout layout = backward_layout(p, chain(), hopper(), 1, true);
  EXPECT_EQ(layout.args.cluster, 4) << "blocks of 128 keys";
  EXPECT_FALSE(layout.args.mirrors);
  EXPECT_LT(layout.tile_counter, 0);
  EXPECT_LT(layout.dq_semaphore, 0);
  EXPECT_EQ(layout.args.dq_columns, 0);
  p.window_right = 0;
  EXPECT_TRUE(backward_layout(p, chain(), hopper(), 1, false).args.mirrors);
  EXPECT_EQ(backward_layout(problem(2, 300, 100, 6, 6, 64), chain(), hopper(), 1, false).args.cluster, 1);
  EXPECT_EQ(backward_layout(p, kPlain64, hopper(), 1, false).args.cluster, 0);
}

TEST(KernelChoice, ChainsTakeKeysThatAClusterHolds) {
  const auto why_not = [](const AttentionProblem& p) { return cannot(chain(), p, hopper()); };
  AttentionProblem p = problem(4, 300, 384, 6, 6, 64);
  p.pass = Pass::kBackward;
  for (const Role role : {Role::kDQ, Role::kDK, Role::kDV}) p.tensors[index_of(role)].dtype = p.dtype;
  EXPECT_EQ(why_not(p), "") << "144 tiles of 64 keys";
  AttentionProblem few = p;
  few.batch = 3;
  EXPECT_NE(why_not(few).find("tile of half as many keys"), std::string::npos) << "108, an SM each";
  const DeviceProperties device = hopper();
  const Kernel kernel = chain();
  KernelRequest same_bits(few, device);
  same_bits.same_bits = true;
  EXPECT_EQ(cannot_because(kernel, same_bits), "");
  few.seqlen_k = 256;
  EXPECT_EQ(why_not(few), "") << "72 tiles of 64 keys";
  few.seqlen_k = 128;
  EXPECT_NE(why_not(few), "") << "36";
  AttentionProblem four_blocks = p;
  four_blocks.batch = 20, four_blocks.seqlen_k = 385;
  EXPECT_NE(why_not(four_blocks).find("up to 384 keys"), std::string::npos);
  four_blocks.window_right = 0;
  EXPECT_EQ(why_not(four_blocks), "") << "480 blocks";
  Kernel shorter = chain();
  shorter.most_keys = 256;
  EXPECT_NE(cannot(shorter, p, hopper()).find("is for up to 256 keys, this problem has 384"),
            std::string::npos);
  AttentionProblem longer = problem(2, 300, 1025, 6, 6, 64);
  EXPECT_NE(why_not(longer).find("which a cluster holds"), std::string::npos);

  AttentionProblem groups = p;
  groups.batch = 12, groups.heads_kv = 2;
  EXPECT_EQ(why_not(groups), "") << "all blocks have the same work";
  groups.window_right = 0;
  EXPECT_NE(why_not(groups).find("groups of heads"), std::string::npos);
  AttentionProblem causal = p;
  causal.window_right = 0;
  EXPECT_EQ(why_not(causal), "");
  causal.seqlen_q = 385;
  EXPECT_NE(why_not(causal).find("all see a key"), std::string::npos);
  causal.window_right = 1;
  EXPECT_EQ(why_not(causal), "");
  const auto many = [](int64_t keys) {
    AttentionProblem of_many = problem(60, keys, keys, 16, 16, 64);
    of_many.pass = Pass::kBackward;
    for (const Role role : {Role::kDQ, Role::kDK, Role::kDV})
      of_many.tensors[index_of(role)].dtype = of_many.dtype;
    return of_many;
  };
  EXPECT_EQ(why_not(many(384)), "") << "22 tiles for each of 132 SMs";
  EXPECT_NE(why_not(many(385)).find("up to 384 keys where heads are many"), std::string::npos);
  AttentionProblem many_causal = many(128);
  many_causal.window_right = 0;
  EXPECT_NE(why_not(many_causal).find("few heads under a causal mask"), std::string::npos);
  AttentionProblem left = p;
  left.window_left = 100;
  EXPECT_NE(why_not(left).find("windows to the left"), std::string::npos);
  AttentionProblem used = p;
  add(used, Role::kSeqUsedK);
  EXPECT_NE(why_not(used).find("sequences of one length"), std::string::npos);
}

TEST(Schedule, PackedSequencesHaveNoStrideOfBatches) {
  AttentionProblem p = problem(3, 512, 512, 4, 4, 64);
  EXPECT_EQ(tma_cannot_because(p, false), "");
  for (const Role role : {Role::kQ, Role::kK, Role::kV}) p.tensors[index_of(role)].stride[0] = -64;
  EXPECT_NE(tma_cannot_because(p, false), "") << "sequences from the last to the first";
  p.packed = p.packed_k = true;
  EXPECT_EQ(tma_cannot_because(p, false), "");
}

TEST(Schedule, PartsOfAForwardDoNotMeet) {
  const AttentionProblem p = problem(2, 1, 65536, 8, 2, 64);
  const ForwardLayout layout = forward_layout(p, kPlain64, hopper(), 2, true);
  ASSERT_GT(layout.args.num_splits, 1);
  const int64_t rows_of_parts = layout.args.num_splits * 2 * 8 * 1;
  EXPECT_EQ(layout.part_o % kPartAlignment, 0);
  EXPECT_EQ(layout.part_lse % kPartAlignment, 0);
  EXPECT_GE(layout.part_lse, layout.part_o + rows_of_parts * 64 * 4);
  EXPECT_GE(layout.workspace_size, layout.part_lse + rows_of_parts * 4);
  EXPECT_LE(layout.workspace_size, layout.part_lse + rows_of_parts * 4 + kPartAlignment);

  const ForwardLayout whole = forward_layout(p, kPlain64, hopper(), 2, false);
  EXPECT_EQ(whole.args.num_splits, 1);
  EXPECT_EQ(whole.workspace_size, 0);
}

TEST(Schedule, TilesOfListsAreOfThoseWhoShareOne) {
  Kernel kernel = kPlain64;
  kernel.tile_m = 8;
  AttentionProblem p = problem(1, 5, 4096, 20, 2, 64);
  add(p, Role::kKeys);
  p.list_size = 640;
  p.tensors[index_of(Role::kKeys)].stride = {2 * 5 * 640, 5 * 640, 640, 1};
  EXPECT_TRUE(packs_group(p, kernel));
  EXPECT_EQ(m_blocks(p, true, kernel.tile_m), 5 * 2) << "10 heads of each query";
  const int splits = forward_layout(p, kernel, hopper(), 2, true).args.num_splits;
  EXPECT_GT(splits, 1);
  EXPECT_LE(splits, 10) << "blocks of the list's entries";
  p.tensors[index_of(Role::kKeys)].stride[2] = 0;
  EXPECT_EQ(m_blocks(p, true, kernel.tile_m), 7) << "50 rows with one list";

  kernel.kind = KernelKind::kBackward;
  kernel.writes_dq = true;
  p.head_dim_v = 30;
  const BackwardLayout layout = backward_layout(p, kernel, hopper(), 1, false);
  EXPECT_EQ(layout.args.dk_columns, 64);
  EXPECT_EQ(layout.args.dv_columns, 32);
  EXPECT_EQ(layout.args.key_rows, 4096 * 2);
  EXPECT_GE(layout.workspace_size, layout.key_sums + 4096 * 2 * 96 * 4);
  std::vector<char> workspace(static_cast<size_t>(layout.workspace_size));
  BackwardArgs args = layout.args;
  layout.point_into(workspace.data(), args);
  EXPECT_EQ(reinterpret_cast<char*>(args.key_sums), workspace.data() + layout.key_sums);
  EXPECT_EQ(args.dv_sums(3) - args.key_sums, 4096 * 2 * 64 + 3 * 32);
  EXPECT_LT(layout.list_counts, 0);
  EXPECT_TRUE(args.adds_named);
}

TEST(Schedule, QueriesOfKeysTakeWhatListsTakeAndAtMostAsMuchMore) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  kernel.writes_dq = true;
  AttentionProblem p = problem(2, 500, 4096, 20, 4, 64);
  add(p, Role::kKeys);
  p.list_size = 640;
  const auto layout_of = [&](std::array<int64_t, 4> strides) {
    p.tensors[index_of(Role::kKeys)].stride = {strides[0], strides[1], strides[2], strides[3]};
    return backward_layout(p, kernel, hopper(), 1, true);
  };
  const int64_t entries = int64_t{2} * 4 * 500 * 640;
  const BackwardLayout own = layout_of({4 * 500 * 640, 500 * 640, 640, 1});
  EXPECT_LT(own.key_sums, 0);
  EXPECT_FALSE(own.args.adds_named);
  EXPECT_EQ(own.args.inverse.keys, 2 * 4096 * 4);
  EXPECT_EQ(own.args.inverse.chunks, 500 * 640 / 4096);
  EXPECT_LE(own.args.inverse.words_to_clear(), entries + ListInverse::kWordsOfEnd);
  EXPECT_LE(own.list_counts + own.args.inverse.words_to_clear() * 4, own.list_starts);
  EXPECT_LE(own.list_starts + own.args.inverse.keys * 8, own.list_queries);
  EXPECT_GE(own.workspace_size, own.list_queries + entries * 4);
  std::vector<char> workspace(static_cast<size_t>(own.workspace_size));
  BackwardArgs args = own.args;
  own.point_into(workspace.data(), args);
  EXPECT_EQ(args.key_sums, nullptr);
  EXPECT_EQ(reinterpret_cast<char*>(args.inverse.counts), workspace.data() + own.list_counts + 16);

  // One for all heads, and one for all queries.
  EXPECT_EQ(layout_of({500 * 640, 0, 640, 1}).args.inverse.keys, 2 * 4096);
  const BackwardLayout shared = layout_of({4 * 640, 640, 0, 1});
  EXPECT_EQ(shared.args.inverse.chunks, 1);
  EXPECT_LT(shared.workspace_size, own.list_queries);

  p.seqlen_q = 1 << 20;
  p.list_size = 2047;
  EXPECT_TRUE(can_invert_lists(p));
  p.list_size = 2048;
  EXPECT_FALSE(can_invert_lists(p));
}

TEST(Schedule, PartsOfABackwardDoNotMeet) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  const AttentionProblem p = problem(2, 200, 5000, 8, 2, 40);
  for (const bool deterministic : {false, true}) {
    const BackwardLayout layout = backward_layout(p, kernel, hopper(), 1, deterministic);
    EXPECT_EQ(layout.args.rows, 256);
    EXPECT_EQ(layout.args.dq_columns, 64);
    const int64_t rows_of_all = 2 * 8 * 256;
    std::vector<std::array<int64_t, 2>> parts = {{layout.lse_log2, rows_of_all * 4},
                                                 {layout.delta, rows_of_all * 4},
                                                 {layout.dq_sum, rows_of_all * 64 * 4}};
    EXPECT_EQ(layout.dq_semaphore >= 0, deterministic);
    // The last turn, and the counters before the first.
    if (deterministic)
      parts.push_back({layout.dq_semaphore, (layout.args.semaphore_at(1, 7, 255, 1) + 1) * 4});
    std::sort(parts.begin(), parts.end());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i][0] % kPartAlignment, 0);
      EXPECT_LE(parts[i][0] + parts[i][1], i + 1 < parts.size() ? parts[i + 1][0] : layout.workspace_size);
    }
    EXPECT_EQ(layout.args.key_blocks, 79);
    // In turn, blocks of as many heads as there are CTAs for each tile of queries.
    EXPECT_LE(layout.args.heads_at_once, deterministic ? 4 : 1);
    EXPECT_GE(layout.args.heads_at_once, 1);
  }
  Kernel of_float32 = kernel;
  of_float32.bf16x3 = of_float32.persistent = true;
  const BackwardLayout copies = backward_layout(p, of_float32, hopper(), 1, true);
  EXPECT_EQ(copies.args.bf16x3_columns, 64);
  constexpr int64_t kRowBytes = 3 * 64 * 2;  // 40 columns, padded, in three parts of bfloat16
  std::vector<std::array<int64_t, 2>> parts = {
      {copies.dq_sum, 2 * 8 * 256 * 64 * 4},
      {copies.dq_semaphore, (copies.args.semaphore_at(1, 7, 255, 1) + 1) * 4},
      {copies.tile_counter, 4},
      {copies.not_finite, 4},
      {copies.bf16x3.q, 2 * 200 * 8 * kRowBytes},
      {copies.bf16x3.k, 2 * 5000 * 2 * kRowBytes},
      {copies.bf16x3.v, 2 * 5000 * 2 * kRowBytes},
      {copies.bf16x3_do, 2 * 200 * 8 * kRowBytes}};
  std::sort(parts.begin(), parts.end());
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_GE(parts[i][0], 0);
    EXPECT_EQ(parts[i][0] % kPartAlignment, 0);
    EXPECT_LE(parts[i][0] + parts[i][1], i + 1 < parts.size() ? parts[i + 1][0] : copies.workspace_size);
  }
  std::vector<char> workspace(static_cast<size_t>(copies.workspace_size));
  BackwardArgs args;
  copies.point_into(workspace.data(), args);
  EXPECT_EQ(args.bf16x3_do - args.bf16x3_q, copies.bf16x3_do - copies.bf16x3.q);
  EXPECT_EQ(reinterpret_cast<char*>(args.not_finite) - args.bf16x3_v, copies.not_finite - copies.bf16x3.v);

  kernel.writes_dq = true;
  const BackwardLayout no_sums = backward_layout(p, kernel, hopper(), 1, true);
  EXPECT_LT(no_sums.workspace_size, 2 * (2 * 8 * 256 * 4 + kPartAlignment) + kPartAlignment);
  kernel.dk_alone = true;  // reads statistics of a whole tile from any row of a sequence on
  const BackwardLayout whole_tiles = backward_layout(p, kernel, hopper(), 1, true);
  EXPECT_GE(whole_tiles.workspace_size, whole_tiles.delta + (2 * 8 * 256 + kernel.tile_m) * 4);
}

TEST(Schedule, SumsOfGradientsThatAreToHaveTheSameBits) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  AttentionProblem p = problem(2, 200, 5000, 8, 2, 40);
  p.pass = Pass::kBackward;
  const std::vector<expr::TensorDeclaration> declared = {{"table", DType::kF32, 3},
                                                         {"unread", DType::kF32, 1}};
  expr::PairExpressions expressions;
  expressions.score = std::get<expr::Expression>(
      expr::parse("s + table[h, q, 3] - table[h, q, 4]", expr::Use::kScore, declared));
  p.expressions = std::make_shared<const expr::PairExpressions>(std::move(expressions));
  NamedTensor table;
  table.tensor.present = true;
  table.tensor.ndim = 3;
  table.tensor.shape = {8, 200, 7};  // one element stands for all queries
  table.tensor.stride = {7, 0, 1};
  table.gradient = table.tensor;
  NamedTensor unread;
  unread.tensor.present = true;
  unread.tensor.ndim = 1;
  unread.tensor.shape = {9};
  unread.tensor.stride = {1};
  p.named = {table, unread};

  EXPECT_TRUE(adds_to_named(p));
  EXPECT_EQ(log2_of_named_count(p), 25) << "2 * 200 * 5,000 * 8 pairs that read two elements";
  EXPECT_LT(backward_layout(p, kernel, hopper(), 1, false).named_sums, 0);
  const BackwardLayout layout = backward_layout(p, kernel, hopper(), 1, true);
  EXPECT_EQ(layout.named_elements, 8 * 7);
  EXPECT_EQ(layout.named_log2_count, 25);
  EXPECT_EQ(layout.named_sums % kPartAlignment, 0);
  EXPECT_GE(layout.workspace_size, layout.named_sums + 8 * 7 * kNamedSumBytes);

  p.seqlen_q = 0;
  EXPECT_FALSE(adds_to_named(p));
  p.seqlen_q = 200;
  p.named[0].gradient.present = false;
  EXPECT_FALSE(adds_to_named(p));
  EXPECT_EQ(backward_layout(p, kernel, hopper(), 1, true).named_elements, 0);
}

TEST(Bf16x3, SixProductsOfPartsTheSmallestFirst) {
  EXPECT_EQ(products_of_parts(1), 1);
  EXPECT_EQ(products_of_parts(kBf16x3Parts), 6);
  std::vector<std::array<int, 2>> seen;
  int before = 2;  // a part is 2^-8 of the one before it
  for (int i = 0; i < 6; ++i) {
    const PartPair pair = part_pair(kBf16x3Parts, i);
    EXPECT_LE(pair.a + pair.b, before);
    before = pair.a + pair.b;
    seen.push_back({pair.a, pair.b});
  }
  std::sort(seen.begin(), seen.end());
  const std::vector<std::array<int, 2>> all = {{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {2, 0}};
  EXPECT_EQ(seen, all);
}

TEST(Schedule, WorkspacesThatCannotBeAreKnown) {
  Kernel kernel = kPlain64;
  kernel.kind = KernelKind::kBackward;
  const AttentionProblem p = problem(0x7fffffff, 1 << 30, 8, 64, 1, 64);
  EXPECT_GE(backward_layout(p, kernel, hopper(), 1, false).workspace_size, Parts::kTooMuch);
}

TEST(Schedule, Grids) {
  ForwardLayout layout = forward_layout(problem(2, 300, 300, 8, 2, 64), kPlain64, hopper(), 2, false);
  Grid grid = default_grid(kPlain64, layout.args);
  EXPECT_EQ(grid.x, 3 * 8 * 2);
  EXPECT_EQ(grid.y, 1);
  EXPECT_EQ(grid.z, 1);
  AttentionProblem wide = problem(2, 300, 300, 8, 2, 64);
  wide.head_dim_v = 576;
  layout = forward_layout(wide, kAnySize, hopper(), 2, false);
  EXPECT_EQ(default_grid(kAnySize, layout.args).z, 9);
  layout = forward_layout(problem(2, 1, 300, 8, 2, 64), kPlain64, hopper(), 2, false);
  EXPECT_EQ(default_grid(kPlain64, layout.args).x, 2 * 2) << "heads of a group packed";

  EXPECT_EQ(grid_cannot_because({0x7fffffff, 65535, 65535}), "");
  EXPECT_NE(grid_cannot_because({int64_t{1} << 31, 1, 1}), "");
  EXPECT_NE(grid_cannot_because({1, 65536, 1}), "");
  EXPECT_NE(grid_cannot_because({.x = -1}), "");
}

TEST(Schedule, HeadsAtOnceFitTheCache) {
  // 16384 keys of 64 + 64 bfloat16: 4 MiB a key head; 3 of them fit a quarter of 50 MiB.
  EXPECT_EQ(heads_at_once(problem(8, 16384, 16384, 32, 8, 64), false, 50 << 20), 3 * 4);
  EXPECT_EQ(heads_at_once(problem(8, 16384, 16384, 32, 8, 64), true, 50 << 20), 3);
  EXPECT_EQ(heads_at_once(problem(1, 128, 128, 4, 4, 64), false, 50 << 20), 4) << "no more than there are";
  EXPECT_EQ(heads_at_once(problem(1, 1, 1 << 30, 4, 4, 64), false, 50 << 20), 1) << "no fewer than one";
  EXPECT_EQ(heads_at_once(problem(0, 1, 16, 4, 4, 64), false, 50 << 20), 1);
}

}  // namespace
}  // namespace fovea::cuda
