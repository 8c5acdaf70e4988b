// The vector operations that the CPU algorithms are written in: one table per instruction set. The algorithms
// (forward.cpp, backward.cpp) are plain C++; everything that touches a vector register is behind this table.
//
// Queries lie on vector lanes. A panel is 48 query rows: 3 AVX-512 registers, 6 of AVX2, 12 of NEON, 3 AMX
// tiles. Score tiles are stored transposed, S^T[key][lane], so that row maxima, sums and masks are lane-wise
// operations without shuffles, and K and V rows are read as they lie, one broadcast element at a time.
//
// Products run over words of 32 bits along the reduction: one float, or a pair of bfloat16
// (word_elements = 2).
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/rows_ahead.hpp"
#include "tile/kv_range.hpp"
#include "tile/philox.hpp"

namespace fovea::cpu {

inline constexpr int kPanel = 48;

// A row of the bits of two keys: 12 bytes, and room for the last vector, which Highway loads in eight bytes.
inline constexpr int64_t kKeptBytes = 20;
constexpr int64_t kept_bytes(int64_t n) {
  return (n + 1) / 2 * kKeptBytes;
}

/// The left operand of a product: word (r, k) at data[r * row_stride + k * k_stride]. One of the strides is 1.
struct Operand {
  const float* data = nullptr;
  int64_t row_stride = 1;
  int64_t k_stride = 1;
};

inline constexpr int64_t kLaneStep = 16;
/// How far lanes of a panel take part in a product, kLaneStep neighbours together: of rows in scores, of reduction words in sums. They do
/// not fall, and the last is the product's own end. Null stands for that of all.
struct LaneEnds {
  int64_t of[kPanel / kLaneStep];
  int64_t wanted = kPanel;  ///< lanes; whole vectors behind them may be left as they are
};

/// Softmax state and scratch of one panel: arrays of kPanel floats. Maxima are in units of log2.
struct PanelState {
  float* row_max;  ///< running maximum
  float* row_sum;  ///< running sum of exp2(score - row_max)
  float* alpha;    ///< out: factor that brings older sums to the new maximum
};

/// Rows of queries in float32 that meet keys.
struct FewRows {
  const float* rows;
  int64_t ld;
  int64_t count;
  const float* lanes =
      nullptr;  ///< the same as row_lanes() wrote them for keys of the type they meet, or null
};
inline constexpr int64_t kMostLaneRows = 48;
inline constexpr int64_t kWeighedRows = 4;  ///< rows whose largest scores and sums are found side by side
/// With fewer rows half of the lanes would have nothing to do.
inline constexpr int64_t kLeastLaneRows = 5;
/// Of up to 16 rows; those that follow lie behind them.
constexpr int64_t lane_floats(int64_t size) {
  return (size + 31) / 32 * 32 * 16;
}

/// n rows of `size` elements of K or V, wherever their groups lie.
struct TileRows {
  const RowGroup* groups;
  int64_t n;
  int64_t size;
  DType type;
};
/// n rows of `bytes` that will be read soon.
struct FetchRows {
  const char* const* rows = nullptr;
  int64_t n = 0;
  int64_t bytes = 0;
};
inline constexpr int64_t kTileQueries = 16;
/// What tiles have summed up of each query: kTileQueries rows of o, `ld` floats apart, a multiple of 16.
struct TileSums {
  float *row_max, *row_sum;
  float* o;
  int64_t ld;
};
/// Words of `size` elements of kTileQueries queries for tile_dots(), whatever their type.
constexpr int64_t tile_query_words(int64_t size) {
  return (size + 63) / 64 * 64 * kTileQueries / 2 * 3;
}
/// Floats of a row of tile_sums().
constexpr int64_t tile_row_size(int64_t size) {
  return (size + 63) / 64 * 64;
}
/// Words of the weights of 128 keys for tile_sums(), whatever the type.
inline constexpr int64_t kTileWeightWords = 128 * kTileQueries * 2;

/// Keys and values of one block, staged as left operands of scores() and accumulate().
struct AttendBlock {
  Operand keys, values;
};

struct Program;
struct ProgramInputs;

/// A program that makes scores of the products of a strip. Lanes, keys and the tile of `inputs` are left out.
struct AttendProgram {
  const Program* program;
  const ProgramInputs* inputs;
  float product_scale;  ///< before the program
  void (*run)(const Program& program, const ProgramInputs& inputs);
};

/// Neighbouring blocks of keys that panels attend to in one step. Rows of K are there up to a multiple of kAttendStrip, and whatever lies
/// behind `end` in them is not seen; pairs of V are zero there.
struct AttendKeys {
  const AttendBlock* blocks;  ///< of kAttendKeys keys each, but the last
  int64_t first, end;         ///< positions; first is a multiple of kAttendKeys
  int64_t words;              ///< reduction words of a row of K, of one part
  int64_t columns;            ///< of V, a multiple of row_multiple
  float factor;               ///< score times factor is in units of log2
  int parts = 1;              ///< bfloat16 parts of each operand
  /// Blocks are those of key_columns() and value_pairs(), columns a multiple of 32: queries are rows, and so is O. Elements of bfloat16 are added
  /// to all scores, and nothing else is; there are no programs and no dropout.
  bool by_rows = false;
  int64_t size = 0, row_of_o = 0;  ///< by_rows: elements of a query; floats of a row of O
  int64_t query_part = 0, key_part = 0, value_part = 0;  ///< words between them
  const AttendProgram* program = nullptr;
  void (*key_elements)(const void* const* rows, DType type, int64_t lanes, int64_t n, const float* factors,
                       float* dst,
                       int64_t ld) = nullptr;  ///< Ops::key_elements
};
inline constexpr int64_t kAttendKeys = 128;
inline constexpr int64_t kAttendStrip = 32;  // rows of K are read in so many
inline constexpr int64_t kAttendLanes = 32;  // and queries taken

/// A panel of queries.
struct AttendPanel {
  const float* queries;
  float *row_max, *row_sum;  ///< as in PanelState
  float* o;  ///< [d_v][kPanel]; by_rows [kPanel][row_of_o], and of rows that have seen no key it is not read
  int rows;
  const int32_t *begin, *end;  ///< keys that each row sees
  tile::Range any, all;        ///< keys that some, that all rows see
  const uint8_t* kept =
      nullptr;  ///< dropout_bits() of the keys from `first` on, where dropout leaves weights out
  const int32_t *query = nullptr, *head = nullptr;  ///< by lane
  /// Added to scores, before `factor`: of lane x and key first + j at distance[x - j * step].
  const float* distance = nullptr;
  int64_t step = 1;
  /// Added, too: of lane x and key first + j element j of elements[x], times factors[x].
  const void* const* elements = nullptr;
  const float* factors = nullptr;
  DType dtype = DType::kF32;
  const uint32_t* seen = nullptr;           ///< words of kSeenKeys keys from `first` on; null: all are seen
  const uint32_t* seen_strips = nullptr;    ///< of blocks, what their words sum up to
  const char* const* query_rows = nullptr;  ///< by lane, where queries are rows
  bool fresh = false;                       ///< o is not there yet: it is written, and not added to
};
inline constexpr int64_t kAttendRowSize =
    128;                                // elements of a query or a value at most, where queries are rows
inline constexpr int kAttendParts = 3;  // of a float32
inline constexpr int64_t kAttendScratch =
    (kAttendKeys / 2 * kAttendParts + 3 * kAttendStrip) * 32 + 48;  // floats

// Which of 32 neighbouring keys a lane sees is a word: word [j / kSeenKeys][lane] has bit j % kSeenKeys of key j.
inline constexpr int64_t kSeenKeys = 32;
// Words of a block of kAttendKeys keys and a panel, summed up: bit [columns of 16 lanes][strips of kSeenKeys keys] tells whether a lane sees a key
// of the strip, and kSeenAll bits higher whether all lanes see all of its keys.
inline constexpr int64_t kSeenColumns = 16, kSeenAll = 16;

/// What is added to the scores of one panel.
struct ScoreAddends {
  float scale = 1;                  ///< of the scores as they come
  const float* distance = nullptr;  ///< of lane x and key j at distance[x - j * step]
  int64_t step = 1;
  const void* const* rows =
      nullptr;  ///< of lane x and key j element j of rows[x], of `dtype`, times factors[x]
  const float* factors = nullptr;
  DType dtype = DType::kF32;
  const uint32_t* seen = nullptr;  ///< scores that are not seen become -inf
  bool fetched = false;            ///< the rows are in a cache
};

/// n rows of `size` float16 or float32.
struct PartRows {
  const char* data;
  int64_t stride_bytes, n, size;
  DType type;
};

struct Ops {
  const char* name;
  int word_elements;  ///< elements of a reduction word: 1 float32, 2 bfloat16
  int row_multiple;   ///< left operands must have rows padded with zeros to a multiple of this
  int k_multiple;     ///< reductions must be padded with zeros to a multiple of this many words
  int max_panels;     ///< of a tile of the forward, which share staged keys and values

