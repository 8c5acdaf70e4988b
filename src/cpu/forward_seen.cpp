// Looks at blocks by their intervals, at strips of those that are seen in part, and at pairs by elements or a program.
#include "cpu/forward_seen.hpp"

#include <algorithm>
#include <limits>

namespace fovea::cpu::forward_pass {

Seen SeenTable::seen_by(int64_t panel, int64_t count) const {
  const Seen first = seen_of(panel, 0);
  for (int64_t i = 1; i < count; ++i)
    if (seen_of(panel, i) != first) return Seen::kSome;
  return first;
}

tile::Range SeenTable::blocks_with_words(int64_t panel, int64_t count) const {
  if (seen_by(panel, count) != Seen::kSome) return {};
  tile::Range known{0, count};
  while (seen_of(panel, known.begin) == Seen::kNone) ++known.begin;
  while (seen_of(panel, known.end - 1) == Seen::kNone) --known.end;
  return known;
}

void SeenTable::sum_up(int64_t panel, int64_t count) const {
  const tile::Range known = blocks_with_words(panel, count);
  for (int64_t i = known.begin; i < known.end; ++i)
    *strips_of(panel, i) = strips_of_words(words_of(panel, i));
}

namespace {

/// Those of a block that is seen in all of its pairs, or in none.
void fill_words(Seen seen, uint32_t* words) {
  std::fill_n(words, kBlockWords, seen == Seen::kAll ? ~uint32_t{0} : uint32_t{0});
}

}  // namespace

/// Which pairs of a panel with n keys from j0 on are seen, by the program.
void SeenSearch::words_by_program(const Lanes& lanes, int64_t j0, int64_t n, uint32_t* words) const {
  ProgramInputs in = terms.inputs_of(group, lanes, KeyPositions(j0), n);
  in.tiles = {tile, nullptr, nullptr};
  in.scratch = registers;
  ops.run_program(terms.programs.shown, in);
  ops.seen_of_scores(tile, n, words);
}

/// The same of a block. Most strips of one that is seen in part are seen in all of their pairs or in none.
void SeenSearch::words_of_block(const Lanes& lanes, Seen seen, int64_t j0, int64_t n, uint32_t* words) const {
  if (seen != Seen::kSome) return fill_words(seen, words);
  if (!blocks.remembers()) return words_by_program(lanes, j0, n, words);
  for (int64_t j = 0; j < n; j += kSeenKeys, words += kPanel) {
    const int64_t keys = std::min(kSeenKeys, n - j);
    const Seen strip = seen_of(group, lanes.first_row, kPanel, j0 + j, keys, blocks);
    if (strip == Seen::kSome) {
      words_by_program(lanes, j0 + j, keys, words);
    } else {
      std::fill_n(words, kPanel, strip == Seen::kAll ? ~uint32_t{0} : uint32_t{0});
    }
  }
}

/// Elements are read, and blocks known by their words.
bool SeenSearch::look_at_elements(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end,
                                  const SeenTable& table) const {
  bool any = false;
  for (int64_t x = 0; x < panels; ++x) {
    seen_by_elements(ops, group, lanes[x], terms, j0, end - j0, table.words_of(x, 0));
    for (int64_t key = j0, i = 0; key < end; key += kBlockKeys, ++i) {
      table.seen_of(x, i) = seen_of_words(table.words_of(x, i), std::min(kBlockKeys, end - key));
      any |= table.seen_of(x, i) != Seen::kNone;
    }
    table.sum_up(x, ceil_div(end - j0, kBlockKeys));
  }
  return any;
}

namespace {

/// The least and the largest class.
struct ClassRange {
  int32_t least = std::numeric_limits<int32_t>::max(), largest = std::numeric_limits<int32_t>::min();

  ClassRange() = default;
  ClassRange(const int32_t* classes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      least = std::min(least, classes[i]);
      largest = std::max(largest, classes[i]);
    }
  }
  /// How much of these queries and those keys see each other.
  Seen with(const ClassRange& other) const {
    if (largest < other.least || other.largest < least) return Seen::kNone;
    const bool one = least == largest && other.least == other.largest;
    return one ? Seen::kAll : Seen::kSome;
  }
};

}  // namespace

