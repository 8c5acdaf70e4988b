// What fwd_mma does with scores before they are weighed: masks, ALiBi, expressions, every term; and which weights dropout drops.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_mma_config.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/packed.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// A warp's scores: its rows of the tile, against blocks of kTileN keys. The base of FwdMma.
template <class Instance>
struct FwdMmaScores {
  using T = typename Instance::Element;
  static constexpr FwdMmaConfig kConfig = Instance::kConfig;
  static constexpr int kTileN = kConfig.tile_n, kSTiles = kTileN / 8;
  static constexpr int kMTiles = kConfig.warp_m() / 16;  ///< m16 tiles of a warp
  /// Whether the kernel is compiled for a score, or for which keys a query sees.
  static constexpr bool kHasScore = kConfig.expression && Expression::kHasScore,
                        kHasSees = kConfig.expression && Expression::kHasSees;
  using WorkTile = FwdMmaWorkTile<kConfig>;
  static_assert(sizeof(WorkTile) <= kConfig.work_tile_bytes());
  using AccS = float[kMTiles][kSTiles][4];

  const ForwardArgs& args;
  const tile::AttentionParams& p;
  const WorkTile* shared_work;  ///< in shared memory, for the mainloop and the epilogue
  const tile::Dropout dropout;  ///< of kernels that know every term

  __device__ __forceinline__ FwdMmaScores(const ForwardArgs& args_, const WorkTile* shared_work_)
      : args(args_),
        p(args_.p),
        shared_work(shared_work_),
        dropout(kConfig.general ? tile::dropout_of(args_.p) : tile::Dropout()) {}

  /// With dropout they are asked for anew at each place: what is derived from them is not kept in registers, which such kernels lack.
  __device__ __forceinline__ static int thread() { return static_cast<int>(index()); }
  __device__ __forceinline__ static int warp() { return static_cast<int>(index() / 32); }
  __device__ __forceinline__ static int lane() { return static_cast<int>(index() % 32); }
  __device__ __forceinline__ static uint32_t index() {
    uint32_t x = threadIdx.x;
    if constexpr (kConfig.dropout) ptx::make_opaque(x);
    return x;
  }

  /// From what the scores of a block are at last to exponents of 2: kernels fold the scale into the exponent's fma, but where
  /// terms are added to scaled products.
  __device__ __forceinline__ static float scale_log2_of(const tile::AttentionParams& p) {
    if constexpr (kConfig.general) return 1.0f;
    return (kHasScore ? 1.0f : p.scale) * tile::kLog2e;
  }