  /// c[rows][kPanel] = a b, with b[k][kPanel] words. Raises column_max, when not null, to the maximum of c by lane. Rows behind the
  /// ends of lanes may be left as they are.
  void (*scores)(Operand a, const float* b, int64_t rows, int64_t k, float* c, float* column_max,
                 const LaneEnds* ends);
  /// c[rows][kPanel] = c * alpha + a b; alpha by lane, null = 1. Words of b behind the ends of lanes are 0.
  void (*accumulate)(Operand a, const float* b, int64_t rows, int64_t k, float* c, const float* alpha,
                     const LaneEnds* ends);
  /// c[rows][kPanel] += a b with b[k][kPanel] at row stride ldb. Tables of one element a word only.
  void (*accumulate_strided)(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c,
                             const LaneEnds* ends);
  /// c[rows][cols] += a b with b[k][cols]; cols a multiple of 16; a.k_stride is 1.
  void (*update)(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k, float* c,
                 int64_t ldc);

  /// Online softmax of one score tile s[n][kPanel]: raises row_max by factor * column_max, writes alpha,
  /// replaces s by exp2(factor * s - row_max) and adds it to row_sum (which it scales by alpha first). When
  /// `pairs` is given the weights go there instead, as bfloat16 pairs [ceil(n/2)][kPanel]. Rows whose maximum
  /// is -inf get weights 0.
  void (*softmax)(float* s, int64_t n, float factor, const float* column_max, PanelState state,
                  uint32_t* pairs);

