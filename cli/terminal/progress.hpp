// A progress bar on the terminal.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace fovea::cli {

/// A bar on stderr for what takes longer than two seconds, when a person watches (stderr is a terminal).
/// Threads may call advance() at the same time.
class Progress {
 public:
  /// `total` steps; 0 when nobody knows how many there will be.
  Progress(std::string label, int64_t total);
  /// Takes the bar away.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(int64_t steps = 1);

 private:
  using Clock = std::chrono::steady_clock;
  void draw(int64_t done);

  std::string label_;
  int64_t total_;
  bool watched_;
  std::atomic<int64_t> done_{0};
  std::mutex drawing_;
  Clock::time_point started_ = Clock::now(), drawn_ = started_;
  bool visible_ = false;
};

}  // namespace fovea::cli
