// For each step of keys, for each key head:
//
//   S = Q K^T            four rows and keys at a time, blocks as they come from memory
//   P = exp(s - m)
//   O = O * alpha + P V  the weight of a key times the scale of its block, numbers as they are
//
// and beside both products, lines of the next step are fetched, in the order of memory.
#include "integrations/ggml/block_rows.hpp"

// Leaves out targets that bring nothing over their neighbours here, and those whose vectors have a size that the compiler does not know.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "integrations/ggml/block_rows.cpp"
// Highway compiles the code from here to HWY_AFTER_NAMESPACE once for each instruction set.
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "integrations/ggml/block_floats-inl.hpp"
#include "integrations/ggml/block_integers.hpp"
#include "integrations/ggml/block_steps.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea_ggml::HWY_NAMESPACE {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint16_t kUnseen = 0xfc00;  // -inf as a float16

/// The float16 at `row` of each of n rows, zeros behind them. Adds zeros to `zeros`, or what is none where a number is not finite.
HWY_INLINE void load_halves(const uint8_t* row, int64_t stride, int64_t n, float* out, V& zeros) {
  uint16_t bits[kStep] = {};
  for (int64_t j = 0; j < n; ++j, row += stride) std::memcpy(bits + j, row, sizeof(uint16_t));
  for (int64_t j = 0; j < kStep; j += kLanes) {
    const V x = from_halves(bits + j);
    hn::Store(x, D(), out + j);
    zeros = hn::MulAdd(x, hn::Zero(D()), zeros);
  }
}
/// What numbers of the blocks of a step's rows are multiplied by, and what is added to them. False where one is not finite.
HWY_NOINLINE bool load_scales(const uint8_t* rows, const BlockRows& of, Step& step) {
  const D d;
  V zeros = hn::Zero(d);
  for (int64_t b = 0; b < of.size / kBlockElements; ++b, rows += block_bytes(of.type)) {
    load_halves(rows, of.key_stride, step.n, step.scales[b], zeros);
    if (has_least(of.type))
      load_halves(rows + sizeof(uint16_t), of.key_stride, step.n, step.leasts[b], zeros);
  }
  return hn::AllTrue(d, hn::Eq(zeros, hn::Zero(d)));
}

/// Products of n keys, from `key` on, become weights.
HWY_NOINLINE void weigh(const BlockAttention& a, float unit, QueryRow& row, int64_t key, int64_t n, float* s,
                        float* alpha) {
  const D d;
  uint16_t padded[kStep];
  const uint16_t* mask = row.mask == nullptr ? nullptr : row.mask + key;
  if (n < kStep) {  // what is behind the last key is not seen
    std::fill(padded, padded + kStep, kUnseen);
    mask == nullptr ? void(std::fill_n(padded, n, uint16_t{0})) : void(std::copy_n(mask, n, padded));
    mask = padded;
  }
  V largest = hn::Set(d, row.largest);
  for (int64_t j = 0; j < kStep; j += kLanes) {
    V x = hn::Mul(hn::Load(d, s + j), hn::Set(d, a.scale * unit));
    if (a.softcap > 0) x = hn::Mul(hn::Set(d, a.softcap), hn::Tanh(d, hn::Div(x, hn::Set(d, a.softcap))));
    if (mask != nullptr) {
      const V number = from_halves(mask + j);
      const V unseen = hn::Set(d, -kInfinity);
      x = hn::IfThenElse(hn::Eq(number, unseen), unseen, hn::MulAdd(number, hn::Set(d, row.slope), x));
    }
    hn::Store(x, d, s + j);
    largest = hn::Max(largest, x);
  }
  const float m = hn::GetLane(hn::MaxOfLanes(d, largest));
  const float base = m == -kInfinity ? 0 : m;
  V sum = hn::Zero(d);
  for (int64_t j = 0; j < kStep; j += kLanes) {
    const V x = hn::Sub(hn::Load(d, s + j), hn::Set(d, base));
    const V p = hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
    hn::Store(p, d, s + j);
    sum = hn::Add(sum, p);
  }
  *alpha = std::exp(row.largest - base);
  row.sum = row.sum * *alpha + hn::GetLane(hn::SumOfLanes(d, sum));
  row.largest = m;
}

