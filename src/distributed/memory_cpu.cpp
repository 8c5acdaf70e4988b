// Memory of the CPU: moves are done when the call returns.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>
#include <thread>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "distributed/memory.hpp"
#include "distributed/memory_cuda.hpp"
#include "distributed/rectangles.hpp"
#include "distributed/shared_memory.hpp"

namespace fovea::distributed {
namespace {

template <class From, class To, bool kAdd>
void move_row(const char* from, char* to, int64_t elements) {
  const auto* const source = reinterpret_cast<const From*>(from);
  auto* const target = reinterpret_cast<To*>(to);
  for (int64_t i = 0; i < elements; ++i) {
    const float value = to_float(source[i]);
    target[i] = from_float<To>(kAdd ? to_float(target[i]) + value : value);
  }
}

using MoveRow = void (*)(const char* from, char* to, int64_t elements);

template <class From, class To>
MoveRow mover(bool add) {
  return add ? move_row<From, To, true> : move_row<From, To, false>;
}
template <class From>
MoveRow mover(const fovea_dtype& to, bool add) {
  if (to.bits == 32) return mover<From, float>(add);
  return to.code == FOVEA_CODE_BFLOAT ? mover<From, Bf16>(add) : mover<From, F16>(add);
}
MoveRow mover(const Move& how) {
  if (how.from.bits == 32) return mover<float>(how.to, how.add);
  return how.from.code == FOVEA_CODE_BFLOAT ? mover<Bf16>(how.to, how.add) : mover<F16>(how.to, how.add);
}

bool copies(const Move& how) {
  return !how.add && how.from.code == how.to.code && how.from.bits == how.to.bits;
}

/// The same box in longer runs, where heads, and then rows, lie side by side in both memories.
Box in_long_runs(Box box, const Move& how) {
  const int64_t from_bytes = how.from.bits / 8, to_bytes = how.to.bits / 8;
  for (const size_t axis : {size_t{2}, size_t{1}}) {
    if (box.from_stride[axis] != box.elements * from_bytes || box.to_stride[axis] != box.elements * to_bytes)
      break;
    box.elements *= box.size[axis];
    box.size[axis] = 1;
  }
  return box;
}

/// Visits the runs of contiguous elements of a box: visit(from, to).
template <class Visit>
void for_each_row(const Box& box, Visit&& visit) {
  for (int64_t b = 0; b < box.size[0]; ++b) {
    for (int64_t r = 0; r < box.size[1]; ++r) {
      for (int64_t h = 0; h < box.size[2]; ++h) {
        visit(box.from + b * box.from_stride[0] + r * box.from_stride[1] + h * box.from_stride[2],
              box.to + b * box.to_stride[0] + r * box.to_stride[1] + h * box.to_stride[2]);
      }
    }
  }
}

/// Of memory of the CPU: ranks that are threads of one process reach it.
struct HostPlace {
  pid_t process = 0;
  void* memory = nullptr;
};

class HostMemory final : public Memory {
 public:
  void begin(void*) override {}
  void* stream(Lane) const override { return nullptr; }
  void order(Lane, Lane) override {}

  void move(std::span<const Box> boxes, const Move& how, Lane) override {
    for (const Box& given : boxes) {
      const Box box = in_long_runs(given, how);
      if (copies(how)) {
        const auto run = static_cast<size_t>(box.elements * how.from.bits / 8);
        for_each_row(box, [&](const char* from, char* to) { std::memcpy(to, from, run); });
      } else {
        const MoveRow move_row_of = mover(how);
        for_each_row(box, [&](const char* from, char* to) { move_row_of(from, to, box.elements); });
      }
    }
  }
  void set_words(void* to, uint32_t word, size_t count, Lane) override {
    auto* const words = static_cast<uint32_t*>(to);
    for (size_t i = 0; i < count; ++i) words[i] = word;
  }
  std::shared_ptr<void> keep(const void* data, size_t bytes) override {
    std::shared_ptr<void> memory(::operator new(bytes > 0 ? bytes : 1),
                                 [](void* p) { ::operator delete(p); });
    if (bytes > 0) std::memcpy(memory.get(), data, bytes);
    return memory;
  }
  void copy_and_wait(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }

  std::shared_ptr<void> share(size_t bytes, SharedPlace& place) override {
    constexpr std::align_val_t kPage{4096};
    std::shared_ptr<void> memory(::operator new(bytes, kPage), [](void* p) { ::operator delete(p, kPage); });
    std::memset(memory.get(), 0, bytes);
    SharedMemories::of_process().add(memory);
    const HostPlace own{getpid(), memory.get()};
    std::memcpy(place.words.data(), &own, sizeof own);
    return memory;
  }
  bool is_of_this_device(const SharedPlace&) const override { return true; }
  std::shared_ptr<void> reach(const SharedPlace& place) override {
    HostPlace other;
    std::memcpy(&other, place.words.data(), sizeof other);
    return other.process == getpid() ? SharedMemories::of_process().find(other.memory) : nullptr;
  }
  void copy(const Box& box, int64_t element_bytes, Lane) override {
    for_each_rectangle(box, element_bytes, [](const Rectangle& r) {
      for (int64_t line = 0; line < r.lines; ++line)
        std::memcpy(r.to + line * r.to_pitch, r.from + line * r.from_pitch, static_cast<size_t>(r.width));
    });
  }
  void copy_at_once(std::span<const Box> boxes, const fovea_dtype& type, Lane lane) override {
    for (const Box& box : boxes) copy(box, type.bits / 8, lane);
  }
  void tell(std::span<uint32_t* const> words, uint32_t number, Lane) override {
    for (uint32_t* word : words) std::atomic_ref(*word).store(number, std::memory_order_release);
  }
  void await(std::span<uint32_t* const> words, uint32_t number, Lane,
             const std::function<void()>& look) override {
    for (uint32_t* word : words) {
      for (int turn = 0; !has_come(std::atomic_ref(*word).load(std::memory_order_acquire), number); ++turn) {
        if (turn % 64 == 63) look();
        std::this_thread::yield();
      }
    }
  }
  void end() override {}
  void wait_for_end() noexcept override {}
  std::vector<uint32_t> take_over(uint32_t* words, size_t count, uint32_t number) override {
    std::vector<uint32_t> were;
    for (size_t i = 0; i < count; ++i) {
      const std::atomic_ref word(words[i]);
      were.push_back(number != 0 ? word.exchange(number) : word.load());
    }
    return were;
  }
};

}  // namespace

std::unique_ptr<Memory> open_memory(fovea_device device) {
  if (device.type == FOVEA_CPU) return std::make_unique<HostMemory>();
  if (device.type == FOVEA_CUDA) return open_cuda_memory(device.id);
  throw_invalid("transport.device", "type " + std::to_string(device.type), "FOVEA_CPU or FOVEA_CUDA",
                "say where messages lie");
}

}  // namespace fovea::distributed
