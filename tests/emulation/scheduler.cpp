#include "emulation/scheduler.hpp"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "emulation/hopper.hpp"

namespace fovea::cuda {

alignas(1024) constinit thread_local unsigned char shared[emulation::kMostCluster * emulation::kMostShared];

}  // namespace fovea::cuda

namespace fovea::emulation {

constinit thread_local Position position;

namespace {

constexpr int kMostThreads = 1024;               // CUDA's limit of a CTA
constexpr int kBarriers = 16;                    // of a CTA, in hardware
constexpr size_t kStackBytes = size_t{1} << 18;  // a kernel's registers are locals here: some 10 KB
constexpr unsigned char kPoison = 0xff;          // NaN in float32, float16 and bfloat16

/// xorshift64*: fast, and good enough for shuffling.
class Random {
 public:
  void seed(uint64_t seed) { state_ = seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du; }
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1du) >> 32);
  }
  uint32_t below(uint32_t end) { return static_cast<uint32_t>((uint64_t{next()} * end) >> 32); }

 private:
  uint64_t state_ = 1;
};

struct Barrier {
  int arrived = 0, expected = 0;
  unsigned generation = 0;
  bool vote = false, result = false;
  const int* live = nullptr;  ///< threads that a barrier of kAllThreads waits for
};

struct Copy {
  unsigned char* to;
  const void* from;
  int bytes;
  bool valid;

  void perform() const {
    if (valid) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    } else {
      std::memset(to, 0, static_cast<size_t>(bytes));
    }
  }
};

/// Groups of asynchronous copies in order; those behind `closed` are not committed.
struct Copies {
  std::vector<Copy> copies;
  std::vector<size_t> ends;  ///< of the committed groups, into `copies`

  void wait(int pending) {
    if (static_cast<int>(ends.size()) <= pending) return;
    const size_t groups = ends.size() - static_cast<size_t>(pending);
    const size_t done = ends[groups - 1];
    for (size_t i = 0; i < done; ++i) copies[i].perform();
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
    ends.erase(ends.begin(), ends.begin() + static_cast<std::ptrdiff_t>(groups));
    for (size_t& end : ends) end -= done;
  }
  void finish() {
    for (const Copy& copy : copies) copy.perform();
    copies.clear();
    ends.clear();
  }
};

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kWaiting, kEnded };

struct Fiber {
  jmp_buf place;
  void* stack = nullptr;
  bool started = false;
  State state = State::kEnded;
  int barrier = 0;
  unsigned generation = 0;               ///< of the barrier or the warp that it waits for
  bool (*ready)(const void*) = nullptr;  ///< what else it waits for: ready(waits_for)
  const void* waits_for = nullptr;
  const char* waits_in = "";
  bool at_cluster = false;          ///< it has arrived at the cluster's barrier, and not waited yet
  unsigned cluster_generation = 0;  ///< of the barrier then
  Copies copies;
};

/// Runs groups of CTAs, mostly of one, one at a time: clusters, or the resident ones. Each thread of the process that launches has one.
class Processor {
 public:
  ~Processor() {
    for (Fiber& fiber : fibers_) {
      if (fiber.stack != nullptr) munmap(fiber.stack, kStackBytes);
    }
  }

