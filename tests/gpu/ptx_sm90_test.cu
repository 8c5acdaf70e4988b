// Compares the wrappers of sm_90a on a Hopper GPU with the maps of src/tile and with exact arithmetic: products and sums of
// small integers are exact in bfloat16, float16 and float32.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "device_array.cuh"
#include "tile/fragment_map.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea_test {
namespace {

namespace ptx = fovea::cuda::ptx;
using namespace fovea::tile;

bool is_hopper() {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9 &&
         properties.minor == 0;
}
#define FOVEA_SKIP_WITHOUT_HOPPER() \
  FOVEA_SKIP_WITHOUT_GPU();         \
  if (!is_hopper()) GTEST_SKIP() << "an instruction of sm_90a, which this GPU has not"

/// An integer from -4 to 4 for each index.
constexpr int number(int i) {
  return static_cast<int>(static_cast<uint32_t>(i) * 2654435761u >> 20) % 9 - 4;
}
template <class T>
T element(int i) {
  const auto x = static_cast<float>(number(i));
  if constexpr (sizeof(T) == 1) {
    return fovea::from_float<T>(x);
  } else {
    return static_cast<T>(x);
  }
}

// ---- mbarrier

constexpr int kRounds = 20;

/// Thread 0 passes numbers to the other warp through one slot.
__global__ void hand_over(int* received) {
  __shared__ alignas(8) uint64_t barriers[2];
  __shared__ int slot;
  const uint32_t full = ptx::shared_address(&barriers[0]), empty = ptx::shared_address(&barriers[1]);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, 32);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised
  if (threadIdx.x == 0) {
    for (int round = 0; round < kRounds; ++round) {
      ptx::mbarrier_wait(
          empty, round % 2 ^ 1);  // the slot has been read and may be overwritten; at first it is free
      for (const long long start = clock64(); round % 2 == 0 && clock64() - start < 3000;) {
      }
      slot = 100 + round;
      ptx::mbarrier_arrive(full);
    }
  } else if (threadIdx.x >= 32) {
    for (int round = 0; round < kRounds; ++round) {
      ptx::mbarrier_wait(full, round % 2);
      received[round * 32 + threadIdx.x - 32] = slot;
      ptx::mbarrier_arrive(empty);
    }
  }
}

TEST(PtxSm90, MbarrierPhases) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<int> received(kRounds * 32);
  hand_over<<<1, 64>>>(received.data());
  const auto got = received.values();
  for (int i = 0; i < kRounds * 32; ++i) EXPECT_EQ(got[static_cast<size_t>(i)], 100 + i / 32);
}

// ---- TMA

constexpr int kColumns = 64, kBoxRows = 16;

/// The driver's function, without linking its library.
CUresult encode(CUtensorMap* map, void* data, const std::vector<cuuint64_t>& sizes,
                const std::vector<cuuint64_t>& strides, const std::vector<cuuint32_t>& box) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) !=
      cudaSuccess)
    return CUDA_ERROR_NOT_FOUND;
  const std::vector<cuuint32_t> steps(sizes.size(), 1);
  return reinterpret_cast<Encode>(entry)(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, static_cast<cuuint32_t>(sizes.size()), data, sizes.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

struct Maps {
  CUtensorMap from4, from5;
};

/// Copies a box with the map of four dimensions, and with the map of five the box one row further, which lies
/// partly outside the tensor.
__global__ void copy_boxes(const __grid_constant__ Maps maps, uint16_t* raw, int row) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t to = ptx::shared_address(memory), full = ptx::shared_address(&barrier);
  constexpr int kBytes = kColumns * kBoxRows * 2;
  if (threadIdx.x == 0) {
    ptx::tma_prefetch(maps.from4);
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(full, 2 * kBytes);
    ptx::tma_load(to, maps.from4, full, 0, row, 1, 0);
    ptx::tma_load(to + kBytes, maps.from5, full, 0, 0, row + 1, 1, 0);
  }
  __syncthreads();  // the barrier is initialised
  ptx::mbarrier_wait(full, 0);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kBytes / 2; i += 32)
    raw[i] = reinterpret_cast<uint16_t*>(memory)[i];
}

/// (rows, heads, columns) of 20 x 3 x 64; a box of rows 7 .. 22 of head 1. `expanded`: all heads are the first, by a stride of 0.
void expect_boxes(bool expanded) {
  constexpr int kRows = 20, kHeads = 3, kRow = 7;
  std::vector<__half> values(kRows * kHeads * kColumns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = element<__half>(static_cast<int>(i));
  const DeviceArray<__half> from(values);
  const cuuint64_t row_bytes = kHeads * kColumns * 2, head_bytes = expanded ? 0 : kColumns * 2,
                   all = row_bytes * kRows;
  Maps maps;
  ASSERT_EQ(encode(&maps.from4, from.data(), {kColumns, kRows, kHeads, 1}, {row_bytes, head_bytes, all},
                   {kColumns, kBoxRows, 1, 1}),
            CUDA_SUCCESS);
  const std::vector<cuuint64_t> sizes = {kColumns, 1, kRows, kHeads, 1},
                                strides = {16, row_bytes, head_bytes, all};
  const std::vector<cuuint32_t> box = {kColumns, 1, kBoxRows, 1, 1};
  ASSERT_EQ(encode(&maps.from5, from.data(), sizes, strides, box), CUDA_SUCCESS);
  DeviceArray<uint16_t> raw(2 * kColumns * kBoxRows);
  copy_boxes<<<1, 32, 2 * kColumns * kBoxRows * 2>>>(maps, raw.data(), kRow);
  const auto got = raw.values();
  const auto at = [&](int row, int column) {
    return values[static_cast<size_t>((row * kHeads + (expanded ? 0 : 1)) * kColumns + column)];
  };
  for (int b = 0; b < 2; ++b) {
    for (int r = 0; r < kBoxRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t address = swizzled_address(
            SwizzleMode::k128, static_cast<uint32_t>(((b * kBoxRows + r) * kColumns + c) * 2));
        const __half x = __ushort_as_half(got[address / 2]);
        const int row = kRow + b + r;
        EXPECT_EQ(static_cast<float>(x), row < kRows ? static_cast<float>(at(row, c)) : 0.0f)
            << b << " " << r << " " << c;
      }
    }
  }
}

