// Sizes: every sequence length around block edges, every head size, nothing at all, decoding.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

constexpr Type kTypes[] = {Type::kF32, Type::kF16, Type::kBF16};

class SequenceLengths : public testing::TestWithParam<int64_t> {};

TEST_P(SequenceLengths, Conform) {
  for (int64_t length = GetParam(); length < GetParam() + 13; ++length) {
    ProblemSpec spec;
    spec.type = kTypes[length % 3];
    spec.seqlen_q = length;
    spec.seqlen_k = length;
    spec.head_dim = spec.head_dim_v = 16;
    spec.placement = Placement::kPageEnd;
    expect_conformance(spec);
    spec.causal = true;
    spec.type = kTypes[(length + 1) % 3];
    spec.seqlen_k = 131 - length;
    expect_conformance(spec);
  }
}
INSTANTIATE_TEST_SUITE_P(From, SequenceLengths, testing::Range(int64_t{1}, int64_t{131}, int64_t{13}));

class HeadSizes : public testing::TestWithParam<int64_t> {};

TEST_P(HeadSizes, Conform) {
  for (int64_t size = GetParam(); size < GetParam() + 48; ++size) {
    ProblemSpec spec;
    spec.type = kTypes[size % 3];
    spec.seqlen_q = 3 + size % 5;
    spec.seqlen_k = 19;
    spec.causal = size % 2 == 0;
    spec.head_dim = size;
    spec.head_dim_v = size % 4 == 0 ? size : 1 + (size * 7 + 3) % 576;
    spec.placement = Placement::kPageEnd;
    expect_conformance(spec);
  }
}
INSTANTIATE_TEST_SUITE_P(From, HeadSizes, testing::Range(int64_t{1}, int64_t{577}, int64_t{48}));

/// Several blocks in each dimension, and more threads than work items.
class ManyBlocks : public testing::TestWithParam<int64_t> {};

TEST_P(ManyBlocks, Conform) {
  ProblemSpec spec;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seqlen_q = 263;
  spec.seqlen_k = 301;
  spec.head_dim = spec.head_dim_v = GetParam();
  spec.causal = true;
  expect_conformance_of_all_types(spec, many_threads());
  spec.causal = false;
  spec.window_left = 100;
  spec.window_right = 60;
  spec.layout = Layout::kMixed;
  expect_conformance_of_all_types(spec, many_threads());
}
INSTANTIATE_TEST_SUITE_P(HeadSize, ManyBlocks, testing::Values(40, 64, 128, 192));

/// Short heads, and enough of them for six tiles and more on each of the emulated device's multiprocessors.
TEST(Shapes, ManyShortHeads) {
  ProblemSpec spec;
  spec.type = Type::kBF16;
  spec.heads_q = spec.heads_kv = 22;
  spec.head_dim = spec.head_dim_v = 64;
  spec.seqlen_q = 130;
  spec.seqlen_k = 301;
  spec.causal = true;
  expect_conformance(spec, many_threads());
  spec.causal = false;
  spec.heads_q = spec.heads_kv = 13;
  spec.head_dim = spec.head_dim_v = 128;
  spec.seqlen_q = 70;
  spec.seqlen_k = 520;
  expect_conformance(spec, many_threads());
}

class Decode : public testing::TestWithParam<int64_t> {};

TEST_P(Decode, Conform) {
  ProblemSpec spec;
  spec.heads_q = 4;
  spec.heads_kv = 1;
  spec.seqlen_k = GetParam();
  spec.head_dim = spec.head_dim_v = 64;
  CheckOptions options = many_threads();
  options.backward = GetParam() < 10'000;
  expect_conformance_of_all_types(spec, options);
}
INSTANTIATE_TEST_SUITE_P(Keys, Decode, testing::Values(5000, 16384, 70001));

TEST(Shapes, DecodeOfAGroup) {
  ProblemSpec spec;
  spec.batch = 3;
  spec.heads_q = 16;
  spec.heads_kv = 2;
  spec.seqlen_q = 2;
  spec.seqlen_k = 900;
  spec.causal = true;
  spec.head_dim = spec.head_dim_v = 80;
  spec.used_k = {900, 1, 333};
  expect_conformance_of_all_types(spec, many_threads());
}