  void run(const Launch& launch, const std::function<void()>& thread) {
    // Whole warps, or one thread.
    if (launch.threads <= 0 || launch.threads > kMostThreads ||
        (launch.threads % kLanes != 0 && launch.threads > 1))
      fail("%d threads a CTA", launch.threads);
    if (launch.cluster < 1 || launch.cluster > kMostCluster ||
        launch.grid.x % static_cast<unsigned>(launch.cluster) != 0)
      fail("clusters of %d in a grid of %u", launch.cluster, launch.grid.x);
    if (launch.resident < 1 || launch.resident > kMostCluster || (launch.resident > 1 && launch.cluster > 1))
      fail("%d resident CTAs, clusters of %d", launch.resident, launch.cluster);
    if (launch.shared_bytes > kMostShared) fail("%zu bytes of shared memory", launch.shared_bytes);
    launch_ = &launch;
    thread_ = &thread;
    position.grid = launch.grid;
    position.block_size = {static_cast<unsigned>(launch.threads), 1, 1};
    seed_ = base_seed() + launches_++;
    random_.seed(seed_);
    const auto together = static_cast<unsigned>(std::max(launch.cluster, launch.resident));
    const unsigned columns = (launch.grid.x + together - 1) / together;
    const uint64_t groups = uint64_t{columns} * launch.grid.y * launch.grid.z;
    // They may run in any order. They run from a random one on, forwards or backwards.
    const uint64_t first = random_.next() % std::max<uint64_t>(groups, 1);
    const bool backwards = random_.below(2) == 1;
    for (uint64_t i = 0; i < groups; ++i) {
      const uint64_t turn = backwards ? groups - 1 - i : i, group = (first + turn) % groups;
      first_block_ = static_cast<unsigned>(group % columns) * together;
      ctas_ = static_cast<int>(std::min(together, launch.grid.x - first_block_));
      position.block = {first_block_, static_cast<unsigned>(group / columns % launch.grid.y),
                        static_cast<unsigned>(group / columns / launch.grid.y)};
      run_group();
    }
    launch_ = nullptr;
  }

  bool arrive(int id, int threads, bool wait, bool vote) {
    if (id < 0 || id >= kBarriers) fail("barrier %d", id);
    if (threads != kAllThreads && (threads <= 0 || threads % kLanes != 0))
      fail("barrier %d of %d threads", id, threads);
    return arrive_at(rank_ * kBarriers + id, threads, wait, vote);
  }
  void arrive_at_cluster() {
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    if (me.at_cluster) fail("a thread arrives at the cluster's barrier twice");
    me.at_cluster = true;
    me.cluster_generation = barriers_.back().generation;
    arrive_at(ctas_ * kBarriers, kAllThreads, false, false);
  }
  void wait_for_cluster() {
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    if (!me.at_cluster) fail("a thread waits for the cluster's barrier, at which it has not arrived");
    me.at_cluster = false;
    if (barriers_.back().generation != me.cluster_generation) return interruption();
    me.state = State::kAtBarrier;
    me.barrier = ctas_ * kBarriers;
    me.generation = me.cluster_generation;
    leave();
  }
  bool arrive_at(int id, int threads, bool wait, bool vote) {
    Barrier& b = barriers_[static_cast<size_t>(id)];
    if (b.arrived > 0 && b.expected != threads)
      fail("barrier %d of %d threads here, of %d elsewhere", id, threads, b.expected);
    b.expected = threads;
    b.vote = b.vote || vote;
    ++b.arrived;
    const unsigned generation = b.generation;
    release_if_complete(b);
    if (!wait) return false;
    if (b.generation == generation) {
      Fiber& me = fibers_[static_cast<size_t>(current_)];
      me.state = State::kAtBarrier;
      me.barrier = id;
      me.generation = generation;
      leave();
    } else {
      interruption();
    }
    return b.result;
  }

  Warp& warp() { return warps_[static_cast<size_t>(current_ / kLanes)]; }
  int lane() const { return current_ % kLanes; }
  void wait_for_warp(unsigned generation) {
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    me.state = State::kInWarp;
    me.generation = generation;
    leave();
  }
  void wait_until(bool (*ready)(const void*), const void* of, const char* what) {
    if (ready(of)) return interruption();
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    me.state = State::kWaiting;
    me.ready = ready;
    me.waits_for = of;
    me.waits_in = what;
    leave();
  }
  uint32_t random_below(uint32_t end) { return random_.below(end); }
  void interruption() {
    // One in eight is often enough for some seed to separate any pair of accesses, and costs little.
    if (random_.below(8) == 0) leave();
  }

  void copy_async(const Copy& copy) {
    Copies& mine = fibers_[static_cast<size_t>(current_)].copies;
    if (!launch_->has_async_copies || random_.below(2) == 0) {
      copy.perform();  // as early as possible: shows reads of the data that is overwritten
    } else {
      mine.copies.push_back(copy);  // as late as possible: shows reads without a wait
    }
  }
  void commit() {
    Copies& mine = fibers_[static_cast<size_t>(current_)].copies;
    mine.ends.push_back(mine.copies.size());
  }
  void wait_for_copies(int pending) { fibers_[static_cast<size_t>(current_)].copies.wait(pending); }

