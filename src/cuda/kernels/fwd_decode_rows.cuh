// Of fwd_decode: how a warp copies rows of K and V to its ring, where they lie in one piece or in pages.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_decode_config.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace fovea::cuda {

/// A warp, and what it knows of the rows that it copies next.
template <class Instance>
struct FwdDecodeRows {
  static constexpr FwdDecodeConfig kConfig = Instance::kConfig;
  using Key = std::conditional_t<kConfig.e4m3, E4M3, typename Instance::Element>;
  using Memory = FwdDecodeMemory<Instance>;
  using KeysOfK = KeyFragments<Key, kConfig.head_dim>;
  using KeysOfV = KeyFragments<Key, kConfig.head_dim_v>;
  static constexpr int kWarps = kConfig.warps, kTileN = kConfig.tile_n(), kWarpKeys = kConfig.kWarpKeys;
  static constexpr int kStages = kConfig.stages;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;

  const ForwardArgs& f;
  const Memory& memory;
  const int warp, lane;

  /// Where keys of the next two pieces lie, and of the two behind them: lane r knows row r of the first, lane 16 + r of the second.
  tile::PageRow page = {}, page_behind = {};
  bool second_piece = false;  ///< that is copied next

  /// Begins to copy piece `n` to a stage, and moves on to the warp's next. Always one group of copies.
  __device__ __forceinline__ void load(const tile::KeyRows& k, const tile::KeyRows& v, int last_key, int& n,
                                       int end, int stage) {
    if (n < end) {
      const int first = n * kWarpKeys;
      const uint32_t to = memory.stage(warp, stage);
      if (k.paged()) {
        if (pieces_lie_in_pages(k)) {
          copy_rows<KeysOfK>(to, k, first_in_page(k), last_key - first, f.p.head_dim);
          copy_rows<KeysOfV>(to + KeysOfK::kBytes, v, first_in_page(v), last_key - first, f.p.head_dim_v);
        } else {
          copy_from_pages<KeysOfK>(to, k, last_key - first, f.p.head_dim);
          copy_from_pages<KeysOfV>(to + KeysOfK::kBytes, v, last_key - first, f.p.head_dim_v);
        }
        if (second_piece) {
          page = page_behind;
        } else {
          page_behind = look_up_pages(k, first + 2 * kTileN, last_key);
        }
        second_piece = !second_piece;
      } else {
        copy_rows<KeysOfK>(to, k, row_in_one_piece(k, first), last_key - first, f.p.head_dim);
        copy_rows<KeysOfV>(to + KeysOfK::kBytes, v, row_in_one_piece(v, first), last_key - first,
                           f.p.head_dim_v);
      }
      n += kWarps;
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ static int row_bytes(const tile::KeyRows& rows) {
    return static_cast<int>(rows.view.row) * static_cast<int>(sizeof(Key));  // fits: aligned rows
  }
  __device__ __forceinline__ static const char* row_in_one_piece(const tile::KeyRows& rows, int row) {
    return rows.data + int64_t{row} * row_bytes(rows);
  }
  /// Whether the 16 keys of each piece lie in one page.
  __device__ __forceinline__ bool pieces_lie_in_pages(const tile::KeyRows& rows) const {
    return (f.p.cache_rows | rows.first) % kWarpKeys == 0;
  }
  /// Where the first of the 16 rows of the piece that is next lies, which are side by side.
  __device__ __forceinline__ const char* first_in_page(const tile::KeyRows& rows) const {
    const int knows = second_piece ? kWarpKeys : 0;
    const int in_pool = __shfl_sync(kWholeWarp, page.page, knows),
              in_page = __shfl_sync(kWholeWarp, page.row, knows);
    return rows.data + (in_pool * rows.view.batch + in_page * rows.view.row) * int64_t{sizeof(Key)};
  }
  /// Copies 16 rows side by side, the first at `first`; those behind row `last` become zeros.
  template <class Rows>
  __device__ __forceinline__ void copy_rows(uint32_t to, const tile::KeyRows& rows, const char* first,
                                            int last, int columns) const {
    const int row = lane / Rows::kChunks, chunk = lane % Rows::kChunks, row_bytes = this->row_bytes(rows);
    const int end = chunk * 16 < columns * static_cast<int>(sizeof(Key)) ? last - row : -1;
    const char* from = first + row * row_bytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < Rows::kCopies; ++i) {
      ptx::cp_async_16(Rows::copied_to(to, row, chunk, i), from, Rows::kRowsAtOnce * i <= end);
      from += Rows::kRowsAtOnce * row_bytes;
    }
  }
  /// Finds out where keys `first` + r of a piece and of the warp's next lie. The answer is needed two pieces later.
  __device__ __forceinline__ tile::PageRow look_up_pages(const tile::KeyRows& keys, int first,
                                                         int last_key) const {
    const int key = min(first + lane % kWarpKeys + lane / kWarpKeys * kTileN, last_key);
    return key >= 0 ? tile::page_row(f.p, keys.batch, keys.first + key) : tile::PageRow{};
  }
  /// Copies the 16 rows of the piece that is next, which lie in several pages.
  template <class Rows>
  __device__ __forceinline__ void copy_from_pages(uint32_t to, const tile::KeyRows& rows, int last,
                                                  int columns) const {
    const int row = lane / Rows::kChunks, chunk = lane % Rows::kChunks;
    const int end = chunk * 16 < columns * static_cast<int>(sizeof(Key)) ? last - row : -1;
    const int knows = row + (second_piece ? kWarpKeys : 0);
#pragma unroll
    for (int i = 0; i < Rows::kCopies; ++i) {
      const int in_pool = __shfl_sync(kWholeWarp, page.page, knows + Rows::kRowsAtOnce * i),
                in_page = __shfl_sync(kWholeWarp, page.row, knows + Rows::kRowsAtOnce * i);
      const int64_t at = in_pool * rows.view.batch + in_page * rows.view.row;
      ptx::cp_async_16(Rows::copied_to(to, row, chunk, i), rows.data + at * int64_t{sizeof(Key)} + chunk * 16,
                       Rows::kRowsAtOnce * i <= end);
    }
  }
};

}  // namespace fovea::cuda
