// Instructions that meet memory: variables, elements of named tensors, and additions to their gradients.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_PROGRAM_ELEMENTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_PROGRAM_ELEMENTS_INL_HPP
#undef FOVEA_CPU_OPS_PROGRAM_ELEMENTS_INL_HPP
#else
#define FOVEA_CPU_OPS_PROGRAM_ELEMENTS_INL_HPP
#endif

#include <algorithm>
#include <cstring>

#include "cpu/ops_program_wide-inl.hpp"
#include "expr/operation.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

void variable(const Instruction& i, const Strip& s) {
  const Elements<int32_t> to(s, i.to);
  const ProgramInputs& in = *s.in;
  const auto fill = [&](int64_t value) { std::fill_n(to.data, i.count, static_cast<int32_t>(value)); };
  switch (static_cast<expr::Variable>(i.payload)) {
    case expr::Variable::kS:
      break;
    case expr::Variable::kB:
      return fill(in.b);
    case expr::Variable::kHk:
      return fill(in.hk);
    case expr::Variable::kNq:
      return fill(in.nq);
    case expr::Variable::kNk:
      return fill(in.nk);
    case expr::Variable::kH:
      std::copy_n(in.head, i.count, to.data);
      break;
    case expr::Variable::kQ:
      std::copy_n(in.query, i.count, to.data);
      break;
    case expr::Variable::kK:
      // Past the last key it is repeated, so that no element outside a tensor is read for it.
      for (int64_t x = 0; x < i.count; ++x) {
        const int64_t j = std::min(x, in.keys - 1);
        to.data[x] = in.list != nullptr ? in.list[j] : static_cast<int32_t>(in.first_key + j);
      }
      break;
  }
}

/// Columns and rows of the blocks that are transposed between a tile and memory.
constexpr int64_t kBlock = 16;
static_assert(kBlock == kStripRows && kBlock % kLanes == 0);

/// Offsets of elements as ints of type Offset, from their three parts.
template <class Offset>
struct ElementOffsets {
  Elements<Offset> column, row, pair;

  ElementOffsets(const Instruction& i, const Strip& s)
      : column(s, i.operand[0]), row(s, i.operand[1]), pair(s, i.operand[2]) {}
  Offset at(int64_t r, int64_t x) const {
    Offset sum = 0;
    if (column) sum += column.at(r, x);
    if (row) sum += row.at(r, x);
    return pair ? sum + pair.at(r, x) : sum;
  }
  /// Whether the rows of a whole strip are neighbours in memory, as the keys of a bias are.
  bool rows_are_contiguous(const Strip& s) const {
    bool all = row && row.each && column && !pair && s.rows == kStripRows && s.width % kBlock == 0;
    for (int64_t r = 1; all && r < kStripRows; ++r) all = row.data[r] == row.data[0] + r;
    return all;
  }
  HWY_INLINE VI vector(int64_t r, int64_t x) const {
    VI sum = column ? column.vector(r, x) : hn::Zero(DI());
    if (row) sum = hn::Add(sum, row.vector(r, x));
    return pair ? hn::Add(sum, pair.vector(r, x)) : sum;
  }
};

HWY_INLINE float as_element(float x) {
  return x;
}
HWY_INLINE float as_element(F16 x) {
  return to_float(x);
}
HWY_INLINE float as_element(Bf16 x) {
  return to_float(x);
}
HWY_INLINE int32_t as_element(int32_t x) {
  return x;
}
HWY_INLINE int32_t as_element(uint8_t x) {
  return x;
}

template <class T>
HWY_INLINE void copy_elements(const T* from, float* to) {
  for (int64_t v = 0; v < kBlock; v += kLanes) hn::StoreU(load_as_float(from + v), D(), to + v);
}
HWY_INLINE void copy_elements(const int32_t* from, float* to) {
  std::memcpy(to, from, kBlock * sizeof(float));
}
HWY_INLINE void copy_elements(const uint8_t* from, float* to) {
  for (int64_t v = 0; v < kBlock; ++v) {
    const int32_t element = from[v];
    std::memcpy(to + v, &element, sizeof(element));
  }
}

/// Rows that are neighbours in memory: each column's elements are read together, and transposed.
template <class T, class Offset, class Out>
void load_blocks(const T* data, const ElementOffsets<Offset>& offsets, const Strip& s,
                 const Elements<Out>& to) {
  alignas(64) float block[kBlock][kBlock];
  for (int64_t x = 0; x < s.width; x += kBlock) {
    for (int64_t lane = 0; lane < kBlock; ++lane) copy_elements(data + offsets.at(0, x + lane), block[lane]);
    transpose_block(block[0], kBlock, reinterpret_cast<float*>(to.data) + x, to.stride);
  }
}