/// Classes are read. Blocks are known by their words, where ranges of classes do not tell.
bool SeenSearch::look_at_classes(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end,
                                 const SeenTable& table) const {
  const auto classes_of = [&](const KeyElements& elements, int64_t query) {
    const auto* base = reinterpret_cast<const int32_t*>(terms.tensors[elements.tensor]);
    return base + elements.row(group.batch, 0, group.head_kv, query);
  };
  const auto& [of_queries, of_keys] = *terms.programs.classes;
  alignas(64) int32_t queries[kMaxPanels][kPanel];
  ClassRange of_panel[kMaxPanels];
  for (int64_t x = 0; x < panels; ++x) {
    for (int lane = 0; lane < kPanel; ++lane)
      queries[x][lane] = *classes_of(of_queries, lanes[x].query[lane]);
    of_panel[x] = {queries[x], kPanel};
  }
  bool any = false;
  for (int64_t key = j0, i = 0; key < end; key += kBlockKeys, ++i) {
    const int64_t n = std::min(kBlockKeys, end - key);
    const int32_t* keys = classes_of(of_keys, 0) + key;
    const ClassRange of_block(keys, n);
    for (int64_t x = 0; x < panels; ++x) {
      Seen& seen = table.seen_of(x, i);
      seen = of_panel[x].with(of_block);
      if (seen == Seen::kSome) {
        ops.seen_of_classes(queries[x], keys, n, table.words_of(x, i));
        seen = seen_of_words(table.words_of(x, i), n);
      }
      any |= seen != Seen::kNone;
    }
  }
  for (int64_t x = 0; x < panels; ++x) {
    const tile::Range with_words = table.blocks_with_words(x, ceil_div(end - j0, kBlockKeys));
    for (int64_t i = with_words.begin; i < with_words.end; ++i)
      if (table.seen_of(x, i) != Seen::kSome) fill_words(table.seen_of(x, i), table.words_of(x, i));
    table.sum_up(x, ceil_div(end - j0, kBlockKeys));
  }
  return any;
}

bool SeenSearch::look(const Lanes* lanes, int64_t panels, int64_t j0, int64_t end,
                      const SeenTable& table) const {
  if (terms.programs.mask) return look_at_elements(lanes, panels, j0, end, table);
  if (terms.programs.classes && table.words != nullptr) return look_at_classes(lanes, panels, j0, end, table);
  const int64_t count = ceil_div(end - j0, kBlockKeys);
  const auto keys_of = [&](int64_t i) { return std::min(kBlockKeys, end - j0 - i * kBlockKeys); };
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    Seen seen[kMaxPanels];
    any |= panels_seen(group, lanes[0].first_row, panels, j0 + i * kBlockKeys, keys_of(i), blocks, seen);
    for (int64_t x = 0; x < panels; ++x) table.seen_of(x, i) = seen[x];
  }
  for (int64_t x = 0; table.words != nullptr && x < panels; ++x) {
    const tile::Range with_words = table.blocks_with_words(x, count);
    for (int64_t i = with_words.begin; i < with_words.end; ++i)
      words_of_block(lanes[x], table.seen_of(x, i), j0 + i * kBlockKeys, keys_of(i), table.words_of(x, i));
    table.sum_up(x, count);
  }
  return any;
}

SharedSeen::SharedSeen(const AttentionProblem& p, const Ops& ops, const PairPrograms& programs) {
  const bool wanted = programs.has_sees && (ops.attend != nullptr || programs.mask);
  if (!wanted || programs.sees_by_head || programs.sees_by_key_head || p.heads_kv < 2) return;
  panels_ = ceil_div(p.seqlen_q * p.group(), kPanel);
  table_.blocks = ceil_div(p.seqlen_k, kBlockKeys);
  if (p.batch * panels_ * table_.blocks * kBlockWords * int64_t{4} <= kMostBytes) batch_ = p.batch;
}

int64_t SharedSeen::bytes() const {
  const int64_t blocks = batch_ * panels_ * table_.blocks;
  return blocks * ((kBlockWords + 1) * int64_t{4} + static_cast<int64_t>(sizeof(Seen))) +
         batch_ * static_cast<int64_t>(sizeof(int32_t));
}

void SharedSeen::set_memory(void* memory) {
  found_ = static_cast<int32_t*>(memory);
  std::fill_n(found_, batch_, 0);
  table_.words = reinterpret_cast<uint32_t*>(found_ + batch_);
  const int64_t blocks = batch_ * panels_ * table_.blocks;
  table_.strips = table_.words + blocks * kBlockWords;
  table_.seen = reinterpret_cast<Seen*>(table_.strips + blocks);
}

void SharedSeen::find(const AttentionProblem& p, const Buffers& buffers, const ScoreTerms& terms,
                      SeenBlocks& blocks, const Ops& ops, float* tile, char* registers, int64_t item) const {
  const int64_t batch = item / items_of_batch(), first = item % items_of_batch() * kMaxPanels;
  const Group group(p, buffers, batch, 0);
  const int64_t panels = std::min(kMaxPanels, ceil_div(group.rows(), kPanel) - first);
  if (panels > 0 && group.span.used_k > 0) {
    Lanes lanes[kMaxPanels];
    for (int64_t x = 0; x < panels; ++x) lanes[x] = Lanes(group, (first + x) * kPanel);
    const SeenSearch search{ops, group, terms, blocks, tile, registers};
    search.look(lanes, panels, 0, group.span.used_k, table(group, first, 0));
  }
  // What is written above is there for a thread that reads the new count.
  std::atomic_ref(found_[batch]).fetch_add(1, std::memory_order_release);
}

}  // namespace fovea::cpu::forward_pass
