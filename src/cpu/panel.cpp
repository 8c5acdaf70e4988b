// Lanes, score terms, scores of a panel, dropout factors, and the staging of operands: the definitions of panel.hpp.
#include "cpu/panel.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace fovea::cpu {

Lanes::Lanes(const Group& group, int64_t row, int64_t end_row) : first_row(row) {
  count = wanted = static_cast<int>(std::min<int64_t>(kPanel, end_row - row));
  // Counted, as a division for each lane would show beside what few keys take.
  int64_t at_query = group.query(row), at_head = row % group.size();
  tile::Range keys = group.window.keys_of(at_query);
  for (int x = 0; x < kPanel; ++x) {
    query[x] = static_cast<int32_t>(at_query);
    head[x] = static_cast<int32_t>(group.head_kv * group.size() + at_head);
    begin[x] = static_cast<int32_t>(keys.begin);
    end[x] = static_cast<int32_t>(keys.end);
    if (x + 1 >= count || ++at_head < group.size()) continue;
    at_head = 0;
    keys = group.window.keys_of(++at_query);
  }
  const int64_t first = group.query(row), last = group.query(row + count - 1) + 1;
  any = group.window.keys_of_any(first, last);
  all = group.window.keys_of_all(first, last);
}

ScoreTerms::ScoreTerms(const AttentionProblem& p, const Buffers& b, const PairPrograms& pair_programs)
    : programs(pair_programs) {
  any = programs.has_score;
  for (size_t i = 0; i < p.named.size(); ++i) tensors[i] = static_cast<const char*>(b.of(p.named[i]));
  factor = any ? kLog2e : static_cast<float>(p.scale * 1.4426950408889634);
  dropout = p.dropout > 0;
  if (dropout) {
    uint64_t seed = b.seed, offset = b.offset;
    if (p.pass == Pass::kBackward && p.has(Role::kRngState)) {
      const auto* state = b.get<const int64_t>(Role::kRngState);
      const int64_t stride = p[Role::kRngState].stride[0];
      seed = static_cast<uint64_t>(state[0]);
      offset = static_cast<uint64_t>(state[stride]);
    }
    stream = tile::Dropout(p.dropout, seed, offset);
    stream.begin_at(b.dropout.first_query, b.dropout.first_key);
  }
}

float load_element(const char* row, DType type, int64_t c) {
  switch (type) {
    case DType::kF16:
      return to_float(reinterpret_cast<const F16*>(row)[c]);
    case DType::kBF16:
      return to_float(reinterpret_cast<const Bf16*>(row)[c]);
    case DType::kE4M3:
      return to_float(reinterpret_cast<const E4M3*>(row)[c]);
    default:
      return reinterpret_cast<const float*>(row)[c];
  }
}

bool all_finite(const Ops& ops, const MatrixView& rows, DType type, int64_t n, int64_t d) {
  if (rows.stride == d) return ops.finite(rows.data, type, n * d);
  for (int64_t j = 0; j < n; ++j)
    if (!ops.finite(rows.data + j * rows.stride * size_of(type), type, d)) return false;
  return true;
}

void scale_products(const Group& group, float* s, int64_t count) {
  if (group.product_scale == 1.0f) return;
  for (int64_t i = 0; i < count; ++i) s[i] *= group.product_scale;
}

ProgramInputs ScoreTerms::inputs_of(const Group& group, const Lanes& lanes, KeyPositions positions,
                                    int64_t n) const {
  ProgramInputs in = inputs_of(group, lanes.query, lanes.head, positions);
  in.lanes = lanes.count;
  in.keys = n;
  return in;
}

ProgramInputs ScoreTerms::inputs_of(const Group& group, const int32_t* query, const int32_t* head,
                                    KeyPositions positions) const {
  ProgramInputs in;
  in.query = query;
  in.head = head;
  in.first_key = positions.first;
  in.list = positions.list;
  in.b = static_cast<int32_t>(group.batch);
  in.hk = static_cast<int32_t>(group.head_kv);
  in.nq = static_cast<int32_t>(group.span.used_q);
  in.nk = static_cast<int32_t>(group.span.used_k);
  in.tensors = tensors;
  return in;
}