TEST(PtxSm90, TmaCopiesBoxesSwizzled) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_boxes(false);
}
TEST(PtxSm90, TmaCopiesOneHeadForAll) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_boxes(true);
}

struct FromAndTo {
  CUtensorMap from, to;
};

/// Copies a box, and adds it to another tensor at the same place, twice.
__global__ void add_boxes(const __grid_constant__ FromAndTo maps, int row) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t at = ptx::shared_address(memory), full = ptx::shared_address(&barrier);
  ptx::mbarrier_init(full, 1);
  ptx::mbarrier_init_fence();
  ptx::mbarrier_arrive_expect(full, kColumns * kBoxRows * 2);
  ptx::tma_load(at, maps.from, full, 0, row, 1, 0);
  ptx::mbarrier_wait(full, 0);
  for (int i = 0; i < 2; ++i) ptx::tma_add(maps.to, at, 0, row, 1, 0);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();  // shared memory is this CTA's until it has been read
}

// ---- what another device or stream brings

constexpr int kArriving = 64;

/// The second CTA writes numbers, after a while, and then the word; the first one copies them once the word has come.
__global__ void copy_what_arrives(uint32_t* word, uint32_t* numbers, uint32_t* copied, uint32_t number) {
  __shared__ __align__(128) uint32_t memory[kArriving];
  __shared__ uint64_t barrier;
  if (blockIdx.x == 1) {
    if (threadIdx.x > 0) return;
    for (const long long start = clock64(); clock64() - start < 100000;) {
    }
    for (uint32_t i = 0; i < kArriving; ++i) numbers[i] = 1000 + i;
    __threadfence_system();
    atomicExch_system(word, number + 2);
    return;
  }
  const uint32_t full = ptx::shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
    ptx::wait_for_arrival(word, number);
    ptx::mbarrier_arrive_expect(full, sizeof memory);
    ptx::bulk_load(ptx::shared_address(memory), numbers, sizeof memory, full);
  }
  __syncthreads();  // the barrier is initialised
  ptx::mbarrier_wait(full, 0);
  copied[threadIdx.x] = memory[threadIdx.x];
}

TEST(PtxSm90, BulkCopiesReadWhatHasArrived) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  std::vector<uint32_t> expected;
  for (uint32_t i = 0; i < kArriving; ++i) expected.push_back(1000 + i);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const DeviceArray<uint32_t> word(std::vector<uint32_t>{0xfffffff0u});  // numbers go round
    const DeviceArray<uint32_t> numbers(kArriving), copied(kArriving);
    copy_what_arrives<<<2, kArriving>>>(word.data(), numbers.data(), copied.data(), 5);
    ASSERT_EQ(copied.values(), expected);
  }
}

/// Eight numbers a thread, in pairs of bits.
template <class T>
__global__ void add_eight(T* sums, uint4 numbers) {
  ptx::red_add_16(sums, numbers);
}

/// Sums that either type holds, so that the order does not matter.
template <class T>
void expect_sums_of_eight(uint32_t one, uint32_t two) {
  constexpr int kThreads = 100;
  const DeviceArray<T> sums(std::vector<T>(8, T(3.0f)));
  add_eight<T><<<1, kThreads>>>(sums.data(), uint4{one << 16 | two, 0, two << 16 | one, one});
  const std::vector<float> added = {2, 1, 0, 0, 1, 2, 1, 0};
  const std::vector<T> got = sums.values();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(static_cast<float>(got[i]), 3 + kThreads * added[i]) << i;
}

TEST(PtxSm90, RedAddsEightElements) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_sums_of_eight<__half>(0x3c00, 0x4000);
  expect_sums_of_eight<__nv_bfloat16>(0x3f80, 0x4000);
}

TEST(PtxSm90, TmaAddsBoxesWhereTheTensorIs) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  // (rows, heads, columns) of 20 x 3 x 64; a box of rows 7 .. 22 of head 1.
  constexpr int kRows = 20, kHeads = 3, kRow = 7;
  std::vector<__half> values(kRows * kHeads * kColumns), ones(values.size(), __half(1.0f));
  for (size_t i = 0; i < values.size(); ++i) values[i] = __half(static_cast<float>(i % 100));
  const DeviceArray<__half> from(values), to(ones);
  const cuuint64_t row_bytes = kHeads * kColumns * 2, head_bytes = kColumns * 2, all = row_bytes * kRows;
  FromAndTo maps;
  for (const auto& [map, data] : {std::pair{&maps.from, from.data()}, std::pair{&maps.to, to.data()}})
    ASSERT_EQ(encode(map, const_cast<__half*>(data), {kColumns, kRows, kHeads, 1},
                     {row_bytes, head_bytes, all}, {kColumns, kBoxRows, 1, 1}),
              CUDA_SUCCESS);
  add_boxes<<<1, 1, kColumns * kBoxRows * 2>>>(maps, kRow);
  const auto got = to.values();
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t head = i / kColumns % kHeads, row = i / (kColumns * kHeads);
    const float added = head == 1 && row >= kRow ? 2 * static_cast<float>(values[i]) : 0.0f;
    EXPECT_EQ(static_cast<float>(got[i]), 1 + added) << i;
  }
}

