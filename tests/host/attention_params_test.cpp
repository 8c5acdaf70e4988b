// From AttentionParams kernels compute the same lengths, key ranges and dropout as the CPU does from the problem.
#include "tile/attention_params.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cpu/sequence.hpp"
#include "cuda/launch/params.hpp"
#include "tile/kv_range.hpp"

namespace fovea {
namespace {

/// One problem in both forms.
struct Both {
  AttentionProblem problem;
  Buffers buffers;
  tile::AttentionParams params;
  std::vector<int32_t> cu_q, cu_k, used_q, used_k;

  void set(bool packed, bool with_used_q, bool with_used_k) {
    problem.packed = problem.packed_k = packed;
    params.batch = static_cast<int>(problem.batch);
    params.seqlen_q = static_cast<int>(problem.seqlen_q);
    params.seqlen_k = static_cast<int>(problem.seqlen_k);
    params.total_q = problem.total_q;
    params.total_k = problem.total_k;
    const auto give = [&](Role role, std::vector<int32_t>& values, const int32_t*& pointer, bool given) {
      buffers.data[index_of(role)] = given ? values.data() : nullptr;
      pointer = given ? values.data() : nullptr;
    };
    give(Role::kCuSeqlensQ, cu_q, params.cu_seqlens_q, packed);
    give(Role::kCuSeqlensK, cu_k, params.cu_seqlens_k, packed);
    give(Role::kSeqUsedQ, used_q, params.seqused_q, with_used_q);
    give(Role::kSeqUsedK, used_k, params.seqused_k, with_used_k);
  }
};

TEST(AttentionParams, SpansOfSequencesAreThoseOfTheCpu) {
  for (int spare = 0; spare <= 3; spare += 3) {
    Both both;
    both.cu_q = {0, 5, 5, 12, 13};
    both.cu_k = {0, 0, 7, 9, 20};
    both.used_q = {3, 0, 7, 1};
    both.used_k = {0, 7, 1, 8};
    both.problem.batch = 4;
    both.problem.seqlen_q = 7;
    both.problem.seqlen_k = 11;
    for (int flags = 0; flags < 8; ++flags) {
      const bool packed = (flags & 1) != 0;
      both.problem.total_q = packed ? 13 + spare : 4 * 7;
      both.problem.total_k = packed ? 20 + spare : 4 * 11;
      both.set(packed, (flags & 2) != 0, (flags & 4) != 0);
      for (int b = 0; b < 4; ++b) {
        SCOPED_TRACE("flags " + std::to_string(flags) + ", sequence " + std::to_string(b));
        const cpu::SequenceSpan expected = cpu::sequence_span(both.problem, both.buffers, b);
        const tile::SequenceSpan span = tile::sequence_span(both.params, b);
        EXPECT_EQ(span.row_q, expected.row_q);
        EXPECT_EQ(span.row_k, expected.row_k);
        EXPECT_EQ(span.length_q, expected.length_q);
        EXPECT_EQ(span.length_k, expected.length_k);
        EXPECT_EQ(span.used_q, expected.used_q);
        EXPECT_EQ(span.used_k, expected.used_k);
      }
    }
  }
}

TEST(AttentionParams, KeyAndQueryRangesAreThoseOfTheWindow) {
  for (int sq = 0; sq <= 7; ++sq) {
    for (int sk = 0; sk <= 7; ++sk) {
      for (int left = -1; left <= 9; ++left) {
        for (int right = -1; right <= 9; ++right) {
          const tile::Window window{sq, sk, left, right};
          tile::AttentionParams p;
          p.window_left = left;
          p.window_right = right;
          const tile::SequenceSpan span{0, 0, 9, 9, sq, sk};  // the used lengths count
          for (int i = 0; i < sq; ++i) {
            const tile::Span32 keys = tile::keys_of(p, span, i);
            ASSERT_EQ((tile::Range{keys.begin, keys.end}), window.keys_of(i));
          }
          for (int begin = 0; begin < sk; ++begin) {
            for (int end = begin + 1; end <= sk; ++end) {
              const tile::Span32 queries = tile::queries_of_any(p, span, begin, end);
              ASSERT_EQ((tile::Range{queries.begin, queries.end}), window.queries_of_any(begin, end));
            }
          }
        }
      }
    }
  }
}

/// The longest sequences and widest windows that a launch accepts: sums stay within 32 bits.
TEST(AttentionParams, RangesOfLongSequences) {
  tile::AttentionParams p;
  constexpr int kLong = 1 << 29;
  p.window_left = kLong;
  p.window_right = kLong;
  const tile::SequenceSpan span{0, 0, kLong, kLong, kLong, kLong};
  const tile::Window window{kLong, kLong, kLong, kLong};
  for (const int i : {0, 1, kLong / 2, kLong - 1}) {
    const tile::Span32 keys = tile::keys_of(p, span, i);
    EXPECT_EQ((tile::Range{keys.begin, keys.end}), window.keys_of(i));
    const tile::Span32 queries = tile::queries_of_any(p, span, i, i + 1);
    EXPECT_EQ((tile::Range{queries.begin, queries.end}), window.queries_of_any(i, i + 1));
  }
}

TEST(AttentionParams, DropoutIsThatOfTheCpu) {
  constexpr uint64_t kSeed = 0x0123456789ABCDEFu, kOffset = 0xFEDCBA9876543210u;
  const tile::Dropout expected(0.3, kSeed, kOffset);
  tile::AttentionParams p;
  p.dropout_threshold = expected.threshold;
  p.dropout_keep_scale = expected.keep_scale;
  p.seed = kSeed;
  p.offset = kOffset;
  int64_t state[2] = {static_cast<int64_t>(kSeed), static_cast<int64_t>(kOffset)};
  for (const bool from_state : {false, true}) {
    if (from_state) {
      p.seed = p.offset = 1;
      p.rng_state = state;
      p.rng_state_is_input = true;
    }
    const tile::Dropout dropout = tile::dropout_of(p);
    EXPECT_EQ(dropout.threshold, expected.threshold);
    EXPECT_EQ(dropout.keep_scale, expected.keep_scale);
    for (int i = 0; i < 5; ++i) {
      for (int j = 0; j < 40; ++j) EXPECT_EQ(dropout.keep(3, i, j), expected.keep(3, i, j));
    }
  }
}

TEST(AttentionParams, PlaceInTheDropoutOfALargerProblem) {
  tile::AttentionParams p;
  p.heads_q = 5;
  Buffers buffers;
  cuda::bind(p, buffers, {});
  EXPECT_EQ(tile::dropout_head(p, 2, 3), 13u);
  EXPECT_TRUE(tile::dropout_of(p).keep(13, 1, 2));
  buffers.dropout = {.heads = 12, .first_head = 40, .first_query = 32, .first_key = 160};
  cuda::bind(p, buffers, {});
  EXPECT_EQ(tile::dropout_head(p, 2, 3), 67u);
  p.dropout_threshold = tile::Dropout(0.5, 0, 0).threshold;
  const tile::Dropout whole(0.5, 0, 0), part = tile::dropout_of(p);
  for (uint32_t i = 0; i < 5; ++i) {
    for (uint32_t j = 0; j < 40; ++j) EXPECT_EQ(part.keep(67, i, j), whole.keep(67, 32 + i, 160 + j));
  }
}

TEST(AttentionParams, Offsets) {
  EXPECT_EQ((tile::RowsView{nullptr, int64_t{1} << 40, 1000, 10}.offset(2, 3, 4)), (int64_t{2} << 40) + 3040);
  EXPECT_EQ((tile::StatsView{nullptr, 1000, int64_t{1} << 33, 1}.offset(2, 3, 4)), 2004 + (int64_t{3} << 33));
  EXPECT_EQ((tile::PairsView{nullptr, 0, 100, int64_t{1} << 32, 1}.offset(7, 2, 3, 4)),
            204 + (int64_t{3} << 32));
}

}  // namespace
}  // namespace fovea
