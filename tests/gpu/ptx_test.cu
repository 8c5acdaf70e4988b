// Compares every wrapper of src/cuda/ptx on a GPU with the fragment maps of src/tile (which host tests compare with the
// tables of the PTX manual) and with exact arithmetic. Built twice: for the GPUs of the library, and as PTX of sm_75,
// whose wrappers differ.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "core/dtype.hpp"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/store.cuh"
#include "device_array.cuh"
#include "tile/fragment_map.hpp"

namespace fovea_test {
namespace {

namespace ptx = fovea::cuda::ptx;
using namespace fovea::tile;

// What the instructions of sm_80 need; the build for sm_75 leaves their kernels empty and skips their tests.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FOVEA_TEST_SM80 1
#endif
#if defined(FOVEA_TEST_PTX_SM75)
constexpr bool kHasSm80 = false;
#else
constexpr bool kHasSm80 = true;
#endif
#define FOVEA_SKIP_WITHOUT_SM80() \
  if (!kHasSm80) GTEST_SKIP() << "an instruction of sm_80, in the build for sm_75"

// ---- shared memory

constexpr int kThreads = 64;

__global__ void addresses(uint32_t* distances) {
  __shared__ uint32_t words[kThreads];
  words[threadIdx.x] = threadIdx.x;
  distances[threadIdx.x] = ptx::shared_address(&words[threadIdx.x]) - ptx::shared_address(&words[0]);
}

TEST(Ptx, SharedAddressCountsBytes) {
  FOVEA_SKIP_WITHOUT_GPU();
  DeviceArray<uint32_t> distances(kThreads);
  addresses<<<1, kThreads>>>(distances.data());
  const auto got = distances.values();
  for (uint32_t t = 0; t < kThreads; ++t) EXPECT_EQ(got[t], 4 * t);
}

__global__ void shared_accesses(uint4* wide, uint2* middle, uint32_t* narrow) {
  __shared__ uint4 words[kThreads];
  const auto t = static_cast<uint32_t>(threadIdx.x);
  ptx::st_shared_16(ptx::shared_address(&words[t]), make_uint4(t, t + 100, t + 200, t + 300));
  __syncthreads();  // the words are written: other threads may overwrite parts of them
  if (t % 2 == 1) ptx::st_shared_4(ptx::shared_address(&words[kThreads - 1 - t]) + 4, 7);
  if (t % 4 == 2) ptx::st_shared_8(ptx::shared_address(&words[t]) + 8, make_uint2(8, 9));
  __syncthreads();  // all words have their final values
  wide[t] = ptx::ld_shared_16(ptx::shared_address(&words[kThreads - 1 - t]));
  middle[t] = ptx::ld_shared_8(ptx::shared_address(words) + 8 * t);
  narrow[t] = ptx::ld_shared_4(ptx::shared_address(words) + 4 * t);
}

TEST(Ptx, SharedLoadsAndStores) {
  FOVEA_SKIP_WITHOUT_GPU();
  DeviceArray<uint4> wide(kThreads);
  DeviceArray<uint2> middle(kThreads);
  DeviceArray<uint32_t> narrow(kThreads);
  shared_accesses<<<1, kThreads>>>(wide.data(), middle.data(), narrow.data());
  const auto got_wide = wide.values();
  const auto got_middle = middle.values();
  const auto got_narrow = narrow.values();
  const auto word = [](uint32_t t, uint32_t part) {
    if (t % 2 == 0 && part == 1) return 7u;
    if (t % 4 == 2 && part >= 2) return 6 + part;
    return t + 100 * part;
  };
  for (uint32_t t = 0; t < kThreads; ++t) {
    const uint32_t from = kThreads - 1 - t;
    EXPECT_EQ(got_wide[t].x, word(from, 0));
    EXPECT_EQ(got_wide[t].y, word(from, 1));
    EXPECT_EQ(got_wide[t].z, word(from, 2));
    EXPECT_EQ(got_wide[t].w, word(from, 3));
    EXPECT_EQ(got_middle[t].x, word(t / 2, t % 2 * 2));
    EXPECT_EQ(got_middle[t].y, word(t / 2, t % 2 * 2 + 1));
    EXPECT_EQ(got_narrow[t], word(t / 4, t % 4));
  }
}

__global__ void hide(const char* text, char* out) {
  int i = static_cast<int>(threadIdx.x);
  auto u = static_cast<uint32_t>(i);
  const char* from = text;
  ptx::make_opaque(i);
  ptx::make_opaque(u);
  ptx::make_opaque(from);
  out[i] = from[u];
}

TEST(Ptx, OpaqueValuesAreUnchanged) {
  FOVEA_SKIP_WITHOUT_GPU();
  const std::vector<char> text = {'a', 'b', 'c', 'd'};
  const DeviceArray<char> from(text), to(text.size());
  hide<<<1, 4>>>(from.data(), to.data());
  EXPECT_EQ(to.values(), text);
}

// ---- named barriers

constexpr int kRounds = 20;

/// Warp 0 passes 32 numbers to warp 1, again and again through the same memory; each is slow in turn. Warp 2
/// takes no part and ends at once.
__global__ void hand_over(int* received) {
  constexpr int kFull = 1, kEmpty = 2, kParties = 64;
  constexpr long long kSlow = 3000;  // clocks, many times what a missing wait would need
  __shared__ int slot[kWarpLanes];
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const auto dawdle = [&](bool now) {
    for (const long long start = clock64(); now && clock64() - start < kSlow;) {
    }
  };
  if (threadIdx.x < kWarpLanes) {
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) ptx::barrier_wait(kEmpty, kParties);  // the slot has been read and may be overwritten
      dawdle(round % 2 == 0);
      slot[lane] = 100 * round + lane;
      ptx::barrier_arrive(kFull, kParties);
    }
  } else if (threadIdx.x < 2 * kWarpLanes) {
    for (int round = 0; round < kRounds; ++round) {
      ptx::barrier_wait(kFull, kParties);  // the slot has been written and may be read
      dawdle(round % 2 == 1);
      received[round * kWarpLanes + lane] = slot[kWarpLanes - 1 - lane];
      if (round + 1 < kRounds) ptx::barrier_arrive(kEmpty, kParties);
    }
  }
}

