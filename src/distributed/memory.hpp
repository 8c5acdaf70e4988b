// Moving boxes of rows and heads between tensors and messages, where they lie: on the CPU or on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/box.hpp"
#include "fovea/fovea.h"

namespace fovea::distributed {

/// What a move does with an element: `to` = `from`, or `to` += `from`, computed in float32.
struct Move {
  fovea_dtype from{}, to{};
  bool add = false;
};

/// Work is put on one of two queues, each in order. CPUs have none: calls return when the work is done.
enum class Lane : uint8_t { kCompute, kLink };

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
};

/// Throws fovea::Error where this build or machine has no such device.
std::unique_ptr<Memory> open_memory(fovea_device device);

}  // namespace fovea::distributed