TEST(Shapes, DecodeWithAWindowAndASink) {
  ProblemSpec spec;
  spec.heads_q = 8;
  spec.heads_kv = 2;
  spec.seqlen_k = 3000;
  spec.window_left = 127;
  spec.window_right = 0;
  spec.sink = spec.dsink = true;
  spec.head_dim = spec.head_dim_v = 64;
  expect_conformance_of_all_types(spec, many_threads());
}

/// A packed batch of decoding steps and prompts of very different lengths.
TEST(Shapes, PackedPromptsAndSteps) {
  ProblemSpec spec;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = 32;
  spec.lengths_q = {1, 200, 0, 1, 17, 1};
  spec.lengths_k = {400, 200, 5, 1, 90, 0};
  spec.seqlen_q = 200;
  spec.seqlen_k = 400;
  spec.causal = true;
  expect_conformance_of_all_types(spec, many_threads());
}

/// A mask and a window of so many keys to the left, which leave holes in tiles.
void leave_holes(ProblemSpec& spec, int64_t left) {
  spec.block_mask = true;
  spec.block_q = 16;
  spec.block_k = 32;
  spec.block_mask_density = 0.3;
  spec.window_left = left;
  spec.window_right = 3;
}

/// Six key heads of eight panels: CPUs divide them into tiles of eight panels to one, by the number of threads.
ProblemSpec many_panels() {
  ProblemSpec spec;
  spec.batch = 3;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = 32;
  spec.seqlen_q = 177;
  spec.seqlen_k = 225;
  return spec;
}

TEST(Shapes, TilesOfEveryHeight) {
  ProblemSpec spec = many_panels();
  CheckOptions options = forward_only();
  options.threads = {1, 2, 4, 16, 24};
  for (const bool causal : {false, true}) {
    spec.causal = causal;
    expect_conformance_of_all_types(spec, options);
  }
}

/// Rows that see a key or value that is not finite go another way than others of their tile.
TEST(Shapes, OddKeysInTilesOfEveryHeight) {
  ProblemSpec spec = many_panels();
  spec.causal = true;
  CheckOptions options = forward_only();
  options.threads = {1, 2, 4, 16, 24};
  for (const Role role : {Role::kK, Role::kV}) {
    for (const double odd :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      for (const bool alibi : {false, true}) {
        spec.alibi = alibi;
        expect_conformance_of_all_types(spec, options, [&](OwnedProblem& x) {
          x[role].set({0, 190, 0, 3}, odd);
          x[role].set({1, 20, 1, 5}, odd);
        });
      }
    }
  }
}

/// Rows look ahead for what ALiBi adds, and leave out what a mask hides.
TEST(Shapes, TermsOfTilesOfEveryHeight) {
  ProblemSpec spec = many_panels();
  spec.alibi = true;
  spec.logit = 2;
  CheckOptions options;
  options.threads = {1, 2, 4, 16, 24};
  for (spec.data_seed = 1; spec.data_seed < 5; ++spec.data_seed)
    expect_conformance_of_all_types(spec, options);
  leave_holes(spec, 40);
  expect_conformance_of_all_types(spec, options);
}

/// A mask of numbers that rise to its edge, times a slope.
TEST(Shapes, SteepElementsOfTilesOfEveryHeight) {
  const KnownExpression steep = {
      .name = "steep",
      .text = "s + slope[h] * m[b, 0, q, k]",
      .tensors = {{"slope",
                   Elements::kReal,
                   {kHeads},
                   [](Random&, const Index& at) { return std::exp2(-2.0 * static_cast<double>(at[0])); }},
                  {"m",
                   Elements::kReal,
                   {kBatches, 1, kQueries, kKeys},
                   [](Random&, const Index& at) {
                     const auto behind = static_cast<double>(at[3] - at[2] - 48 * at[0]);
                     return behind > 0 ? -std::numeric_limits<double>::infinity() : behind;
                   }}},
      .score = [](NamedValues& t, const Pair& p, float s) {
        const Index index = {p.b, 0, p.q, p.k};
        const float slope = t.real(0, {p.h}), m = t.real(1, index);
        return Scored{s + slope * m, 1, {{{0, {p.h}, m}, {1, index, slope}}}};
      }};
  ProblemSpec spec;
  spec.score = &steep;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = 64;
  spec.seqlen_q = 177;
  spec.seqlen_k = 250;
  CheckOptions options;
  options.threads = {1, 2, 3, 5, 8};
  for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
    spec.named_type = type;
    expect_conformance_of_all_types(spec, options);
  }
}