DistanceValues distance_values(const Ops& ops, const Group& group, const ScoreTerms& terms, int64_t first_row,
                               int64_t rows, int64_t j0, int64_t n, float factor, char* registers,
                               float* memory) {
  constexpr int64_t kKeys = kStripRows;
  const int64_t heads = group.size(), first_query = group.query(first_row);
  // Distances of queries and keys that exist, each once; a key of a program gives `step` of them.
  const int64_t count = group.query(first_row + rows - 1) - first_query + n;
  const int64_t step = std::min<int64_t>(kPanel / heads, count);
  const int64_t first_distance = first_query - (j0 + n - 1);
  alignas(64) int32_t query[kPanel], head[kPanel], keys[kKeys];
  alignas(64) float values[kKeys * kPanel];
  for (int64_t x = 0; x < kPanel; ++x) {
    query[x] = static_cast<int32_t>(std::min(x / heads, step - 1));
    head[x] = static_cast<int32_t>(group.head_kv * heads + x % heads);
  }
  ProgramInputs in = terms.inputs_of(group, query, head, KeyPositions(keys));
  in.tiles = {values, nullptr, nullptr};
  in.scratch = registers;
  const int64_t all_keys = ceil_div(count, step);
  for (int64_t first = 0; first < all_keys; first += kKeys) {
    in.keys = std::min(kKeys, all_keys - first);
    const auto start = [&](int64_t key) { return std::min((first + key) * step, count - step); };
    // The query 0 stands for all: what counts is its distance.
    for (int64_t key = 0; key < in.keys; ++key)
      keys[key] = static_cast<int32_t>(-(first_distance + start(key)));
    ops.run_program(terms.programs.of_distance, in);
    for (int64_t key = 0; key < in.keys; ++key) {
      float* to = memory + start(key) * heads;
      for (int64_t x = 0; x < step * heads; ++x) to[x] = values[key * kPanel + x] * factor;
    }
  }
  // Lanes past the last row read on: no weight of theirs may be NaN.
  std::fill_n(memory + count * heads, kPanel, 0.0f);
  return {memory - first_query * heads + (j0 + n - 1) * heads};
}

void element_rows(const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                  const KeyElements& elements, int64_t j0, const void** rows) {
  const char* base = terms.tensors[elements.tensor] + j0 * size_of(elements.dtype);
  for (int x = 0; x < kPanel; ++x) {
    const int64_t row = elements.row(group.batch, lanes.head[x], group.head_kv, lanes.query[x]);
    rows[x] = base + row * size_of(elements.dtype);
  }
}

void element_factors(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                     float unit, char* registers, float* factors) {
  std::fill_n(factors, kPanel, unit);
  if (terms.programs.factor.empty()) return;
  alignas(64) float values[kPanel];
  ProgramInputs in = terms.inputs_of(group, lanes, KeyPositions(int64_t{0}), 1);
  in.tiles = {values, nullptr, nullptr};
  in.scratch = registers;
  ops.run_program(terms.programs.factor, in);
  for (int x = 0; x < kPanel; ++x) factors[x] *= values[x];
}

void seen_by_elements(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                      int64_t j0, int64_t n, uint32_t* seen) {
  const SeenElements& mask = *terms.programs.mask;
  const void* rows[kPanel];
  element_rows(group, lanes, terms, mask.elements, j0, rows);
  ops.seen_of_elements(rows, mask.elements.dtype, n, mask.zeros, seen);
}

Seen seen_of_words(const uint32_t* words, int64_t n) {
  uint32_t some = 0, hidden = 0;
  for (int64_t j = 0; j < n; j += kSeenKeys, words += kPanel) {
    const uint32_t keys = ~uint32_t{0} >> (kSeenKeys - std::min(kSeenKeys, n - j));
    for (int x = 0; x < kPanel; ++x) {
      some |= words[x] & keys;
      hidden |= ~words[x] & keys;
    }
  }
  return hidden == 0 ? Seen::kAll : some == 0 ? Seen::kNone : Seen::kSome;
}

