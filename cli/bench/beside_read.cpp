// The definitions of beside_read.hpp.
#include "cli/bench/beside_read.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "cli/bench/read_memory.hpp"

namespace fovea::cli {

void time_beside_read(const std::function<void(const KeysAndValues&)>& run,
                      std::span<const KeysAndValues> caches, int threads, double seconds, BenchRow& row) {
  MemoryReader reader(threads);
  volatile uint32_t sink = 0;  // a sum that nobody reads could be optimised away
  size_t runs = 0, reads = 0;
  const auto next_of = [&](size_t& turn) { return caches[turn++ % caches.size()]; };
  const auto read = [&](const ReadWay& way) {
    const auto [k, v] = next_of(reads);
    sink = reader.read(k->bytes.data(), k->bytes.size(), way) +
           reader.read(v->bytes.data(), v->bytes.size(), way);
  };
  // Threads of our pool that look for work would take a core from the read, and half of its rate on two.
  std::this_thread::sleep_for(std::chrono::duration<double>(kUntilPoolsSleep));
  const ReadWay way = fastest_way(read);
  const std::function<void()> both[] = {[&] { run(next_of(runs)); }, [&] { read(way); }};
  constexpr int kRunsOfATurn = 8;  // pauses would take nearly all of the time
  const std::vector<Timing> timings =
      measure_in_turns(both, seconds, {.pause = kUntilPoolsSleep, .runs = kRunsOfATurn});
  row.timing = timings[0];
  row.read = {timings[1], way.name(), caches.front().bytes()};
}

void time_beside_copy(const std::function<void()>& run, const Array& k, const Array& v,
                      const Mirrors& mirrors, Gpu& gpu, double seconds, BenchRow& row) {
  constexpr int kLeastReplays = 5;
  row.timing = gpu.measure(run, seconds, kLeastReplays);
  row.host_seconds = gpu.host_seconds(run);
  const size_t bytes = k.bytes.size() + v.bytes.size();
  if (bytes == 0) return;
  void* to = gpu.allocate(std::max(k.bytes.size(), v.bytes.size()));
  const auto copy = [&] {
    for (const Array* array : {&k, &v}) gpu.copy(to, mirrors.address(*array), array->bytes.size());
  };
  row.read = {gpu.measure(copy, seconds, kLeastReplays), "a copy, which reads and writes", 2 * bytes};
}

}  // namespace fovea::cli
