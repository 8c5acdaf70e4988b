// Where the keys and values of one sequence and head lie: rows of a tensor, or of pages that a table names.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"

namespace fovea::tile {

/// The sequence of k and v that sequence b reads; packed keys have one.
constexpr int cache_of(const AttentionParams& p, int b) {
  if (p.cu_seqlens_k != nullptr) return 0;
  return p.cache_batch != nullptr ? p.cache_batch[b] : b;
}

/// Row `row` of page `page`.
struct PageRow {
  int page, row;
};

/// The page that an entry of the table names. One that names no page of the pool counts as page 0: nobody reads outside of it.
constexpr int page_in_pool(const AttentionParams& p, int entry) {
  return static_cast<uint32_t>(entry) < static_cast<uint32_t>(p.caches) ? entry : 0;
}

/// The table's entry for row `row` of sequence b, as it is, and the row in its page.
constexpr PageRow page_entry(const AttentionParams& p, int b, int row) {
  const uint32_t page = p.cache_rows.quotient(static_cast<uint32_t>(row));
  return {p.page_table.data[b * p.page_table.batch + page], p.cache_rows.remainder(row)};
}

/// Where row `row` of sequence b lies by the table of pages.
constexpr PageRow page_row(const AttentionParams& p, int b, int row) {
  const PageRow entry = page_entry(p, b, row);
  return {page_in_pool(p, entry.page), entry.row};
}

/// Rows of k, or of v.
struct KeyRows {
  const AttentionParams& p;
  const RowsView& view;
  const char* data;  ///< of key 0; with pages, of row 0 of page 0
  int batch, element_bytes;
  int first;  ///< with pages: the row of key 0

  constexpr bool paged() const { return p.page_table.data != nullptr; }
  /// Bytes from `data` to key j.
  constexpr int64_t offset(int j) const {
    if (!paged()) return j * view.row * element_bytes;
    const PageRow at = page_row(p, batch, first + j);
    return (at.page * view.batch + at.row * view.row) * element_bytes;
  }
  constexpr const char* row(int j) const { return data + offset(j); }
};

/// Those of sequence b and key head `head`, from column `column` on.
constexpr KeyRows key_rows(const AttentionParams& p, const RowsView& view, const SequenceSpan& span, int b,
                           int head, int element_bytes, int column = 0) {
  const bool paged = p.page_table.data != nullptr;
  const int64_t first = paged ? view.offset(0, 0, head) : view.offset(cache_of(p, b), span.row_k, head);
  return {p, view,          view.data + (first + column) * element_bytes,
          b, element_bytes, static_cast<int>(span.row_k)};
}

}  // namespace fovea::tile
