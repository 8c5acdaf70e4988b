// Rung 32 in CuTe: layouts say where things are, partitions say whose they are, and copies and products
// follow from both. A block owns 64 queries; thread (r, c) of 8 x 16 sums rows r + 8 i, columns c + 16 j of
// both products, so the 16 lanes of a row find its maximum among themselves.
#include <cute/tensor.hpp>

#include "ladder/harness/launch.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::side_cute {

using namespace cute;

constexpr int kThreads = 128, kLanesOfRow = 16;
using Vector = AutoVectorizingCopyWithAssumedAlignment<128>;  ///< four values along a row at a time
using Value = Copy_Atom<UniversalCopy<float>, float>;

/// Tiles in shared memory: rows are 4 longer than they need be, so that neighbours' reads of 16 bytes meet
/// all banks.
template <int kRows, int kColumns>
using Padded = Layout<cute::Shape<Int<kRows>, Int<kColumns>>, Stride<Int<kColumns + 4>, _1>>;

template <int D>
struct Tile {
  static constexpr int kM = 64, kN = D > 64 ? 32 : 64;  ///< queries, keys
  using Q = Padded<kM, D>;
  using K = Padded<kN, D>;
  using P = Padded<kM, kN>;
  using Columns =
      Layout<cute::Shape<Int<D>, Int<kN>>, Stride<_1, Int<D + 4>>>;  ///< V as (d, key), as it lies
  static constexpr int kFloats = cosize_v<Q> + 2 * cosize_v<K> + cosize_v<P> + 12;  // each from 16 bytes on
};

/// A multiply-add a thread on CUDA cores, 8 x 16 threads side by side.
using Mma = decltype(make_tiled_mma(MMA_Atom<UniversalFMA<float>>{},
                                    Layout<cute::Shape<_8, _16, _1>, Stride<_16, _1, _0>>{}));
/// A value a thread by cp.async, 4 rows of 32 columns at a time; 0 where the predicate does not hold.
using Copy =
    decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>, float>{},
                             Layout<cute::Shape<_4, _32>, Stride<_32, _1>>{}, Layout<cute::Shape<_1, _1>>{}));

/// A tile of a matrix into shared memory; `places` are its coordinates, of which those in `shape` exist.
template <class From, class To, class Places, class Limits>
__device__ __forceinline__ void load_tile(const From& from, To&& to, const Places& places,
                                          const Limits& shape) {
  const auto mine = Copy{}.get_slice(threadIdx.x);
  const Tensor source = mine.partition_S(from);
  const Tensor place = mine.partition_S(places);
  Tensor target = mine.partition_D(to);
  CUTE_UNROLL
  for (int i = 0; i < size<1>(source); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < size<2>(source); ++j)
      copy(Copy{}.with(elem_less(place(0, i, j), shape)), source(_, i, j), target(_, i, j));
  }
}

