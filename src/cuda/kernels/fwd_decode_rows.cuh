// Of fwd_decode: how a warp copies rows of K and V to its ring, where they lie in one piece or in pages.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_decode_config.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace fovea::cuda {

/// Where the 16 keys of each piece lie.
enum class KeyLayout {
  kOnePiece,     ///< all keys of the sequence side by side
  kPieceInPage,  ///< those of a piece side by side in a page
  kRowsInPages,  ///< each by itself
};

/// A warp, and what it knows of the rows that it copies next.
template <class Instance>
struct FwdDecodeRows {
  static constexpr auto kConfig = Instance::kConfig;
  using Key = std::conditional_t<kConfig.e4m3, E4M3, typename Instance::Element>;
  using Memory = FwdDecodeMemory<Instance>;
  using KeysOfK =
      typename ConfigOf<Instance>::template RowsInStage<Key, kConfig.head_dim, kConfig.stage_keys()>;
  using KeysOfV =
      typename ConfigOf<Instance>::template RowsInStage<Key, kConfig.head_dim_v, kConfig.stage_keys()>;
  static constexpr int kWarps = kConfig.copying_warps(), kWarpKeys = kConfig.kWarpKeys,
                       kTileN = kWarpKeys * kWarps;
  static constexpr int kStages = kConfig.stages, kPiecesOfStage = kConfig.stage_keys() / kWarpKeys;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;

  const ForwardArgs& f;
  const Memory& memory;
  const int warp, lane;

  // In pages, rows are found for a group of pieces at once: 32, of whose first rows each lane knows one, where no piece lies in several
  // pages; else two, of whose rows each lane knows one.
  int64_t of_k = 0, of_v = 0;  ///< bytes from the data of k and of v to the lane's row
  int copied = 0;              ///< pieces of the group
  int entry_behind = 0;        ///< of the table, for the group behind it: what is done with it waits for it

  /// Before the first piece, `n`.
  template <KeyLayout kLayout>
  __device__ __forceinline__ void begin_rows(const tile::KeyRows& k, int last_key, int n) {
    if constexpr (kLayout != KeyLayout::kOnePiece) {
      entry_behind = look_up_pages<kLayout>(k, n, last_key);
      copied = pieces_of_group(kLayout);
    }
  }