// ---- clusters

/// The first CTA of two copies a box to both. Then each writes a number into the other's shared memory, and arrives there, first at
/// one barrier, then at another: a phase that ends twice before anybody asks looks like one that has not ended.
__global__ void __cluster_dims__(2, 1, 1)
    meet(const __grid_constant__ CUtensorMap from, uint16_t* raw, uint32_t* received) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ alignas(8) uint64_t barriers[3];
  __shared__ uint32_t slot;
  const uint32_t full = ptx::shared_address(&barriers[0]), there = ptx::shared_address(&barriers[1]),
                 read = ptx::shared_address(&barriers[2]);
  const int rank = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  constexpr int kElements = kColumns * kBoxRows;
  if (thread == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(there, 1);
    ptx::mbarrier_init(read, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_barrier();  // the barriers of both are ready
  if (thread == 0) {
    ptx::mbarrier_arrive_expect(full, 2 * kElements);
    if (rank == 0) ptx::tma_load_multicast(ptx::shared_address(memory), from, full, 0, 0, 1, 0, 3);
    ptx::st_cluster_4(ptx::address_in_cta(ptx::shared_address(&slot), 1 - rank),
                      100 + static_cast<uint32_t>(rank));
    ptx::mbarrier_arrive_cluster(ptx::address_in_cta(there, 1 - rank));
  }
  ptx::mbarrier_wait(full, 0);
  for (int i = thread; i < kElements; i += 32)
    raw[rank * kElements + i] = reinterpret_cast<uint16_t*>(memory)[i];
  ptx::mbarrier_wait_cluster(there, 0);
  received[rank * 32 + thread] = *static_cast<volatile uint32_t*>(&slot);
  __syncwarp();
  if (thread == 0) ptx::mbarrier_arrive_in_cta(ptx::address_in_cta(read, 1 - rank));
  ptx::mbarrier_wait(read, 0);
  ptx::cluster_barrier();  // nobody arrives at the other's barriers any more
}

TEST(PtxSm90, ClustersShareCopiesAndMemory) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  constexpr int kRows = 20, kHeads = 3;
  std::vector<__half> values(kRows * kHeads * kColumns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = element<__half>(static_cast<int>(i));
  const DeviceArray<__half> from(values);
  const cuuint64_t row_bytes = kHeads * kColumns * 2, head_bytes = kColumns * 2;
  CUtensorMap map;
  ASSERT_EQ(encode(&map, from.data(), {kColumns, kRows, kHeads, 1},
                   {row_bytes, head_bytes, row_bytes * kRows}, {kColumns, kBoxRows, 1, 1}),
            CUDA_SUCCESS);
  DeviceArray<uint16_t> raw(2 * kColumns * kBoxRows);
  DeviceArray<uint32_t> received(64);
  meet<<<2, 32, kColumns * kBoxRows * 2>>>(map, raw.data(), received.data());
  const auto got = raw.values();
  for (size_t cta = 0; cta < 2; ++cta) {
    for (int r = 0; r < kBoxRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t address =
            swizzled_address(SwizzleMode::k128, static_cast<uint32_t>((r * kColumns + c) * 2));
        const __half x = __ushort_as_half(got[cta * kColumns * kBoxRows + address / 2]);
        EXPECT_EQ(static_cast<float>(x),
                  static_cast<float>(values[static_cast<size_t>((r * kHeads + 1) * kColumns + c)]))
            << cta << " " << r << " " << c;
      }
    }
  }
  const auto numbers = received.values();
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(numbers[i], i < 32 ? 101u : 100u) << i;
}

/// A chain of CTAs: each adds its rank to 16 bytes a thread and sends them on; a fence of one thread is for all stores.
__global__ void __cluster_dims__(4, 1, 1) pass_on(uint4* received) {
  __shared__ alignas(16) uint4 inbox[32];
  __shared__ alignas(8) uint64_t full;
  const int rank = ptx::cta_rank();
  const auto thread = threadIdx.x;
  if (thread == 0) ptx::mbarrier_init(ptx::shared_address(&full), 1);
  ptx::mbarrier_init_fence();
  ptx::cluster_barrier();  // all barriers are initialised
  uint4 sums = {thread, thread + 1, thread + 2, thread + 3};
  if (rank > 0) {
    ptx::mbarrier_wait_cluster(ptx::shared_address(&full), 0);
    sums = inbox[thread];
  }
  const auto more = static_cast<unsigned>(100 * (rank + 1));
  sums = {sums.x + more, sums.y + more, sums.z + more, sums.w + more};
  if (rank < 3) {
    ptx::st_cluster_16(ptx::address_in_cta(ptx::shared_address(&inbox[thread]), rank + 1), sums);
    __syncthreads();  // all have stored: the fence of one is for them, too
    if (thread == 0) ptx::mbarrier_arrive_cluster(ptx::address_in_cta(ptx::shared_address(&full), rank + 1));
  } else {
    received[thread] = sums;
  }
  ptx::cluster_barrier();  // nobody writes to a CTA any more: it may end
}

TEST(PtxSm90, StoresOfACtaReachTheNextOne) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint32_t> received(128);
  pass_on<<<4, 32>>>(reinterpret_cast<uint4*>(received.data()));
  const auto got = received.values();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i / 4 + i % 4 + 1000) << i;
}