uint32_t strips_of_words(const uint32_t* words) {
  uint32_t strips = 0;
  for (int64_t strip = 0; strip < kAttendKeys / kSeenKeys; ++strip, words += kPanel) {
    for (int64_t column = 0; column < kPanel / kSeenColumns; ++column) {
      uint32_t some = 0, hidden = 0;
      for (int64_t x = column * kSeenColumns; x < (column + 1) * kSeenColumns; ++x) {
        some |= words[x];
        hidden |= ~words[x];
      }
      const int64_t bit = column * (kAttendKeys / kSeenKeys) + strip;
      strips |= uint32_t{some != 0} << bit | uint32_t{hidden == 0} << (kSeenAll + bit);
    }
  }
  return strips;
}

PairScratch::PairScratch(Scratch& memory, const AttentionProblem& p, const PairPrograms& programs,
                         int64_t tile_size, int64_t heads) {
  registers = memory.take<char>(programs.scratch_bytes());
  if (programs.has_slope) slope = memory.take<float>(tile_size);
  if (programs.gradients_read_score) before = memory.take<float>(tile_size);
  if (!programs.of_distance.empty())
    distances = memory.take<float>(DistanceValues::size(p, kPanel, tile_size / kPanel));
  if (programs.mask) seen_pairs = memory.take<uint32_t>(ceil_div(tile_size, kSeenKeys));
  const int64_t nodes = SeenBlocks::Memory::ranges_of(p);
  const int64_t known = nodes > 0 && heads > 1 ? SeenBlocks::kKnownBlocks : 0;
  seen.ranges = {memory.take<expr::Range>(nodes), static_cast<size_t>(nodes)};
  seen.known = {memory.take<SeenBlocks::Known>(known), static_cast<size_t>(known)};
}

LaneEnds ends_of(const Lanes& lanes, KeyPositions positions, int64_t n, int64_t pair) {
  LaneEnds ends;
  const int64_t all = ceil_div(n, pair);
  int64_t before = 0;
  for (size_t step = 0; step < std::size(ends.of); ++step) {
    const int32_t* of_step = lanes.end + step * kLaneStep;
    const int64_t last = *std::max_element(of_step, of_step + kLaneStep) - positions.first;
    before = std::clamp(ceil_div(last, pair), before, all);
    ends.of[step] = positions.list != nullptr ? all : before;
  }
  ends.of[std::size(ends.of) - 1] = all;
  ends.wanted = lanes.wanted;
  return ends;
}

namespace {

/// s = K Q^T, of rows [K | V] and [Q | QV] where queries meet values.
void multiply(const Ops& ops, const Group& group, const ScoreOperands& x, int64_t key_rows, float* s,
              float* maxima, const LaneEnds* ends) {
  if (group.key_share == 1.0f) return ops.scores(x.keys, x.queries, key_rows, x.words, s, maxima, ends);
  const int64_t words = x.words - x.value_words;
  ops.scores(x.keys, x.queries, key_rows, words, s, nullptr, nullptr);
  for (int64_t i = 0; i < key_rows * kPanel; ++i) s[i] *= group.key_share;
  ops.update({x.keys.data + words, x.keys.row_stride, 1}, x.queries + words * kPanel, kPanel, key_rows,
             kPanel, x.value_words, s, kPanel);
  if (maxima != nullptr) ops.column_max(s, key_rows, maxima);
}

}  // namespace

namespace {

/// Makes scores without a program.
void scores_of_form(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                    Seen seen, const ScoreOperands& x, int64_t key_rows, int64_t n, int64_t j0, float* s,
                    float* maxima, const PairScratch& scratch) {
  const PairPrograms& programs = terms.programs;
  ScoreAddends addends;
  const void* rows[kPanel];
  float factors[kPanel];
  if (programs.has_score) addends.scale = static_cast<float>(group.problem->scale) * group.product_scale;
  if (!programs.of_distance.empty()) {
    const DistanceValues values = distance_values(ops, group, terms, lanes.first_row, lanes.count, j0, n,
                                                  1.0f, scratch.registers, scratch.distances);
    addends.distance = values.of(lanes.first_row, j0, group.size());
    addends.step = group.size();
  }
  if (programs.elements) {
    element_rows(group, lanes, terms, *programs.elements, j0, rows);
    element_factors(ops, group, lanes, terms, 1.0f, scratch.registers, factors);
    addends.rows = rows;
    addends.factors = factors;
    addends.dtype = programs.elements->dtype;
    addends.fetched = scratch.elements_fetched;
  }
  if (programs.has_sees && seen == Seen::kSome) {
    seen_by_elements(ops, group, lanes, terms, j0, n, scratch.seen_pairs);
    addends.seen = scratch.seen_pairs;
  }
  const bool one_term = addends.seen == nullptr && (addends.distance != nullptr) != (addends.rows != nullptr);
  if (one_term && ops.scores_and_term != nullptr && key_rows == n && group.key_share == 1.0f)
    return ops.scores_and_term(x.keys, x.queries, n, x.words, addends, s, maxima);
  const LaneEnds ends = ends_of(lanes, KeyPositions(j0), key_rows);
  multiply(ops, group, x, key_rows, s, nullptr, &ends);
  ops.add_terms(s, n, addends, maxima);
}

}  // namespace