/// A bias over more keys than a run has, of which a mask and a window leave holes.
TEST(Shapes, BiasOfTilesOfEveryHeight) {
  ProblemSpec spec;
  spec.heads_q = 2;
  spec.heads_kv = 1;
  spec.seqlen_q = 203;
  spec.seqlen_k = 2250;
  spec.bias = true;
  spec.bias_broadcast = 0;
  CheckOptions options;
  options.threads = {1, 2, 3, 5, 8};
  options.backward = false;
  for (const int64_t size : {72, 128}) {
    spec.head_dim = size;
    spec.head_dim_v = 168 - size;
    expect_conformance_of_all_types(spec, options);
  }
  leave_holes(spec, 900);
  expect_conformance_of_all_types(spec, options);
  spec.seqlen_k = 250;  // keys of one run
  spec.bias_values = BiasValues::kSomeMinusInfinity;
  spec.bias_broadcast = 0b0100;
  expect_conformance_of_all_types(spec, options);
}

ProblemSpec with_everything_that_reduces() {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seqlen_q = spec.seqlen_k = 5;
  spec.sink = spec.dsink = spec.dlse = true;
  spec.bias = spec.dbias = true;
  spec.bias_broadcast = 0b1111;
  return spec;
}

TEST(Shapes, NoBatch) {
  ProblemSpec spec = with_everything_that_reduces();
  spec.batch = 0;
  expect_conformance_of_all_types(spec);
}
TEST(Shapes, NoQueries) {
  ProblemSpec spec = with_everything_that_reduces();
  spec.seqlen_q = 0;
  expect_conformance_of_all_types(spec);
}
TEST(Shapes, NoKeys) {
  ProblemSpec spec = with_everything_that_reduces();
  spec.seqlen_k = 0;
  expect_conformance_of_all_types(spec);
  spec.sink = spec.dsink = false;
  expect_conformance_of_all_types(spec);
}
TEST(Shapes, PackedButEmpty) {
  ProblemSpec spec = with_everything_that_reduces();
  spec.lengths_q = {0, 0, 0};
  spec.lengths_k = {0, 0, 0};
  expect_conformance_of_all_types(spec);
  spec.spare_rows = 3;
  expect_conformance_of_all_types(spec);
}
TEST(Shapes, AllRowsWithoutKeys) {
  ProblemSpec spec = with_everything_that_reduces();
  spec.used_k = {0, 0};
  expect_conformance_of_all_types(spec);
  spec.used_k.clear();
  spec.mask = true;
  spec.mask_broadcast = 0b1111;
  spec.mask_density = 0;
  expect_conformance_of_all_types(spec);
  spec.sink = spec.dsink = false;
  expect_conformance_of_all_types(spec);
}
TEST(Shapes, SmallestProblem) {
  ProblemSpec spec;
  spec.head_dim = spec.head_dim_v = 1;
  expect_conformance_of_all_types(spec);
}

/// Windows of every small width, with more and with fewer queries than keys.
TEST(Shapes, Windows) {
  for (const auto& [sq, sk] : {std::pair{20, 20}, std::pair{31, 9}, std::pair{9, 31}, std::pair{70, 101}}) {
    for (const int64_t left : {-1, 0, 1, 16, 63}) {
      for (const int64_t right : {-1, 0, 2, 48}) {
        ProblemSpec spec;
        spec.type = kTypes[(left + right + 2) % 3];
        spec.seqlen_q = sq;
        spec.seqlen_k = sk;
        spec.window_left = left;
        spec.window_right = right;
        expect_conformance(spec);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::conformance