/// Each CTA of a cluster stores 16 and 8 bytes a thread in the next one, whose barrier counts them.
__global__ void __cluster_dims__(2, 1, 1) store_and_count(uint4* received, uint2* received_less) {
  __shared__ alignas(16) uint4 inbox[32];
  __shared__ alignas(8) uint2 inbox_less[32];
  __shared__ alignas(8) uint64_t full;
  const int rank = ptx::cta_rank();
  const auto thread = threadIdx.x;
  if (thread == 0) {
    ptx::mbarrier_init(ptx::shared_address(&full), 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_arrive();
  const auto x = thread + static_cast<unsigned>(1000 * (rank + 1));
  const uint32_t own = ptx::shared_address(&full);
  ptx::cluster_wait();  // both barriers are initialised
  const uint32_t there = ptx::address_in_cta(own, 1 - rank);
  ptx::st_async_16(ptx::address_in_cta(ptx::shared_address(&inbox[thread]), 1 - rank),
                   uint4{x, x + 1, x + 2, x + 3}, there);
  ptx::st_async_8(ptx::address_in_cta(ptx::shared_address(&inbox_less[thread]), 1 - rank),
                  uint2{x + 4, x + 5}, there);
  if (thread == 0) ptx::mbarrier_arrive_expect(own, 32 * 24);
  ptx::mbarrier_wait(own, 0);  // 24 bytes of each thread are there
  received[32 * rank + thread] = inbox[thread];
  received_less[32 * rank + thread] = inbox_less[thread];
}

TEST(PtxSm90, BarriersCountStoresOfOtherCtas) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint32_t> received(256), received_less(128);
  store_and_count<<<2, 32>>>(reinterpret_cast<uint4*>(received.data()),
                             reinterpret_cast<uint2*>(received_less.data()));
  const auto got = received.values(), less = received_less.values();
  for (size_t cta = 0; cta < 2; ++cta) {
    for (size_t thread = 0; thread < 32; ++thread) {
      const size_t row = 32 * cta + thread, first = thread + 1000 * (2 - cta);
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(got[4 * row + i], first + i) << cta << " " << thread;
      for (size_t i = 0; i < 2; ++i) EXPECT_EQ(less[2 * row + i], first + 4 + i) << cta << " " << thread;
    }
  }
}

// ---- parts of 16 bytes

__global__ void copy_parts(const uint4* from, uint4* to) {
  __shared__ alignas(16) uint4 words[17];
  const int bytes = static_cast<int>(threadIdx.x);
  words[bytes] = uint4{~0u, ~0u, ~0u, ~0u};
  ptx::cp_async_16_part(ptx::shared_address(&words[bytes]), from + bytes, bytes);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  to[bytes] = words[bytes];  // this thread's own copy: no barrier
}

TEST(PtxSm90, CpAsyncFillsPartsWithZeros) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  std::vector<uint32_t> numbers(17 * 4);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 0x01010101u * static_cast<uint32_t>(i + 1);
  const DeviceArray<uint32_t> from(numbers);
  DeviceArray<uint32_t> to(numbers.size());
  copy_parts<<<1, 17>>>(reinterpret_cast<const uint4*>(from.data()), reinterpret_cast<uint4*>(to.data()));
  const auto got = to.values();
  for (size_t bytes = 0; bytes < 17; ++bytes) {
    for (size_t i = 0; i < 16; ++i) {
      const size_t word = bytes * 4 + i / 4;
      EXPECT_EQ(got[word] >> (8 * (i % 4)) & 0xff, i < bytes ? word + 1 : 0u) << bytes << " " << i;
    }
  }
}

// ---- votes, pieces

/// In round r only thread r of the first 128 has something to say; the others vote at a barrier of their own, all against.
__global__ void vote(uint32_t* heard) {
  const int thread = static_cast<int>(threadIdx.x), barrier = 1 + thread / 128;
  uint32_t rounds = 0;
  for (int round = 0; round < 160; ++round)
    rounds += ptx::barrier_wait_any(barrier, 128, thread == round && thread < 128) ? 1u : 0u;
  heard[thread] = rounds;
}

TEST(PtxSm90, BarriersTellWhetherAnyHas) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint32_t> heard(256);
  vote<<<1, 256>>>(heard.data());
  const auto got = heard.values();
  for (size_t thread = 0; thread < got.size(); ++thread)
    EXPECT_EQ(got[thread], thread < 128 ? 128u : 0u) << thread;
}

/// Each float16 beside another, and where the pair lies in memory.
__global__ void convert_pairs(uint32_t* pairs) {
  __shared__ uint32_t words[256];
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t pair = ptx::e4m3x2_of_f16x2(i | (i ^ 0xffffu) << 16);
  ptx::st_shared_2(ptx::shared_address(&words[threadIdx.x]), static_cast<uint16_t>(pair));
  ptx::st_shared_2(ptx::shared_address(&words[threadIdx.x]) + 2, static_cast<uint16_t>(pair >> 8));
  pairs[i] = words[threadIdx.x];
}

TEST(PtxSm90, PairsOfFloat16BecomeOf8Bits) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint32_t> pairs(1 << 16);
  convert_pairs<<<256, 256>>>(pairs.data());
  const auto got = pairs.values();
  for (uint32_t i = 0; i < got.size(); ++i) {
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t code = half == 0 ? i : i ^ 0xffffu;
      const float x = fovea::to_float(fovea::F16{static_cast<uint16_t>(code)});
      const uint8_t expected = fovea::from_float<fovea::E4M3>(x).bits;
      const auto byte = static_cast<uint8_t>(got[i] >> (8 * half));
      ASSERT_EQ(byte & 0x7f, expected & 0x7f) << x;
      if (!std::isnan(x)) ASSERT_EQ(byte, expected) << x;
    }
    ASSERT_EQ(got[i] >> 16, got[i] >> 8 & 0xffu) << "the upper byte alone";
  }
}