  /// The three steps at once for several panels and blocks, or null. A row's maximum may be an earlier one, which changes no
  /// result. Values that some row does not see must be finite. `scratch` holds kAttendScratch floats.
  void (*attend)(const AttendKeys& keys, const AttendPanel* panels, int64_t count, float* scratch);
  /// Bfloat16 parts that add up to an element in attend(). More than one: its operands are not those of the other products, and all of
  /// them must be finite.
  int attend_parts;
  /// Part i of element c of row j goes to dst[i * part_size + j * row_size + c], zeros behind the last; row_size is a multiple of 32. False
  /// where an element is not finite, or one of its parts.
  bool (*split_rows)(const PartRows& rows, int parts, uint16_t* dst, int64_t row_size, int64_t part_size);
  /// The same of a panel src[size][kPanel]: parts of elements 2 w and 2 w + 1 are word w of dst[parts][part_words / kPanel][kPanel].
  bool (*split_lanes)(const float* src, int64_t size, int parts, uint32_t* dst, int64_t part_words);

  /// Backward of one tile: p = exp2(factor * s - lse2) and ds = p * (dp - delta), by lane. s and dp are
  /// [n][kPanel]; p and ds are written with row stride `ld` (float32 words), or as bfloat16 rows of 2 * ld
  /// elements with ds also as pairs [ceil(n/2)][kPanel] words. Where p is 0, ds is 0 whatever dp holds. Rows `ahead` come to the
  /// second-level cache, some with each key.
  void (*gradients)(const float* s, const float* dp, int64_t n, float factor, const float* lse2,
                    const float* delta, float* p, float* ds, int64_t ld, uint32_t* ds_pairs,
                    const FetchRows& ahead);
  /// The same with p and ds as float32 [n][kPanel], in place of s and dp.
  void (*gradients_float)(float* s, float* dp, int64_t n, float factor, const float* lse2, const float* delta,
                          const FetchRows& ahead);
  /// Rounds p and ds, float32 [n][kPanel], into the forms that gradients() writes.
  void (*store_gradients)(const float* p_tile, const float* ds_tile, int64_t n, float* p, float* ds,
                          int64_t ld, uint32_t* ds_pairs);

  /// ds = ds * factor. Where ds is 0 it stays 0, whatever the factor holds.
  void (*multiply_gradients)(float* ds, const float* factor, int64_t count);

