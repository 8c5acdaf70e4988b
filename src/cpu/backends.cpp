// The list of CPU backends: one per instruction set. All run the same algorithms over a table of operations.
#include "cpu/backends.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/forward.hpp"
#include "cpu/ops.hpp"
#include "cpu/reference.hpp"
#include "cpu/terms_in_expressions.hpp"

namespace fovea::cpu {
namespace {

#if defined(__x86_64__) || defined(__i386__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}
#else
bool has_avx2() {
  return false;
}
bool has_avx512() {
  return false;
}
bool has_avx512_bf16() {
  return false;
}
#endif

/// CPUID leaf 7 reports the tiles; the kernel grants their 8 KB of state to a process that asks (arch_prctl
/// ARCH_REQ_XCOMP_PERM with component 18, Linux 5.16).
bool has_amx_bf16() {
#if defined(__linux__) && defined(__x86_64__)
  static const bool granted = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    // Every processor with tiles has VBMI and AVX512-FP16, which rows_amx.cpp takes, but a virtual machine may hide them.
    constexpr unsigned kAvx512Fp16 = 1u << 23;
    if (!__builtin_cpu_supports("avx512vbmi") || (d & kAvx512Fp16) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
#else
  return false;
#endif
}

std::string missing(const Ops* ops, bool cpu_has, const char* needs) {
  if (ops == nullptr) return std::string("not in this build (another processor family)");
  return cpu_has ? std::string() : std::string("this processor lacks ") + needs;
}

std::string amx_missing() {
  return missing(amx_bf16_ops(), has_amx_bf16(), "AMX-BF16 (or the kernel does not grant its state)");
}
std::string avx512_bf16_missing() {
  return missing(avx512_bf16_ops(), has_avx512_bf16(), "AVX512-BF16");
}
std::string avx512_missing() {
  return missing(avx512_ops(), has_avx512(), "AVX-512 F, BW, DQ and VL");
}
std::string avx2_missing() {
  return missing(avx2_ops(), has_avx2(), "AVX2 and FMA");
}
std::string neon_missing() {
  return missing(neon_ops(), true, "NEON");
}
std::string generic_missing() {
  return missing(generic_ops(), true, "");
}

// What a backend cannot do, as the clause that fails; "" when it can.

std::string needs_bf16(const AttentionProblem& p) {
  return p.dtype == DType::kBF16
             ? ""
             : "its products take bfloat16 only, this problem is " + std::string(name_of(p.dtype));
}
/// What tiles multiply of a problem: bfloat16; few rows of float16 and float32 as parts (rows_amx.cpp), many as parts that are staged
/// (parts_amx.cpp).
const Ops* tiles_for(const AttentionProblem& p) {
  if (p.dtype == DType::kBF16) return amx_bf16_ops();
  if (p.dtype != DType::kF16 && p.dtype != DType::kF32) return nullptr;
  if (few_rows_on_tiles(p, *amx_bf16_ops())) return amx_bf16_ops();
  return many_rows_as_parts(p) ? p.dtype == DType::kF16 ? amx_f16_ops() : amx_f32_ops() : nullptr;
}
std::string needs_float(const AttentionProblem& p) {
  return p.dtype != DType::kF64 ? "" : "float64 is computed by the reference only";
}

std::string cannot_list_because(const AttentionProblem& p) {
  if (!p.has(Role::kKeys) || p.pass == Pass::kForward) return "";
  if (p.has(Role::kDBias)) return "computes no dbias where queries have lists of keys";
  // Float32 sums of dk and dv, rows padded to 16 columns, are counted in bytes of 64 bits.
  constexpr double kMostBytes = 0x1p60;
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.heads_kv * p.seqlen_k);
  return rows * 4 * static_cast<double>(p.head_dim + p.head_dim_v + 32) < kMostBytes
             ? ""
             : "has no memory for float32 sums of dk and dv as large as these";
}

/// `terms`: the problem as it is computed.
Preparation prepare_with(const Ops& ops, const AttentionProblem& p, const AttentionProblem& terms,
                         const PrepareOptions& options) {
  if (std::string clause = cannot_list_because(p); !clause.empty()) return {nullptr, std::move(clause)};
  const bool forward = p.pass == Pass::kForward, lists = p.has(Role::kKeys);
  const auto prepare = lists     ? forward ? prepare_forward_of_lists : prepare_backward_of_lists
                       : forward ? prepare_forward
                                 : prepare_backward;
  return {prepare(terms, ops, options), ""};
}

template <const Ops* (*kOps)(), std::string (*kCannotBecause)(const AttentionProblem&)>
Preparation try_prepare(const AttentionProblem& p, const PrepareOptions& options) {
  const AttentionProblem terms = with_terms_in_expressions(p);
  if (std::string clause = kCannotBecause(terms); !clause.empty()) return {nullptr, std::move(clause)};
  return prepare_with(*kOps(), p, terms, options);
}
Preparation try_prepare_amx(const AttentionProblem& p, const PrepareOptions& options) {
  const AttentionProblem terms = with_terms_in_expressions(p);
  const Ops* const ops = tiles_for(terms);
  return ops != nullptr ? prepare_with(*ops, p, terms, options) : Preparation{nullptr, needs_bf16(p)};
}

constexpr Backend kAmxBf16 = {"cpu_amx_bf16", amx_missing, try_prepare_amx, prepare_append};
constexpr Backend kAvx512Bf16 = {"cpu_avx512_bf16", avx512_bf16_missing,
                                 try_prepare<avx512_bf16_ops, needs_bf16>, prepare_append};
constexpr Backend kAvx512 = {"cpu_avx512", avx512_missing, try_prepare<avx512_ops, needs_float>,
                             prepare_append};
constexpr Backend kAvx2 = {"cpu_avx2", avx2_missing, try_prepare<avx2_ops, needs_float>, prepare_append};
constexpr Backend kNeon = {"cpu_neon", neon_missing, try_prepare<neon_ops, needs_float>, prepare_append};
constexpr Backend kGeneric = {"cpu_generic", generic_missing, try_prepare<generic_ops, needs_float>,
                              prepare_append};

using Backends = std::array<const Backend*, 7>;
constexpr Backends kBackends = {&kAmxBf16, &kAvx512Bf16, &kAvx512,          &kAvx2,
                                &kNeon,    &kGeneric,    &kReferenceBackend};
constexpr Backends kFloatsBeforePairs = {&kAmxBf16, &kAvx512,  &kAvx512Bf16,      &kAvx2,
                                         &kNeon,    &kGeneric, &kReferenceBackend};

/// Intel's processors start one VDPBF16PS in two cycles, of 32 products, and two multiply-adds of 16 in each.
bool multiplies_pairs_slowly() {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace

std::span<const Backend* const> backends() {
  return multiplies_pairs_slowly() ? kFloatsBeforePairs : kBackends;
}

int default_threads() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::string machine_description() {
  std::string model = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0 && line.find(':') != std::string::npos) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  std::string sets;
  if (has_avx2()) sets += " avx2 fma";
  if (has_avx512()) sets += " avx512";
  if (has_avx512_bf16()) sets += " avx512_bf16";
  if (has_amx_bf16()) sets += " amx_bf16";
  if (neon_ops() != nullptr) sets += " neon";
  return model + "; instruction sets:" + (sets.empty() ? " baseline" : sets) +
         "; threads: " + std::to_string(default_threads());
}

}  // namespace fovea::cpu