// ---- stmatrix, pairs, thread_index

template <bool kTrans>
__global__ void store_matrices(uint16_t* out) {
  __shared__ alignas(16) uint16_t rows[32][8];
  const int lane = static_cast<int>(ptx::thread_index());
  uint32_t r[4];
  for (int m = 0; m < 4; ++m) {
    for (int half = 0; half < 2; ++half) {
      const Coord at = Ldmatrix::at(lane, half, kTrans);
      r[m] = (half == 0 ? 0 : r[m]) | static_cast<uint32_t>(m * 64 + at.row * 8 + at.col) << (16 * half);
    }
  }
  if constexpr (kTrans) {
    ptx::stmatrix_x4_trans(ptx::shared_address(&rows[lane][0]), r);
  } else {
    ptx::stmatrix_x4(ptx::shared_address(&rows[lane][0]), r);
  }
  __syncwarp();  // the matrices may be read
  for (int i = 0; i < 8; ++i) out[lane * 8 + i] = rows[lane][i];
}

TEST(PtxSm90, StmatrixStoresWhatLdmatrixLoads) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint16_t> out(256);
  for (const auto kernel : {store_matrices<false>, store_matrices<true>}) {
    kernel<<<1, 32>>>(out.data());
    const auto got = out.values();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i);
  }
}

// ---- bulk copies

/// One thread copies `from` to shared memory, adds that to `sums` twice, and overwrites it with zeros once it is read.
__global__ void load_and_add(const float* from, float* sums, int count) {
  __shared__ alignas(16) float values[64];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t full = ptx::shared_address(&barrier), at = ptx::shared_address(values), bytes = count * 4;
  ptx::mbarrier_init(full, 1);
  ptx::mbarrier_init_fence();
  ptx::mbarrier_arrive_expect(full, bytes);
  ptx::bulk_load(at, from, bytes, full);
  ptx::mbarrier_wait(full, 0);
  ptx::bulk_add_f32(sums, at, bytes);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();  // the first sum is in global memory
  const float first = *static_cast<volatile float*>(sums);
  ptx::bulk_add_f32(sums, at, bytes);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
  for (int i = 0; i < count; ++i) values[i] = 0;  // read already
  ptx::bulk_wait<0>();
  sums[count] = first;
}

TEST(PtxSm90, BulkLoadsAndAdds) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  constexpr int kCount = 64;
  std::vector<float> values(kCount), before(kCount + 4, 1.0f);
  for (int i = 0; i < kCount; ++i) values[static_cast<size_t>(i)] = static_cast<float>(number(i));
  DeviceArray<float> from(values), sums(before);
  load_and_add<<<1, 1>>>(from.data(), sums.data(), kCount);
  const auto got = sums.values();
  for (size_t i = 0; i < kCount; ++i) EXPECT_EQ(got[i], 1 + 2 * values[i]);
  EXPECT_EQ(got[kCount], 1 + values[0]);
  EXPECT_EQ(got[kCount + 1], 1);
}

/// CTAs take turns to add: to each of `count` sums the number of the turn times a factor, so that the order shows in the last bits. The
/// first stores. One fence orders the turn that has come before the additions, or these before the turn that is passed on.
__global__ void add_in_turns(int* started, int* turn, float* sums, int count) {
  extern __shared__ __align__(16) float values[];
  __shared__ int number;
  if (threadIdx.x == 0) number = atomicAdd(started, 1);
  __syncthreads();  // all know the number
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    values[i] = fmaf(static_cast<float>(number + 1), 0.1f, static_cast<float>(i));
  __syncthreads();  // all values are there
  if (threadIdx.x != 0) return;
  ptx::async_proxy_fence();  // values, for the additions
  if (number % 2 == 0) {
    ptx::wait_for(turn, number);
  } else {
    while (ptx::ld_relaxed(turn) != number) {
    }
    ptx::fence_acq_rel();
  }
  if (number == 0) {
    ptx::bulk_store_f32(sums, ptx::shared_address(values), count * 4);
  } else {
    ptx::bulk_add_f32(sums, ptx::shared_address(values), count * 4);
  }
  ptx::bulk_commit();
  ptx::bulk_wait<0>();  // they are in memory
  ptx::fence_acq_rel();
  ptx::st_relaxed(turn, number + 1);
}

TEST(PtxSm90, SumsHaveArrivedBeforeTheTurnIsPassedOn) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  constexpr int kCtas = 4000, kCount = 4096;
  std::vector<float> expected(kCount, 0.0f);
  for (int cta = 0; cta < kCtas; ++cta) {
    for (int i = 0; i < kCount; ++i)
      expected[static_cast<size_t>(i)] += std::fmaf(static_cast<float>(cta + 1), 0.1f, static_cast<float>(i));
  }
  for (int repeat = 0; repeat < 20; ++repeat) {
    DeviceArray<int> started(std::vector<int>{0}), turn(std::vector<int>{0});
    DeviceArray<float> sums(std::vector<float>(kCount, NAN));
    add_in_turns<<<kCtas, 128, kCount * 4>>>(started.data(), turn.data(), sums.data(), kCount);
    ASSERT_EQ(sums.values(), expected) << "repeat " << repeat;
  }
}

