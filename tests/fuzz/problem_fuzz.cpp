// libFuzzer target: fovea_plan_create returns a status for every description. A plan for a small problem is also
// run, on memory that ends where the tensors end, so that AddressSanitizer sees every access beyond.
//
// The bytes choose sizes and features of a valid problem, and then a few places where it is spoilt. Completely
// random descriptions would all fail the first check.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "fovea/fovea.h"

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "broken promise: %s (last error: %s)\n", what, fovea_last_error());
  std::abort();
}

/// Reads numbers from the input; zeros after its end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() { return at_ < size_ ? data_[at_++] : uint8_t{0}; }
  bool flag() { return (byte() & 1) != 0; }
  /// In [0, limit).
  int below(int limit) { return byte() % limit; }
  template <class T>
  T raw() {
    T value{};
    auto* bytes = reinterpret_cast<unsigned char*>(&value);
    for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = byte();
    return value;
  }
  bool empty() const { return at_ >= size_; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

int64_t hostile_number(Bytes& in) {
  constexpr std::array<int64_t, 22> kNumbers = {0,
                                                1,
                                                2,
                                                3,
                                                -1,
                                                -2,
                                                7,
                                                8,
                                                576,
                                                577,
                                                64,
                                                1 << 16,
                                                1 << 30,
                                                0x7fffffff,
                                                0x80000000,
                                                int64_t{1} << 40,
                                                int64_t{1} << 57,
                                                kMax,
                                                kMax - 1,
                                                -kMax,
                                                -kMax - 1,
                                                kMax / 2};
  return in.below(8) == 0 ? in.raw<int64_t>() : kNumbers[static_cast<size_t>(in.below(kNumbers.size()))];
}

double hostile_real(Bytes& in) {
  constexpr std::array<double, 12> kNumbers = {0,
                                               0.5,
                                               1,
                                               -1,
                                               2,
                                               30,
                                               std::numeric_limits<double>::quiet_NaN(),
                                               std::numeric_limits<double>::infinity(),
                                               -std::numeric_limits<double>::infinity(),
                                               1e308,
                                               5e-324,
                                               0.999999999};
  return in.below(8) == 0 ? in.raw<double>() : kNumbers[static_cast<size_t>(in.below(kNumbers.size()))];
}

constexpr fovea_dtype kFloat32{FOVEA_CODE_FLOAT, 32, 1}, kFloat64{FOVEA_CODE_FLOAT, 64, 1};
constexpr fovea_dtype kFloat16{FOVEA_CODE_FLOAT, 16, 1}, kBFloat16{FOVEA_CODE_BFLOAT, 16, 1};
constexpr fovea_dtype kInt32{FOVEA_CODE_INT, 32, 1}, kInt64{FOVEA_CODE_INT, 64, 1};
constexpr fovea_dtype kUInt8{FOVEA_CODE_UINT, 8, 1}, kBool{FOVEA_CODE_BOOL, 8, 1};

fovea_dtype hostile_dtype(Bytes& in) {
  constexpr std::array<fovea_dtype, 8> kTypes = {kFloat32, kFloat64, kFloat16, kBFloat16,
                                                 kInt32,   kInt64,   kUInt8,   kBool};
  return in.below(4) == 0 ? in.raw<fovea_dtype>() : kTypes[static_cast<size_t>(in.below(kTypes.size()))];
}

/// One tensor and everything that its fields point to.
struct Tensor {
  fovea_tensor c{};
  std::array<int64_t, 8> shape{}, strides{};
  bool present = false, has_strides = false;
  /// For tensors of lengths: their values, as many as before spoiling.
  std::vector<int32_t> values;

  void make(fovea_dtype dtype, std::initializer_list<int64_t> sizes) {
    present = true;
    c.dtype = dtype;
    c.device = {FOVEA_CPU, 0};
    c.ndim = static_cast<int32_t>(sizes.size());
    size_t i = 0;
    for (const int64_t size : sizes) shape[i++] = size;
  }
};

enum Index {
#define FOVEA_FUZZ_INDEX(field, Name, forward, backward, meaning) k##Name,
  FOVEA_TENSORS(FOVEA_FUZZ_INDEX)
#undef FOVEA_FUZZ_INDEX
      kCount
};

struct Description {
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_options options = FOVEA_OPTIONS_INIT;
  std::array<Tensor, kCount> tensors;

  /// Points the problem at the tensors of this object. (Not in a constructor, since the object moves after it.)
  void connect() {
    constexpr std::array<const fovea_tensor * fovea_problem::*, kCount> fields = {
#define FOVEA_FUZZ_FIELD(field, Name, forward, backward, meaning) &fovea_problem::field,
        FOVEA_TENSORS(FOVEA_FUZZ_FIELD)
#undef FOVEA_FUZZ_FIELD
    };
    for (size_t i = 0; i < kCount; ++i) {
      Tensor& t = tensors[i];
      t.c.shape = t.shape.data();
      t.c.strides = t.has_strides ? t.strides.data() : nullptr;
      problem.*fields[i] = t.present ? &t.c : nullptr;
    }
  }
};

void make_coherent(Bytes& in, Description& d) {
  constexpr std::array<int64_t, 8> kSizes = {1, 2, 3, 5, 8, 17, 0, 4};
  const auto size = [&] { return kSizes[static_cast<size_t>(in.below(kSizes.size()))]; };
  const auto some = [&] { return 1 + in.below(4); };
  const int64_t batch = in.below(4), seqlen_q = size(), seqlen_k = size(), heads_kv = some();
  const int64_t heads_q = heads_kv * some(), head = 1 + in.below(20), head_v = 1 + in.below(20);
  constexpr std::array<fovea_dtype, 4> kTypes = {kFloat32, kBFloat16, kFloat16, kFloat64};
  const fovea_dtype dtype = kTypes[static_cast<size_t>(in.below(4))];
  const bool backward = in.flag(), packed = in.flag();
  auto& t = d.tensors;
  const auto rows = [&](Index index, int64_t seqlen, int64_t heads, int64_t columns) {
    if (packed) {
      t[index].make(dtype, {seqlen, heads, columns});
    } else {
      t[index].make(dtype, {batch, seqlen, heads, columns});
    }
  };
  const auto statistics = [&](Index index) {
    if (packed) {
      t[index].make(kFloat32, {heads_q, seqlen_q});
    } else {
      t[index].make(kFloat32, {batch, heads_q, seqlen_q});
    }
  };
  rows(kQ, seqlen_q, heads_q, head);
  rows(kK, seqlen_k, heads_kv, head);
  rows(kV, seqlen_k, heads_kv, head_v);
  rows(kO, seqlen_q, heads_q, head_v);
  if (in.flag()) t[kO].c.dtype = kFloat32;
  if (backward || in.flag()) statistics(kLse);
  d.problem.pass = backward ? FOVEA_BACKWARD : FOVEA_FORWARD;
  if (backward) {
    rows(kDO, seqlen_q, heads_q, head_v);
    rows(kDQ, seqlen_q, heads_q, head);
    rows(kDK, seqlen_k, heads_kv, head);
    rows(kDV, seqlen_k, heads_kv, head_v);
    if (in.flag()) statistics(kDLse);
  }
  if (packed) {
    t[kCuSeqlensQ].make(kInt32, {batch + 1});
    t[kCuSeqlensK].make(kInt32, {batch + 1});
  }
  const auto or_one = [&](int64_t full) { return in.flag() ? full : int64_t{1}; };
  if (in.below(3) == 0) {
    const std::array<int64_t, 4> shape = {or_one(batch), or_one(heads_q), or_one(seqlen_q), or_one(seqlen_k)};
    t[kBias].make(in.flag() ? dtype : kFloat32, {shape[0], shape[1], shape[2], shape[3]});
    if (backward) t[kDBias].make(kFloat32, {shape[0], shape[1], shape[2], shape[3]});
  }
  if (in.below(3) == 0) {
    t[kMask].make(in.flag() ? kBool : kUInt8,
                  {or_one(batch), or_one(heads_q), or_one(seqlen_q), or_one(seqlen_k)});
  }
  if (in.below(3) == 0) {
    const int64_t block_q = 1 + in.below(20), block_k = 1 + in.below(20);
    d.problem.block_q = block_q;
    d.problem.block_k = block_k;
    t[kBlockMask].make(kBool, {or_one(batch), or_one(heads_q), (seqlen_q + block_q - 1) / block_q,
                               (seqlen_k + block_k - 1) / block_k});
  }
  if (in.below(3) == 0) {
    if (in.flag()) {
      t[kAlibi].make(kFloat32, {heads_q});
    } else {
      t[kAlibi].make(kFloat32, {batch, heads_q});
    }
  }
  if (in.below(3) == 0) {
    t[kSink].make(kFloat32, {heads_q});
    if (backward) t[kDSink].make(kFloat32, {heads_q});
  }
  if (in.below(3) == 0) t[kSeqUsedQ].make(kInt32, {batch});
  if (in.below(3) == 0) t[kSeqUsedK].make(kInt32, {batch});
  if (in.below(3) == 0) t[kRngState].make(kInt64, {2});
  if (in.below(3) == 0) {
    const int64_t count = in.below(40);
    if (packed) {
      t[kKeys].make(kInt32, {or_one(heads_kv), seqlen_q, count});
    } else {
      t[kKeys].make(kInt32, {or_one(batch), or_one(heads_kv), seqlen_q, count});
    }
  }
  d.problem.causal = in.flag();
  if (in.flag()) d.problem.window_left = in.below(20) - 1;
  if (in.flag()) d.problem.window_right = in.below(20) - 1;
  if (in.below(4) == 0) d.problem.softcap = 3;
  if (in.below(4) == 0) d.problem.dropout = 0.25;
  if (packed && in.flag()) d.problem.max_seqlen_q = seqlen_q, d.problem.max_seqlen_k = seqlen_k;
  const int backends = fovea_backend_count();
  if (in.below(4) != 0) d.options.backend = fovea_backend_name(in.below(backends));
  d.options.num_threads = 1;
  if (in.below(4) == 0) d.options.num_splits = in.below(5);
  d.options.batch_invariant = in.below(4) == 0;
}

void spoil(Bytes& in, Description& d) {
  Tensor& t = d.tensors[static_cast<size_t>(in.below(kCount))];
  const auto dimension = static_cast<size_t>(in.below(5));
  switch (in.below(14)) {
    case 0:
      t.present = !t.present;
      break;
    case 1:
      t.c.ndim = in.below(3) == 0 ? static_cast<int32_t>(hostile_number(in)) : in.below(7) - 1;
      break;
    case 2:
      t.c.dtype = hostile_dtype(in);
      break;
    case 3:
      t.c.device = {static_cast<int32_t>(in.below(4)), in.raw<int32_t>()};
      break;
    case 4:
    case 5:
      t.shape[dimension] = hostile_number(in);
      break;
    case 6:
      t.has_strides = !t.has_strides;
      break;
    case 7:
    case 8:
      // Compact strides, one of them spoilt.
      t.has_strides = true;
      for (size_t i = 8; i-- > 0;) {
        t.strides[i] = i + 1 >= static_cast<size_t>(std::max(t.c.ndim, 1)) || i + 1 >= 8
                           ? 1
                           : static_cast<int64_t>(static_cast<uint64_t>(t.strides[i + 1]) *
                                                  static_cast<uint64_t>(t.shape[i + 1]));
      }
      t.strides[dimension] = in.flag() ? hostile_number(in) : t.strides[dimension] + in.below(5);
      break;
    case 9:
      t.c.byte_offset = in.raw<uint64_t>();
      break;
    case 10:
      switch (in.below(4)) {
        case 0:
          d.problem.scale = hostile_real(in);
          break;
        case 1:
          d.problem.softcap = hostile_real(in);
          break;
        case 2:
          d.problem.dropout = hostile_real(in);
          break;
        case 3:
          d.problem.pass = static_cast<int32_t>(hostile_number(in));
          break;
      }
      break;
    case 11:
      switch (in.below(6)) {
        case 0:
          d.problem.window_left = hostile_number(in);
          break;
        case 1:
          d.problem.window_right = hostile_number(in);
          break;
        case 2:
          d.problem.block_q = hostile_number(in);
          break;
        case 3:
          d.problem.block_k = hostile_number(in);
          break;
        case 4:
          d.problem.max_seqlen_q = hostile_number(in);
          break;
        case 5:
          d.problem.max_seqlen_k = hostile_number(in);
          break;
      }
      break;
    case 12:
      d.options.num_threads = in.below(3) == 0 ? static_cast<int32_t>(hostile_number(in)) : in.below(4);
      if (in.flag()) d.options.num_splits = static_cast<int32_t>(hostile_number(in));
      break;
    case 13:
      d.problem.struct_size = in.flag() ? d.problem.struct_size - 8 * static_cast<size_t>(in.below(40))
                                        : static_cast<size_t>(hostile_number(in)) % sizeof(fovea_problem);
      break;
  }
}

/// Bytes from the first element to the end of the last, or -1 when they are too many for these runs.
int64_t small_extent(const Tensor& t) {
  constexpr int64_t kLimit = 1 << 16;
  const auto rank = static_cast<size_t>(t.c.ndim);
  if (std::find(t.shape.begin(), t.shape.begin() + t.c.ndim, 0) != t.shape.begin() + t.c.ndim) return 0;
  int64_t last = 0, compact = 1;
  for (size_t i = rank; i-- > 0;) {
    if (t.shape[i] == 1) continue;
    const int64_t stride = t.has_strides ? t.strides[i] : compact;
    if (t.shape[i] > kLimit || stride > kLimit) return -1;
    last += (t.shape[i] - 1) * stride;
    compact *= t.shape[i];
    if (last > kLimit || compact > kLimit) return -1;
  }
  return (last + 1) * (t.c.dtype.bits / 8);
}

/// The plan reads the data of cu_seqlens, seqused and similar tensors, so they need memory.
void give_lengths(Bytes& in, Description& d) {
  for (const Index index : {kCuSeqlensQ, kCuSeqlensK, kSeqUsedQ, kSeqUsedK}) {
    Tensor& t = d.tensors[index];
    if (!t.present) continue;
    const bool starts = index == kCuSeqlensQ || index == kCuSeqlensK;
    const Tensor& rows = d.tensors[index == kCuSeqlensQ || index == kSeqUsedQ ? kQ : kK];
    const int64_t total = rows.shape[0];
    const auto count = static_cast<size_t>(t.shape[0]);
    t.values.resize(count);
    int64_t value = 0;
    for (size_t i = 0; i < count; ++i) {
      if (starts) {
        if (i > 0) value += in.below(3) == 0 ? 0 : in.below(5);
        if (i + 1 == count && in.flag()) value = total;
        t.values[i] = static_cast<int32_t>(std::min(value, total));
      } else {
        t.values[i] = in.below(6);
      }
      if (in.below(64) == 63) t.values[i] = in.raw<int32_t>();
    }
    if (in.below(4) != 0) t.c.data = t.values.data();
  }
}

struct FreeAligned {
  void operator()(void* p) const { ::operator delete (p, std::align_val_t{FOVEA_WORKSPACE_ALIGNMENT}); }
};

void run(const Bytes& input, Description& d, const fovea_plan* plan) {
  if (d.problem.struct_size != sizeof(fovea_problem)) return;  // some tensors were not part of the problem
  Bytes in = input;
  std::array<std::unique_ptr<unsigned char[]>, kCount> memory;
  std::array<void*, kCount> p{};
  double work = 0;
  for (size_t i = 0; i < kCount; ++i) {
    Tensor& t = d.tensors[i];
    if (!t.present) continue;
    const int64_t extent = small_extent(t);
    if (extent < 0) return;
    work += static_cast<double>(extent);
    // Plain new aligns to 16 bytes, and an access past the end is one past the allocation.
    memory[i] = std::make_unique<unsigned char[]>(static_cast<size_t>(extent));
    p[i] = memory[i].get();
    if (static_cast<size_t>(extent) == t.values.size() * sizeof(int32_t)) {
      if (extent > 0) std::memcpy(p[i], t.values.data(), static_cast<size_t>(extent));
    } else {
      for (int64_t b = 0; b < extent; ++b) memory[i][static_cast<size_t>(b)] = in.byte();
    }
    // Entries of lists are mostly keys, so that runs take place.
    for (int64_t b = 0; i == kKeys && b < extent; b += int64_t{sizeof(int32_t)}) {
      const int32_t entry = in.below(64) == 63 ? in.raw<int32_t>() : in.below(5) - 1;
      std::memcpy(memory[i].get() + b, &entry, sizeof(entry));
    }
  }
  if (work > 1 << 17 || fovea_plan_flops(plan) > 1e6 || fovea_plan_workspace_size(plan) > (1u << 26)) return;

  fovea_buffers b = FOVEA_BUFFERS_INIT;
#define FOVEA_FUZZ_POINTER(field, Name, forward, backward, meaning) b.field = p[k##Name];
  FOVEA_TENSORS(FOVEA_FUZZ_POINTER)
#undef FOVEA_FUZZ_POINTER
  b.workspace_size = fovea_plan_workspace_size(plan);
  const std::unique_ptr<void, FreeAligned> workspace(
      ::operator new (b.workspace_size, std::align_val_t{FOVEA_WORKSPACE_ALIGNMENT}));
  b.workspace = workspace.get();
  const fovea_status status = fovea_run(plan, &b);
  if (status != FOVEA_OK && status != FOVEA_INVALID_ARGUMENT) fail("fovea_run of a plan");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  Description d;
  make_coherent(in, d);
  const int spoilt = in.below(4);
  give_lengths(in, d);
  for (int i = 0; i < spoilt; ++i) spoil(in, d);
  for (Tensor& t : d.tensors) {
    // A plan reads only lengths; the caller promises that the other memory exists.
    if (t.shape[0] != static_cast<int64_t>(t.values.size()) || t.c.byte_offset != 0) t.c.data = nullptr;
  }
  d.connect();

  fovea_plan* plan = nullptr;
  const fovea_status status = fovea_plan_create(&d.problem, &d.options, &plan);
  if (status == FOVEA_OK) {
    if (!plan || fovea_plan_backend(plan)[0] == '\0' || fovea_plan_reason(plan)[0] == '\0')
      fail("a whole plan");
    if (!(fovea_plan_flops(plan) >= 0)) fail("flops");
    run(in, d, plan);
  } else {
    if (plan) fail("no plan on failure");
    if (status != FOVEA_INVALID_ARGUMENT && status != FOVEA_UNSUPPORTED)
      fail("a status that blames the input");
    if (fovea_last_error()[0] == '\0' || fovea_last_error_argument()[0] == '\0')
      fail("a message and an argument");
  }
  fovea_plan_destroy(plan);
  return 0;
}
