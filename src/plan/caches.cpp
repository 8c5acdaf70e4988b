// The checks of caches.hpp.
#include "plan/caches.hpp"

#include <algorithm>
#include <string>

#include "core/status.hpp"
#include "tile/kv_range.hpp"

namespace fovea::plan {
namespace {

std::string whole(int64_t x) {
  return std::to_string(x);
}

void check_pages(const AttentionProblem& p, const int32_t* row, int64_t batch, tile::Range rows) {
  const int64_t end = (rows.end + p.cache_rows - 1) / p.cache_rows;
  for (int64_t n = rows.begin / p.cache_rows; n < end; ++n) {
    if (row[n] >= 0 && row[n] < p.caches) continue;
    throw_invalid("page_table", whole(row[n]) + " at entry " + whole(n) + " of sequence " + whole(batch),
                  p.caches == 0 ? "no used keys, as k has no pages"
                                : "0 to " + whole(p.caches - 1) + ", the pages of k",
                  "name pages of k and v up to the last key that seqused_k counts");
  }
}

}  // namespace

void check_cache_tensors(const AttentionProblem& p) {
  const auto refuse_both = [&](Role role, Role other) {
    if (!p.has(role) || !p.has(other)) return;
    throw_invalid(name_of(role), "a tensor", std::string("none, as there is ") + name_of(other),
                  "leave one of them out: both say where the keys of a sequence lie");
  };
  refuse_both(Role::kPageTable, Role::kCuSeqlensK);
  refuse_both(Role::kCacheBatch, Role::kCuSeqlensK);
  refuse_both(Role::kCacheBatch, Role::kPageTable);
}

void check_cache_contents(const AttentionProblem& p, const Buffers& buffers) {
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  const auto* starts_k = buffers.get<const int32_t>(Role::kCuSeqlensK);
  const auto* pads = buffers.get<const int32_t>(Role::kLeftPadK);
  const auto* chosen = buffers.get<const int32_t>(Role::kCacheBatch);
  const auto* table = buffers.get<const int32_t>(Role::kPageTable);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = used_k     ? used_k[b]
                           : starts_k ? int64_t{starts_k[b + 1]} - starts_k[b]
                                      : p.seqlen_k;
    if (pads != nullptr && (pads[b] < 0 || pads[b] > length)) {
      throw_invalid("leftpad_k", "element " + whole(b) + " = " + whole(pads[b]),
                    "0 to " + whole(length) + ", the used length of the sequence",
                    "count the rows in front of the first key, which seqused_k counts, too");
    }
    if (chosen != nullptr && (chosen[b] < 0 || chosen[b] >= p.caches)) {
      throw_invalid("cache_batch", "element " + whole(b) + " = " + whole(chosen[b]),
                    p.caches == 0 ? "no sequences of q, as k has none"
                                  : "0 to " + whole(p.caches - 1) + ", the sequences of k",
                    "name the sequence of k and v to read");
    }
    if (table != nullptr && used_k != nullptr) {
      const int64_t pad = pads == nullptr ? 0 : pads[b];
      if (pad < length) check_pages(p, table + b * p[Role::kPageTable].stride[0], b, {pad, length});
    }
  }
}

}  // namespace fovea::plan
