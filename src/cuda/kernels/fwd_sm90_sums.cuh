// The second level of a consumer's sums of O, where operands have 8 bits: accumulators of wgmma keep 13 to 14 bits then, so what they
// have added up goes to float32 sums in shared memory. In registers these would leave room for two consumers only.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/shared.cuh"

namespace fovea::cuda {

/// A thread reads and writes its own sums alone. No P V is under way in any of these.
template <class Memory>
struct FwdSm90Sums {
  /// Of P V that wgmma adds up. The 48 steps of 1,536 keys lose less than 2^-8 of a sum, where weights of four bits are off by 2^-5;
  /// putting sums away at every 768 keys costs 3 %.
  static constexpr int kMostBlocks = 1536 / Memory::kConfig.tile_n;

  static constexpr int kFours = Memory::kConfig.head_dim_v / 8;

  const Memory& memory;
  int w;               ///< number of the consumer
  int blocks = 0;      ///< that the accumulators have added up
  bool begun = false;  ///< whether there are sums of this tile

  __device__ __forceinline__ void begin() {
    blocks = 0;
    begun = false;
  }
  /// Behind P V of a block; before the first block, too.
  template <int kRegs>
  __device__ __forceinline__ void end_block(float (&acc)[kRegs]) {
    if (__builtin_expect(++blocks > kMostBlocks, 0)) put(acc);
  }
  /// The accumulators become the whole sums.
  template <int kRegs>
  __device__ __forceinline__ void add_to(float (&acc)[kRegs]) const {
    if (!begun) return;
    for_each_four<kRegs / 4>([&](int four, uint32_t at) {
      const float4 before = load(at);
      acc[4 * four] += before.x;
      acc[4 * four + 1] += before.y;
      acc[4 * four + 2] += before.z;
      acc[4 * four + 3] += before.w;
    });
  }
  /// The sums of the thread's two rows follow their maxima.
  __device__ __forceinline__ void scale(const float (&factor)[2]) const {
    if (!begun) return;
    for_each_four<kFours>([&](int, uint32_t at) {
      const float4 x = load(at);
      store(at, x.x * factor[0], x.y * factor[0], x.z * factor[1], x.w * factor[1]);
    });
  }

 private:
  template <int kRegs>
  __device__ __forceinline__ void put(float (&acc)[kRegs]) {
    add_to(acc);
    for_each_four<kRegs / 4>([&](int four, uint32_t at) {
      float* const x = acc + 4 * four;
      store(at, x[0], x[1], x[2], x[3]);
      x[0] = x[1] = x[2] = x[3] = 0.0f;
    });
    blocks = 0;
    begun = true;
  }

  /// Calls visit(number of four accumulators, address of their sums): two of the thread's first row, and two of its second.
  template <int kCount, class Visit>
  __device__ __forceinline__ void for_each_four(const Visit& visit) const {
    const int thread = 32 * warp_index() + lane_index();
#pragma unroll
    for (int four = 0; four < kCount; ++four) visit(four, memory.sums(w, thread, four));
  }
  static __device__ __forceinline__ float4 load(uint32_t at) {
    const uint4 x = ptx::ld_shared_16(at);
    return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
  }
  static __device__ __forceinline__ void store(uint32_t at, float a, float b, float c, float d) {
    ptx::st_shared_16(
        at, make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)));
  }
};

}  // namespace fovea::cuda
