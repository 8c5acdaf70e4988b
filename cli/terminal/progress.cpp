// Draws the progress bar.
#include "cli/terminal/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace fovea::cli {
namespace {
constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kBetweenDrawings = std::chrono::milliseconds(200);
constexpr int64_t kBarWidth = 30;
}  // namespace

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), watched_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (visible_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::advance(int64_t steps) {
  const int64_t done = done_.fetch_add(steps, std::memory_order_relaxed) + steps;
  if (watched_) draw(done);
}

void Progress::draw(int64_t done) {
  const std::unique_lock lock(drawing_, std::try_to_lock);
  if (!lock) return;  // another thread is drawing
  const Clock::time_point now = Clock::now();
  if (now - started_ < kPatience || (visible_ && now - drawn_ < kBetweenDrawings)) return;
  drawn_ = now;
  visible_ = true;
  const double elapsed = std::chrono::duration<double>(now - started_).count();
  if (total_ <= 0) {
    fmt::print(stderr, "\r{}: {} done, {:.0f} s\x1b[K", label_, done, elapsed);
  } else {
    const int64_t filled = std::min(done, total_) * kBarWidth / total_;
    const double remaining =
        elapsed * static_cast<double>(total_ - std::min(done, total_)) / static_cast<double>(done);
    fmt::print(stderr, "\r{} [{}{}] {}%, about {:.0f} s left\x1b[K", label_,
               std::string(static_cast<size_t>(filled), '#'),
               std::string(static_cast<size_t>(kBarWidth - filled), '.'),
               std::min(done, total_) * 100 / total_, remaining);
  }
  std::fflush(stderr);
}

}  // namespace fovea::cli
