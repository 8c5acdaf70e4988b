// Tests of the emulated device: the errors that it must find in wrong kernels, and the operations of a warp.
#include "emulation/scheduler.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

// The wrappers of shim/, by which kernels reach the scheduler.
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace fovea::emulation {
namespace {

namespace ptx = cuda::ptx;

constexpr int kThreads = 128;
/// Schedules are random: enough launches for a mistake to show in one.
constexpr int kLaunches = 64;

Launch launch(size_t shared, int threads = kThreads) {
  return {"of a test", {1, 1, 1}, threads, shared, true};
}
uint32_t thread_id() {
  return position.thread.x;
}
uint32_t word(uint32_t index) {
  return ptx::shared_address(cuda::shared) + 4 * index;
}

/// Each thread reads the word of the thread half a CTA away. Returns how many read a wrong value, over all launches.
int wrong_exchanges(bool with_barrier) {
  int wrong = 0;
  for (int i = 0; i < kLaunches; ++i) {
    run(launch(4 * kThreads), [&] {
      ptx::st_shared_4(word(thread_id()), thread_id());
      if (with_barrier) __syncthreads();
      const uint32_t other = (thread_id() + kThreads / 2) % kThreads;
      if (ptx::ld_shared_4(word(other)) != other) ++wrong;
    });
  }
  return wrong;
}
TEST(Scheduler, BarrierOrdersAccesses) {
  EXPECT_EQ(wrong_exchanges(true), 0);
}
TEST(Scheduler, MissingBarrierShows) {
  EXPECT_GT(wrong_exchanges(false), 0);
}

TEST(Scheduler, RunsEveryThreadOfEveryCta) {
  std::vector<int> ran(3 * 2 * 4 * kThreads);
  Launch grid = launch(0);
  grid.grid = {3, 2, 4};
  run(grid, [&] {
    const unsigned cta = position.block.x + 3 * (position.block.y + 2 * position.block.z);
    ++ran[cta * kThreads + thread_id()];
  });
  for (const int times : ran) EXPECT_EQ(times, 1);
}

TEST(Scheduler, SharedMemoryStartsPoisoned) {
  run(launch(16), [] { EXPECT_EQ(ptx::ld_shared_4(word(thread_id() % 4)), 0xffffffffu); });
}

TEST(Scheduler, NamedBarriersJoinSomeWarps) {
  for (int i = 0; i < kLaunches; ++i) {
    uint32_t seen = 0;
    run(launch(4), [&] {
      if (thread_id() < 32) {
        if (thread_id() == 0) ptx::st_shared_4(word(0), 7);
        ptx::barrier_arrive(2, 64);
      } else if (thread_id() < 64) {
        ptx::barrier_wait(2, 64);
        if (thread_id() == 32) seen = ptx::ld_shared_4(word(0));
      }
    });
    EXPECT_EQ(seen, 7u);
  }
}

/// Two clusters of two CTAs. A thread of each CTA hands its number to the other, which reads it behind a barrier.
Launch clusters() {
  Launch pairs = launch(64);
  pairs.grid = {4, 1, 1};
  pairs.cluster = 2;
  return pairs;
}
int wrong_messages(bool with_wait) {
  int wrong = 0;
  for (int i = 0; i < kLaunches; ++i) {
    run(clusters(), [&] {
      const uint32_t barrier = word(0), message = word(2), cta = position.block.x;
      const int other = cta % 2 == 0 ? 1 : 0;
      if (thread_id() == 0) ptx::mbarrier_init(barrier, 1);
      ptx::cluster_barrier();
      if (thread_id() == 0) {
        ptx::st_cluster_4(ptx::address_in_cta(message, other), cta);
        ptx::mbarrier_arrive_cluster(ptx::address_in_cta(barrier, other));
      }
      if (with_wait) ptx::mbarrier_wait_cluster(barrier, 0);
      if (ptx::ld_shared_4(message) != (cta ^ 1)) ++wrong;
      ptx::cluster_barrier();
    });
  }
  return wrong;
}
TEST(Scheduler, CtasOfAClusterReachEachOther) {
  EXPECT_EQ(wrong_messages(true), 0);
}
TEST(Scheduler, MissingWaitForAnotherCtaShows) {
  EXPECT_GT(wrong_messages(false), 0);
}

/// CTA 1 reads what CTA 0 writes behind its flag. Returns how often it read too early, over all launches.
int wrong_reads_of_another_cta(bool with_wait) {
  int wrong = 0;
  for (int i = 0; i < kLaunches; ++i) {
    int flag = 0, value = 0;
    Launch pair = launch(16, 32);
    pair.grid.x = pair.resident = 2;
    run(pair, [&] {
      EXPECT_EQ(ptx::cta_rank(), 0) << "no cluster";
      ptx::st_shared_4(word(0), position.block.x);
      if (thread_id() != 0) return;
      for (int n = 0; n < 10; ++n) interruption();
      if (position.block.x == 0) {
        value = 1;
        ptx::st_release(&flag, 1);
      } else {
        if (with_wait) ptx::wait_for(&flag, 1);
        if (value != 1) ++wrong;
      }
      if (ptx::ld_shared_4(word(0)) != position.block.x) ++wrong;  // each has shared memory of its own
    });
  }
  return wrong;
}
TEST(Scheduler, ResidentCtasWaitForEachOther) {
  EXPECT_EQ(wrong_reads_of_another_cta(true), 0);
}
TEST(Scheduler, MissingWaitOfAResidentCtaShows) {
  EXPECT_GT(wrong_reads_of_another_cta(false), 0);
}
TEST(Scheduler, ResidentCtasThatAreLeft) {
  std::vector<int> ran(7);
  Launch launches = launch(0, 32);
  launches.grid.x = 7;
  launches.resident = 3;
  run(launches, [&] { ran[position.block.x] += thread_id() == 0; });
  EXPECT_EQ(ran, std::vector<int>(7, 1));
}

TEST(Scheduler, BarrierVotes) {
  run(launch(0), [] {
    EXPECT_NE(__syncthreads_or(thread_id() == 77), 0);
    EXPECT_EQ(__syncthreads_or(0), 0);
  });
}

/// Copies one word a thread. Returns how many of the launches read it before it arrived.
int early_reads(bool with_wait) {
  std::vector<uint32_t> from(kThreads, 5);
  int early = 0;
  for (int i = 0; i < kLaunches; ++i) {
    run(launch(4 * kThreads), [&] {
      ptx::cp_async_4(word(thread_id()), &from[thread_id()], true);
      ptx::cp_async_commit();
      if (with_wait) ptx::cp_async_wait<0>();
      __syncthreads();
      if (ptx::ld_shared_4(word(thread_id())) != 5) ++early;
    });
  }
  return early;
}
TEST(Scheduler, CopiesAreThereAfterTheWait) {
  EXPECT_EQ(early_reads(true), 0);
}
TEST(Scheduler, MissingWaitShows) {
  EXPECT_GT(early_reads(false), 0);
}

TEST(Scheduler, CopiesOfNothingAreZeros) {
  run(launch(16 * kThreads), [] {
    ptx::cp_async_16(word(4 * thread_id()), nullptr, false);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    EXPECT_EQ(ptx::ld_shared_4(word(4 * thread_id() + 3)), 0u);
  });
}

TEST(Warp, Shuffles) {
  run(launch(0, 64), [] {
    EXPECT_EQ(__shfl_xor_sync(0xffffffffu, thread_id(), 5), thread_id() ^ 5u);
    EXPECT_EQ(__shfl_sync(0xffffffffu, thread_id(), 3), thread_id() / 32 * 32 + 3);
    EXPECT_EQ(__ballot_sync(0xffffffffu, thread_id() % 32 < 4), 0xfu);
    EXPECT_FALSE(__any_sync(0xffffffffu, false));
  });
}

/// C = A B of one warp by ldmatrix and mma, with small integers, so that every order of additions is exact.
TEST(Warp, ProductThroughLdmatrix) {
  constexpr int kM = 16, kN = 16, kK = 16;
  const auto a = [](int m, int k) { return static_cast<float>((m * 5 + k * 3) % 7 - 3); };
  const auto b = [](int k, int n) { return static_cast<float>((k * 2 + n * 11) % 9 - 4); };
  std::array<std::array<float, kN>, kM> c{};
  run(launch(2 * kK * (kM + kN), 32), [&] {
    auto* sA = reinterpret_cast<__half*>(cuda::shared);  // (m, k)
    auto* sB = sA + kM * kK;                             // (k, n)
    if (thread_id() == 0) {
      for (int m = 0; m < kM; ++m) {
        for (int k = 0; k < kK; ++k) sA[m * kK + k] = a(m, k);
      }
      for (int k = 0; k < kK; ++k) {
        for (int n = 0; n < kN; ++n) sB[k * kN + n] = b(k, n);
      }
    }
    __syncwarp();
    const auto lane = static_cast<int>(thread_id());
    const tile::ChunkCoord at = tile::ldmatrix_down_first(lane);
    uint32_t fa[4], fb[4];
    ptx::ldmatrix_x4(fa, ptx::shared_address(sA + at.row * kK + at.chunk * 8));
    ptx::ldmatrix_x4_trans(fb, ptx::shared_address(sB + at.row * kN + at.chunk * 8));
    for (int n8 = 0; n8 < 2; ++n8) {
      float d[4] = {};
      if (n8 == 0) {
        ptx::mma_m16n8k16<__half>(d, fa, fb[0], fb[1]);
      } else {
        ptx::mma_m16n8k8_f16(d, fa[0], fa[1], fb[2]);
        ptx::mma_m16n8k8_f16(d, fa[2], fa[3], fb[3]);
      }
      for (int reg = 0; reg < 4; ++reg) {
        c[static_cast<size_t>(lane / 4 + reg / 2 * 8)][static_cast<size_t>(n8 * 8 + lane % 4 * 2 + reg % 2)] =
            d[reg];
      }
    }
  });
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      float sum = 0;
      for (int k = 0; k < kK; ++k) sum += a(m, k) * b(k, n);
      EXPECT_EQ(c[static_cast<size_t>(m)][static_cast<size_t>(n)], sum) << m << ", " << n;
    }
  }
}