bool panel_scores(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms, Seen seen,
                  const ScoreOperands& operands, int64_t key_rows, int64_t n, KeyPositions positions,
                  float* s, float* maxima, const PairScratch& scratch) {
  const int64_t j0 = positions.first;
  const bool inside = positions.list != nullptr || (lanes.all.begin <= j0 && j0 + n <= lanes.all.end);
  const Program* program = terms.programs.program_of(seen);
  if (inside && !terms.any && program == nullptr && key_rows == n) {
    LaneEnds ends{{n, n, n}, lanes.wanted};
    multiply(ops, group, operands, n, s, maxima, &ends);
    return false;
  }
  if (positions.list == nullptr && scratch.before == nullptr && terms.programs.takes_form(seen)) {
    scores_of_form(ops, group, lanes, terms, seen, operands, key_rows, n, j0, s,
                   inside ? std::exchange(maxima, nullptr) : nullptr, scratch);
    if (!inside) ops.mask_range(s, n, static_cast<int32_t>(j0), lanes.begin, lanes.end);
    if (maxima != nullptr) ops.column_max(s, n, maxima);
    return !inside || seen == Seen::kSome;
  }
  // A program may bring numbers of all pairs together, seen or not.
  const LaneEnds ends = ends_of(lanes, positions, key_rows);
  multiply(ops, group, operands, key_rows, s, nullptr, program == nullptr ? &ends : nullptr);
  if (terms.any) scale_products(group, s, n * kPanel);
  if (program != nullptr) {
    if (scratch.before != nullptr) std::copy_n(s, n * kPanel, scratch.before);
    ProgramInputs in = terms.inputs_of(group, lanes, positions, n);
    in.tiles = {s, scratch.slope, nullptr};
    in.scratch = scratch.registers;
    if (inside) in.maxima = std::exchange(maxima, nullptr);
    ops.run_program(*program, in);
  }
  if (!inside) ops.mask_range(s, n, static_cast<int32_t>(j0), lanes.begin, lanes.end);
  if (maxima != nullptr) ops.column_max(s, n, maxima);
  return !inside || seen == Seen::kSome;
}

Seen seen_of(const Group& group, int64_t first_row, int64_t count, int64_t j0, int64_t n,
             SeenBlocks& blocks) {
  const int64_t end_row = std::min(first_row + count, group.rows());
  return blocks.of({group.query(first_row), ceil_div(end_row, group.size()), j0, j0 + n, group.batch, 0,
                    group.head_kv, group.span.used_q, group.span.used_k});
}

bool panels_seen(const Group& group, int64_t first_row, int64_t panels, int64_t j0, int64_t n,
                 SeenBlocks& blocks, Seen* seen) {
  const Seen tile = seen_of(group, first_row, panels * kPanel, j0, n, blocks);
  std::fill_n(seen, panels, tile);
  if (tile != Seen::kSome) return tile == Seen::kAll;
  bool any = false;
  for (int64_t x = 0; x < panels; ++x) {
    if (panels > 1) seen[x] = seen_of(group, first_row + x * kPanel, kPanel, j0, n, blocks);
    any = any || seen[x] != Seen::kNone;
  }
  return any;
}