  size_t shared_size() const { return launch_ ? launch_->shared_bytes : 0; }
  const Launch* launch() const { return launch_; }
  uint64_t seed() const { return seed_; }
  int current() const { return current_; }
  int rank() const { return rank_; }
  void in_cta(int rank, const std::function<void()>& work) {
    if (rank < 0 || rank >= ctas_) fail("CTA %d of a cluster of %d", rank, ctas_);
    if (live_[static_cast<size_t>(rank)] == 0)
      fail("a touch of CTA %d of the cluster, which has ended", rank);
    const int own = rank_;
    rank_ = rank;
    work();
    rank_ = own;
  }

 private:
  static uint64_t base_seed() {
    static const uint64_t seed = [] {
      const char* text = std::getenv("FOVEA_EMULATION_SEED");
      return text && *text ? std::strtoull(text, nullptr, 10) : 1;
    }();
    return seed;
  }

  void run_group() {
    const auto ctas = static_cast<size_t>(ctas_);
    const auto threads = ctas * static_cast<size_t>(launch_->threads),
               warps = (threads + kLanes - 1) / kLanes, lanes = warps * kLanes;
    while (fibers_.size() < lanes) {
      fibers_.emplace_back();
      make_stack(fibers_.back());
    }
    warps_.assign(warps, Warp());
    live_.fill(launch_->threads);
    all_live_ = static_cast<int>(threads);
    barriers_.assign(ctas * kBarriers + 1, Barrier());
    for (size_t b = 0; b < barriers_.size(); ++b)
      barriers_[b].live = b < ctas * kBarriers ? &live_[b / kBarriers] : &all_live_;
    for (size_t t = 0; t < lanes; ++t) {
      fibers_[t].state = t < threads ? State::kReady : State::kEnded;
      fibers_[t].copies.finish();
    }
    begin_cta_of_hopper();
    // All of it, because shared memory holds arbitrary data when a kernel starts.
    std::memset(cuda::shared, kPoison, ctas * kMostShared);

    std::vector<unsigned> order(warps);
    for (size_t w = 0; w < warps; ++w) order[w] = static_cast<unsigned>(w);
    while (all_live_ > 0) {
      for (size_t w = warps; w > 1; --w)
        std::swap(order[w - 1], order[random_.below(static_cast<uint32_t>(w))]);
      bool progress = random_.below(4) == 0 && step_of_tma();
      for (const unsigned w : order) {
        // Warps get ahead of each other by up to a few dozen operations, which is several tiles.
        const uint32_t turns = 1 + random_.below(1u << random_.below(7));
        for (uint32_t turn = 0; turn < turns; ++turn) {
          if (!run_warp(w)) break;
          progress = true;
        }
      }
      if (!progress && !step_of_tma()) report_hang();
    }
    end_cta_of_hopper();
    for (size_t cta = 0; cta < ctas; ++cta) {
      const unsigned char* end = cuda::shared + (cta + 1) * kMostShared;
      const unsigned char* behind = cuda::shared + cta * kMostShared + launch_->shared_bytes;
      for (const unsigned char* at = behind; at < end; ++at) {
        if (*at != kPoison)
          fail("wrote %zu bytes behind its shared memory", static_cast<size_t>(at - behind));
      }
    }
  }

  /// Each lane of a warp until it waits. False when all of them do.
  bool run_warp(unsigned w) {
    bool any = false;
    const unsigned flip = random_.below(kLanes);
    for (unsigned l = 0; l < kLanes; ++l) {
      const auto t = static_cast<size_t>(w * kLanes + (l ^ flip));
      Fiber& fiber = fibers_[t];
      switch (fiber.state) {
        case State::kEnded:
          continue;
        case State::kAtBarrier:
          if (barriers_[static_cast<size_t>(fiber.barrier)].generation == fiber.generation) continue;
          break;
        case State::kInWarp:
          if (warps_[w].generation == fiber.generation) continue;
          break;
        case State::kWaiting:
          if (!fiber.ready(fiber.waits_for)) continue;
          break;
        case State::kReady:
          break;
      }
      fiber.state = State::kReady;
      enter(t);
      any = true;
    }
    return any;
  }