/// Elements of type T. Where the mask is not set nothing is read, and the result is 0.
template <class T>
void load_of(const Instruction& i, const Strip& s) {
  using Out = decltype(as_element(T{}));
  const auto* data = reinterpret_cast<const T*>(s.in->tensors[static_cast<size_t>(i.payload)]);
  const Elements<int32_t> mask(s, i.operand[3]);
  const Elements<Out> to(s, i.to);
  if (i.wide_offsets) {
    const ElementOffsets<int64_t> offsets(i, s);
    if (i.count == 0 && !mask && offsets.rows_are_contiguous(s)) return load_blocks(data, offsets, s, to);
    return for_elements<Out>(i, s, [&](int64_t r, int64_t x) {
      return mask && mask.at(r, x) == 0 ? Out{0} : as_element(data[offsets.at(r, x)]);
    });
  }
  const ElementOffsets<int32_t> offsets(i, s);
  if (i.count == 0 && !mask && offsets.rows_are_contiguous(s)) return load_blocks(data, offsets, s, to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  alignas(64) int32_t at[kLanes];
  alignas(64) int32_t seen[kLanes];
  for (int64_t x = 0; x < width; x += kLanes) {
    for (int64_t r = 0; r < rows; ++r) {
      const VI offset = offsets.vector(r, x);
      Out* out = to.data + r * to.stride + x;
      if (sizeof(T) == 4 && !mask) {
        store(hn::GatherIndex(TagOf<Out>(), reinterpret_cast<const Out*>(data), offset), out);
        continue;
      }
      hn::StoreU(offset, DI(), at);
      if (mask) hn::StoreU(mask.vector(r, x), DI(), seen);
      for (int64_t lane = 0; lane < kLanes; ++lane)
        out[lane] = mask && seen[lane] == 0 ? Out{0} : as_element(data[at[lane]]);
    }
  }
}

void load(const Instruction& i, const Strip& s) {
  switch (i.dtype) {
    case DType::kF32:
      return load_of<float>(i, s);
    case DType::kF16:
      return load_of<F16>(i, s);
    case DType::kBF16:
      return load_of<Bf16>(i, s);
    case DType::kI32:
      return load_of<int32_t>(i, s);
    case DType::kU8:
    case DType::kBool:
      return load_of<uint8_t>(i, s);
    case DType::kF64:
    case DType::kI64:
    case DType::kE4M3:
      break;  // refused by validation
  }
}

HWY_INLINE void add_element(float x, double* to) {
  *to += static_cast<double>(x);
}
HWY_INLINE void add_element(float x, float* to) {
  *to += x;
}
/// The one addition of an element of 16 bits.
template <class T>
HWY_INLINE void add_element(float x, T* to) {
  *to = from_float<T>(x);
}
HWY_INLINE void add_block_row(const float* from, double* to) {
  for (int64_t r = 0; r < kBlock; ++r) to[r] += static_cast<double>(from[r]);
}
HWY_INLINE void add_block_row(const float* from, float* to) {
  for (int64_t r = 0; r < kBlock; r += kLanes)
    hn::StoreU(hn::Add(hn::LoadU(D(), to + r), hn::LoadU(D(), from + r)), D(), to + r);
}
HWY_INLINE void add_block_row(const float* from, F16* to) {
  from_float_any(from, kBlock, DType::kF16, to);
}
HWY_INLINE void add_block_row(const float* from, Bf16* to) {
  from_float_any(from, kBlock, DType::kBF16, to);
}

/// Adds the values to `out`; an offset counts only where its value is not 0.
template <class Offset, class T>
void add_values_at(const Instruction& i, const Strip& s, T* out) {
  const ElementOffsets<Offset> offsets(i, s);
  const Elements<float> value(s, i.operand[3]);
  if (!offsets.row && !offsets.pair) {  // one element a column: the rows are added first
    for (int64_t x = 0; x < s.width; x += kLanes) {
      V sum = hn::Zero(D());
      for (int64_t r = 0; r < s.rows; ++r) sum = hn::Add(sum, value.get<false>(r, x));
      alignas(64) float sums[kLanes];
      hn::StoreU(sum, D(), sums);
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (sums[lane] != 0) add_element(sums[lane], out + offsets.at(0, x + lane));
      }
    }
    return;
  }
  if (i.everywhere && offsets.rows_are_contiguous(s)) {
    // Rows that no prefetcher follows, as they are too many.
    constexpr int64_t kAhead = 4 * kBlock;
    alignas(64) float block[kBlock][kBlock];
    for (int64_t x = 0; x < s.width; x += kBlock) {
      transpose_block(value.data + x, value.stride, block[0], kBlock);
      const int64_t lanes = std::min(kBlock, s.in->lanes - x);  // those past the last repeat its row
      for (int64_t lane = 0; lane < lanes; ++lane) {
        T* to = out + offsets.at(0, x + lane);
        __builtin_prefetch(to + kAhead, 1, 2);
        add_block_row(block[lane], to);
      }
    }
    return;
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t x = 0; x < s.width; ++x) {
      const float v = value.at(r, x);
      if (v != 0) add_element(v, out + offsets.at(r, x));
    }
  }
}

template <class T>
void add_values(const Instruction& i, const Strip& s, T* out) {
  if (i.wide_offsets) {
    add_values_at<int64_t>(i, s, out);
  } else {
    add_values_at<int32_t>(i, s, out);
  }
}

void add_to(const Instruction& i, const Strip& s) {
  const GradientTarget& target = s.in->gradients[i.payload & ((1 << kGradientBits) - 1)];
  if (target.sums != nullptr) return add_values(i, s, target.sums);
  switch (target.dtype) {
    case DType::kF16:
      return add_values(i, s, static_cast<F16*>(target.output));
    case DType::kBF16:
      return add_values(i, s, static_cast<Bf16*>(target.output));
    default:
      return add_values(i, s, static_cast<float*>(target.output));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_PROGRAM_ELEMENTS_INL_HPP