void dropout_bits(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms, int64_t n,
                  KeyPositions positions, uint8_t* kept) {
  int32_t heads[kPanel];
  const auto first =
      static_cast<int32_t>(group.buffers->dropout.head_number(group.problem->heads_q, group.batch, 0));
  for (int x = 0; x < kPanel; ++x) heads[x] = first + lanes.head[x];
  if (positions.list == nullptr) {
    ops.dropout_bits(terms.stream, lanes.query, heads, positions.first, n, kept);
    return;
  }
  // A key of a list at a time: of the bits of two neighbours, those of one.
  std::fill_n(kept, kept_bytes(n), uint8_t{0});
  for (int64_t j = 0; j < n; ++j) {
    const int64_t key = std::max<int64_t>(positions[j], 0);  // -1 is no key, and has no weight
    uint8_t two[kept_bytes(2)];
    ops.dropout_bits(terms.stream, lanes.query, heads, key - key % 2, 2, two);
    for (int64_t byte = 0; byte < 2 * kPanel / 8; ++byte) {
      const int even_bits = two[byte] >> key % 2 & 0x55;
      kept[j / 2 * kKeptBytes + byte] |= static_cast<uint8_t>(even_bits << j % 2);
    }
  }
}

float keep_scale(const AttentionProblem& p) {
  return p.dropout > 0 ? tile::Dropout(p.dropout, 0, 0).keep_scale : 1.0f;
}

// Staging

Staging::Staging(const AttentionProblem& p, const Ops& table)
    : ops(&table),
      type(p.dtype),
      query_type(p[Role::kQ].dtype),
      key_type(p[Role::kK].dtype),
      d(p.head_dim),
      d_v(p.head_dim_v) {
  row_type = ops->word_elements == 1 ? key_type : type;
  words_d = words_of(d);
  words_dv = words_of(d_v);
  words_qv = p.has(Role::kQV) ? words_dv : 0;
  padded_d = round_up(d, 16);
  padded_dv = round_up(d_v, 16);
}

void Staging::copy_row(const char* from, DType from_type, int64_t size, char* to) const {
  if (from_type == row_type) {
    std::memcpy(to, from, static_cast<size_t>(size * size_of(row_type)));
    return;
  }
  constexpr int64_t kChunk = 64;
  float values[kChunk];
  for (int64_t c = 0; c < size; c += kChunk) {
    const int64_t count = std::min(kChunk, size - c);
    ops->to_float(from + c * size_of(from_type), from_type, count, values);
    ops->from_float(values, count, row_type, to + c * size_of(row_type));
  }
}

void Staging::load_row(const char* row, DType from, int64_t size, int64_t words, float* dst) const {
  if (ops->word_elements == 2) {
    copy_row(row, from, size, reinterpret_cast<char*>(dst));
    if (const int64_t rest = words * 4 - size * 2; rest > 0)
      std::memset(reinterpret_cast<char*>(dst) + size * 2, 0, static_cast<size_t>(rest));
  } else {
    ops->to_float(row, from, size, dst);
    std::fill(dst + size, dst + words, 0.0f);
  }
}

namespace {

/// Rows further apart than this are copied together: each takes a TLB entry of its own in every pass over the
/// block, and rows a power of two apart fall into the same few sets of the first-level cache.
constexpr int64_t kFarRowBytes = 1024;

}  // namespace

bool Staging::lie_well(int64_t stride, int64_t size) const {
  return stride == size || stride * size_of(row_type) <= kFarRowBytes;
}

Operand Staging::stage_rows(const MatrixView& rows, int64_t n, int64_t size, int64_t words,
                            float* buffer) const {
  const int64_t bytes = size_of(row_type);
  const bool whole_words = bytes * ops->word_elements == 4 && size == words * ops->word_elements &&
                           rows.stride % ops->word_elements == 0 && n % ops->row_multiple == 0;
  if (whole_words && lie_well(rows.stride, size)) {
    return {reinterpret_cast<const float*>(rows.data), rows.stride / ops->word_elements, 1};
  }
  copy_rows(rows, n, size, words, buffer);
  return {buffer, words, 1};
}

void Staging::copy_rows(const MatrixView& rows, int64_t n, int64_t size, int64_t words, float* buffer) const {
  const int64_t bytes = size_of(row_type);
  for (int64_t j = 0; j < n; ++j)
    load_row(rows.data + j * rows.stride * bytes, size, words, buffer + j * words);
  std::fill(buffer + n * words, buffer + rows_size(n, words), 0.0f);
}

