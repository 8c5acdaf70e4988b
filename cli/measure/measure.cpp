// Times, peak memory and errors: the definitions of measure.hpp.
#include "cli/measure/measure.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>

namespace fovea::cli {

Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<size_t>(share * static_cast<double>(times.size() - 1) + 0.5)];
  };
  return {static_cast<int>(times.size()), at(0.5), times.front(), (at(0.75) - at(0.25)) / at(0.5)};
}

Timing measure(const std::function<void()>& run, double seconds, int least_runs) {
  return measure_in_turns({&run, 1}, seconds, {.least_rounds = least_runs}).front();
}

std::vector<Timing> measure_in_turns(std::span<const std::function<void()>> runs, double seconds,
                                     const Turns& turns) {
  using Clock = std::chrono::steady_clock;
  constexpr int kMostRounds = 10'000;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  for (const auto& run : runs) run();
  std::vector<std::vector<double>> times(runs.size());
  const Clock::time_point begin = Clock::now();
  for (int round = 0; round < kMostRounds && (round < turns.least_rounds || since(begin) < seconds);
       ++round) {
    for (size_t i = 0; i < runs.size(); ++i) {
      if (turns.pause > 0) {
        std::this_thread::sleep_for(std::chrono::duration<double>(turns.pause));
        // Threads that fell asleep take a while to come, and to be moved to cores of their own.
        const Clock::time_point woken = Clock::now();
        while (since(woken) < turns.pause && (times[i].empty() || times[i].back() < turns.pause)) runs[i]();
      }
      for (int repeat = 0; repeat < turns.runs; ++repeat) {
        const Clock::time_point start = Clock::now();
        runs[i]();
        times[i].push_back(since(start));
      }
    }
  }
  std::vector<Timing> timings;
  for (std::vector<double>& each : times) timings.push_back(summary(std::move(each)));
  return timings;
}

double peak_memory() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
#if defined(__APPLE__)
  return static_cast<double>(usage.ru_maxrss);
#else
  return static_cast<double>(usage.ru_maxrss) * 1024;
#endif
}

ErrorSize error_between(std::span<const double> got, std::span<const double> expected) {
  double largest = 0, errors = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(got[i] - expected[i]);
    // std::max would lose a NaN.
    if (std::isnan(error)) return {error, error};
    largest = std::max(largest, error);
    errors += error * error;
    size += expected[i] * expected[i];
  }
  const double relative = errors == 0 ? 0
                          : size == 0 ? std::numeric_limits<double>::infinity()
                                      : std::sqrt(errors / size);
  return {largest, relative};
}

}  // namespace fovea::cli