  void release_if_complete(Barrier& b) {
    if (b.arrived == 0 || b.arrived != (b.expected == kAllThreads ? *b.live : b.expected)) return;
    b.arrived = 0;
    b.result = b.vote;
    b.vote = false;
    ++b.generation;
  }

  [[noreturn]] void report_hang() {
    std::vector<int> at_barrier(barriers_.size());
    int in_warp = 0, waiting = 0;
    const char *operation = "", *wait = "";
    const int threads = ctas_ * launch_->threads;
    for (size_t t = 0; t < static_cast<size_t>(threads); ++t) {
      if (fibers_[t].state == State::kAtBarrier) ++at_barrier[static_cast<size_t>(fibers_[t].barrier)];
      if (fibers_[t].state == State::kInWarp) {
        ++in_warp;
        operation = warps_[t / kLanes].operation;
      }
      if (fibers_[t].state == State::kWaiting) {
        ++waiting;
        wait = fibers_[t].waits_in;
      }
    }
    char text[512] = "";
    int length = 0;
    const auto room = [&] { return sizeof text - static_cast<size_t>(length); };
    for (size_t b = 0; b < barriers_.size() && length < 400; ++b) {
      if (at_barrier[b] == 0 && barriers_[b].arrived == 0) continue;
      length +=
          std::snprintf(text + length, room(), " %d wait at barrier %zu (%d of %d arrived);", at_barrier[b],
                        b, barriers_[b].arrived,
                        barriers_[b].expected == kAllThreads ? *barriers_[b].live : barriers_[b].expected);
    }
    if (in_warp > 0)
      length += std::snprintf(text + length, room(), " %d wait for their warp in %s;", in_warp, operation);
    if (waiting > 0) std::snprintf(text + length, room(), " %d wait in %s;", waiting, wait);
    current_ = -1;
    fail("hangs: of %d threads %d have ended;%s", threads, threads - all_live_, text);
  }

  static void make_stack(Fiber& fiber) {
    fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fiber.stack == MAP_FAILED) fail("no memory for stacks");
    // A stack overflow ends here.
    mprotect(fiber.stack, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
  }

  static void body();

  // Once a fiber runs, _setjmp and _longjmp switch: unlike swapcontext they make no system call.
  __attribute__((noinline)) void enter(size_t t) {
    current_ = static_cast<int>(t);
    rank_ = current_ / launch_->threads;
    position.thread.x = static_cast<unsigned>(current_ % launch_->threads);
    position.block.x = first_block_ + static_cast<unsigned>(rank_);
    Fiber& fiber = fibers_[t];
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
  }
  __attribute__((noinline)) void leave() {
    if (_setjmp(fibers_[static_cast<size_t>(current_)].place) == 0) _longjmp(scheduler_, 1);
  }

  void end_thread() {
    Fiber& me = fibers_[static_cast<size_t>(current_)];
    me.copies.finish();
    end_thread_of_hopper();
    me.state = State::kEnded;
    // Who has ended is not waited for: an arrival of its own would stand for another thread's.
    if (me.at_cluster && barriers_.back().generation == me.cluster_generation) --barriers_.back().arrived;
    me.at_cluster = false;
    --live_[static_cast<size_t>(rank_)];
    --all_live_;
    release_if_complete(barriers_[static_cast<size_t>(rank_ * kBarriers)]);
    release_if_complete(barriers_.back());
  }

  const Launch* launch_ = nullptr;
  const std::function<void()>* thread_ = nullptr;
  // The vector may move its elements: no reference to them lives across a launch.
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Barrier> barriers_;  ///< kBarriers of each CTA, and that of the cluster
  jmp_buf scheduler_;
  Random random_;
  uint64_t seed_ = 0, launches_ = 0;
  int current_ = -1, rank_ = 0;  ///< the running thread and its CTA, both within the group
  int ctas_ = 1;                 ///< of the group
  unsigned first_block_ = 0;
  std::array<int, kMostCluster> live_{};  ///< threads of each CTA that have not ended
  int all_live_ = 0;
};

