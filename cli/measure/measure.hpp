// Times, memory and errors.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace fovea::cli {

struct Timing {
  int runs = 0;
  double median = 0, fastest = 0;  ///< seconds
  /// Distance of the quartiles from each other over the median.
  double spread = 0;
};

/// Of the times of single runs, in seconds.
Timing summary(std::vector<double> times);

/// Runs once to warm up, then at least `least_runs` times and until `seconds` have passed.
Timing measure(const std::function<void()>& run, double seconds, int least_runs = 5);
/// How runs take turns. Threads of a pool look for more work for a while after a run, on cores that the next one may need: `pause`
/// seconds before each turn let them fall asleep. A run that is shorter than the pause is repeated as long before it is timed.
struct Turns {
  int least_rounds = 5;
  double pause = 0;
  int runs = 1;  ///< of each in a turn, timed one by one
};
inline constexpr double kUntilPoolsSleep = 0.03;  // libgomp's threads spin for 5 to 20 ms
/// The same for several, in turns. One Timing for each.
std::vector<Timing> measure_in_turns(std::span<const std::function<void()>> runs, double seconds,
                                     const Turns& turns = {});

/// The most memory that this process has held, in bytes; 0 where the system does not tell.
double peak_memory();

struct ErrorSize {
  double largest = 0;   ///< max |got - expected|
  double relative = 0;  ///< of the Frobenius norm
};
ErrorSize error_between(std::span<const double> got, std::span<const double> expected);

}  // namespace fovea::cli
