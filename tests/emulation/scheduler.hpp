// Runs CTAs of CUDA kernels on the CPU: every thread of a CTA is a fiber, and one processor runs them in turn, warps
// in random order. Operations of a whole CTA or warp (barriers, shuffles, matrix products, asynchronous copies) call
// this scheduler. It does not model speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace fovea::emulation {
inline constexpr size_t kMostShared =
    232448;  ///< dynamic shared memory of a CTA: 227 KB on sm_90, the most of all chips
inline constexpr int kMostCluster = 8;  ///< CTAs of a cluster: as many as every chip takes
}  // namespace fovea::emulation
namespace fovea::cuda {
/// The `extern __shared__ unsigned char shared[]` of every kernel, one for each thread that runs CTAs. The memory of each
/// CTA of those that run together lies behind that of the one before, so their kernels go by shared address.
extern constinit thread_local unsigned char shared[emulation::kMostCluster * emulation::kMostShared];
}  // namespace fovea::cuda

namespace fovea::emulation {

inline constexpr int kLanes = 32;
/// Where shared memory starts in the shared window: not at 0, so that a null address is caught.
inline constexpr uint32_t kSharedBase = 1024;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Launch {
  const char* name = "";
  Index grid;
  int threads = 0;
  size_t shared_bytes = 0;
  bool has_async_copies = true;  ///< false: copies through registers, complete at once (sm_75)
  int cluster = 1;               ///< CTAs along x that run together, and know of each other
  int resident =
      1;  ///< of no cluster: CTAs along x that run together, of a kernel that goes by shared address
};

/// Runs `thread` for every thread of every CTA. Ends the process with a report when the kernel cannot go on.
void run(const Launch& launch, const std::function<void()>& thread);

/// Prints the error, its place and the seed, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// The indices of the running thread and of its CTA.
struct Position {
  Index thread, block, block_size, grid;
};
extern constinit thread_local Position position;

/// Barrier 0 is __syncthreads, of all threads that have not ended. Returns whether any thread voted.
bool barrier(int id, int threads, bool wait, bool vote = false);
inline constexpr int kAllThreads = -1;

/// Of all threads of the cluster that have not ended.
void cluster_arrive();
void cluster_wait();
/// CTA, of those that run together, whose thread runs, or whose memory `work` is about; fails when all its threads have ended.
int cta_rank();
/// The same in a cluster, else 0.
int cluster_rank();
void in_cta(int rank, const std::function<void()>& work);

/// A point at which the running thread may be interrupted, at random.
void interruption();

/// A shared address that a CTA of a cluster makes carries its rank from this bit on, as on the chip.
inline constexpr int kRankBit = 24;
constexpr uint32_t without_rank(uint32_t address) {
  return address & ((1u << kRankBit) - 1);
}
/// The bytes at a shared address of this CTA; fails unless `size` of them exist and the address is a multiple of `alignment`.
unsigned char* shared_bytes(uint32_t address, size_t size, size_t alignment, const char* what);
uint32_t shared_address(const void* pointer);

/// Asynchronous copies of the running thread: they take effect at once or at the wait, at random.
void copy_async(uint32_t to, const void* from, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

/// Blocks the running thread until `ready(of)`; `what` is for the report of a hang.
void wait_until(bool (*ready)(const void* of), const void* of, const char* what);
/// A random number below `end`, from the generator that decides the order of events.
uint32_t random_below(uint32_t end);

/// Operations of a warp. All lanes arrive with their input; the last computes all outputs.
struct Warp {
  static constexpr size_t kMostIn = 48, kMostOut = 16;
  alignas(16) unsigned char in[kLanes * kMostIn];
  alignas(16) unsigned char out[kLanes * kMostOut];
  const char* operation = nullptr;
  int arrived = 0;
  unsigned generation = 0;
};
Warp& this_warp();
int this_lane();
/// Waits until the operation at which this lane has arrived is done.
void wait_for_warp(unsigned generation);
void check_operation(Warp& warp, const char* operation);

/// `compute(const In* in, Out* out)` sees the 32 lanes of the warp.
template <class Out, class In, class Compute>
Out collective(const char* operation, const In& in, Compute&& compute) {
  static_assert(sizeof(In) <= Warp::kMostIn && sizeof(Out) <= Warp::kMostOut);
  Warp& warp = this_warp();
  const auto lane = static_cast<size_t>(this_lane());
  check_operation(warp, operation);
  std::memcpy(warp.in + lane * sizeof(In), &in, sizeof(In));
  if (++warp.arrived == kLanes) {
    compute(reinterpret_cast<const In*>(warp.in), reinterpret_cast<Out*>(warp.out));
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_for_warp(warp.generation);
  }
  Out out;
  std::memcpy(&out, warp.out + lane * sizeof(Out), sizeof(Out));
  return out;
}

}  // namespace fovea::emulation
