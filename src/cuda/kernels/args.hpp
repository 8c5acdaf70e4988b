// What launches pass to kernels beside the problem: how the work is split, and where intermediate results
// lie. Plain data, by value.
#pragma once

#include <cstdint>

#include "cuda/kernels/transposed_values.hpp"
#include "tile/alibi_reach.hpp"
#include "tile/attention_params.hpp"
#include "tile/divisor.hpp"
#include "tile/seen_blocks.hpp"
#include "tile/tile_scheduler.hpp"

namespace fovea::cuda {

/// Of fwd_decode_cluster, where lengths of sequences differ: which CTAs of a cluster share the keys of a tile.
struct ClusterSharing {
  bool by_length =
      false;  ///< a sequence's length says how many CTAs share the keys of its tiles; else all of the cluster
  bool heads =
      false;  ///< those of the cluster that a tile leaves have tiles of other heads; else they end at once
  int log2_most = 0;  ///< of a tile
  /// A tile has twice as many CTAs where each would have more elements of keys and values than 2^this: 4,096 keys of two times 128 columns.
  int log2_elements = 20;
};

/// A tile of queries is kTileM rows of one sequence and key head. With `pack_group` queries of the `group`
/// heads that share the key head are packed into it, row r being query r / group of head r % group: K and V
/// are then read once for all of them.
struct ForwardArgs {
  tile::AttentionParams p;
  bool pack_group = false;
  /// Whether tiles of the sequences of a head are neighbours: for kernels with expressions, where these read what sequences share; for
  /// kernels with ALiBi, where heads have a reach (alibi_norms).
  bool sequences_first = false;
  /// With pack_group: floor(2^32 / group) + 1, so that the upper half of row * query_magic is row / group.
  /// Exact while row * group < 2^32, which is when the launch may pack.
  uint32_t query_magic = 0;
  /// Heads (of q, or of k with pack_group) whose tiles run at the same time: as many as have K and V that fit
  /// the L2 cache together. At least 1.
  int heads_at_once = 1;
  /// Sections of so many heads; the heads that are left run at the same time after them.
  int whole_sections = 0;
  /// Keys are divided among this many CTAs a query tile. With 1 the kernel writes o and lse; else float32
  /// parts:
  ///   part_o   (num_splits, batch, heads_q, rows, head_dim_v)     normalised within the split
  ///   part_lse (num_splits, batch, heads_q, rows)                 natural logarithm, -inf without a key;
  ///   without the sink
  /// of `rows` = p.seqlen_q rows a sequence, which fwd_combine merges (and where the sink enters).
  /// With part_rows the kernel merges, too (tile/stream_k.hpp): num_splits CTAs have equal shares of all keys, and parts are
  ///   part_o (2 num_splits, part_rows, head_dim_v), part_lse (2 num_splits, part_rows), part_flags (2 num_splits).
  int num_splits = 1;
  /// Whether fwd_combine adds the parts of a row in one order whatever else is in the batch.
  bool parts_in_turn = false;
  int cluster_ctas =
      0;  ///< of fwd_decode_cluster: CTAs that share the keys of a tile, or of a split, and merge them themselves
  int part_rows = 0;
  int part_lanes =
      1;  ///< heads whose keys neighbouring CTAs read side by side: CTA n takes share n / part_lanes
  float* part_o = nullptr;
  float* part_lse = nullptr;
  uint64_t* part_flags = nullptr;
  uint64_t part_tag = 0;  ///< in the flag of a part that is there
  /// q, k and v of float32 as bf16x3 (kernels/to_bf16x3.cuh), bfloat16 of shape (batch, seqlen, heads, kBf16x3Parts,
  /// bf16x3_columns) each, for kernels that multiply these. Null, and 0 columns, for all others.
  char *bf16x3_q = nullptr, *bf16x3_k = nullptr, *bf16x3_v = nullptr;
  int bf16x3_columns = 0;
  TransposedValues transposed_v;  ///< for kernels that multiply operands of 8 bits
  int slots = 0;  ///< CTAs, or clusters, that the GPU holds at a time: as many as kernels that stay need
  /// Of a kernel that stays: tiles given out so far, 0 at first, or null: then CTAs take tiles in turn (tile::snake). For
  /// tiles of unequal work.
  int* tile_counter = nullptr;
  /// Of a kernel that stays: whether each CTA has one tile alone, of sequences of one length. The grid is then (blocks, heads, sequences),
  /// which saves 1 us before a CTA's first load (H200).
  bool one_tile_each = false;
  /// Whether the loader asks for Q and the last block of keys before the tile is planned: where one_tile_each, a tensor holds each sequence's
  /// keys in order, no window ends to the left, and heads are not packed.
  bool loads_first = false;
  tile::SeenBlocksView seen;     ///< of tiles of queries, where an expression says which keys they see
  tile::AlibiNorms alibi_norms;  ///< where blocks beyond the reach of slopes are passed over
  ClusterSharing sharing;        ///< of the clusters of cluster_ctas
};

/// Rows of a box of q that TMA copies (tma_args.hpp): what a warpgroup multiplies at a time.
inline constexpr int kTmaRowsQ = 64;
inline constexpr int kTmaRowBytes = 128, kTmaColumns = 64;

/// Rows of a box of k and v that TMA copies: of the kernel's tile of keys, and of one page where they lie in pages of
/// `page_rows`; 0: in none.
constexpr int tma_box_keys(int tile_n, int page_rows) {
  int box = tile_n;
  while (page_rows != 0) {  // greatest common divisor
    const int rest = box % page_rows;
    box = page_rows;
    page_rows = rest;
  }
  return box;
}
/// The swizzle of 128 bytes repeats after so many rows: smaller boxes would begin inside of it.
inline constexpr int kTmaFewestKeys = 8;

/// Most CTAs that share a tile of fwd_decode_cluster, a power of two: GPUs of compute capability 9.0 hold clusters of 16.
inline constexpr int kMostDecodeCtas = 16;

/// Most sequences of a kernel that cuts tiles into shares: their units lie in 2 KB of shared memory.
inline constexpr int kStreamSequences = 512;

/// The query of a row: rows of the heads of a packed group lie side by side.
constexpr int query_of_row(const ForwardArgs& args, int row) {
  return args.pack_group ? static_cast<int>((uint64_t{static_cast<uint32_t>(row)} * args.query_magic) >> 32)
                         : row;
}

/// Where slopes differ in their reach, heads begin with the last one, which in ALiBi's paper has the smallest slope and the longest tiles.
constexpr int longest_head_first(const tile::AlibiNorms& norms, int head, int heads) {
  return norms.wanted ? heads - 1 - head : head;
}

/// Tiles of `tile_m` rows, the longest first.
constexpr tile::QueryTiles query_tiles(const ForwardArgs& args, int tile_m, bool sequences_first = false) {
  const tile::AttentionParams& p = args.p;
  const int heads = args.pack_group ? p.heads_kv : p.heads_q, group = args.pack_group ? p.group : 1;
  const bool descending = tile::later_queries_first(p);
  tile::QueryTiles tiles;
  tiles.packed = p.cu_seqlens_q != nullptr;
  const int64_t rows = int64_t{p.seqlen_q} * group;
  tiles.grid = {static_cast<int>((rows + tile_m - 1) / tile_m),
                heads,
                p.batch,
                args.num_splits,
                args.heads_at_once,
                args.whole_sections,
                descending,
                sequences_first};
  tiles.packed_grid = {{p.cu_seqlens_q, p.batch, p.total_q, tile_m, group, descending},
                       heads,
                       args.num_splits,
                       args.heads_at_once,
                       args.whole_sections};
  return tiles;
}

/// Lists of the queries that name a key, made from the lists of keys (list_inverse.cuh). A key is a row of k of a key head, or of
/// all key heads where they share their lists.
struct ListInverse {
  unsigned long long* end = nullptr;  ///< of the segments given out; 0 at first, as `counts`, which follow
  int32_t* counts =
      nullptr;  ///< (chunks, keys): at last where the queries of a chunk end in the segment of a key
  int64_t* starts = nullptr;   ///< (keys): of segments
  int32_t* queries = nullptr;  ///< one for each entry
  int64_t keys = 0;
  int chunks = 0, heads = 1;