/// sums += A B^T of this thread: a (1, rows, k), b (1, columns, k) in shared memory, four of k at a time.
template <class A, class B, class Sums, class CopyA, class CopyB>
__device__ __forceinline__ void multiply(const A& a, const B& b, Sums& sums, CopyA copy_a, CopyB copy_b) {
  const Tensor a4 = flat_divide(a, make_shape(_1{}, size<1>(a), _4{}));
  const Tensor b4 = flat_divide(b, make_shape(_1{}, size<1>(b), _4{}));
  Tensor values_a = make_fragment_like(a4(_, _, _, 0, 0, 0));
  Tensor values_b = make_fragment_like(b4(_, _, _, 0, 0, 0));
#pragma unroll 2
  for (int k = 0; k < size<5>(a4); ++k) {
    copy(copy_a, a4(_, _, _, 0, 0, k), values_a);
    copy(copy_b, b4(_, _, _, 0, 0, k), values_b);
    CUTE_UNROLL
    for (int x = 0; x < 4; ++x) gemm(Mma{}, values_a(_, _, x), values_b(_, _, x), sums);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, D > 32 ? 2 : 4) flash_cute(Attention<float> p) {
  using T = Tile<D>;
  const auto whole = make_shape(p.seqlen, p.head_dim);
  const auto matrix = [&](auto* from) {
    const int64_t first = static_cast<int64_t>(blockIdx.y) * p.seqlen * p.head_dim;
    return make_tensor(make_gmem_ptr(from + first), whole,
                       make_stride(static_cast<int64_t>(p.head_dim), _1{}));
  };
  const auto tile_m = make_shape(Int<T::kM>{}, Int<D>{});
  const auto tile_n = make_shape(Int<T::kN>{}, Int<D>{});
  const auto own = make_coord(static_cast<int>(blockIdx.x), 0);
  const Tensor places = make_identity_tensor(whole);
  const Tensor gK = local_tile(matrix(p.k), tile_n, make_coord(_, 0));  // (key, d, tile)
  const Tensor gV = local_tile(matrix(p.v), tile_n, make_coord(_, 0));
  const Tensor cK = local_tile(places, tile_n, make_coord(_, 0));
  Tensor gO = local_tile(matrix(p.o), tile_m, own);

  float* memory = shared_memory<float>();
  const auto take = [&](auto layout) {
    const Tensor taken = make_tensor(make_smem_ptr(memory), layout);
    memory += (cosize(layout) + 3) / 4 * 4;
    return taken;
  };
  Tensor sQ = take(typename T::Q{});
  Tensor sK = take(typename T::K{});
  Tensor sV = take(typename T::K{});
  Tensor sP = take(typename T::P{});

  const auto mine = Mma{}.get_slice(threadIdx.x);
  const Tensor tQ = mine.partition_A(sQ);
  const Tensor tK = mine.partition_B(sK);
  const Tensor tP = mine.partition_A(sP);
  const Tensor tV = mine.partition_B(make_tensor(sV.data(), typename T::Columns{}));
  Tensor weights = mine.partition_C(sP);
  const Tensor key = mine.partition_C(make_identity_tensor(make_shape(Int<T::kM>{}, Int<T::kN>{})));
  Tensor scores = partition_fragment_C(Mma{}, make_shape(Int<T::kM>{}, Int<T::kN>{}));
  Tensor o = partition_fragment_C(Mma{}, tile_m);
  constexpr int kRows = decltype(size<1>(scores))::value;
  OnlineRow rows[kRows];
  clear(o);
  load_tile(local_tile(matrix(p.q), tile_m, own), sQ, local_tile(places, tile_m, own), whole);

  for (int tile = 0; tile < size<2>(gK); ++tile) {
    __syncthreads();  // all warps have read the tiles before: they may be overwritten
    load_tile(gK(_, _, tile), sK, cK(_, _, tile), whole);
    load_tile(gV(_, _, tile), sV, cK(_, _, tile), whole);
    cp_async_fence();
    cp_async_wait<0>();
    __syncthreads();  // the tiles are complete and may be read
    clear(scores);
    multiply(tQ, tK, scores, Vector{}, Vector{});
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      OnlineRow block;
      CUTE_UNROLL
      for (int x = 0; x < size<2>(scores); ++x) {
        const bool exists = tile * T::kN + get<1>(key(0, r, x)) < p.seqlen;
        scores(0, r, x) = exists ? scores(0, r, x) * p.scale : -INFINITY;
        block.max = fmaxf(block.max, scores(0, r, x));
      }
      for (int bit = kLanesOfRow / 2; bit > 0; bit /= 2)
        block.max = fmaxf(block.max, __shfl_xor_sync(kWholeWarp, block.max, bit));
      const float factor = rows[r].merge(block);
      CUTE_UNROLL
      for (int x = 0; x < size<2>(scores); ++x) {
        const float weight = expf(scores(0, r, x) - rows[r].max);
        weights(0, r, x) = weight;
        rows[r].sum += weight;  // of this lane's keys; summed over the lanes at the end
      }
      CUTE_UNROLL
      for (int y = 0; y < size<2>(o); ++y) o(0, r, y) *= factor;
    }
    __syncwarp();  // a warp reads the weights of its own rows alone
    multiply(tP, tV, o, Vector{}, Value{});
  }

  Tensor to = mine.partition_C(gO);
  const Tensor place = mine.partition_C(local_tile(places, tile_m, own));
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    float sum = rows[r].sum;
    for (int bit = kLanesOfRow / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, bit);
    CUTE_UNROLL
    for (int y = 0; y < size<2>(o); ++y) {
      if (elem_less(place(0, r, y), whole)) to(0, r, y) = o(0, r, y) / sum;
    }
    const int i = get<0>(place(0, r, 0));
    if (threadIdx.x % kLanesOfRow == 0 && i < p.seqlen)
      p.lse[static_cast<int64_t>(blockIdx.y) * p.seqlen + i] = rows[r].max + logf(sum);
  }
}

template <int D>
void start(const Attention<float>& p) {
  launch(flash_cute<D>, {blocks_of(p.seqlen, Tile<D>::kM), static_cast<unsigned>(p.batch)}, kThreads,
         Tile<D>::kFloats * sizeof(float), p);
}

void run(const Attention<float>& p) {
  if (p.head_dim <= 32) return start<32>(p);
  if (p.head_dim <= 64) return start<64>(p);
  start<128>(p);
}

}  // namespace ladder::side_cute