  /// Masks s[n][kPanel], keys from j0 on: keeps lane x of key j when begin[x] <= j < end[x], else -inf.
  void (*mask_range)(float* s, int64_t n, int32_t j0, const int32_t* begin, const int32_t* end);
  /// column_max[lane] = max(column_max[lane], s[j][lane]).
  void (*column_max)(const float* s, int64_t n, float* column_max);

  /// Which weights dropout keeps, keys from j0 on, j0 even: bit 2 x + e of row j of kKeptBytes is that of lane x for the key
  /// j0 + 2 j + e. Lane x is query[x] of a sequence; head[x] is batch index * heads_q + query head.
  void (*dropout_bits)(const tile::Dropout& dropout, const int32_t* query, const int32_t* head, int64_t j0,
                       int64_t n, uint8_t* kept);
  /// x[n][kPanel] *= scale where kept; 0 elsewhere, whatever x holds.
  void (*multiply_kept)(float* x, const uint8_t* kept, float scale, int64_t n);
  /// Clears the elements of pairs[ceil(n/2)][kPanel] that are not kept.
  void (*keep_pairs)(uint32_t* pairs, const uint8_t* kept, int64_t n);

  /// Runs a program over tiles of scores: expressions of a problem (program.hpp).
  void (*run_program)(const Program& program, const ProgramInputs& inputs);

  // Expressions that need no program for each pair (score_form.hpp).
  /// dst[j * ld + x] = factors[x] * element j of rows[x], for n keys and `lanes` lanes, a multiple of 16.
  void (*key_elements)(const void* const* rows, DType type, int64_t lanes, int64_t n, const float* factors,
                       float* dst, int64_t ld);
  /// The reverse, for the first `lanes` of kPanel lanes: element j of rows[x] becomes tile[j * ld + x]. `streams`: past the caches.
  void (*store_key_elements)(const float* tile, int64_t ld, int64_t lanes, int64_t n, DType type,
                             void* const* rows, bool streams);
  /// The same of bfloat16 pairs[ceil(n/2)][kPanel].
  void (*store_key_pairs)(const uint32_t* pairs, int64_t lanes, int64_t n, void* const* rows, bool streams);
  /// Then what was streamed is there for whoever waits for this thread.
  void (*end_streams)();
  /// Keys whose element is 0 (`zeros`), or is not: that of lane x and key j is element j of rows[x].
  void (*seen_of_elements)(const void* const* rows, DType type, int64_t n, bool zeros, uint32_t* seen);
  /// Keys whose class is that of a lane.
  void (*seen_of_classes)(const int32_t* lanes, const int32_t* keys, int64_t n, uint32_t* seen);
  /// Keys whose score s[n][kPanel] is not -inf.
  void (*seen_of_scores)(const float* s, int64_t n, uint32_t* seen);
  /// Turns s[n][kPanel] into scores, and raises maxima[kPanel], where given, to their largest.
  void (*add_terms)(float* s, int64_t n, const ScoreAddends& addends, float* maxima);
  /// Or null: scores() and add_terms() in one, of either a distance or elements, and with all keys seen.
  void (*scores_and_term)(Operand a, const float* b, int64_t rows, int64_t k, const ScoreAddends& term,
                          float* c, float* column_max);

  /// factors[i] /= sums[i], and lse[i] = ln 2 * maxima[i] + ln sums[i]; 0 and -inf where the sum is 0.
  void (*end_rows)(const float* maxima, const float* sums, int64_t n, float* factors, float* lse);
  /// dst[c][r] = src[r][c] for 32-bit words.
  void (*transpose)(const float* src, int64_t ld_src, int64_t rows, int64_t cols, float* dst, int64_t ld_dst);
  /// Whether all elements of a row are finite.
  bool (*finite)(const void* row, DType type, int64_t count);
  /// The sum of the squares of a row, in any order; infinite or NaN where an element is.
  float (*sum_of_squares)(const void* row, DType type, int64_t count);
  /// Converts `count` elements of `type` to float32.
  void (*to_float)(const void* src, DType type, int64_t count, float* dst);
  /// Converts `count` float32 to `type`, rounding to nearest even.
  void (*from_float)(const float* src, int64_t count, DType type, void* dst);
  /// words[c] = the pair (a[c], b[c]) of 16-bit elements; b null = zeros.
  void (*interleave)(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* words);
  /// dst[c][w] = the pair (rows[2 w][c], rows[2 w + 1][c]) for columns up to round_up(size, 16) and `words` words, a
  /// multiple of 16; zeros past n rows and `size` columns. Where it is not null, the left operand of accumulate() has
  /// k_stride 1 (V transposed); elsewhere row_stride 1.
  void (*pair_columns)(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t words,
                       uint32_t* dst);