TEST(Ptx, NamedBarriersHandOver) {
  FOVEA_SKIP_WITHOUT_GPU();
  DeviceArray<int> received(kRounds * kWarpLanes);
  hand_over<<<1, 3 * kWarpLanes>>>(received.data());
  const auto got = received.values();
  for (int i = 0; i < kRounds * kWarpLanes; ++i) {
    ASSERT_EQ(got[static_cast<size_t>(i)], 100 * (i / kWarpLanes) + kWarpLanes - 1 - i % kWarpLanes) << i;
  }
}

// ---- cp.async

/// Thread t copies word t of `from` to stage 0, and word 64 + t to stage 1 unless t is a multiple of 3: then it
/// passes a null address, which must not be read. Reads stage 0 while stage 1 may be in flight.
template <class Word>
__global__ void async_copies(const Word* from, Word* first, Word* second) {
  __shared__ alignas(16) Word stages[2][kThreads];
  const unsigned t = threadIdx.x;
  const auto copy = [](Word* to, const Word* source, bool valid) {
    if constexpr (sizeof(Word) == 16) {
      ptx::cp_async_16(ptx::shared_address(to), source, valid);
    } else {
      ptx::cp_async_4(ptx::shared_address(to), source, valid);
    }
  };
  std::memset(&stages[0][t], 0xff, sizeof(Word));
  std::memset(&stages[1][t], 0xff, sizeof(Word));
  __syncthreads();  // the patterns are written: copies of other threads may overwrite them
  const unsigned other = kThreads - 1 - t;
  copy(&stages[0][other], from + other, true);
  ptx::cp_async_commit();
  const bool valid = t % 3 != 0;
  copy(&stages[1][t], valid ? from + kThreads + t : nullptr, valid);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  __syncthreads();  // stage 0 of all threads is complete
  first[t] = stages[0][t];
  ptx::cp_async_wait<0>();
  second[t] = stages[1][t];  // this thread's own copy: no barrier
}

template <class Word>
void test_async_copies() {
  constexpr size_t kWords = sizeof(Word) / 4;
  std::vector<uint32_t> numbers(2 * kThreads * kWords);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i) + 1;
  DeviceArray<uint32_t> from(numbers), first(kThreads * kWords), second(kThreads * kWords);
  async_copies<Word><<<1, kThreads>>>(reinterpret_cast<const Word*>(from.data()),
                                      reinterpret_cast<Word*>(first.data()),
                                      reinterpret_cast<Word*>(second.data()));
  const auto got_first = first.values();
  const auto got_second = second.values();
  for (size_t i = 0; i < kThreads * kWords; ++i) {
    EXPECT_EQ(got_first[i], numbers[i]) << i;
    EXPECT_EQ(got_second[i], i / kWords % 3 == 0 ? 0 : numbers[kThreads * kWords + i]) << i;
  }
}

TEST(Ptx, CpAsync16CopiesAndFillsWithZeros) {
  FOVEA_SKIP_WITHOUT_GPU();
  test_async_copies<uint4>();
}
TEST(Ptx, CpAsync4CopiesAndFillsWithZeros) {
  FOVEA_SKIP_WITHOUT_GPU();
  test_async_copies<uint32_t>();
}

// ---- ldmatrix

