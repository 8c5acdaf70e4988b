// Moving boxes of rows and heads between tensors and messages, where they lie: on the CPU or on a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/box.hpp"
#include "fovea/fovea.h"

namespace fovea::distributed {

/// What a move does with an element: `to` = `from`, or `to` += `from`, computed in float32.
struct Move {
  fovea_dtype from{}, to{};
  bool add = false;
};

/// Says where memory of a rank is, to others of its host.
struct SharedPlace {
  std::array<char, 128> words{};
};

/// Work is put on queues, each in order: those of computing, of which one is beside the other, and that of links. CPUs have none: calls
/// return when the work is done.
enum class Lane : uint8_t { kCompute, kBeside, kLink };
inline constexpr size_t kLanes = 3;

/// Memory of one kind, and what a run puts on its queues.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  /// What one run works with: the caller's stream is its lane of computing.
  virtual void begin(void* stream) = 0;
  virtual void* stream(Lane lane) const = 0;
  /// What is put on `later` from now on waits for what lies on `sooner`.
  virtual void order(Lane sooner, Lane later) = 0;
  /// All boxes at once; their targets do not overlap.
  virtual void move(std::span<const Box> boxes, const Move& how, Lane lane) = 0;
  virtual void set_words(void* to, uint32_t word, size_t count, Lane lane) = 0;
  /// For numbers that a plan keeps: waits until they are there.
  virtual std::shared_ptr<void> keep(const void* data, size_t bytes) = 0;
  /// Copies between the host and this memory, and waits: for what ranks tell each other when they make plans.
  virtual void copy_and_wait(void* to, const void* from, size_t bytes) = 0;

  // ---- memory that other ranks reach ----
  /// Cleared memory for them.
  virtual std::shared_ptr<void> share(size_t bytes, SharedPlace& place) = 0;
  /// Another rank's, under an address of this one; null where this rank does not reach it.
  virtual std::shared_ptr<void> reach(const SharedPlace& place) = 0;
  /// Whether it is memory of the same device.
  virtual bool is_of_this_device(const SharedPlace& place) const = 0;
  /// Copies a box as it is, from or to memory of any rank. On GPUs without an SM.
  virtual void copy(const Box& box, int64_t element_bytes, Lane lane) = 0;
  /// The same of many boxes, faster. On GPUs by as many SMs as links keep busy, which leave room for moves.
  virtual void copy_at_once(std::span<const Box> boxes, const fovea_dtype& type, Lane lane) = 0;
  /// Writes a number to words of any rank once all that lies on the lane is done and seen by all.
  virtual void tell(std::span<uint32_t* const> words, uint32_t number, Lane lane) = 0;
  /// What is put on the lane from now on waits until each of these words of this rank's has come to the number. Where the host waits, it
  /// calls `look` now and then.
  virtual void await(std::span<uint32_t* const> words, uint32_t number, Lane lane,
                     const std::function<void()>& look) = 0;
  /// Said behind a run; and waits until the last one is done, and all lanes but the caller's stream.
  virtual void end() = 0;
  virtual void wait_for_end() noexcept = 0;
  /// From any thread, whatever waits on the lanes: the words as they are; then each becomes `number`, if that is not 0.
  virtual std::vector<uint32_t> take_over(uint32_t* words, size_t count, uint32_t number) = 0;
};

/// Whether a word has come to a number; both go round.
constexpr bool has_come(uint32_t word, uint32_t number) {
  return static_cast<int32_t>(word - number) >= 0;
}

/// Throws fovea::Error where this build or machine has no such device.
std::unique_ptr<Memory> open_memory(fovea_device device);

}  // namespace fovea::distributed
