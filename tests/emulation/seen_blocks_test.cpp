// The look at the pairs (seen_blocks.cuh), compiled for kSeesOfSeenBlocks: blocks and pairs against a loop over all of them, for
// queries and keys that are alike, in groups, or neither; with windows, lengths, heads that differ, and tiles and blocks of many sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

#include "cuda/kernels/seen_blocks.cuh"
#include "emulation/scheduler.hpp"

namespace fovea::emulation {
namespace {

constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2;

/// What groups and marks are like.
enum class Data : uint8_t { kOne, kDocuments, kFewDocuments, kRandom, kDifferent };
constexpr std::array kAllData = {Data::kOne, Data::kDocuments, Data::kFewDocuments, Data::kRandom,
                                 Data::kDifferent};

struct Case {
  int queries, keys, tile_rows, block_rows;
  int window_left = -1, window_right = -1;
  bool heads_differ = false, keeps_pairs = true;

  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << c.queries << " queries, " << c.keys << " keys, tiles of " << c.tile_rows << ", blocks of "
               << c.block_rows << ", window " << c.window_left << ", " << c.window_right
               << (c.heads_differ ? ", heads differ" : "") << (c.keeps_pairs ? "" : ", without pairs");
  }
};
constexpr std::array kCases = {
    Case{130, 200, 64, 64},
    Case{130, 200, 64, 64, 20, 5},
    Case{100, 2200, 64, 64, -1, 0},
    Case{70, 300, 64, 48},
    Case{70, 300, 64, 80, 100, -1},
    Case{150, 260, 128, 64, -1, -1, false, false},
    Case{150, 260, 80, 128, -1, -1, true},
    Case{150, 260, 64, 128, 60, 10, true, false},
};

class SeenBlocks : public testing::TestWithParam<Case> {
 protected:
  std::vector<int32_t> values(int length, Data data) {
    std::vector<int32_t> x;
    for (int b = 0; b < kBatch; ++b) {
      int document = 0;
      for (int i = 0; i < length; ++i) {
        const auto chance = static_cast<int>(random_() % 1000);
        document += chance < (data == Data::kDocuments ? 25 : 6) ? 1 : 0;
        const bool is_document = data == Data::kDocuments || data == Data::kFewDocuments;
        x.push_back(data == Data::kOne ? 0 : is_document ? document : data == Data::kRandom ? chance % 3 : i);
      }
    }
    return x;
  }

  void make(Data of_queries, Data of_keys) {
    const Case& c = GetParam();
    group_ = values(c.queries, of_queries);
    mark_ = values(c.keys, of_keys);
    shift_.assign(kHeads, 0);
    for (int h = 0; c.heads_differ && h < kHeads; ++h) shift_[static_cast<size_t>(h)] = h % 3;
    used_q_ = {c.queries, static_cast<int32_t>(random_() % static_cast<unsigned>(c.queries + 1))};
    used_k_ = {static_cast<int32_t>(random_() % static_cast<unsigned>(c.keys + 1)), c.keys};
  }

  /// With kKeys tiles are of keys.
  template <bool kKeys, class Args>
  void look(Args& args) {
    const Case& c = GetParam();
    tile::AttentionParams& p = args.p;
    p.batch = kBatch;
    p.heads_q = kHeads;
    p.heads_kv = kHeadsKv;
    p.group = kHeads / kHeadsKv;
    p.seqlen_q = c.queries;
    p.seqlen_k = c.keys;
    p.seqused_q = used_q_.data();
    p.seqused_k = used_k_.data();
    p.window_left = c.window_left;
    p.window_right = c.window_right;
    p.expression.at[0] = tensor(group_, c.queries);
    p.expression.at[1] = tensor(mark_, c.keys);
    p.expression.at[2] = tensor(shift_, 1);
    tile::SeenBlocksView& view = args.seen;
    view.batches = kBatch;
    view.heads = !c.heads_differ ? 1 : kKeys ? kHeadsKv : kHeads;
    view.pair_heads = c.heads_differ ? kHeads : 1;
    view.tile_rows = c.tile_rows;
    view.block_rows = c.block_rows;
    const int rows = kKeys ? c.keys : c.queries, walked = kKeys ? c.queries : c.keys;
    view.tiles = (rows + c.tile_rows - 1) / c.tile_rows;
    view.blocks = (walked + c.block_rows - 1) / c.block_rows;
    words_.assign(static_cast<size_t>(2 * view.size()), 0x3c3c3c3c);
    view.data = words_.data();
    pairs_.assign(
        static_cast<size_t>(kBatch * view.pair_heads * view.tiles * view.blocks * view.words_of_block()),
        0x3c3c3c3c);
    view.pairs = c.keeps_pairs ? pairs_.data() : nullptr;
    run({"seen_blocks", {static_cast<unsigned>(view.size()), 1, 1}, cuda::kSeenBlocksThreads, 0, true},
        [&] { cuda::seen_blocks(args); });
  }
  static tile::NamedTensor tensor(const std::vector<int32_t>& x, int row) {
    tile::NamedTensor t;
    t.data = reinterpret_cast<const char*>(x.data());
    t.stride[0] = row;
    t.stride[1] = 1;
    t.extent[0] = t.extent[1] = 1 << 20;
    return t;
  }