constexpr int kMatrixElements = 64;

/// Matrix m holds 64 m + 8 row + column. Rows lie in reverse order with gaps, so that only the addresses decide.
template <bool kTrans>
__global__ void load_matrices(uint32_t* registers) {
  constexpr int kMatrices = 4;
  constexpr int kPitch = 24;  // elements: 48 bytes, a multiple of 16
  __shared__ alignas(16) uint16_t rows[kMatrices * 8][kPitch];
  for (int i = static_cast<int>(threadIdx.x); i < kMatrices * kMatrixElements; i += kWarpLanes) {
    rows[kMatrices * 8 - 1 - i / 8][i % 8] = static_cast<uint16_t>(i);
  }
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x);
  const int row = Ldmatrix::matrix_of_address(lane) * 8 + Ldmatrix::row_of_address(lane);
  const uint32_t address = ptx::shared_address(&rows[kMatrices * 8 - 1 - row][0]);
  uint32_t r[kMatrices];
  if constexpr (kTrans) {
    ptx::ldmatrix_x4_trans(r, address);
  } else {
    ptx::ldmatrix_x4(r, address);
  }
  for (int m = 0; m < kMatrices; ++m) registers[lane * kMatrices + m] = r[m];
}

template <bool kTrans>
void test_ldmatrix() {
  constexpr int kMatrices = 4;
  DeviceArray<uint32_t> registers(kWarpLanes * kMatrices);
  load_matrices<kTrans><<<1, kWarpLanes>>>(registers.data());
  const auto got = registers.values();
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    for (int m = 0; m < kMatrices; ++m) {
      for (int half = 0; half < 2; ++half) {
        const Coord at = Ldmatrix::at(lane, half, kTrans);
        const uint32_t element = got[static_cast<size_t>(lane * kMatrices + m)] >> (16 * half) & 0xffff;
        EXPECT_EQ(element, static_cast<uint32_t>(kMatrixElements * m + 8 * at.row + at.col))
            << "lane " << lane << " matrix " << m << " half " << half;
      }
    }
  }
}

TEST(Ptx, LdmatrixX4) {
  FOVEA_SKIP_WITHOUT_GPU();
  test_ldmatrix<false>();
}
TEST(Ptx, LdmatrixX4Trans) {
  FOVEA_SKIP_WITHOUT_GPU();
  test_ldmatrix<true>();
}

// ---- mma

/// How an element type lies in a 32-bit register.
template <class T>
__host__ __device__ uint32_t bits_of(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half_as_ushort(__float2half_rn(x));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  } else {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
  }
}

template <class Map, class T>
__device__ void multiply(float (&d)[4], const uint32_t (&a)[Map::kRegsA], const uint32_t (&b)[Map::kRegsB]) {
#if defined(FOVEA_TEST_SM80)
  if constexpr (std::is_same_v<Map, MmaM16N8K16>) ptx::mma_m16n8k16<T>(d, a, b[0], b[1]);
  if constexpr (std::is_same_v<Map, MmaM16N8K8Tf32>) ptx::mma_m16n8k8_tf32(d, a, b[0], b[1]);
#endif
  if constexpr (std::is_same_v<Map, MmaM16N8K8>) ptx::mma_m16n8k8_f16(d, a[0], a[1], b[0]);
}

/// D = A B + D of one warp, every matrix row-major float32 in global memory: fragments by the maps, element by
/// element.
template <class Map, class T>
__global__ void product(const float* a, const float* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t ra[Map::kRegsA] = {}, rb[Map::kRegsB] = {};
  float rd[AccumulatorM16N8::kRegs];
  for (int reg = 0; reg < Map::kRegsA; ++reg) {
    for (int half = 0; half < Map::kHalves; ++half) {
      const Coord at = Map::a(lane, reg, half);
      ra[reg] |= bits_of<T>(a[at.row * Map::kK + at.col]) << (16 * half);
    }
  }
  for (int reg = 0; reg < Map::kRegsB; ++reg) {
    for (int half = 0; half < Map::kHalves; ++half) {
      const Coord at = Map::b(lane, reg, half);
      rb[reg] |= bits_of<T>(b[at.row * Map::kN + at.col]) << (16 * half);
    }
  }
  for (int reg = 0; reg < AccumulatorM16N8::kRegs; ++reg) {
    const Coord at = AccumulatorM16N8::at(lane, reg);
    rd[reg] = d[at.row * Map::kN + at.col];
  }
  multiply<Map, T>(rd, ra, rb);
  for (int reg = 0; reg < AccumulatorM16N8::kRegs; ++reg) {
    const Coord at = AccumulatorM16N8::at(lane, reg);
    d[at.row * Map::kN + at.col] = rd[reg];
  }
}

