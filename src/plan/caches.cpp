// The checks of caches.hpp.
#include "plan/caches.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/status.hpp"
#include "plan/text.hpp"
#include "tile/kv_range.hpp"

namespace fovea::plan {
namespace {

void check_pages(const AttentionProblem& p, const int32_t* row, int64_t batch, tile::Range rows) {
  const int64_t end = (rows.end + p.cache_rows - 1) / p.cache_rows;
  for (int64_t n = rows.begin / p.cache_rows; n < end; ++n) {
    if (row[n] >= 0 && row[n] < p.caches) continue;
    throw_invalid("page_table", whole(row[n]) + " at entry " + whole(n) + " of sequence " + whole(batch),
                  p.caches == 0 ? "no used keys, as k has no pages"
                                : "0 to " + whole(p.caches - 1) + ", the pages of k",
                  p.appends() ? "name pages of k and v up to the last row that is appended"
                              : "name pages of k and v up to the last key that seqused_k counts");
  }
}

/// Rows that sequence b appends; -1 where cu_seqlens_k_new is not known.
int64_t new_rows_of(const AttentionProblem& p, const Buffers& buffers, int64_t b) {
  if (!p.packed_new()) return p.new_rows;
  const auto* starts = buffers.get<const int32_t>(Role::kCuSeqlensKNew);
  return starts == nullptr ? -1 : int64_t{starts[b + 1]} - starts[b];
}

int64_t queries_of(const AttentionProblem& p, const Buffers& buffers, int64_t b) {
  if (const auto* used = buffers.get<const int32_t>(Role::kSeqUsedQ)) return used[b];
  const auto* starts = buffers.get<const int32_t>(Role::kCuSeqlensQ);
  return starts != nullptr ? int64_t{starts[b + 1]} - starts[b] : p.packed ? 0 : p.seqlen_q;
}

/// New rows fit behind the `used` ones, and have angles.
void check_new_rows(const AttentionProblem& p, const Buffers& buffers, int64_t b, int64_t used,
                    int64_t rows) {
  if (used + rows > p.seqlen_k) {
    throw_invalid(
        "k_new", whole(rows) + " rows behind the " + whole(used) + " of sequence " + whole(b),
        "at most " + whole(p.seqlen_k - used) + ", as k has " + whole(p.seqlen_k) + " rows for each sequence",
        "make the cache larger, or append less");
  }
  if (!p.rotates()) return;
  const auto* positions = buffers.get<const int32_t>(Role::kRotaryPositions);
  if (positions == nullptr && p.has(Role::kRotaryPositions)) return;
  const int64_t first = positions ? positions[b] : used;
  const int64_t count = std::max(
      rows, p.rotary_by_row ? queries_of(p, buffers, b) : std::min<int64_t>(queries_of(p, buffers, b), 1));
  if (first >= 0 && (count == 0 || first + count <= p.positions)) return;
  throw_invalid(positions ? "rotary_positions" : "rotary_cos",
                "positions " + whole(first) + " to " + whole(first + count - 1) + " in sequence " + whole(b),
                "0 to " + whole(p.positions - 1) + ", the rows of rotary_cos",
                "make the tables of angles longer");
}

/// Factors that the products can go through: a negative one would turn the largest score into the smallest.
void check_descale(const AttentionProblem& p, const Buffers& buffers, Role role) {
  const auto* factors = buffers.get<const float>(role);
  if (!p.has(role) || factors == nullptr) return;
  const auto& stride = p[role].stride;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      const float factor = factors[b * stride[0] + h * stride[1]];
      if (factor > 0 && std::isfinite(factor)) continue;
      throw_invalid(name_of(role),
                    number_text(factor) + " for key head " + whole(h) + " of sequence " + whole(b),
                    "a finite number above 0", "give what the elements were divided by");
    }
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
  refuse_both(Role::kKNew, Role::kCuSeqlensK);
  const auto need_both = [&](Role role, Role other) {
    if (!p.has(role) || p.has(other)) return;
    throw_invalid(name_of(other), "no tensor", std::string("a tensor, because there is ") + name_of(role),
                  std::string("set it, or leave out ") + name_of(role));
  };
  need_both(Role::kKNew, Role::kVNew);
  need_both(Role::kVNew, Role::kKNew);
  need_both(Role::kRotaryCos, Role::kRotarySin);
  const DType keys = p[Role::kK].dtype, queries = p[Role::kQ].dtype;
  if (p.has(Role::kQDescale) && queries != DType::kE4M3) {
    throw_invalid("q_descale", "a tensor", "none, as q is " + std::string(name_of(queries)),
                  "leave it out, or give q as float8_e4m3fn");
  }
  for (const Role role : {Role::kKDescale, Role::kVDescale}) {
    if (!p.has(role) || keys == DType::kE4M3) continue;
    throw_invalid(name_of(role), "a tensor", "none, as k is " + std::string(name_of(keys)),
                  "leave it out, or give k and v as float8_e4m3fn");
  }
  if (p.pass == Pass::kBackward && queries == DType::kE4M3) {
    throw_invalid("q", name_of(queries), "float32, float16, bfloat16 or float64 in a backward problem",
                  "convert q, k and v: values of 8 bits have no gradients");
  }
  if (p.pass == Pass::kBackward && keys == DType::kE4M3) {
    throw_invalid("k", name_of(keys), "the type of q in a backward problem",
                  "convert k and v: values of 8 bits have no gradients");
  }
}

void check_cache_contents(const AttentionProblem& p, const Buffers& buffers) {
  check_descale(p, buffers, Role::kQDescale);
  check_descale(p, buffers, Role::kKDescale);
  check_descale(p, buffers, Role::kVDescale);
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  const auto* starts_k = buffers.get<const int32_t>(Role::kCuSeqlensK);
  const auto* pads = buffers.get<const int32_t>(Role::kLeftPadK);
  const auto* chosen = buffers.get<const int32_t>(Role::kCacheBatch);
  const auto* table = buffers.get<const int32_t>(Role::kPageTable);
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t length = used_k ? used_k[b] : starts_k ? int64_t{starts_k[b + 1]} - starts_k[b] : p.seqlen_k;
    bool known = true;  // the length
    if (p.appends()) {
      const int64_t rows = new_rows_of(p, buffers, b);
      known = used_k != nullptr && rows >= 0;
      if (known) check_new_rows(p, buffers, b, length, rows);
      length += rows;
    }
    if (known && pads != nullptr && (pads[b] < 0 || pads[b] > length)) {
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
    if (known && table != nullptr && used_k != nullptr) {
      const int64_t pad = pads == nullptr ? 0 : pads[b];
      if (pad < length) check_pages(p, table + b * p[Role::kPageTable].stride[0], b, {pad, length});
    }
  }
}

}  // namespace fovea::plan