/// The same, in shared memory of each CTA: what all before have added is brought there by a copy, looked at, and added to.
__global__ void look_in_turns(int* started, int* turn, float* sums, int* wrong, int count) {
  extern __shared__ __align__(16) float values[];
  __shared__ __align__(8) uint64_t arrived;
  __shared__ int number;
  const uint32_t barrier = ptx::shared_address(&arrived), at = ptx::shared_address(values);
  if (threadIdx.x == 0) {
    number = atomicAdd(started, 1);
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // all know the number, and the barrier is there
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) values[i] = 1.0f;
  __syncthreads();  // all values are there
  if (threadIdx.x == 0) {
    ptx::async_proxy_fence();  // values, for the additions
    ptx::wait_for(turn, number);
    ptx::bulk_add_f32(sums, at, count * 4);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();  // they are in memory
    ptx::st_release(turn, number + 1);
    ptx::wait_for(turn, static_cast<int>(gridDim.x));
    ptx::async_proxy_fence_all();  // what others have added, for the copy
    ptx::mbarrier_arrive_expect(barrier, count * 4);
    ptx::bulk_load(at, sums, count * 4, barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
    if (values[i] != static_cast<float>(gridDim.x)) atomicAdd(wrong, 1);
}

TEST(PtxSm90, CopiesBringWhatOthersHaveAdded) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  constexpr int kCtas = 132, kCount = 4096;  // all run at a time
  for (int repeat = 0; repeat < 50; ++repeat) {
    DeviceArray<int> started(std::vector<int>{0}), turn(std::vector<int>{0}), wrong(std::vector<int>{0});
    DeviceArray<float> sums(std::vector<float>(kCount, 0.0f));
    look_in_turns<<<kCtas, 128, kCount * 4>>>(started.data(), turn.data(), sums.data(), wrong.data(), kCount);
    ASSERT_EQ(wrong.values()[0], 0) << "repeat " << repeat;
  }
}

__global__ void indices(uint32_t* out) {
  out[threadIdx.x] = ptx::thread_index();
}

TEST(PtxSm90, ThreadIndexIsThreadIdx) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<uint32_t> out(96);
  indices<<<1, 96>>>(out.data());
  const auto got = out.values();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i);
}

__global__ void time_a_wait(int64_t* passed, uint32_t clocks) {
  const int64_t begin = clock64();
  ptx::wait_clocks(clocks);
  passed[threadIdx.x] = clock64() - begin;
}

TEST(PtxSm90, WaitsForClocks) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  constexpr uint32_t kClocks = 5000;
  DeviceArray<int64_t> passed(64);
  time_a_wait<<<1, 64>>>(passed.data(), kClocks);
  for (const int64_t clocks : passed.values()) {
    EXPECT_GE(clocks, kClocks);
    EXPECT_LT(clocks, 2 * kClocks);
  }
}

template <class T>
__global__ void maxima(const uint32_t* a, const uint32_t* b, uint32_t* c) {
  c[threadIdx.x] = ptx::max_pair<T>(a[threadIdx.x], b[threadIdx.x]);
}

template <class T>
uint32_t pair_of(float low, float high) {
  const T both[2] = {static_cast<T>(low), static_cast<T>(high)};
  uint32_t bits;
  std::memcpy(&bits, both, 4);
  return bits;
}

template <class T>
void expect_maxima() {
  const float inf = INFINITY, nan = NAN;
  const DeviceArray<uint32_t> a(
      {pair_of<T>(1, -2), pair_of<T>(nan, 3), pair_of<T>(inf, -inf), pair_of<T>(0.5f, 256)}),
      b({pair_of<T>(0, -1), pair_of<T>(2, nan), pair_of<T>(7, 1), pair_of<T>(0.25f, 257)});
  DeviceArray<uint32_t> c(4);
  maxima<T><<<1, 4>>>(a.data(), b.data(), c.data());
  EXPECT_EQ(c.values(), (std::vector<uint32_t>{pair_of<T>(1, -1), pair_of<T>(2, 3), pair_of<T>(inf, 1),
                                               pair_of<T>(0.5f, 257)}));
}
TEST(PtxSm90, LargerOfPairs) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_maxima<__half>();
  expect_maxima<__nv_bfloat16>();
}

__global__ void products(const uint32_t* a, const uint32_t* b, uint32_t* c) {
  c[threadIdx.x] = ptx::multiply_bf16_pairs(a[threadIdx.x], b[threadIdx.x]);
}
TEST(PtxSm90, ProductsOfPairs) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  using T = __nv_bfloat16;
  const float inf = INFINITY;
  // 1 + 2^-7 squared lies between two numbers, 0.01 of their distance above the lower; 1.5 times it half way, and goes to the even one.
  const DeviceArray<uint32_t> a(
      {pair_of<T>(3, -2), pair_of<T>(1.0078125f, 1.0078125f), pair_of<T>(inf, 3e38f), pair_of<T>(1e-38f, 0)}),
      b({pair_of<T>(0.5f, 7), pair_of<T>(1.0078125f, 1.5f), pair_of<T>(-1, 2), pair_of<T>(0.25f, -5)});
  DeviceArray<uint32_t> c(4);
  products<<<1, 4>>>(a.data(), b.data(), c.data());
  EXPECT_EQ(c.values(), (std::vector<uint32_t>{
                            pair_of<T>(1.5f, -14), pair_of<T>(1.015625f, 1.515625f), pair_of<T>(-inf, inf),
                            pair_of<T>(0.25f * __bfloat162float(__float2bfloat16(1e-38f)), -0.0f)}));
}