  /// Begins to copy piece `n`, the warp's next, to a stage, if it is before `end`. Always one group of copies.
  template <KeyLayout kLayout>
  __device__ __forceinline__ void load(const tile::KeyRows& k, const tile::KeyRows& v, int last_key, int n,
                                       int end, int stage) {
    if (n < end) {
      const int last = last_key - n * kWarpKeys;
      const uint32_t to = memory.stage(kConfig.copies_pieces() ? n % kPiecesOfStage : warp, stage);
      if constexpr (kLayout != KeyLayout::kOnePiece) {
        if (copied == pieces_of_group(kLayout)) begin_group<kLayout>(k, v, last_key, n, end);
      }
      if constexpr (kLayout == KeyLayout::kOnePiece) {
        const int64_t first = n * kWarpKeys;
        copy_rows<KeysOfK>(to, k.data + first * row_bytes(k), row_bytes(k), last, f.p.head_dim);
        copy_rows<KeysOfV>(to + kConfig.values_behind(), v.data + first * row_bytes(v), row_bytes(v), last,
                           f.p.head_dim_v);
      } else if constexpr (kLayout == KeyLayout::kPieceInPage) {
        copy_rows<KeysOfK>(to, k.data + of_lane(of_k, copied), row_bytes(k), last, f.p.head_dim);
        copy_rows<KeysOfV>(to + kConfig.values_behind(), v.data + of_lane(of_v, copied), row_bytes(v), last,
                           f.p.head_dim_v);
      } else {
        copy_from_pages<KeysOfK>(to, k.data, of_k, last, f.p.head_dim);
        copy_from_pages<KeysOfV>(to + kConfig.values_behind(), v.data, of_v, last, f.p.head_dim_v);
      }
      ++copied;
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ static int row_bytes(const tile::KeyRows& rows) {
    return static_cast<int>(rows.view.row) * static_cast<int>(sizeof(Key));  // fits: aligned rows
  }
  /// run(layout), with that of the rows as a constant.
  template <class Run>
  __device__ __forceinline__ void for_layout(const tile::KeyRows& rows, const Run& run) const {
    if constexpr (kConfig.one_piece) {
      if (!kConfig.pages || !rows.paged())
        return run(std::integral_constant<KeyLayout, KeyLayout::kOnePiece>{});
    }
    if constexpr (kConfig.copies_pieces()) {
      run(std::integral_constant<KeyLayout, KeyLayout::kPieceInPage>{});
    } else if constexpr (kConfig.pages) {
      if ((f.p.cache_rows.value | rows.first) % kWarpKeys == 0) {
        run(std::integral_constant<KeyLayout, KeyLayout::kPieceInPage>{});
      } else {
        run(std::integral_constant<KeyLayout, KeyLayout::kRowsInPages>{});
      }
    }
  }
  static constexpr int pieces_of_group(KeyLayout layout) {
    return layout == KeyLayout::kPieceInPage ? 32 : 2;
  }
  /// Finds the lane's row of the group from piece `n` on, and asks for that of the group behind it.
  template <KeyLayout kLayout>
  __device__ __forceinline__ void begin_group(const tile::KeyRows& k, const tile::KeyRows& v, int last_key,
                                              int n, int end) {
    const tile::PageRow at = {tile::page_in_pool(f.p, entry_behind),
                              f.p.cache_rows.remainder(row_of_lane<kLayout>(k, n, last_key))};
    const int behind = n + pieces_of_group(kLayout) * kWarps;
    if (behind < end) entry_behind = look_up_pages<kLayout>(k, behind, last_key);
    of_k = offset_in_pages(k, at), of_v = offset_in_pages(v, at);
    copied = 0;
  }
  static __device__ __forceinline__ int64_t offset_in_pages(const tile::KeyRows& rows, tile::PageRow at) {
    const int64_t page_bytes = rows.view.batch * static_cast<int64_t>(sizeof(Key));
    return static_cast<uint32_t>(at.page) * page_bytes + int64_t{at.row} * row_bytes(rows);
  }
  /// The lane's row, by the sequence's table, of the group from piece `n` on; that of the last key for keys behind it.
  template <KeyLayout kLayout>
  __device__ __forceinline__ int row_of_lane(const tile::KeyRows& keys, int n, int last_key) const {
    const int of_lane =
        kLayout == KeyLayout::kPieceInPage ? lane * kTileN : lane % kWarpKeys + lane / kWarpKeys * kTileN;
    return keys.first + min(n * kWarpKeys + of_lane, last_key);
  }
  /// The table's entry for it.
  template <KeyLayout kLayout>
  __device__ __forceinline__ int look_up_pages(const tile::KeyRows& keys, int n, int last_key) const {
    return last_key >= 0 ? tile::page_entry(f.p, keys.batch, row_of_lane<kLayout>(keys, n, last_key)).page
                         : 0;
  }
  static __device__ __forceinline__ int64_t of_lane(int64_t offset, int knows) {
    return __shfl_sync(kWholeWarp, static_cast<long long>(offset), knows);
  }
  /// Copies 16 rows side by side, the first at `first`; those behind row `last` become zeros.
  template <class Rows>
  __device__ __forceinline__ void copy_rows(uint32_t to, const char* first, int row_bytes, int last,
                                            int columns) const {
    const int row = lane / Rows::kChunks, chunk = lane % Rows::kChunks;
    const int end = chunk * 16 < columns * static_cast<int>(sizeof(Key)) ? last - row : -1;
    const char* from = first + row * row_bytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < Rows::kCopies; ++i)
      ptx::cp_async_16(Rows::copied_to(to, row, chunk, i),
                       from + int64_t{i} * (Rows::kRowsAtOnce * row_bytes), Rows::kRowsAtOnce * i <= end);
  }
  /// Copies the 16 rows of the piece that is next, which lie in several pages.
  template <class Rows>
  __device__ __forceinline__ void copy_from_pages(uint32_t to, const char* data, int64_t offset, int last,
                                                  int columns) const {
    const int row = lane / Rows::kChunks, chunk = lane % Rows::kChunks;
    const int end = chunk * 16 < columns * static_cast<int>(sizeof(Key)) ? last - row : -1;
    const int knows = row + copied * kWarpKeys;
    data += chunk * 16;
#pragma unroll
    for (int i = 0; i < Rows::kCopies; ++i)
      ptx::cp_async_16(Rows::copied_to(to, row, chunk, i),
                       data + of_lane(offset, knows + Rows::kRowsAtOnce * i), Rows::kRowsAtOnce * i <= end);
  }
};

}  // namespace fovea::cuda
