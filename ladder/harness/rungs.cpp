// The list of all rungs, in the order of the ladder.
#include <array>

#include "ladder/harness/rung.hpp"

struct __nv_bfloat16;  // CUDA's type, which only kernels use

namespace ladder {

using AttentionF32 = Attention<float>;
using AttentionBf16 = Attention<__nv_bfloat16>;
using GradientBf16 = AttentionGradient<__nv_bfloat16>;

// Each is defined in the kernel file of its folder.
void cpu_textbook(const Attention<float>&);
void cpu_blocked(const Attention<float>&);
void cpu_online(const Attention<float>&);
void cpu_vector(const Attention<float>&);
void cpu_threads(const Attention<float>&);
void cpu_packed(const Attention<float>&);
// Those of GPUs in a namespace each, so that a file may join several.
#define RUN(Problem, rung)  \
  namespace rung {          \
  void run(const Problem&); \
  }
RUN(Matmul, matmul_naive);
RUN(Matmul, matmul_coalesced);
RUN(Matmul, matmul_shared);
RUN(Matmul, matmul_transposed);
RUN(Matmul, matmul_registers);
RUN(Matmul, matmul_tensor);
RUN(Softmax, softmax_thread);
RUN(Softmax, softmax_block);
RUN(Softmax, softmax_warp);
RUN(Softmax, softmax_registers);
RUN(AttentionF32, attention_three_kernels);
RUN(AttentionF32, attention_flash1);
RUN(AttentionF32, attention_flash2);
RUN(AttentionF32, side_cute);
RUN(AttentionBf16, tensor_mma);
RUN(AttentionBf16, tensor_ldmatrix);
RUN(AttentionBf16, tensor_swizzle);
RUN(AttentionBf16, tensor_cp_async);
RUN(AttentionBf16, tensor_prefetch);
RUN(AttentionBf16, tensor_fragments);
RUN(AttentionBf16, tensor_exponent);
RUN(AttentionBf16, tensor_lazy);
RUN(AttentionBf16, tensor_tiles);
RUN(AttentionBf16, tensor_persistent);
RUN(AttentionBf16, tensor_tuned);
RUN(AttentionBf16, tensor_causal);
RUN(AttentionBf16, tensor_balanced);
RUN(AttentionBf16, hopper_tma);
RUN(AttentionBf16, hopper_wgmma);
RUN(AttentionBf16, hopper_specialised);
RUN(AttentionBf16, hopper_pingpong);
RUN(AttentionBf16, hopper_overlap);
RUN(AttentionBf16, hopper_persistent);
RUN(AttentionBf16, hopper_queued);
RUN(AttentionBf16, hopper_causal);
RUN(GradientBf16, backward_textbook);
RUN(GradientBf16, backward_recompute);
RUN(GradientBf16, backward_atomics);
RUN(GradientBf16, backward_tensor);

// Every build lists the rungs of GPUs; a build without CUDA has no code for them.
#ifdef LADDER_CUDA
#define GPU(Problem, rung) with<Problem, rung::run>
#else
#define GPU(Problem, rung) nullptr
#endif
// sm_90a: a build for other chips has no code for them.
#ifdef LADDER_HOPPER
#define HOPPER(rung) with<AttentionBf16, rung::run>
#else
#define HOPPER(rung) nullptr
#endif
// Built where CuTe's headers were found.
#ifdef LADDER_CUTE
#define CUTE(rung) with<AttentionF32, rung::run>
#else
#define CUTE(rung) nullptr
#endif

namespace {

template <class P, void (*kRun)(const P&)>
void with(const Task& task) {
  kRun(P(task));
}
size_t floats(double count) {
  return static_cast<size_t>(count);
}
size_t nothing(Shape) {
  return 0;
}

bool any(Shape) {
  return true;
}
constexpr const char* kAny = "any sizes";
bool to_128(Shape s) {
  return s.c <= 128;
}
constexpr const char* kTo128 = "head sizes up to 128";

bool batch_fits(Shape s) {
  return s.a <= 65535;  // planes of a grid
}
constexpr const char* kBatch = "batches up to 65535";
bool attention_fits(Shape s) {
  return to_128(s) && batch_fits(s);
}
constexpr const char* kAttentionFits = "head sizes up to 128, batches up to 65535";
bool is_128(Shape s) {
  return s.c == 128 && batch_fits(s);
}
bool to_64(Shape s) {
  return s.c <= 64 && batch_fits(s);
}
constexpr const char* kTo64 = "head sizes up to 64, batches up to 65535";
bool is_64(Shape s) {
  return s.c == 64 && batch_fits(s);
}
constexpr const char* k64 = "head size 64, batches up to 65535";
size_t a_float_a_row(Shape s) {
  return floats(1.0 * s.a * s.b);
}
constexpr const char* k128 = "head size 128, batches up to 65535";

const std::array kGroups = {
    Group{"cpu", "Attention on the CPU, float32", Family::attention, Type::f32, Where::cpu, {{4, 1024, 64}}},
    Group{"matmul", "Matrix product, float32", Family::matmul, Type::f32, Where::gpu, {{4096, 4096, 4096}}},
    Group{"softmax",
          "Softmax, float32",
          Family::softmax,
          Type::f32,
          Where::gpu,
          {{1024, 1024}, {16384, 16384}}},
    Group{"attention",
          "Attention on CUDA cores, float32",
          Family::attention,
          Type::f32,
          Where::gpu,
          {{100, 4096, 32}}},
    Group{"tensor",
          "Attention on tensor cores, bfloat16",
          Family::attention,
          Type::bf16,
          Where::gpu,
          {{512, 512, 128},
           {256, 1024, 128},
           {128, 2048, 128},
           {64, 4096, 128},
           {32, 8192, 128},
           {16, 16384, 128}}},
    Group{"hopper",
          "Attention on Hopper's tensor cores, bfloat16",
          Family::attention,
          Type::bf16,
          Where::gpu,
          {{512, 512, 128},
           {256, 1024, 128},
           {128, 2048, 128},
           {64, 4096, 128},
           {32, 8192, 128},
           {16, 16384, 128}}},
    Group{"causal",
          "Causal attention on tensor cores, bfloat16",
          Family::causal,
          Type::bf16,
          Where::gpu,
          {{512, 512, 128},
           {256, 1024, 128},
           {128, 2048, 128},
           {64, 4096, 128},
           {32, 8192, 128},
           {16, 16384, 128}}},
    Group{"backward",
          "Gradients of attention, bfloat16 to float32",
          Family::gradient,
          Type::bf16,
          Where::gpu,
          {{32, 2048, 64}}},
};
constexpr const Group *kCpu = &kGroups[0], *kMatmul = &kGroups[1], *kSoftmax = &kGroups[2],
                      *kAttention = &kGroups[3], *kTensor = &kGroups[4], *kHopper = &kGroups[5],
                      *kCausal = &kGroups[6], *kBackward = &kGroups[7];

constexpr double kF32 = 1e-5;    // a few roundings of sums of some thousand terms
constexpr double kTf32 = 2e-3;   // operands of 11 bits
constexpr double kExact = 1e-4;  // float32 over sums of products that cancel
constexpr double kBf16 = 1e-2;   // weights and outputs of 8 bits

const std::array kRungs = {
    Rung{"01_cpu_textbook", "three loops over the whole matrix", kCpu, Bound::cpu_f32, kF32, 0,
         [](Shape s) { return floats(1.0 * s.b * s.b); }, any, kAny, with<AttentionF32, cpu_textbook>},
    Rung{"02_cpu_blocked", "blocks that stay in the cache", kCpu, Bound::cpu_f32, kF32, 0,
         [](Shape s) { return floats(32.0 * s.b); }, any, kAny, with<AttentionF32, cpu_blocked>},
    Rung{"03_cpu_online", "softmax in one pass", kCpu, Bound::cpu_f32, kF32, 0, nothing, any, kAny,
         with<AttentionF32, cpu_online>},
    Rung{"04_cpu_vector", "vector registers", kCpu, Bound::cpu_f32, kF32, 0, nothing, any, kAny,
         with<AttentionF32, cpu_vector>},
    Rung{"05_cpu_threads", "all processors", kCpu, Bound::cpu_f32, kF32, 0, nothing, any, kAny,
         with<AttentionF32, cpu_threads>},
    Rung{"06_cpu_packed", "packed tiles in registers", kCpu, Bound::cpu_f32, kF32, 0,
         [](Shape s) { return floats(1.0 * s.a * ((s.b + 63) / 64) * 64 * (s.c + (s.c + 31) / 32 * 32)); },
         to_128, kTo128, with<AttentionF32, cpu_packed>},

    Rung{"10_matmul_naive", "a thread for each element", kMatmul, Bound::gpu_f32, kF32, 75, nothing, any,
         kAny, GPU(Matmul, matmul_naive)},
    Rung{"11_matmul_coalesced", "neighbours read neighbours", kMatmul, Bound::gpu_f32, kF32, 75, nothing, any,
         kAny, GPU(Matmul, matmul_coalesced)},
    Rung{"12_matmul_shared", "tiles in shared memory", kMatmul, Bound::gpu_f32, kF32, 75, nothing, any, kAny,
         GPU(Matmul, matmul_shared)},
    Rung{"13_matmul_transposed", "A transposed, 16 rows a thread", kMatmul, Bound::gpu_f32, kF32, 75, nothing,
         any, kAny, GPU(Matmul, matmul_transposed)},
    Rung{"14_matmul_registers", "8 x 8 sums in registers", kMatmul, Bound::gpu_f32, kF32, 75, nothing, any,
         kAny, GPU(Matmul, matmul_registers)},
    Rung{"15_matmul_tensor", "tensor cores, tf32", kMatmul, Bound::gpu_tf32, kTf32, 80, nothing, any, kAny,
         GPU(Matmul, matmul_tensor)},

    Rung{"20_softmax_thread", "a thread a row", kSoftmax, Bound::gpu_memory, kF32, 75, nothing, any, kAny,
         GPU(Softmax, softmax_thread)},
    Rung{"21_softmax_block", "a block a row", kSoftmax, Bound::gpu_memory, kF32, 75, nothing, any, kAny,
         GPU(Softmax, softmax_block)},
    Rung{"22_softmax_warp", "a warp a row, online", kSoftmax, Bound::gpu_memory, kF32, 75, nothing, any, kAny,
         GPU(Softmax, softmax_warp)},
    Rung{"23_softmax_registers", "rows stay in registers", kSoftmax, Bound::gpu_memory, kF32, 75, nothing,
         [](Shape s) { return s.b <= 16384; }, "rows of up to 16384 columns",
         GPU(Softmax, softmax_registers)},

    Rung{"30_attention_three_kernels", "the matrix of scores in memory", kAttention, Bound::gpu_f32, kF32, 75,
         [](Shape s) { return floats(1.0 * s.a * s.b * s.b); }, batch_fits, kBatch,
         GPU(AttentionF32, attention_three_kernels)},
    Rung{"31_attention_flash1", "tiles; O, l and m in memory", kAttention, Bound::gpu_f32, kF32, 75,
         [](Shape s) { return floats(2.0 * s.a * s.b); }, to_128, kTo128,
         GPU(AttentionF32, attention_flash1)},
    Rung{"32_attention_flash2", "a block owns its queries", kAttention, Bound::gpu_f32, kF32, 75, nothing,
         attention_fits, kAttentionFits, GPU(AttentionF32, attention_flash2)},
    Rung{"33_side_numba", "rung 32 in Python", kAttention, Bound::gpu_f32, kF32, 75, nothing, attention_fits,
         kAttentionFits, nullptr, true, true},
    Rung{"34_side_cute", "rung 32 in CuTe", kAttention, Bound::gpu_f32, kF32, 80, nothing, attention_fits,
         kAttentionFits, CUTE(side_cute)},

    Rung{"40_tensor_mma", "two products on tensor cores", kTensor, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_mma)},
    Rung{"41_tensor_ldmatrix", "fragments by ldmatrix", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128,
         k128, GPU(AttentionBf16, tensor_ldmatrix)},
    Rung{"42_tensor_swizzle", "no bank conflicts", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128, k128,
         GPU(AttentionBf16, tensor_swizzle)},
    Rung{"43_tensor_cp_async", "copies past the registers", kTensor, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_cp_async)},
    Rung{"44_tensor_prefetch", "the next block while this one", kTensor, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_prefetch)},
    Rung{"45_tensor_fragments", "fragments ahead of use", kTensor, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_fragments)},
    Rung{"46_tensor_exponent", "scale and exp in one", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128,
         k128, GPU(AttentionBf16, tensor_exponent)},
    Rung{"47_tensor_lazy", "maxima that may lag", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128, k128,
         GPU(AttentionBf16, tensor_lazy)},
    Rung{"48_tensor_tiles", "32 queries a warp", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128, k128,
         GPU(AttentionBf16, tensor_tiles)},
    Rung{"49_tensor_persistent", "blocks that stay", kTensor, Bound::gpu_bf16, kBf16, 80, nothing, is_128,
         k128, GPU(AttentionBf16, tensor_persistent)},
    Rung{"50_tensor_tuned", "nothing checked in the loop", kTensor, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_tuned)},

    Rung{"51_tensor_causal", "causal: only what is seen", kCausal, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_causal)},
    Rung{"52_tensor_balanced", "causal: long and short tiles", kCausal, Bound::gpu_bf16, kBf16, 80, nothing,
         is_128, k128, GPU(AttentionBf16, tensor_balanced)},

    Rung{"60_hopper_tma", "tiles by TMA", kHopper, Bound::gpu_bf16, kBf16, 90, nothing, is_128, k128,
         HOPPER(hopper_tma), false},
    Rung{"61_hopper_wgmma", "products of warpgroups", kHopper, Bound::gpu_bf16, kBf16, 90, nothing, is_128,
         k128, HOPPER(hopper_wgmma), false},
    Rung{"62_hopper_specialised", "producers and consumers", kHopper, Bound::gpu_bf16, kBf16, 90, nothing,
         is_128, k128, HOPPER(hopper_specialised), false},
    Rung{"63_hopper_pingpong", "ping-pong: consumers queue products in turns", kHopper, Bound::gpu_bf16,
         kBf16, 90, nothing, is_128, k128, HOPPER(hopper_pingpong), false},
    Rung{"64_hopper_overlap", "softmax beside the own products", kHopper, Bound::gpu_bf16, kBf16, 90, nothing,
         is_128, k128, HOPPER(hopper_overlap), false},
    Rung{"65_hopper_persistent", "blocks that stay, O by TMA", kHopper, Bound::gpu_bf16, kBf16, 90, nothing,
         is_128, k128, HOPPER(hopper_persistent), false},
    Rung{"66_hopper_queued", "three consumers, stale maxima", kHopper, Bound::gpu_bf16, kBf16, 90, nothing,
         is_128, k128, HOPPER(hopper_queued), false},

    Rung{"67_hopper_causal", "causal: a block on the diagonal", kCausal, Bound::gpu_bf16, kBf16, 90, nothing,
         is_128, k128, HOPPER(hopper_causal), false},

    Rung{"70_backward_textbook", "P and dS in memory", kBackward, Bound::gpu_f32, kExact, 75,
         [](Shape s) { return floats(1.0 * s.a * s.b * (1.0 + 2.0 * s.b)); }, batch_fits, kBatch,
         GPU(GradientBf16, backward_textbook)},
    Rung{"71_backward_recompute", "P again from L", kBackward, Bound::gpu_f32, kExact, 75, a_float_a_row,
         to_64, kTo64, GPU(GradientBf16, backward_recompute)},
    Rung{"72_backward_atomics", "one loop; dQ by atomics", kBackward, Bound::gpu_f32, kExact, 75,
         a_float_a_row, to_64, kTo64, GPU(GradientBf16, backward_atomics)},
    Rung{"73_backward_tensor", "tensor cores", kBackward, Bound::gpu_bf16, kBf16, 80, a_float_a_row, is_64,
         k64, GPU(GradientBf16, backward_tensor)},
};

}  // namespace

std::string Rung::needs() const {
  if (capability == 0) return "";
  const std::string number =
      "compute capability " + std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  return newer_too ? number : "a Hopper GPU (" + number + ")";
}

std::span<const Group> groups() {
  return kGroups;
}
std::span<const Rung> rungs() {
  return kRungs;
}

}  // namespace ladder
