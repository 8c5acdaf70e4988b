// Which pairs the panels of a forward see, by `sees`: how much of each block, and words of them (kSeenKeys).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

#include "cpu/panel.hpp"

namespace fovea::cpu::forward_pass {

// Keys a block: the score tile (128 x 48 floats = 24 KB) stays in a 32 KB first-level cache while it is
// written, turned into weights and read again.
inline constexpr int64_t kBlockKeys = kAttendKeys;
// Panels of a tile in any table: Ops::max_panels says how many each has.
inline constexpr int64_t kMaxPanels = 8;
// Words of the pairs of a block and a panel.
inline constexpr int64_t kBlockWords = kBlockKeys / kSeenKeys * kPanel;

/// Of panels and blocks, those of a panel one behind the other.
struct SeenTable {
  Seen* seen = nullptr;
  /// Null: not wanted. Those of a panel that sees all or nothing are not known, nor those of blocks before the first of which it sees some, and
  /// behind the last.
  uint32_t* words = nullptr;
  uint32_t* strips = nullptr;  ///< of blocks whose words are known, what they sum up to
  int64_t blocks = 0;          ///< from one panel to the next

  Seen& seen_of(int64_t panel, int64_t block) const { return seen[panel * blocks + block]; }
  uint32_t* words_of(int64_t panel, int64_t block) const {
    return words + (panel * blocks + block) * kBlockWords;
  }
  uint32_t* strips_of(int64_t panel, int64_t block) const { return strips + panel * blocks + block; }
  /// Sums up the words that are known.
  void sum_up(int64_t panel, int64_t count) const;
  SeenTable from(int64_t panel, int64_t block) const {
    if (words == nullptr) return {&seen_of(panel, block), nullptr, nullptr, blocks};
    return {&seen_of(panel, block), words_of(panel, block), strips_of(panel, block), blocks};
  }
  /// How much a panel sees of the first `count` blocks.
  Seen seen_by(int64_t panel, int64_t count) const;
  /// Those of the first `count` whose words of a panel are known: from the first of which it sees some on to the last.
  tile::Range blocks_with_words(int64_t panel, int64_t count) const;
};

/// Finds out which pairs of one key head are seen.
struct SeenSearch {
  const Ops& ops;
  const Group& group;
  const ScoreTerms& terms;
  SeenBlocks& blocks;
  float* tile;  ///< of a block and a panel
  char* registers;

  /// Of `panels` panels, at most kMaxPanels, with keys [j0, end), from the first block of the table on. False where nothing is seen.
  bool look(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end, const SeenTable& table) const;

 private:
  bool look_at_elements(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end,
                        const SeenTable& table) const;
  bool look_at_classes(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end,
                       const SeenTable& table) const;
  void words_by_program(const Lanes& lanes, int64_t j0, int64_t n, uint32_t* words) const;
  void words_of_block(const Lanes& lanes, Seen seen, int64_t j0, int64_t n, uint32_t* words) const;
};

/// The same of whole sequences, found out once for all heads, where `sees` does not tell them apart. Worth it where a step is fast.
class SharedSeen {
 public:
  static constexpr int64_t kMostBytes = 64 << 20;  // of a last-level cache

  SharedSeen() = default;
  SharedSeen(const AttentionProblem& p, const Ops& ops, const PairPrograms& programs);

  bool present() const { return batch_ > 0; }
  int64_t bytes() const;
  void set_memory(void* memory);
  /// What threads find out, each item once.
  int64_t items() const { return batch_ * items_of_batch(); }
  void find(const AttentionProblem& p, const Buffers& buffers, const ScoreTerms& terms, SeenBlocks& blocks,
            const Ops& ops, float* tile, char* registers, int64_t item) const;
  /// Returns when all is known of the sequence. What is not is in the hands of threads that run.
  void wait_for(const Group& group) const {
    if (!present()) return;
    const std::atomic_ref found(found_[group.batch]);
    while (found.load(std::memory_order_acquire) < items_of_batch()) std::this_thread::yield();
  }
  /// From a panel and a key on, a multiple of kBlockKeys.
  SeenTable table(const Group& group, int64_t panel, int64_t key) const {
    return table_.from(group.batch * panels_ + panel, key / kBlockKeys);
  }

 private:
  int64_t items_of_batch() const { return ceil_div(panels_, kMaxPanels); }

  int64_t batch_ = 0, panels_ = 0;  ///< panels of a sequence
  SeenTable table_;
  int32_t* found_ = nullptr;  ///< items of each sequence
};

}  // namespace fovea::cpu::forward_pass