  /// Or null: n rows of K as right operands of scores whose queries are rows: of each 32 keys [words][even keys, odd keys], zeros up to 32 keys.
  void (*key_columns)(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t words,
                      uint32_t* dst);
  /// The same of V: pairs of rows [pairs][columns].
  void (*value_pairs)(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t columns,
                      uint32_t* dst);
  /// Or null: the words of up to kPanel rows of `size` elements, transposed: dst[words][kPanel], zeros past `count` rows and
  /// `size` elements. Elements are bfloat16.
  void (*stage_lanes)(const char* const* rows, int64_t count, int64_t size, int64_t words, float* dst);
  /// Or null: rows[x][c] = o[c][x] * factor[x] of lanes [0, count), rounded to nearest even to bfloat16.
  /// Where the factor is 0, so is the row.
  void (*write_lanes)(const float* o, int64_t size, const float* factor, int64_t count, char* const* rows);
  /// Or null: the same of rows o[count][ld].
  void (*write_rows)(const float* o, int64_t ld, int64_t size, const float* factor, int64_t count,
                     char* const* rows);

  // Few queries: the speed of memory is the limit, K and V are read once. Each pass also prefetches the rows
  // that the next pass reads (`ahead`), so that memory is always busy.

  /// Queries of a key head that are few: up to so many go through the keys as rows, more as panels.
  int64_t few_rows;
  /// Or null: writes rows of `size` elements as FewRows::lanes for keys of `key_type`, lane_floats(size) for each 16. False where
  /// row_dots() takes the rows as they are.
  bool (*row_lanes)(const float* rows, int64_t ld, int64_t count, int64_t size, DType key_type, float* lanes);
  /// s[q][j] = dot(q[q], k[j]): n rows of `k` with elements of `type` and row stride ldk, n at most 128; row stride of s lds.
  void (*row_dots)(const FewRows& q, const void* k, DType type, int64_t ldk, int64_t n, int64_t d, float* s,
                   int64_t lds, RowsAhead& ahead);
  /// o[q][c] += sum_j p[q][j] * v[j][c], n at most 128.
  void (*row_sums)(const float* p, int64_t ldp, int64_t num_q, const void* v, DType type, int64_t ldv,
                   int64_t n, int64_t d, float* o, int64_t ldo, RowsAhead& ahead);

  // The same on tiles, for up to kTileQueries rows, or null: products of bfloat16 that add up to those of other types. Keys and values
  // of 16 or 8 bits.

  /// Before the first and behind the last tile_dots() and tile_sums() of a thread: the tiles get their shape, which takes as long as
  /// 10 keys.
  void (*tile_start)();
  void (*tile_stop)();
  /// Between the two, every 200 ns where there are no products: else the unit that multiplies tiles falls asleep.
  void (*tile_awake)();
  /// Queries of `query_type`, given as float32, for tile_dots() with keys of `key_type`. False where one is not finite and has no
  /// such products.
  bool (*tile_queries)(const float* q, int64_t ldq, int64_t num_q, int64_t size, DType query_type,
                       DType key_type, uint32_t* staged);
  /// Products of up to 128 keys as tiles leave them: s[n][kTileQueries], n up to the next multiple of 32.
  void (*tile_dots)(const uint32_t* queries, int64_t num_q, DType query_type, const TileRows& keys, float* s,
                    RowsAhead& ahead);
  /// The same as row_dots() writes them. False where some are NaN that row_dots() may know better.
  bool (*tile_scores)(const float* s, int64_t n, int64_t num_q, DType query_type, DType key_type, float* rows,
                      int64_t ld);
  /// Turns products into weights for tile_sums(), exp2(factor * s - m), where n is a multiple of 32 and all keys are seen. Raises row_max,
  /// the largest m, adds to row_sum, and rescales the older sums. False, and nothing is done, where a product is NaN. Overwrites s.
  bool (*tile_weigh)(float* s, int64_t n, int64_t num_q, DType query_type, DType value_type, float factor,
                     const TileSums& sums, uint32_t* weights, RowsAhead& ahead);
  /// Rows of up to 128 weights for tile_sums().
  void (*tile_weights)(const float* p, int64_t ldp, int64_t n, int64_t num_p, DType query_type,
                       DType value_type, uint32_t* weights);
  /// row_sums() of up to 128 keys; o has kTileQueries rows of tile_row_size(), in which columns lie as tiles have them. Returns to how many
  /// columns it added: all but where values are not finite. tile_dots() and tile_weigh() fetch some lines of `ahead`, this all that are left.
  int64_t (*tile_sums)(const uint32_t* weights, int64_t num_p, DType query_type, const TileRows& values,
                       float* o, int64_t ldo, RowsAhead& ahead);
  /// Copies a row of `size` of such columns of values of `type`, in tile_row_size() floats, to one in their order; `to_tiles`: the reverse.
  /// Both may be the same row.
  void (*tile_columns)(const float* from, int64_t size, DType type, bool to_tiles, float* to);
  /// How far behind row r of o there is another one of tile_sums() that belongs to its result; 0: there is none.
  int64_t (*tile_second_row)(int64_t num_p, DType query_type);