Processor& processor() {
  thread_local Processor the_processor;
  return the_processor;
}

void Processor::body() {
  Processor& self = processor();
  for (;;) {  // a thread of one CTA after the other
    (*self.thread_)();
    self.end_thread();
    self.leave();
  }
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& thread) {
  processor().run(launch, thread);
}

void fail(const char* format, ...) {
  Processor& p = processor();
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fflush(nullptr);
  if (p.launch() != nullptr) {
    std::fprintf(stderr, "emulated kernel %s, CTA (%u, %u, %u) of (%u, %u, %u), thread %d, seed %llu: %s\n",
                 p.launch()->name, position.block.x, position.block.y, position.block.z, position.grid.x,
                 position.grid.y, position.grid.z, p.current(), static_cast<unsigned long long>(p.seed()),
                 text);
  } else {
    std::fprintf(stderr, "emulated device: %s\n", text);
  }
  std::abort();  // the suite's handler names the problem that was running
}

bool barrier(int id, int threads, bool wait, bool vote) {
  return processor().arrive(id, threads, wait, vote);
}
void cluster_arrive() {
  processor().arrive_at_cluster();
}
void cluster_wait() {
  processor().wait_for_cluster();
}
int cta_rank() {
  return processor().rank();
}
int cluster_rank() {
  return processor().launch()->cluster > 1 ? cta_rank() : 0;
}
void in_cta(int rank, const std::function<void()>& work) {
  processor().in_cta(rank, work);
}
void interruption() {
  processor().interruption();
}
void wait_until(bool (*ready)(const void*), const void* of, const char* what) {
  processor().wait_until(ready, of, what);
}
uint32_t random_below(uint32_t end) {
  return processor().random_below(end);
}

unsigned char* shared_bytes(uint32_t address, size_t size, size_t alignment, const char* what) {
  const size_t end = processor().shared_size();
  const uint32_t own = without_rank(address);
  const size_t offset = size_t{own} - kSharedBase;
  // Without a rank: from a descriptor, which has no room for it.
  if (own != address && static_cast<int>(address >> kRankBit) != cta_rank())
    fail("%s: shared address %#x is another CTA's", what, address);
  if (own < kSharedBase || offset + size > end)
    fail("%s: %zu bytes at shared address %#x, which is byte %lld of %zu", what, size, address,
         static_cast<long long>(own) - kSharedBase, end);
  if (address % alignment != 0)
    fail("%s: shared address %#x is no multiple of %zu", what, address, alignment);
  return cuda::shared + static_cast<size_t>(cta_rank()) * kMostShared + offset;
}

uint32_t shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  // A kernel may form the address behind the end, but not use it.
  if (byte < cuda::shared || byte > cuda::shared + processor().shared_size())
    fail("the shared address of memory that is not dynamic shared memory");
  return (kSharedBase + static_cast<uint32_t>(byte - cuda::shared)) | static_cast<uint32_t>(cluster_rank())
                                                                          << kRankBit;
}

void copy_async(uint32_t to, const void* from, int bytes, bool valid) {
  unsigned char* target =
      shared_bytes(to, static_cast<size_t>(bytes), static_cast<size_t>(bytes), "cp.async");
  if (valid && reinterpret_cast<uintptr_t>(from) % static_cast<size_t>(bytes) != 0)
    fail("cp.async: global address %p is no multiple of %d", from, bytes);
  processor().copy_async({target, from, bytes, valid});
}
void copy_async_commit() {
  processor().commit();
}
void copy_async_wait(int pending) {
  processor().wait_for_copies(pending);
  processor().interruption();
}

Warp& this_warp() {
  return processor().warp();
}
int this_lane() {
  return processor().lane();
}
void wait_for_warp(unsigned generation) {
  processor().wait_for_warp(generation);
}
void check_operation(Warp& warp, const char* operation) {
  if (warp.arrived == 0) {
    warp.operation = operation;
  } else if (warp.operation != operation && std::strcmp(warp.operation, operation) != 0) {
    fail("lanes of one warp are apart: %s here, %s elsewhere", operation, warp.operation);
  }
}

}  // namespace fovea::emulation
