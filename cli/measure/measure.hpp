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
/// The same for several, in turns: each is timed once a round. One Timing for each. Before each run there are `pause` seconds: threads
/// of a pool look for more work for a while, on cores that the next one may need. A run that is shorter than the pause is repeated
/// before it is timed.
std::vector<Timing> measure_in_turns(std::span<const std::function<void()>> runs, double seconds,
                                     int least_rounds = 5, double pause = 0);

/// The most memory that this process has held, in bytes; 0 where the system does not tell.
double peak_memory();

struct ErrorSize {
  double largest = 0;   ///< max |got - expected|
  double relative = 0;  ///< of the Frobenius norm
};
ErrorSize error_between(std::span<const double> got, std::span<const double> expected);

}  // namespace fovea::cli