__global__ void not_zero(const uint32_t* a, uint32_t* out) {
  out[threadIdx.x] = ptx::bf16_pairs_not_zero(a[threadIdx.x]);
}
TEST(PtxSm90, PairsThatAreNotZero) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  using T = __nv_bfloat16;
  const DeviceArray<uint32_t> a(
      {pair_of<T>(0, -0.0f), pair_of<T>(1, 0), pair_of<T>(0, -1e-39f), pair_of<T>(NAN, INFINITY)});
  DeviceArray<uint32_t> out(4);
  not_zero<<<1, 4>>>(a.data(), out.data());
  EXPECT_EQ(out.values(), (std::vector<uint32_t>{0u, 0xffffu, 0xffff0000u, ~0u}));
}

__global__ void masks(const uint32_t* signs, uint32_t* out) {
  out[threadIdx.x] = ptx::halves_by_signs(signs[threadIdx.x]);
}
__global__ void words_by_sign(const uint32_t* signs, uint32_t* low, uint32_t* high) {
  low[threadIdx.x] = ptx::word_by_sign(signs[threadIdx.x], 0);
  high[threadIdx.x] = ptx::word_by_sign(signs[threadIdx.x], 1);
}
TEST(PtxSm90, SignsFillHalves) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  const DeviceArray<uint32_t> signs(
      {0u, 1u << 15, 1u << 31, 1u << 15 | 1u << 31, ~(1u << 15 | 1u << 31), ~0u});
  DeviceArray<uint32_t> out(6);
  masks<<<1, 6>>>(signs.data(), out.data());
  EXPECT_EQ(out.values(), (std::vector<uint32_t>{0u, 0xffffu, 0xffff0000u, ~0u, 0u, ~0u}));
}
TEST(PtxSm90, ASignFillsAWord) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  const DeviceArray<uint32_t> signs({0u, 1u << 15, 1u << 31, ~(1u << 15), ~(1u << 31)});
  DeviceArray<uint32_t> low(5), high(5);
  words_by_sign<<<1, 5>>>(signs.data(), low.data(), high.data());
  EXPECT_EQ(low.values(), (std::vector<uint32_t>{0u, ~0u, 0u, 0u, ~0u}));
  EXPECT_EQ(high.values(), (std::vector<uint32_t>{0u, 0u, ~0u, ~0u, 0u}));
}

// ---- launches that follow each other

/// Lets the next launch begin, and writes long after that.
__global__ void write_late(int* number) {
  ptx::let_next_launch_begin();
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
  *number = 7;
}
__global__ void read_in_time(const volatile int* number, int* got) {
  got[0] = *number;
  ptx::wait_for_launches_before();
  got[1] = *number;
}
TEST(PtxSm90, ALaunchThatBeginsEarlySeesWhatTheOneBeforeWrites) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<int> number(1), got(2);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  read_in_time<<<1, 1, 0, stream>>>(number.data(),
                                    got.data());  // what loads it would take longer than the first runs
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  write_late<<<1, 1, 0, stream>>>(number.data());
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  ASSERT_EQ(
      cudaLaunchKernelEx(&config, read_in_time, static_cast<const volatile int*>(number.data()), got.data()),
      cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(got.values(), (std::vector<int>{0, 7}));  // 0: it began before the first had ended
  cudaStreamDestroy(stream);
}

// ---- setmaxnreg

/// Half of the threads release registers, the other half takes them, and all continue.
__global__ void __launch_bounds__(256, 1) hand_registers(int* out) {
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    out[threadIdx.x] = 1;
  } else {
    ptx::setmaxnreg_inc<240>();
    out[threadIdx.x] = 2;
  }
}
TEST(PtxSm90, SetmaxnregMovesRegisters) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  DeviceArray<int> out(256);
  hand_registers<<<1, 256>>>(out.data());
  const auto got = out.values();
  for (size_t t = 0; t < 256; ++t) EXPECT_EQ(got[t], t < 128 ? 1 : 2);
}

// ---- wgmma

/// k of two steps, so that the second accumulates: rows of 64 bytes.
template <class T>
constexpr int kK = 64 / sizeof(T);
/// How B lies: as rows of K^T, of V, or as rows of K^T in columns of 16-byte chunks (V of 8 bits).
enum class LayoutOfB { kKMajor, kMNMajor, kChunks };

template <LayoutOfB kB, int kN>
__device__ WgmmaDescriptor descriptor_of_b(uint32_t at, int rows) {
  if (kB == LayoutOfB::kMNMajor) return wgmma_mn_major(at, SwizzleMode::k128, rows);
  if (kB == LayoutOfB::kKMajor) return wgmma_k_major(at, SwizzleMode::k128);
  return {at, kN * 16, 128, SwizzleMode::kNone, 0};
}