/// Integers, so that every sum is exact in any order and any misplaced element shows.
template <class Map, class T>
void test_product() {
  std::mt19937 random(7);
  const auto numbers = [&](int count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = static_cast<float>(static_cast<int>(random() % 31) - 15);
    return values;
  };
  const auto a = numbers(Map::kM * Map::kK), b = numbers(Map::kK * Map::kN), c = numbers(Map::kM * Map::kN);
  const DeviceArray<float> da(a), db(b), dd(c);
  product<Map, T><<<1, kWarpLanes>>>(da.data(), db.data(), dd.data());
  const auto got = dd.values();
  for (int m = 0; m < Map::kM; ++m) {
    for (int n = 0; n < Map::kN; ++n) {
      const auto at = static_cast<size_t>(m * Map::kN + n);
      float expected = c[at];
      for (int k = 0; k < Map::kK; ++k) {
        expected += a[static_cast<size_t>(m * Map::kK + k)] * b[static_cast<size_t>(k * Map::kN + n)];
      }
      EXPECT_EQ(got[at], expected) << "m " << m << " n " << n;
    }
  }
}

TEST(Ptx, MmaM16N8K16Float16) {
  FOVEA_SKIP_WITHOUT_SM80();
  FOVEA_SKIP_WITHOUT_GPU();
  test_product<MmaM16N8K16, __half>();
}
TEST(Ptx, MmaM16N8K16BFloat16) {
  FOVEA_SKIP_WITHOUT_SM80();
  FOVEA_SKIP_WITHOUT_GPU();
  test_product<MmaM16N8K16, __nv_bfloat16>();
}
TEST(Ptx, MmaM16N8K8Float16) {
  FOVEA_SKIP_WITHOUT_GPU();
  test_product<MmaM16N8K8, __half>();
}
TEST(Ptx, MmaM16N8K8Tf32) {
  FOVEA_SKIP_WITHOUT_SM80();
  FOVEA_SKIP_WITHOUT_GPU();
  test_product<MmaM16N8K8Tf32, float>();
}

/// mma ignores the lower 13 bits of a tf32 operand and does not round them; split_tf32 relies on this.
TEST(Ptx, Tf32OperandsAreTruncated) {
  FOVEA_SKIP_WITHOUT_SM80();
  FOVEA_SKIP_WITHOUT_GPU();
  using Map = MmaM16N8K8Tf32;
  std::vector<float> a(Map::kM * Map::kK), b(Map::kK * Map::kN), d(Map::kM * Map::kN);
  a[0] = 1 + 0x1p-10f + 0x1.fffp-11f;  // nearest to 1 + 2^-9, but truncated it is 1 + 2^-10
  b[0] = 1;
  const DeviceArray<float> da(a), db(b), dd(d);
  product<Map, float><<<1, kWarpLanes>>>(da.data(), db.data(), dd.data());
  EXPECT_EQ(dd.values()[0], 1 + 0x1p-10f);
}

/// float16 products accumulate in float32: sums beyond 65504, and bits below float16's.
TEST(Ptx, MmaAccumulatesInFloat32) {
  FOVEA_SKIP_WITHOUT_GPU();
  using Map = MmaM16N8K8;
  std::vector<float> a(Map::kM * Map::kK, 60000), b(Map::kK * Map::kN, 2), d(Map::kM * Map::kN, 0.5f);
  const DeviceArray<float> da(a), db(b), dd(d);
  product<Map, __half><<<1, kWarpLanes>>>(da.data(), db.data(), dd.data());
  const float operand = __half2float(__float2half_rn(60000));
  for (const float x : dd.values()) EXPECT_EQ(x, 8 * 2 * operand + 0.5f);
}

/// P goes from the accumulators of one product into the next within a lane.
__global__ void accumulator_as_operand(float* wrong) {
  const int lane = static_cast<int>(threadIdx.x);
  wrong[lane] = 0;
  for (int reg = 0; reg < MmaM16N8K16::kRegsA; ++reg) {
    for (int half = 0; half < 2; ++half) {
      const AccumulatorIndex from = accumulator_of_a(reg, half);
      const Coord wanted = MmaM16N8K16::a(lane, reg, half), have = AccumulatorM16N8::at(lane, from.reg);
      if (wanted.row != have.row || wanted.col != have.col + 8 * from.tile) wrong[lane] += 1;
    }
  }
}
TEST(Ptx, MapsAgreeOnTheDevice) {
  FOVEA_SKIP_WITHOUT_GPU();
  DeviceArray<float> wrong(kWarpLanes);
  accumulator_as_operand<<<1, kWarpLanes>>>(wrong.data());
  for (const float x : wrong.values()) EXPECT_EQ(x, 0);
}

