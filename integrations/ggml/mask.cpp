// Reads a mask once and says what it is: most are a causal band, which then costs nothing.
#include "mask.hpp"

#include <algorithm>
#include <optional>

namespace fovea_ggml {
namespace {

constexpr uint16_t kMinusInfinity = 0xfc00;
bool is_zero(uint16_t x) {
  return (x & 0x7fff) == 0;
}

/// The keys [begin, end) that a row sees, if all of them have the number 0.
struct RowRange {
  int64_t begin, end;
};

bool all_unseen(const uint16_t* row, int64_t count) {
  uint16_t different = 0;
  for (int64_t j = 0; j < count; ++j) different |= row[j] ^ kMinusInfinity;
  return different == 0;
}
bool all_zero(const uint16_t* row, int64_t count) {
  uint16_t bits = 0;
  for (int64_t j = 0; j < count; ++j) bits |= row[j];
  return is_zero(bits);
}

/// Without value when the row sees keys that are no single range of zeros, or none.
std::optional<RowRange> range_of(const uint16_t* row, int64_t keys) {
  int64_t begin = 0, end = keys;
  while (begin < keys && row[begin] == kMinusInfinity) ++begin;
  while (end > begin && row[end - 1] == kMinusInfinity) --end;
  if (begin == end || !all_zero(row + begin, end - begin)) return std::nullopt;
  return RowRange{begin, end};
}

/// Whether the row is `range`; one pass without branches, where range_of() goes key by key.
bool is_range(const uint16_t* row, int64_t keys, const RowRange& range) {
  return all_unseen(row, range.begin) && all_zero(row + range.begin, range.end - range.begin) &&
         all_unseen(row + range.end, keys - range.end);
}

/// A band as its first and last rows suggest it; each row is checked against it afterwards.
struct Band {
  int64_t used;
  bool causal;
  int64_t window;

  RowRange row(int64_t i, int64_t queries) const {
    const int64_t last = causal ? i + used - queries : used - 1;
    return {window < 0 ? 0 : std::max<int64_t>(0, last - window), last + 1};
  }
};

std::optional<Band> guess_band(const MaskView& mask, int64_t batch) {
  const auto first = range_of(mask.row(batch, 0, 0), mask.keys);
  const auto last = range_of(mask.row(batch, 0, mask.queries - 1), mask.keys);
  if (!first || !last) return std::nullopt;
  const int64_t span = mask.queries - 1;
  Band band{last->end, span > 0 && last->end - first->end == span, -1};
  if (!band.causal && last->end != first->end) return std::nullopt;
  if (last->begin > 0) {
    // One query: a band that ends at its last key. Several without a diagonal: no band has such a begin.
    if (!band.causal && span > 0) return std::nullopt;
    band.causal = true;
    band.window = last->end - 1 - last->begin;
  }
  return band;
}

bool is_band(const MaskView& mask, int64_t batch, int64_t head, const Band& band,
             [[maybe_unused]] int threads) {
  bool same = true;
#pragma omp parallel for num_threads(threads) reduction(&& : same) if (mask.queries >= 64)
  for (int64_t i = 0; i < mask.queries; ++i) {
    const RowRange range = band.row(i, mask.queries);
    same = same && range.begin < range.end && is_range(mask.row(batch, head, i), mask.keys, range);
  }
  return same;
}

/// Fills kind, causal, window and used_keys when every plane is a band of one shape.
bool find_band(const MaskView& mask, int threads, MaskSummary& summary) {
  std::optional<Band> shape;
  for (int64_t batch = 0; batch < mask.batches; ++batch) {
    const auto band = guess_band(mask, batch);
    if (!band) return false;
    if (shape && (shape->causal != band->causal || shape->window != band->window)) return false;
    shape = band;
    for (int64_t head = 0; head < mask.heads; ++head) {
      if (!is_band(mask, batch, head, *band, threads)) return false;
    }
    summary.used_keys.push_back(static_cast<int32_t>(band->used));
  }
  summary.kind = MaskKind::kBand;
  summary.causal = shape->causal;
  summary.window = shape->window;
  return true;
}

/// What the numbers of a block are, a bit for each.
constexpr unsigned kHasUnseen = 1, kHasZero = 2, kHasOther = 4;

unsigned numbers_of(const uint16_t* row, int64_t count) {
  uint16_t unseen = 0, zero = 0, other = 0;
  for (int64_t j = 0; j < count; ++j) {
    const auto is_unseen = static_cast<uint16_t>(row[j] == kMinusInfinity);
    const auto zeros = static_cast<uint16_t>(is_zero(row[j]));
    unseen |= is_unseen;
    zero |= zeros;
    other |= static_cast<uint16_t>(1 ^ (is_unseen | zeros));
  }
  return (unseen != 0 ? kHasUnseen : 0u) | (zero != 0 ? kHasZero : 0u) | (other != 0 ? kHasOther : 0u);
}

/// Classes of the blocks of rows [first, last) of one plane; returns the numbers of all of them.
unsigned classify_rows(const MaskView& mask, int64_t batch, int64_t head, int64_t first, int64_t last,
                       uint8_t* classes) {
  unsigned all = 0;
  for (int64_t j = 0; j < mask.keys; j += kMaskKeys) {
    unsigned numbers = 0;
    for (int64_t i = first; i < last; ++i) {
      numbers |= numbers_of(mask.row(batch, head, i) + j, std::min(kMaskKeys, mask.keys - j));
    }
    *classes++ = numbers == kHasUnseen ? kBlockUnseen : numbers == kHasZero ? kBlockPlain : kBlockMixed;
    all |= numbers;
  }
  return all;
}

void classify_blocks(const MaskView& mask, [[maybe_unused]] int threads, MaskSummary& summary) {
  const int64_t rows = (mask.queries + kMaskQueries - 1) / kMaskQueries;
  const int64_t columns = (mask.keys + kMaskKeys - 1) / kMaskKeys;
  const int64_t planes = mask.batches * mask.heads;
  summary.block_rows = rows;
  summary.block_columns = columns;
  summary.blocks.resize(static_cast<size_t>(planes * rows * columns));
  unsigned all = 0;
#pragma omp parallel for num_threads(threads) reduction(| : all) if (planes * rows >= 8)
  for (int64_t x = 0; x < planes * rows; ++x) {
    const int64_t plane = x / rows, first = x % rows * kMaskQueries;
    all |= classify_rows(mask, plane / mask.heads, plane % mask.heads, first,
                         std::min(first + kMaskQueries, mask.queries), summary.blocks.data() + x * columns);
  }
  summary.kind = (all & kHasOther) != 0 ? MaskKind::kAdded : MaskKind::kZeros;
  for (int64_t batch = 0; batch < mask.batches; ++batch) {
    const uint8_t* classes = summary.blocks.data() + batch * mask.heads * rows * columns;
    int64_t used = 0;
    for (int64_t x = 0; x < mask.heads * rows * columns; ++x) {
      if (classes[x] != kBlockUnseen) used = std::max(used, x % columns + 1);
    }
    summary.used_keys.push_back(static_cast<int32_t>(std::min(used * kMaskKeys, mask.keys)));
  }
}

}  // namespace

MaskSummary summarise(const MaskView& mask, int threads) {
  MaskSummary summary;
  if (mask.data == nullptr) return summary;
  if (mask.queries == 0 || mask.keys == 0 || find_band(mask, threads, summary)) return summary;
  summary.used_keys.clear();
  classify_blocks(mask, threads, summary);
  return summary;
}

}  // namespace fovea_ggml