void finish(QueryRow& row, int64_t size) {
  float largest = row.largest;
  if (row.has_sink) largest = std::max(largest, row.sink);
  const float base = largest == -kInfinity ? 0 : largest, factor = std::exp(row.largest - base);
  const float sum = row.sum * factor + (row.has_sink ? std::exp(row.sink - base) : 0);
  if (row.lse != nullptr) *row.lse = sum == 0 ? -kInfinity : base + std::log(sum);
  const float share = sum == 0 ? 0 : factor / sum;
  for (int64_t c = 0; c < size; ++c) row.o[c] *= share;
}

/// Whether some row sees one of n keys.
bool any_seen(const BlockAttention& a, int64_t key, int64_t n) {
  for (int64_t x = 0; x < a.heads * a.rows; ++x) {
    const uint16_t* mask = a.queries[x].mask;
    if (mask == nullptr ||
        std::any_of(mask + key, mask + key + n, [](uint16_t number) { return number != kUnseen; }))
      return true;
  }
  return false;
}
/// The first step from `key` on of which some row sees a key, or the end of all keys.
int64_t next_seen(const BlockAttention& a, int64_t key) {
  while (key < a.keys && !any_seen(a, key, std::min(kStep, a.keys - key))) key += kStep;
  return std::min(key, a.keys);
}

template <class Products>
void attend_with(const BlockAttention& a) {
  for (int64_t x = 0; x < a.heads * a.rows; ++x) {
    a.queries[x].largest = -kInfinity;
    a.queries[x].sum = 0;
    std::fill_n(a.queries[x].o, a.v.size, 0.0f);
  }
  const Products products(a);
  const FloatProducts floats(a);
  Ahead ahead(a, a.heads * products.points());
  Step step;
  for (int64_t key = next_seen(a, 0), next; key < a.keys; key = next) {
    next = next_seen(a, key + kStep);
    ahead.begin(next);
    step.n = std::min(kStep, a.keys - key);
    for (int64_t head = 0; head < a.heads; ++head) {
      step.k = reinterpret_cast<const uint8_t*>(a.k.data) + key * a.k.key_stride + head * a.k.head_stride;
      step.v = reinterpret_cast<const uint8_t*>(a.v.data) + key * a.v.key_stride + head * a.v.head_stride;
      const bool finite_keys = load_scales(step.k, a.k, step);
      finite_keys ? products.dots(head, step, ahead) : floats.dots(head, step, ahead);
      for (int64_t r = 0; r < a.rows; ++r) {
        const int64_t x = head * a.rows + r;
        weigh(a, finite_keys ? products.unit(x) : 1, a.queries[x], key, step.n, step.scores[r],
              &step.alpha[r]);
      }
      const bool finite_values = load_scales(step.v, a.v, step);
      finite_values ? products.sums(head, step, ahead) : floats.sums(head, step, ahead);
    }
  }
  for (int64_t x = 0; x < a.heads * a.rows; ++x) finish(a.queries[x], a.v.size);
}

void attend(const BlockAttention& a) {
  attend_with<FloatProducts>(a);
}
#if HWY_TARGET == HWY_AVX3
bool finite(const BlockAttention& a) {
  float zeros = 0;
  for (int64_t x = 0; x < a.heads * a.rows; ++x)
    for (int64_t i = 0; i < a.k.size; ++i) zeros += 0 * a.queries[x].q[i];
  return zeros == 0;
}
void attend_integers(const BlockAttention& a) {
  if (!finite(a)) return attend(a);
  attend_with<IntegerProducts>(a);
}
#endif

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea_ggml {
namespace {

std::vector<BlockWay> ways_of_this_processor() {
  std::vector<BlockWay> ways;
#if defined(__x86_64__)
  // What Highway's target AVX3 may use.
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512vnni"))
    ways.push_back({"AVX-512 VNNI", N_AVX3::attend_integers, kMostBlockRows});
  if (has_avx512) ways.push_back({"AVX-512", N_AVX3::attend, 16});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    ways.push_back({"AVX2", N_AVX2::attend, 8});
#endif
  ways.push_back({"any", HWY_STATIC_DISPATCH(attend), 8});
  return ways;
}

}  // namespace

const std::vector<BlockWay>& block_ways() {
  static const std::vector<BlockWay> ways = ways_of_this_processor();
  return ways;
}

}  // namespace fovea_ggml
#endif