TEST(Mistakes, HangNamesTheBarrier) {
  EXPECT_DEATH(run(launch(0),
                   [] {
                     if (thread_id() < 32) ptx::barrier_wait(3, 64);
                   }),
               "of a test.*hangs: of 128 threads 96 have ended; 32 wait at barrier 3 \\(32 of 64 arrived\\)");
}
TEST(Mistakes, HangNamesTheOperation) {
  EXPECT_DEATH(run(launch(0, 32),
                   [] {
                     if (thread_id() > 0) __syncwarp();
                   }),
               "hangs: .* 31 wait for their warp in __syncwarp");
}
TEST(Mistakes, CtaOfTheClusterHasEnded) {
  const auto write_late = [] {
    run(clusters(), [] {
      if (position.block.x % 2 == 0) return;
      for (int i = 0; i < 1000; ++i) interruption();
      ptx::st_cluster_4(ptx::address_in_cta(word(0), 0), 1);
    });
  };
  EXPECT_DEATH(write_late(), "CTA 0 of the cluster, which has ended");
}

TEST(Mistakes, LanesApart) {
  EXPECT_DEATH(run(launch(0, 32),
                   [] {
                     if (thread_id() == 0) {
                       __syncwarp();
                     } else {
                       __ballot_sync(0xffffffffu, true);
                     }
                   }),
               "lanes of one warp are apart");
}
TEST(Mistakes, BehindSharedMemory) {
  EXPECT_DEATH(run(launch(64, 32), [] { ptx::st_shared_4(word(thread_id()), 0); }),
               "st.shared: 4 bytes .* of 64");
  EXPECT_DEATH(run(launch(64, 32), [] { cuda::shared[64] = 1; }), "wrote 0 bytes behind its shared memory");
}
TEST(Mistakes, MisalignedShared) {
  EXPECT_DEATH(run(launch(64, 32), [] { ptx::ld_shared_8(word(1)); }), "no multiple of 8");
}
TEST(Mistakes, MisalignedGlobal) {
  alignas(16) static std::array<unsigned char, 64> from{};
  EXPECT_DEATH(run(launch(64, 32), [] { ptx::cp_async_16(word(0), from.data() + 8, true); }),
               "no multiple of 16");
  EXPECT_DEATH(run(launch(0, 32), [] { __ldg(reinterpret_cast<const uint4*>(from.data() + 8)); }),
               "a load of 16 bytes");
}

}  // namespace
}  // namespace fovea::emulation