/// D = A B: A (64, kK) K-major, B (kK, N).
template <class T, int kN, LayoutOfB kB, bool kRegisters>
__global__ void multiply(const T* a, const T* b, float* d) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int kBytes = sizeof(T), kInChunk = 16 / kBytes, kOfStep = 32 / kBytes, kDepth = kK<T>;
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t base = ptx::shared_address(memory);
  const auto put = [&](uint32_t address, T x) { *reinterpret_cast<T*>(memory + (address - base)) = x; };
  // Strips of 128 bytes (kK fills half of one), swizzled as TMA would.
  const WgmmaDescriptor da = wgmma_k_major(base, SwizzleMode::k128);
  const WgmmaDescriptor db = descriptor_of_b<kB, kN>(base + 64 * 128, kDepth);
  for (int i = thread; i < 64 * kDepth; i += 128)
    put(wgmma_k_major_address(da, i / kDepth, i % kDepth / kInChunk) + i % kInChunk * kBytes, a[i]);
  for (int i = thread; i < kN * kDepth; i += 128) {  // b is (kK, N)
    const int k = i / kN, n = i % kN;
    put(kB == LayoutOfB::kMNMajor ? wgmma_mn_major_address(db, k, n / kInChunk) + n % kInChunk * kBytes
                                  : wgmma_k_major_address(db, n, k / kInChunk) + k % kInChunk * kBytes,
        b[i]);
  }
  ptx::async_proxy_fence();
  __syncthreads();  // the operands are complete and visible to wgmma
  uint32_t fragments[2][4];
  for (int step = 0; step < 2; ++step) {
    for (int reg = 0; reg < 4; ++reg) {
      T together[4 / kBytes];
      for (int i = 0; i < 4 / kBytes; ++i) {
        const Coord at = kBytes == 1 ? WgmmaOperandA8::at(thread, reg, i) : WgmmaOperandA::at(thread, reg, i);
        together[i] = a[at.row * kDepth + step * kOfStep + at.col];
      }
      memcpy(&fragments[step][reg], together, 4);
    }
  }
  float acc[kN / 2];
  constexpr ptx::WgmmaMajor kMajor = kB == LayoutOfB::kMNMajor ? ptx::WgmmaMajor::kMN : ptx::WgmmaMajor::kK;
  constexpr uint32_t kStepOfB =
      kB == LayoutOfB::kMNMajor ? kOfStep * 128 : (kB == LayoutOfB::kKMajor ? 32 : kN * 32);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint64_t b_step = db.encode() + wgmma_start_step(static_cast<uint32_t>(step) * kStepOfB);
    using Product = ptx::Wgmma<kN>;
    if constexpr (kRegisters) {
      if (step == 0) {
        Product::template rs<T, ptx::WgmmaStart::kZero, kMajor>(acc, fragments[step], b_step);
      } else {
        Product::template rs<T, ptx::WgmmaStart::kAccumulate, kMajor>(acc, fragments[step], b_step);
      }
    } else {
      const uint64_t a_step = da.encode() + wgmma_start_step(static_cast<uint32_t>(step) * 32);
      if (step == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, kMajor>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, kMajor>(acc, a_step, b_step);
      }
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_done(acc);
  for (int reg = 0; reg < kN / 2; ++reg) {
    const Coord at = WgmmaAccumulator::at(thread, reg);
    d[at.row * kN + at.col] = acc[reg];
  }
}

template <class T, int kN, LayoutOfB kB, bool kRegisters>
void expect_product() {
  constexpr int kDepth = kK<T>;
  std::vector<T> a(64 * kDepth), b(kDepth * kN);
  for (size_t i = 0; i < a.size(); ++i) a[i] = element<T>(static_cast<int>(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = element<T>(static_cast<int>(i) + 5000);
  const DeviceArray<T> device_a(a), device_b(b);
  DeviceArray<float> d(64 * kN);
  // An MN-major B is made of strips of 64 columns, also where the last one is not full.
  const int bytes = 64 * 128 + (kB == LayoutOfB::kMNMajor ? (kN + 63) / 64 * kDepth * 128 : kN * 128);
  multiply<T, kN, kB, kRegisters><<<1, 128, bytes>>>(device_a.data(), device_b.data(), d.data());
  const auto got = d.values();
  int wrong = 0;
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < kN; ++n) {
      int sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += number(m * kDepth + k) * number(k * kN + n + 5000);
      wrong += got[static_cast<size_t>(m * kN + n)] != static_cast<float>(sum);
    }
  }
  EXPECT_EQ(wrong, 0) << "N = " << kN << ", layout " << static_cast<int>(kB)
                      << (kRegisters ? ", A in registers" : "");
}
template <int kN>
void expect_products() {
  expect_product<__half, kN, LayoutOfB::kKMajor, false>();
  expect_product<__half, kN, LayoutOfB::kMNMajor, true>();
  expect_product<__nv_bfloat16, kN, LayoutOfB::kKMajor, true>();
  expect_product<__nv_bfloat16, kN, LayoutOfB::kMNMajor, false>();
}
/// Sums of these stay below 2^12: accumulators of products of 8 bits keep as many bits.
template <int kN>
void expect_products_of_8_bits() {
  expect_product<fovea::E4M3, kN, LayoutOfB::kKMajor, false>();
  expect_product<fovea::E4M3, kN, LayoutOfB::kChunks, false>();
  expect_product<fovea::E4M3, kN, LayoutOfB::kChunks, true>();
}

TEST(PtxSm90, WgmmaMultiplies) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_products<16>();
  expect_products<32>();
  expect_products<48>();
  expect_products<64>();
  expect_products<72>();
  expect_products<80>();
  expect_products<96>();
  expect_products<104>();
  expect_products<112>();
  expect_products<128>();
  expect_products<136>();
  expect_products<144>();
  expect_products<160>();
  expect_products<176>();
  expect_products<192>();
  expect_products<256>();
}

TEST(PtxSm90, WgmmaMultiplies8Bits) {
  FOVEA_SKIP_WITHOUT_HOPPER();
  expect_products_of_8_bits<16>();
  expect_products_of_8_bits<32>();
  expect_products_of_8_bits<64>();
  expect_products_of_8_bits<96>();
  expect_products_of_8_bits<128>();
  expect_products_of_8_bits<256>();
}

}  // namespace
}  // namespace fovea_test