  bool sees(int b, int h, int q, int k) const {
    const Case& c = GetParam();
    return group_[static_cast<size_t>(b * c.queries + q)] + shift_[static_cast<size_t>(h)] ==
           mark_[static_cast<size_t>(b * c.keys + k)];
  }
  bool in_window(int b, int q, int k) const {
    const Case& c = GetParam();
    const int distance = k - (q + used_k_[static_cast<size_t>(b)] - used_q_[static_cast<size_t>(b)]);
    return (c.window_left < 0 || distance >= -c.window_left) &&
           (c.window_right < 0 || distance <= c.window_right);
  }
  /// The bit of row `row` and column `column` of a block (warp/pair_bits.cuh).
  static bool pair_bit(const uint32_t* block, const tile::SeenBlocksView& view, int row, int column) {
    const int lane = row % 8 * 4 + column % 8 / 2;
    const uint32_t word = block[row / 16 * view.words_of_rows() + column / 64 * 32 + lane];
    const int bit = row % 16 / 8 + 16 * (column % 2) + 8 * (column % 64 / 32) + 2 * (column % 32 / 8);
    return (word >> bit & 1) != 0;
  }

  template <bool kKeys>
  void expect_block(const tile::SeenBlocksView& view, int b, int h, int tile, int block) const {
    const Case& c = GetParam();
    const int used_rows = (kKeys ? used_k_ : used_q_)[static_cast<size_t>(b)],
              used_columns = (kKeys ? used_q_ : used_k_)[static_cast<size_t>(b)];
    const int rows = std::min((tile + 1) * c.tile_rows, used_rows),
              columns = std::min((block + 1) * c.block_rows, used_columns);
    const bool shares = kKeys && c.heads_differ;
    const int head0 = shares ? h * (kHeads / kHeadsKv) : h, heads = head0 + (shares ? kHeads / kHeadsKv : 1);
    bool any = false, some = false;
    const auto for_each_pair = [&](auto&& visit) {
      for (int head = head0; head < heads; ++head)
        for (int i = tile * c.tile_rows; i < rows; ++i)
          for (int j = block * c.block_rows; j < columns; ++j)
            visit(head, i, j, sees(b, head, kKeys ? j : i, kKeys ? i : j));
    };
    for_each_pair([&](int, int i, int j, bool seen) {
      if (!in_window(b, kKeys ? j : i, kKeys ? i : j)) return;
      any = any || seen;
      some = some || !seen;
    });
    const auto bit = [&](int64_t behind) {
      const auto word = static_cast<size_t>(view.offset(b, h, tile) + block / 32 + behind);
      return (words_[word] >> (block % 32) & 1) != 0;
    };
    ASSERT_EQ(bit(0), any) << c << ": block " << block << " of tile " << tile << " of sequence " << b;
    ASSERT_EQ(bit(view.size()), some)
        << c << ": block " << block << " of tile " << tile << " of sequence " << b;
    if (!c.keeps_pairs || !any || !some) return;
    for_each_pair([&](int head, int i, int j, bool seen) {
      const uint32_t* at =
          pairs_.data() + view.pairs_offset(b, head, tile) + int64_t{block} * view.words_of_block();
      ASSERT_EQ(pair_bit(at, view, i % c.tile_rows, j % c.block_rows), seen)
          << c << ": row " << i << ", column " << j << " of head " << head << " of sequence " << b;
    });
  }

  template <bool kKeys, class Args>
  void expect_all() {
    for (const Data of_queries : kAllData) {
      for (const Data of_keys : kAllData) {
        make(of_queries, of_keys);
        Args args;
        look<kKeys>(args);
        for (int b = 0; b < kBatch; ++b)
          for (int h = 0; h < args.seen.heads; ++h)
            for (int tile = 0; tile < args.seen.tiles; ++tile)
              for (int block = 0; block < args.seen.blocks; ++block) {
                expect_block<kKeys>(args.seen, b, h, tile, block);
                if (HasFatalFailure()) return;
              }
      }
    }
  }

  std::mt19937 random_{3};
  std::vector<int32_t> group_, mark_, shift_, used_q_, used_k_;
  std::vector<uint32_t> words_, pairs_;
};

TEST_P(SeenBlocks, OfTilesOfQueries) {
  expect_all<false, cuda::ForwardArgs>();
}
TEST_P(SeenBlocks, OfTilesOfKeys) {
  expect_all<true, cuda::BackwardArgs>();
}
INSTANTIATE_TEST_SUITE_P(Case, SeenBlocks, testing::ValuesIn(kCases));

}  // namespace
}  // namespace fovea::emulation
