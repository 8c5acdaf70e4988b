// How fast memory can be read: the yardstick of decoding, which reads K and V once and computes little.
#pragma once

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace fovea::cli {

/// A way to walk over memory. Which one is fastest depends on the processor.
struct ReadWay {
  size_t chunk = 0;    ///< bytes that a thread takes at a time, a multiple of 256
  size_t streams = 0;  ///< places of the chunk that are read at once: 1 or 4
  size_t ahead = 0;    ///< distance of software prefetches in bytes; 0 leaves it to the processor
  std::string name() const;
};

/// The way for which the best of three calls of `read` takes least time.
ReadWay fastest_way(const std::function<void(const ReadWay&)>& read);

/// Reads memory with threads that wait between reads. It sums all words, so the compiler can leave no read out.
class MemoryReader {
 public:
  explicit MemoryReader(int num_threads);
  ~MemoryReader();
  MemoryReader(const MemoryReader&) = delete;
  MemoryReader& operator=(const MemoryReader&) = delete;

  /// The sum, modulo 2^32, of the 4-byte words of [data, data + bytes) up to the last whole 256 bytes. The
  /// threads take chunks as they come free.
  uint32_t read(const void* data, size_t bytes, const ReadWay& way);

 private:
  void take_chunks();
  void keep_apart();

  int core_ = -1;  ///< of the thread that reads, when workers were kept off it
  const char* data_ = nullptr;
  size_t bytes_ = 0;
  ReadWay way_{};
  bool stop_ = false;
  std::atomic<size_t> next_{0};
  std::atomic<uint32_t> sum_{0};
  std::barrier<> turn_;
  std::vector<std::thread> workers_;
};

}  // namespace fovea::cli