/// ldmatrix by the orders of fragment_map.hpp gives the fragments of A and B of a product of whole tiles.
#if !defined(FOVEA_TEST_PTX_SM75)
__global__ void product_by_ldmatrix(const __half* a, const __half* b_rows_n, float* d) {
  __shared__ alignas(16) __half sa[16][16], sb[16][16];
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += kWarpLanes) {
    sa[i / 16][i % 16] = a[i];
    sb[i / 16][i % 16] = b_rows_n[i];
  }
  __syncwarp();
  uint32_t ra[4], rb[4];
  const ChunkCoord of_a = ldmatrix_down_first(lane), of_b = ldmatrix_across_first(lane);
  ptx::ldmatrix_x4(ra, ptx::shared_address(&sa[of_a.row][8 * of_a.chunk]));
  ptx::ldmatrix_x4(rb, ptx::shared_address(&sb[of_b.row][8 * of_b.chunk]));
  for (int tile = 0; tile < 2; ++tile) {
    float rd[4] = {};
#if defined(FOVEA_TEST_SM80)
    ptx::mma_m16n8k16<__half>(rd, ra, rb[2 * tile], rb[2 * tile + 1]);
#endif
    for (int reg = 0; reg < 4; ++reg) {
      const Coord at = AccumulatorM16N8::at(lane, reg);
      d[at.row * 16 + at.col + 8 * tile] = rd[reg];
    }
  }
}
TEST(Ptx, LdmatrixFeedsMma) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<__half> a(256), b(256);
  for (size_t i = 0; i < 256; ++i) {
    a[i] = __float2half_rn(static_cast<float>(static_cast<int>(i * 7 % 13) - 6));
    b[i] = __float2half_rn(static_cast<float>(static_cast<int>(i * 11 % 17) - 8));
  }
  const DeviceArray<__half> da(a), db(b);
  const DeviceArray<float> dd(256);
  product_by_ldmatrix<<<1, kWarpLanes>>>(da.data(), db.data(), dd.data());
  const auto got = dd.values();
  for (size_t m = 0; m < 16; ++m) {
    for (size_t n = 0; n < 16; ++n) {
      float expected = 0;
      for (size_t k = 0; k < 16; ++k) expected += __half2float(a[m * 16 + k]) * __half2float(b[n * 16 + k]);
      EXPECT_EQ(got[m * 16 + n], expected) << "m " << m << " n " << n;
    }
  }
}
#endif

// ---- red

__global__ void add_up(float* sums) {
  const auto x = static_cast<float>(threadIdx.x % 4 + 1);
  ptx::red_add(sums, x);
  ptx::red_add_v4(sums + 4, x, 2 * x, 3 * x, -x);
}

/// Integers below 2^24: the sum does not depend on the order.
TEST(Ptx, RedAddsOfManyThreadsSumUp) {
  FOVEA_SKIP_WITHOUT_GPU();
  constexpr int kBlocks = 300, kBlock = 128;
  DeviceArray<float> sums(std::vector<float>{1, 10, 2, 3, 4, 5, 6, 7});
  add_up<<<kBlocks, kBlock>>>(sums.data());
  const float total = kBlocks * (kBlock / 4) * (1 + 2 + 3 + 4);
  const std::vector<float> expected = {1 + total,     10,       2, 3, 4 + total, 5 + 2 * total,
                                       6 + 3 * total, 7 - total};
  EXPECT_EQ(sums.values(), expected);
}

// ---- st

__global__ void store_four(float* to) {
  const auto x = static_cast<float>(threadIdx.x);
  ptx::store_v4(to + 4 * threadIdx.x, x, 2 * x, 3 * x, -x);
}

TEST(Ptx, StoresOfFourNumbersStandSideBySide) {
  FOVEA_SKIP_WITHOUT_GPU();
  constexpr int kThreads = 64;
  DeviceArray<float> to(std::vector<float>(4 * kThreads + 1, 7));
  store_four<<<1, kThreads>>>(to.data());
  std::vector<float> expected;
  for (int i = 0; i < kThreads; ++i)
    for (const int factor : {1, 2, 3, -1}) expected.push_back(static_cast<float>(factor * i));
  expected.push_back(7);
  EXPECT_EQ(to.values(), expected);
}

// ---- flags between CTAs

/// CTAs take turns to change the words of all their threads: x becomes 3 x + number, so the order shows. Every other one
/// looks at the flag itself.
__global__ void take_turns(int* started, int* turn, uint32_t* x) {
  __shared__ int number;
  if (threadIdx.x == 0) {
    number = atomicAdd(started, 1);
    if (number % 2 == 0) {
      ptx::wait_for(turn, number);
    } else {
      while (ptx::ld_acquire(turn) != number) {
      }
    }
  }
  __syncthreads();  // it is this CTA's turn: all threads may change their words
  x[threadIdx.x] = 3 * x[threadIdx.x] + static_cast<uint32_t>(number);
  __syncthreads();  // all have changed their words: thread 0 may pass the turn on
  if (threadIdx.x == 0) ptx::st_release(turn, number + 1);
}