  /// A step of the softmax of up to kWeighedRows rows of n scores, `lds` floats apart: raises row_max, turns s into
  /// exp2(factor * s - row_max), and adds to row_sum, times alpha.
  void (*row_softmax)(float* s, int64_t lds, int64_t rows, int64_t n, float factor, const PanelState& state);
  /// s[j] = exp2(factor * s[j] - max2) for one row; returns the sum.
  float (*row_exp2)(float* s, int64_t n, float factor, float max2);
};

/// The table of each instruction set, null where this build has none. Calling its functions needs the processor.
const Ops* generic_ops();
const Ops* avx2_ops();
const Ops* avx512_ops();
const Ops* avx512_bf16_ops();
/// The same as on a processor without AVX512_VBMI.
const Ops* avx512_ops_without_vbmi();
const Ops* avx512_bf16_ops_without_vbmi();
const Ops* amx_bf16_ops();
/// Float words, but for the forward of many rows, whose products are of bfloat16 parts.
const Ops* amx_f16_ops();
const Ops* amx_f32_ops();
const Ops* neon_ops();

// Entries of amx_bf16_ops(), in attend_amx.cpp and panels_amx.cpp.
void attend_amx(const AttendKeys& keys, const AttendPanel* panels, int64_t count, float* scratch);
void pair_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t words,
                      uint32_t* dst);
void key_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t words,
                     uint32_t* dst);
void value_pairs_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t columns,
                     uint32_t* dst);
void stage_lanes_amx(const char* const* rows, int64_t count, int64_t size, int64_t words, float* dst);
void write_lanes_amx(const float* o, int64_t size, const float* factor, int64_t count, char* const* rows);
void write_rows_amx(const float* o, int64_t ld, int64_t size, const float* factor, int64_t count,
                    char* const* rows);
// In parts_amx.cpp.
bool split_rows_amx(const PartRows& rows, int parts, uint16_t* dst, int64_t row_size, int64_t part_size);
bool split_lanes_amx(const float* src, int64_t size, int parts, uint32_t* dst, int64_t part_words);
// In rows_amx.cpp.
void tile_start_amx();
void tile_awake_amx();
void tile_stop_amx();
void tile_columns_amx(const float* from, int64_t size, DType type, bool to_tiles, float* to);
bool tile_queries_amx(const float* q, int64_t ldq, int64_t num_q, int64_t size, DType query_type,
                      DType key_type, uint32_t* staged);
void tile_dots_amx(const uint32_t* queries, int64_t num_q, DType query_type, const TileRows& k, float* s,
                   RowsAhead& ahead);
bool tile_scores_amx(const float* s, int64_t n, int64_t num_q, DType query_type, DType key_type, float* rows,
                     int64_t ld);
bool tile_weigh_amx(float* s, int64_t n, int64_t num_q, DType query_type, DType value_type, float factor,
                    const TileSums& sums, uint32_t* weights, RowsAhead& ahead);
void tile_weights_amx(const float* p, int64_t ldp, int64_t n, int64_t num_p, DType query_type,
                      DType value_type, uint32_t* weights);
int64_t tile_sums_amx(const uint32_t* weights, int64_t num_p, DType query_type, const TileRows& v, float* o,
                      int64_t ldo, RowsAhead& ahead);
int64_t tile_second_row_amx(int64_t num_p, DType query_type);

}  // namespace fovea::cpu
