// What the harness knows of a rung. rungs.cpp lists all rungs; the harness and `fovea ladder` go through them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladder/harness/task.hpp"

namespace ladder {

/// causal: attention in which query i sees keys 0 to i.
enum class Family : uint8_t { matmul, softmax, attention, causal, gradient };
enum class Type : uint8_t { f32, bf16 };
enum class Where : uint8_t { cpu, gpu };
/// The peak that a rung is compared with.
enum class Bound : uint8_t {
  cpu_f32,     ///< fused multiply-adds of float32 on all processors
  cpu_memory,  ///< bytes from and to the host's memory, as fast as all processors copy
  gpu_f32,     ///< the same on CUDA cores
  gpu_tf32,    ///< tensor cores, float32 operands rounded to 19 bits
  gpu_bf16,    ///< tensor cores, bfloat16 operands
  gpu_memory   ///< bytes from and to memory, as fast as a copy
};

/// Rungs that solve the same problem, each faster than the one before.
struct Group {
  const char* name;
  const char* title;
  Family family;
  Type type;
  Where where;
  std::vector<Shape> shapes;  ///< timed by default
};

struct Rung {
  const char* name;  ///< of its folder
  const char* idea;
  const Group* group;
  Bound bound;
  double tolerance;            ///< largest error, as a share of the largest value of the tensor
  int capability;              ///< least compute capability, times ten; 0 on CPUs
  size_t (*workspace)(Shape);  ///< in floats
  bool (*accepts)(Shape);
  const char* accepted;      ///< in words
  void (*run)(const Task&);  ///< null where the build has no code for it
  bool newer_too = true;     ///< runs on newer GPUs as well; those of sm_90a do not
  bool in_python = false;    ///< a kernel.py, which bench/gpu/ladder_peers.py checks and times; `run` is null

  /// Whether a GPU of that compute capability (times ten) can run it.
  bool runs_on(int gpu) const { return newer_too ? gpu >= capability : gpu == capability; }
  /// Which GPU it needs, in words; empty for rungs of CPUs.
  std::string needs() const;
};

std::span<const Group> groups();
std::span<const Rung> rungs();

}  // namespace ladder