TEST(Ptx, AFlagPublishesTheWritesOfAllThreads) {
  FOVEA_SKIP_WITHOUT_GPU();
  constexpr int kBlocks = 2000, kBlock = 96;
  DeviceArray<int> started(std::vector<int>{0}), turn(std::vector<int>{0});
  DeviceArray<uint32_t> x(std::vector<uint32_t>(kBlock, 1));
  take_turns<<<kBlocks, kBlock>>>(started.data(), turn.data(), x.data());
  uint32_t expected = 1;
  for (uint32_t i = 0; i < kBlocks; ++i) expected = 3 * expected + i;
  EXPECT_EQ(x.values(), std::vector<uint32_t>(kBlock, expected));
  EXPECT_EQ(turn.values(), std::vector<int>{kBlocks});
}

/// The CTAs of a row each set a flag and look at those of all: who finds all set takes the first.
__global__ void find_all(uint64_t* flags, int* takers, uint64_t tag) {
  uint64_t* const row = flags + blockIdx.y * gridDim.x;
  if (threadIdx.x == 0) ptx::st_release(row + blockIdx.x, tag);
  __syncwarp();  // every lane looks behind the flag
  ptx::fence_sc();
  const bool set = threadIdx.x >= gridDim.x || ptx::ld_acquire(row + threadIdx.x) == tag;
  if (__all_sync(0xffffffffu, set) && threadIdx.x == 0 && ptx::take_flag(row, tag))
    atomicAdd(takers + blockIdx.y, 1);
}

TEST(Ptx, OneOfThoseThatSetFlagsFindsAll) {
  FOVEA_SKIP_WITHOUT_GPU();
  constexpr int kBlocks = 24, kRows = 5000;
  constexpr uint64_t kTag = 0x123456789abcdef0;
  DeviceArray<uint64_t> flags(std::vector<uint64_t>(kBlocks * kRows, 7));
  DeviceArray<int> takers(std::vector<int>(kRows, 0));
  find_all<<<dim3(kBlocks, kRows), 32>>>(flags.data(), takers.data(), kTag);
  EXPECT_EQ(takers.values(), std::vector<int>(kRows, 1));
  const std::vector<uint64_t> left = flags.values();
  for (size_t i = 0; i < left.size(); ++i) ASSERT_EQ(left[i], i % kBlocks == 0 ? 0 : kTag) << i;
}

// ---- conversions

/// Of each float to 16 bits alone and in a pair, and of the bits of its number back.
struct Converted {
  uint16_t f16 = 0, bf16 = 0;
  uint32_t f16x2 = 0, bf16x2 = 0;
  float from_f16 = 0, from_bf16 = 0;
};
__global__ void convert(const float* x, Converted* y, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const auto bits = static_cast<uint16_t>(i);
  y[i] = {ptx::f16_of(x[i]),           ptx::bf16_of(x[i]),      ptx::f16x2_of(x[i], -x[i]),
          ptx::bf16x2_of(x[i], -x[i]), ptx::float_of_f16(bits), ptx::float_of_bf16(bits)};
}

template <class T>
void expect_rounded(float x, uint32_t bits) {
  const T expected = fovea::from_float<T>(x), got{static_cast<uint16_t>(bits)};
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(fovea::to_float(got)));
  } else {
    EXPECT_EQ(got.bits, expected.bits) << x;
  }
}

TEST(Ptx, ConversionsOf16BitFloats) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<float> x;
  std::mt19937 random(1);
  for (uint32_t bits = 0; bits < 1u << 16;
       ++bits) {  // of every size; halfway between two bfloat16, and near it
    x.push_back(std::bit_cast<float>(bits << 16 |
                                     (bits % 3 == 0 ? 0x8000u : static_cast<uint32_t>(random()) & 0xffffu)));
  }
  const DeviceArray<float> dx(x);
  const DeviceArray<Converted> dy(x.size());
  convert<<<256, 256>>>(dx.data(), dy.data(), static_cast<int>(x.size()));
  const auto y = dy.values();
  for (uint32_t i = 0; i < x.size(); ++i) {
    expect_rounded<fovea::F16>(x[i], y[i].f16);
    expect_rounded<fovea::F16>(x[i], y[i].f16x2 & 0xffffu);
    expect_rounded<fovea::F16>(-x[i], y[i].f16x2 >> 16);
    expect_rounded<fovea::Bf16>(x[i], y[i].bf16);
    expect_rounded<fovea::Bf16>(x[i], y[i].bf16x2 & 0xffffu);
    expect_rounded<fovea::Bf16>(-x[i], y[i].bf16x2 >> 16);
    const auto bits = static_cast<uint16_t>(i);
    const float f16 = fovea::to_float(fovea::F16{bits}), bf16 = fovea::to_float(fovea::Bf16{bits});
    if (!std::isnan(f16)) EXPECT_EQ(y[i].from_f16, f16);
    if (!std::isnan(bf16)) EXPECT_EQ(y[i].from_bf16, bf16);
    EXPECT_EQ(std::isnan(y[i].from_f16), std::isnan(f16));
    EXPECT_EQ(std::isnan(y[i].from_bf16), std::isnan(bf16));
  }
}