  /// Words of `end`, so that `counts` begin at a multiple of 16 bytes.
  static constexpr int kWordsOfEnd = 4;

  /// `row_k`: of all sequences.
  constexpr int64_t row(int64_t row_k, int head) const { return row_k * heads + head; }
  constexpr int64_t words_to_clear() const { return chunks > 0 ? kWordsOfEnd + chunks * keys : 0; }
  /// Entries that name the key, once the queries are written.
  constexpr int count_of(int64_t key) const { return counts[(chunks - 1) * keys + key]; }
};

/// When the steps of a tile of keys go from the last queries to the first.
enum class LastQueriesFirst : uint8_t {
  kNever,
  kInTurns,  ///< where the order of additions is fixed, if the launch says so
  kAlways
};

/// The backward is three launches: bwd_preprocess (delta, and zeros where sums are accumulated), the main kernel
/// over key blocks, bwd_postprocess (dq from its float32 sums; the unused rows of dq). dbias and dsink have
/// kernels of their own.
struct BackwardArgs {
  tile::AttentionParams p;
  /// Float32 row statistics, (batch, heads_q, rows) with rows = seqlen_q rounded up to kRowPadding:
  ///   lse_log2  lse * log2(e), and +inf for rows that take no part, so that their weights are exp2(-inf) = 0
  ///   delta     rowsum(dO * O) - dlse, 0 for rows that take no part
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  /// Float32 sums of dq before the factor `scale`, (batch, heads_q, rows, head_dim padded to the kernel's):
  /// the layout inside a tile belongs to the main kernel and bwd_postprocess alone.
  float* dq_sum = nullptr;
  /// Where blocks of keys wait for one another: whose turn it is to add to a tile of dq_sum
  /// (semaphore_at), and before these the CTAs that have begun, for each of semaphore_columns() slices. 0 at first.
  int* dq_semaphore = nullptr;
  /// With it: rows of a tile whose first block of keys, in that order, stores its part, where the others add theirs. dq_sum holds anything
  /// before, and at last where nobody had a turn or the last wrote dq. 0: all add, to zeros.
  int turn_rows = 0;
  /// With these: whether the others wait for that first block alone, and add in any order; else all add in order, for the same bits each time.
  bool first_alone = false;
  bool dq_in_vectors = false;   ///< whether the main kernel writes rows of dq in vectors of 16 bytes alone
  int* tile_counter = nullptr;  ///< of a kernel that stays: tiles given out; 0 at first
  /// Where queries have lists: float32 sums of dk before the factor `scale`, (rows of k, heads_kv, dk_columns), and of dv behind
  /// them, (rows of v, heads_kv, dv_columns). Rows are those of all sequences; key_rows: rows times heads. 0 at first.
  float* key_sums = nullptr;
  int64_t key_rows = 0;
  int dk_columns = 0, dv_columns = 0;
  ListInverse inverse;      ///< in their place where dk and dv are to have the same bits each time
  bool adds_named = false;  ///< whether the main kernel for lists adds to the gradients of named tensors
  /// q, k, v and d_o of float32 as bf16x3, as in ForwardArgs, for a main kernel that multiplies these, with zeros for rows of
  /// q and d_o that take no part; whether a row of dk or dv is not finite, which bwd_postprocess_exact then looks for: 0 at
  /// first.
  char *bf16x3_q = nullptr, *bf16x3_k = nullptr, *bf16x3_v = nullptr, *bf16x3_do = nullptr;
  int* not_finite = nullptr;
  int bf16x3_columns = 0;
  int key_blocks = 1;  ///< of the longest sequence, a CTA each
  /// Key heads whose blocks run at the same time. With `dq_semaphore` as many as keep them from waiting: in a head
  /// another block can begin for each tile of dQ that the one before it has left.
  int heads_at_once = 1;
  /// Of a kernel that stays: sections of so many heads; those that are left make the last one.
  int whole_sections = 0;
  /// Of a kernel that stays: whether the steps of a tile go from the last queries to the first. In a fixed order of additions the first
  /// keys add first then, in rounds (tile::KeyRounds), else the last.
  bool last_queries_first = false;
  int key_rounds = 1;
  /// Heads of the group whose steps at a block of queries follow one another: 1, or all.
  tile::Divisor heads_a_block = 1;
  int slots = 0;  ///< CTAs that the GPU holds at a time: as many as kernels that stay need
  /// Where the blocks of keys of a head are a cluster: how many; and whether every other head has the last block at rank 0.
  int cluster = 0;
  bool mirrors = false;
  bool sequences_first = false;  ///< as in ForwardArgs
  bool adds_dbias = false;       ///< whether the main kernel adds dS to dbias, which holds zeros at first
  int64_t rows = 0;              ///< rows a (batch, head) of the buffers above
  tile::SeenBlocksView seen;     ///< of tiles of keys, where an expression says which queries see them
  tile::AlibiNorms alibi_norms;  ///< as in ForwardArgs
  int dq_columns = 0;            ///< head_dim as the main kernel pads it: the width of dq_sum