Operand Staging::stage_keys(const MatrixView& keys, const MatrixView& values, int64_t n,
                            float* buffer) const {
  if (!has_qv()) return stage_rows(keys, n, d, words_d, buffer);
  copy_keys(keys, values, n, buffer);
  return {buffer, score_words(), 1};
}

void Staging::copy_keys(const MatrixView& keys, const MatrixView& values, int64_t n, float* buffer) const {
  if (!has_qv()) return copy_rows(keys, n, d, words_d, buffer);
  const int64_t bytes = size_of(row_type), words = score_words();
  for (int64_t j = 0; j < n; ++j) {
    load_row(keys.data + j * keys.stride * bytes, d, words_d, buffer + j * words);
    load_row(values.data + j * values.stride * bytes, d_v, words_qv, buffer + j * words + words_d);
  }
  std::fill(buffer + n * words, buffer + rows_size(n, words), 0.0f);
}

Operand Staging::stage_columns(const MatrixView& rows, int64_t n, int64_t size, float* buffer) const {
  if (ops->word_elements == 1 && row_type == DType::kF32 && lie_well(rows.stride, size)) {
    return {reinterpret_cast<const float*>(rows.data), 1, rows.stride};
  }
  copy_columns(rows, n, size, buffer);
  return copied_columns(buffer, n, size);
}

Operand Staging::copied_columns(const float* buffer, int64_t n, int64_t size) const {
  if (ops->word_elements == 1) return {buffer, 1, size};
  if (ops->pair_columns != nullptr) return {buffer, words_of(n), 1};
  return {buffer, 1, round_up(size, ops->row_multiple)};
}

void Staging::copy_columns(const MatrixView& rows, int64_t n, int64_t size, float* buffer) const {
  if (ops->word_elements == 1) {
    const int64_t bytes = size_of(row_type);
    for (int64_t j = 0; j < n; ++j)
      load_row(rows.data + j * rows.stride * bytes, size, size, buffer + j * size);
    return;
  }
  const int64_t words = words_of(n), columns = round_up(size, ops->row_multiple);
  if (ops->pair_columns != nullptr) {
    ops->pair_columns(rows.row<const uint16_t>(0), rows.stride, n, size, words,
                      reinterpret_cast<uint32_t*>(buffer));
    return;
  }
  for (int64_t w = 0; w < words; ++w) {
    float* out = buffer + w * columns;
    if (2 * w < n) {
      const uint16_t* low = rows.row<const uint16_t>(2 * w);
      ops->interleave(low, 2 * w + 1 < n ? rows.row<const uint16_t>(2 * w + 1) : nullptr, size,
                      reinterpret_cast<uint32_t*>(out));
      std::fill(out + size, out + columns, 0.0f);
    } else {
      std::fill(out, out + columns, 0.0f);
    }
  }
}

void Staging::stage_panel(const Group& group, const Lanes& lanes, Role role, int64_t size, int64_t words,
                          float* dst, float* temp) const {
  const DType from = role == Role::kQ ? query_type : type;
  if (ops->stage_lanes != nullptr && from == DType::kBF16) {
    const HeadRows from_rows = group.head_rows(role);
    const char* rows[kPanel];
    for (int x = 0; x < lanes.count; ++x) rows[x] = from_rows.row(lanes.query[x], lanes.head[x]);
    return ops->stage_lanes(rows, lanes.count, size, words, dst);
  }
  for (int x = 0; x < kPanel; x += 4) {
    if (x >= lanes.count) {
      for (int64_t w = 0; w < words; ++w) std::fill_n(dst + w * kPanel + x, 4, 0.0f);
      continue;
    }
    for (int r = 0; r < 4; ++r) {
      if (x + r < lanes.count) {
        load_row(group.row_data(role, lanes.first_row + x + r), from, size, words, temp + r * words);
      } else {
        std::fill_n(temp + r * words, words, 0.0f);
      }
    }
    ops->transpose(temp, words, 4, words, dst + x, kPanel);
  }
}

void Staging::stage_queries(const Group& group, const Lanes& lanes, float* dst, float* temp) const {
  stage_panel(group, lanes, Role::kQ, d, words_d, dst, temp);
  if (has_qv()) stage_panel(group, lanes, Role::kQV, d_v, words_qv, dst + words_d * kPanel, temp);
}

}  // namespace fovea::cpu