/// Of each float to 8 bits, and of four at a time; of each pair of bytes to two float16, and of it beside another.
__global__ void convert_8_bits(const float* x, uint8_t* to, uint32_t* fours, uint32_t* halves, uint2* pairs) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = ptx::e4m3_of(x[i]);
  fours[i] = ptx::e4m3x4_of(x[i], x[i ^ 1], x[i ^ 2], x[i ^ 3]);
  halves[i] = ptx::f16x2_of_e4m3x2(i | 0xabcd0000u);
  ptx::f16x4_of_e4m3x4(pairs[i].x, pairs[i].y, i | (i ^ 0xffffu) << 16);
}

TEST(Ptx, ConversionsOf8BitFloats) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<float> x;
  for (uint32_t bits = 0; bits < 1u << 16;
       ++bits) {  // of every size; halfway between two numbers, and beside that
    const uint32_t low = bits % 3 == 0 ? 0u : bits % 3 == 1 ? 1u : 0xffffu;
    x.push_back(std::bit_cast<float>(bits << 16 | low));
  }
  const DeviceArray<float> dx(x);
  const DeviceArray<uint8_t> bytes(x.size());
  const DeviceArray<uint32_t> fours(x.size()), halves(x.size());
  const DeviceArray<uint2> pairs(x.size());
  convert_8_bits<<<256, 256>>>(dx.data(), bytes.data(), fours.data(), halves.data(), pairs.data());
  const auto y = bytes.values();
  const auto together = fours.values();
  const auto wide = halves.values();
  const auto two = pairs.values();
  for (uint32_t i = 0; i < x.size(); ++i) {
    const uint8_t expected = fovea::from_float<fovea::E4M3>(x[i]).bits;
    ASSERT_EQ(y[i] & 0x7f, expected & 0x7f) << x[i];
    if (!std::isnan(x[i])) ASSERT_EQ(y[i], expected) << x[i];
    for (uint32_t byte = 0; byte < 4; ++byte)
      ASSERT_EQ(static_cast<uint8_t>(together[i] >> (8 * byte)), y[i ^ byte]) << x[i ^ byte];
    ASSERT_EQ(two[i].x, wide[i]);
    ASSERT_EQ(two[i].y, wide[i ^ 0xffffu]);
    for (uint32_t half = 0; half < 2; ++half) {
      const float from = fovea::to_float(fovea::E4M3{static_cast<uint8_t>(i >> (8 * half))});
      const float got = fovea::to_float(fovea::F16{static_cast<uint16_t>(wide[i] >> (16 * half))});
      if (std::isnan(from)) {
        ASSERT_TRUE(std::isnan(got)) << i;
      } else {
        ASSERT_EQ(got, from) << i;
      }
    }
  }
}

__global__ void fma_pairs(uint32_t a16, uint32_t b16, uint32_t c16, uint32_t a, uint32_t b, uint32_t c,
                          uint32_t* d) {
  d[0] = ptx::fma_f16x2(a16, b16, c16);
  d[1] = ptx::fma_bf16x2(a, b, c);
}

TEST(Ptx, FmaOfPairsRoundsOnce) {
  FOVEA_SKIP_WITHOUT_GPU();
  const auto pair = [](auto convert_one, float low, float high) {
    return static_cast<uint32_t>(convert_one(low).bits) | static_cast<uint32_t>(convert_one(high).bits) << 16;
  };
  const auto f16 = [&](float low, float high) { return pair(fovea::from_float<fovea::F16>, low, high); };
  const auto bf16 = [&](float low, float high) { return pair(fovea::from_float<fovea::Bf16>, low, high); };
  DeviceArray<uint32_t> d(2);
  for (int i = 0; i < 200; ++i) {
    const float a = static_cast<float>(i % 33 - 16) / 8, b = static_cast<float>(i % 29 - 11) / 8;
    const float c = static_cast<float>(i - 100) / 64;  // a b + c is exact in float32
    fma_pairs<<<1, 1>>>(f16(a, -a), f16(b, b), f16(c, 1), bf16(a, -a), bf16(b, b), bf16(c, 1), d.data());
    EXPECT_EQ(d.values()[0], f16(a * b + c, 1 - a * b));
    if (kHasSm80) EXPECT_EQ(d.values()[1], bf16(a * b + c, 1 - a * b));
  }
}