  /// Calls visit(mt, half, row of the tile) for this lane's rows.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(const Visit& visit) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(mt, half, shared_work->first_row + warp() * kConfig.warp_m() + mt * 16 + half * 8 + lane() / 4);
    }
  }
  /// This lane's first key of block n.
  __device__ __forceinline__ int first_key(int n) const {
    return n * kTileN + 2 * (lane() % 4);
  }

  /// Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void mask(AccS& acc_s, int n) const {
    for_each_row([&](int mt, int half, int row) {
      mask_row(acc_s[mt], half, first_key(n),
               tile::keys_of(p, shared_work->span, WorkTile::query_of(args, row)));
    });
  }

  // --- kernels that know every term ---

  __device__ __forceinline__ void add_terms(AccS& acc_s, int n) const {
    for_each_row([&](int mt, int half, int row) {
      const WorkTile& here = *shared_work;
      const QueryRow r = query_row(args, here, row);
      const tile::Span32 seen = row < here.end_row ? tile::keys_of(p, here.span, r.query) : tile::Span32{};
      apply_terms(acc_s[mt], half, first_key(n), seen,
                  ScoreRow<T>(p, here.span, here.batch, r.head, r.query));
    });
  }
  __device__ __forceinline__ void drop(AccS& acc_s, int n) const {
    for_each_row([&](int mt, int half, int row) {
      const WorkTile& here = *shared_work;
      const QueryRow r = query_row(args, here, row);
      drop_weights(acc_s[mt], half, first_key(n), DropoutRow(dropout, p, here.batch, r.head, r.query));
    });
  }

  /// The dropout of the problem.
  __device__ __forceinline__ const tile::Dropout& whole_dropout() const {
    if constexpr (kConfig.dropout) return shared_work->dropout;
    return dropout;
  }

  // --- kernels that know one: rows of a tile are queries of one head ---

  /// Pairs that the expression lets see each other, where it does not let all of a block.
  struct Seen {
    bool partial = false;
    PairBits<kHasSees ? kSTiles / 2 : 1> of[kMTiles];
  };
  /// Of block n: to be found before its products, since it comes from memory.
  __device__ __forceinline__ Seen seen_of(int n) const {
    Seen seen;
    if constexpr (kHasSees) {
      seen.partial = shared_work->seen.is_partial(n);
      if (seen.partial) find_seen(seen, n);
    }
    return seen;
  }
  /// From Q K^T of block n to scores.
  __device__ __forceinline__ void apply_term(AccS& acc_s, int n, const Seen& seen) const {
    if constexpr (kConfig.alibi) add_alibi(acc_s, n);
    if constexpr (kHasScore) apply_score(acc_s, n);
    if constexpr (kHasSees) {
      if (seen.partial) hide_unseen(acc_s, seen);
    }
    if (n >= shared_work->n_masked) mask(acc_s, n);
  }

  /// S -> S - slope / scale |distance|.
  __device__ __forceinline__ void add_alibi(AccS& acc_s, int n) const {
    const WorkTile& here = *shared_work;
    const float factor = -alibi_slope(p, here.batch, here.head) / p.scale;
    const int row = here.first_row + warp() * kConfig.warp_m() + lane() / 4;
    const auto distance = static_cast<float>(row + here.span.used_k - here.span.used_q - first_key(n));
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          add_distances<-1>(acc_s[mt][nt], half, factor,
                            distance + static_cast<float>(16 * mt + 8 * half - 8 * nt));
      }
    }
  }

  /// The expression's share of this lane's rows.
  struct Queries {
    Expression::Head head;
    Expression::Query of[kMTiles][2];
  };
  __device__ __forceinline__ Queries queries() const {
    static_assert(kMTiles == 1 || kMTiles == 2);
    const WorkTile& here = *shared_work;
    const Expression::Head head = expression_head(p, here.span, here.batch, here.head);
    const auto query = [&](int row) {
      return Expression::Query(
          head, query_in_use(here.span, here.first_row + warp() * kConfig.warp_m() + lane() / 4 + row));
    };
    if constexpr (kMTiles == 1) return {head, {{query(0), query(8)}}};
    if constexpr (kMTiles == 2) return {head, {{query(0), query(8)}, {query(16), query(24)}}};
  }
  /// The key of element 2 half + e of tile nt. Keys behind the last one get that, so that every tensor has their elements: the window
  /// takes them out.
  __device__ __forceinline__ Expression::Key key_of(const Expression::Head& head, int n, int nt,
                                                    int e) const {
    const int k = first_key(n) + 8 * nt + e;
    return Expression::Key(head, Expression::kReadsByKey ? max(min(k, shared_work->span.used_k - 1), 0) : k);
  }
  __device__ __forceinline__ void apply_score(AccS& acc_s, int n) const {
    const Queries query = queries();
#pragma unroll
    for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Expression::Key key = key_of(query.head, n, nt, e);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& s = acc_s[mt][nt][2 * half + e];
            s = Expression::score(query.head, query.of[mt][half], key, s * p.scale);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void find_seen(Seen& seen, int n) const {
    const tile::SeenBlocksView& view = args.seen;
    const WorkTile& here = *shared_work;
    if (view.pairs == nullptr) {
      const Queries query = queries();
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        seen.of[mt].template ask<8>([&](int i) {
          return Expression::sees(query.head, query.of[mt][i / 2 % 2], key_of(query.head, n, i / 4, i % 2));
        });
      }
      return;
    }
    const uint32_t* const pairs = view.pairs +
                                  view.pairs_offset(here.batch, here.head, here.first_row / kConfig.tile_m) +
                                  int64_t{n} * view.words_of_block() + lane();
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt)
      seen.of[mt].load(pairs + (warp() * kMTiles + mt) * view.words_of_rows());
  }
  /// Scores of pairs that the expression does not let see each other become -inf.
  __device__ __forceinline__ static void hide_unseen(AccS& acc_s, const Seen& seen) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int i = 0; i < 4 * kSTiles; ++i)
        if (!seen.of[mt][i]) acc_s[mt][i / 4][i % 4] = -INFINITY;
    }
  }

  /// Which weights of 16 rows of the warp in a block dropout keeps.
  using Kept = KeptWeights<kConfig.dropout ? kTileN / 16 : 1>;
  /// Finds those of rows 16 mt in block n.
  __device__ __forceinline__ void find_kept_of_rows(Kept& kept, int mt, int n) const {
    const WorkTile& here = *shared_work;
    const int first_row = here.first_row + warp() * kConfig.warp_m() + 16 * mt;
    kept.template of_queries<2>(here.dropout, tile::dropout_head(p, here.batch, here.head), lane(),
                                [&](int i) {
                                  return FirstPair{first_row, n * kTileN + 16 * i};
                                });
  }
  /// Weights of a step, as operand A: those that dropout drops become 0, the others lack the factor 1 / (1 - p).
  __device__ __forceinline__ static void drop(uint32_t (&weights)[4], const Kept& kept, int step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) weights[r] &= ptx::halves_by_signs(kept.signs(step, r));
  }
};

}  // namespace fovea::cuda