  static constexpr int kRowPadding = 128;  ///< the largest query tile of any main kernel
  /// One turn for so many rows and columns: the smallest tile of any main kernel.
  static constexpr int kSemaphoreRows = 32, kSemaphoreColumns = 32;

  constexpr int semaphore_columns() const { return dq_columns / kSemaphoreColumns; }
  /// Rows of k of the sequences before.
  constexpr int64_t key_rows_before(const tile::SequenceSpan& span, int batch) const {
    return p.cu_seqlens_k != nullptr ? span.row_k : int64_t{batch} * p.seqlen_k;
  }
  /// The row of `key_sums` of key j.
  constexpr int64_t key_row(const tile::SequenceSpan& span, int batch, int head_kv, int j) const {
    return (key_rows_before(span, batch) + j) * p.heads_kv + head_kv;
  }
  constexpr float* dk_sums(int64_t row) const { return key_sums + row * dk_columns; }
  constexpr float* dv_sums(int64_t row) const { return key_sums + key_rows * dk_columns + row * dv_columns; }
  /// Where in `dq_semaphore` the tile stands whose first row is `row` of a (batch, head).
  constexpr int64_t semaphore_at(int batch, int head, int row, int slice) const {
    const int64_t rows_before = (int64_t{batch} * p.heads_q + head) * rows + row;
    return (1 + rows_before / kSemaphoreRows) * semaphore_columns() + slice;
  }
};

}  // namespace fovea::cuda