// ---- special functions

__global__ void special(const float* x, float* exponential, float* logarithm, float* reciprocal, int count) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    exponential[i] = ptx::ex2(x[i]);
    logarithm[i] = ptx::lg2(x[i]);
    reciprocal[i] = ptx::rcp(x[i]);
  }
}
struct SpecialResults {
  std::vector<float> ex2, lg2, rcp;
};
SpecialResults special_of(const std::vector<float>& x) {
  const DeviceArray<float> dx(x), e(x.size()), l(x.size()), r(x.size());
  special<<<264, 256>>>(dx.data(), e.data(), l.data(), r.data(), static_cast<int>(x.size()));
  return {e.values(), l.values(), r.values()};
}

TEST(Ptx, Ex2IsWithinTwoUlp) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<float> x;
  for (int i = 0; i <= 1 << 20; ++i)
    x.push_back(-126 + 253 * static_cast<float>(i) / (1 << 20));                  // normal results
  for (int i = 0; i < 4096; ++i) x.push_back(-static_cast<float>(i) * 0x1p-20f);  // weights near 1
  const auto got = special_of(x).ex2;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp2(static_cast<double>(x[i]));
    const double ulp = std::exp2(std::floor(std::log2(expected)) - 23);
    if (expected > static_cast<double>(std::numeric_limits<float>::max())) continue;
    ASSERT_LE(std::abs(static_cast<double>(got[i]) - expected), 2.5 * ulp)
        << "2^" << x[i];  // 2, and its rounding
  }
}

TEST(Ptx, Ex2OfSpecialValues) {
  FOVEA_SKIP_WITHOUT_GPU();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto got =
      special_of({-infinity, infinity, 0, -0.0f, -127, -150, -1e30f, 128, 1e30f, std::nanf(""), 1, -1}).ex2;
  const float expected[] = {0, infinity, 1, 1, 0, 0, 0, infinity, infinity};
  for (size_t i = 0; i < std::size(expected); ++i) EXPECT_EQ(got[i], expected[i]) << i;
  EXPECT_TRUE(std::isnan(got[9]));
  EXPECT_EQ(got[10], 2);
  EXPECT_EQ(got[11], 0.5f);
}

TEST(Ptx, RcpIsWithinOneUlp) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<float> x;
  for (int exponent = -120; exponent <= 120; ++exponent) {
    for (int i = 0; i < 2048; ++i) x.push_back(std::ldexp(1 + static_cast<float>(i) / 2048, exponent));
  }
  const auto got = special_of(x).rcp;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = 1 / static_cast<double>(x[i]);
    const double ulp = std::exp2(std::floor(std::log2(expected)) - 23);
    ASSERT_LE(std::abs(static_cast<double>(got[i]) - expected), 1.5 * ulp)
        << "1 / " << x[i];  // 1, and its rounding
  }
}

TEST(Ptx, Lg2IsWithinTheBoundOfTheManual) {
  FOVEA_SKIP_WITHOUT_GPU();
  std::vector<float> x;
  for (int exponent = -125; exponent <= 126; ++exponent) {
    for (int i = 0; i < 2048; ++i) x.push_back(std::ldexp(1 + static_cast<float>(i) / 2048, exponent));
  }
  for (int i = -4096; i <= 4096; ++i) x.push_back(1 + static_cast<float>(i) * 0x1p-23f);
  const auto got = special_of(x).lg2;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::log2(static_cast<double>(x[i]));
    const bool near_1 = x[i] > 0.5f && x[i] < 2;
    // The bound of the manual, and the rounding of the result.
    const double allowed = 0x1p-22 * (near_1 ? 1 : std::abs(expected)) + 0x1p-24 * std::abs(expected);
    ASSERT_LE(std::abs(static_cast<double>(got[i]) - expected), allowed) << "log2 of " << x[i];
  }
}

TEST(Ptx, Lg2OfSpecialValues) {
  FOVEA_SKIP_WITHOUT_GPU();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto got = special_of({0, infinity, 1, 2, 1e-40f, -1, std::nanf("")}).lg2;
  EXPECT_EQ(got[0], -infinity);
  EXPECT_EQ(got[1], infinity);
  EXPECT_EQ(got[2], 0);
  EXPECT_EQ(got[3], 1);
  EXPECT_EQ(got[4], -infinity);  // subnormal inputs are 0
  EXPECT_TRUE(std::isnan(got[5]));
  EXPECT_TRUE(std::isnan(got[6]));
}

}  // namespace
}  // namespace fovea_test
