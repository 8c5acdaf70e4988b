// Appending to a cache: copies new rows to k and v, rotates those of k, and rotates q. The same code serves every CPU backend and
// the reference, which computes in float64 for float64.
#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "cpu/backends.hpp"
#include "cpu/parallel.hpp"
#include "cpu/sequence.hpp"

namespace fovea::cpu {
namespace {

// Below this many bytes a second thread costs more than it brings.
constexpr int64_t kMinBytesPerThread = 1 << 18;

template <class T>
auto real(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return to_float(x);
  }
}
/// Elements of type T of a cache: `scale` times what is stored.
template <class T>
struct Stored {
  float scale = 1;

  template <class Real>
  T of(Real x) const {
    if constexpr (std::is_same_v<T, double>) {
      return x;
    } else if constexpr (std::is_same_v<T, E4M3>) {
      return from_float<T>(static_cast<float>(x) / scale);
    } else {
      return from_float<T>(x);
    }
  }
  /// Copies n elements.
  template <class From>
  void copy(const From* from, int64_t n, T* to) const {
    if constexpr (std::is_same_v<From, T>) {
      std::copy_n(from, n, to);
    } else {
      for (int64_t c = 0; c < n; ++c) to[c] = of(real(from[c]));
    }
  }
};

/// Elements of type T that are `factor` times what is copied.
template <class T>
struct Scaled {
  float factor = 1;

  template <class Real>
  T of(Real x) const {
    return Stored<T>{}.of(x * static_cast<Real>(factor));
  }
  template <class From>
  void copy(const From* from, int64_t n, T* to) const {
    for (int64_t c = 0; c < n; ++c) to[c] = of(real(from[c]));
  }
};

/// Copies rows of `size` elements, and turns their first pairs by angles of type A, in the precision of T.
template <class T, class A>
struct Rotation {
  using Real = decltype(real(T{}));
  const A *cosines, *sines;
  int64_t cos_stride, sin_stride, half, size;
  bool interleaved;

  Rotation(const AttentionProblem& p, const Buffers& buffers)
      : cosines(buffers.get<const A>(Role::kRotaryCos)),
        sines(buffers.get<const A>(Role::kRotarySin)),
        cos_stride(p[Role::kRotaryCos].stride[0]),
        sin_stride(p[Role::kRotarySin].stride[0]),
        half(p.rotary_half),
        size(p.head_dim),
        interleaved(p.rotary_interleaved) {}

  /// As elements that `stored` makes.
  template <class From, class To, class Made>
  void copy(const From* from, To* to, const Made& stored, int64_t position) const {
    const A *cos = cosines + position * cos_stride, *sin = sines + position * sin_stride;
    const int64_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half;
    for (int64_t j = 0; j < half; ++j) {
      const auto x = static_cast<Real>(real(from[j * step])),
                 y = static_cast<Real>(real(from[j * step + partner]));
      const auto c = real(cos[j]), s = real(sin[j]);
      to[j * step] = stored.of(x * c - y * s);
      to[j * step + partner] = stored.of(x * s + y * c);
    }
    stored.copy(from + 2 * half, size - 2 * half, to + 2 * half);
  }
};

/// What a sequence appends, and where.
struct NewRows {
  int64_t first_new;  ///< row of k_new
  int64_t count, used;
  int64_t position;  ///< of the first of them, and of the first query
};

class Append final : public AppendStep {
 public:
  Append(const AttentionProblem& problem, int num_threads) : p_(problem) {
    const int64_t rows_kv = p_.total_new * p_.heads_kv, rows_q = p_.rotates() ? p_.total_q * p_.heads_q : 0;
    const int64_t bytes =
        (rows_kv * (p_.head_dim + p_.head_dim_v) + rows_q * p_.head_dim) * size_of(p_.dtype);
    num_threads_ = static_cast<int>(std::clamp<int64_t>(bytes / kMinBytesPerThread, 1, num_threads));
  }

  void run(const Buffers& buffers, int32_t* lengths, void* q) const override {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const NewRows rows = new_rows_of(buffers, b);
      lengths[b] = static_cast<int32_t>(rows.used + rows.count);
    }
    switch (p_.dtype) {
      case DType::kF64:
        return run_rotated<double>(buffers, q);
      case DType::kF16:
        return run_rotated<F16>(buffers, q);
      case DType::kBF16:
        return run_rotated<Bf16>(buffers, q);
      default:
        return run_rotated<float>(buffers, q);
    }
  }

 private:
  NewRows new_rows_of(const Buffers& buffers, int64_t b) const {
    NewRows rows{0, p_.new_rows, buffers.get<const int32_t>(Role::kSeqUsedK)[b], 0};
    if (const auto* starts = buffers.get<const int32_t>(Role::kCuSeqlensKNew))
      rows.first_new = starts[b], rows.count = starts[b + 1] - starts[b];
    const auto* positions = buffers.get<const int32_t>(Role::kRotaryPositions);
    rows.position = positions != nullptr ? positions[b] : rows.used;
    return rows;
  }

  template <class T>
  void run_rotated(const Buffers& buffers, void* q) const {
    if (p_.rotates() && p_[Role::kRotaryCos].dtype != p_.dtype) {
      run_heads<T, float>(buffers, static_cast<T*>(q));
    } else {
      run_heads<T, T>(buffers, static_cast<T*>(q));
    }
  }
  /// Heads go over the threads, and the sequences one after the other: two that append to one row do not race.
  template <class T, class A>
  void run_heads(const Buffers& buffers, T* q) const {
    const Rotation<T, A> rotation(p_, buffers);
    WorkQueue heads(p_.heads_kv + (p_.rotates() ? p_.heads_q : 0));
    run_threads(num_threads_, [&](int) {
      for (int64_t head; (head = heads.next()) >= 0;) {
        for (int64_t b = 0; b < p_.batch; ++b) {
          if (head < p_.heads_kv && p_[Role::kK].dtype == DType::kE4M3) {
            append<E4M3>(buffers, rotation, b, head);
          } else if (head < p_.heads_kv) {
            append<T>(buffers, rotation, b, head);
          } else if (p_[Role::kQ].dtype == DType::kE4M3) {
            const int64_t head_q = head - p_.heads_kv;
            const Scaled<T> scaled{descale_of(p_, buffers, Role::kQDescale, b, head_q / p_.group())};
            rotate_queries<E4M3>(buffers, rotation, b, head_q, scaled, q);
          } else {
            rotate_queries<T>(buffers, rotation, b, head - p_.heads_kv, Stored<T>{}, q);
          }
        }
      }
    });
  }

  template <class To, class T, class A>
  void append(const Buffers& buffers, const Rotation<T, A>& rotation, int64_t b, int64_t head) const {
    const NewRows rows = new_rows_of(buffers, b);
    if (rows.count == 0) return;
    const MatrixView k_new = cpu::rows_of(p_, buffers, Role::kKNew, b, head, rows.first_new),
                     v_new = cpu::rows_of(p_, buffers, Role::kVNew, b, head, rows.first_new);
    const KeyRows k(p_, buffers, Role::kK, b, head, rows.used), v(p_, buffers, Role::kV, b, head, rows.used);
    const Stored<To> stored_k{descale_of(p_, buffers, Role::kKDescale, b, head)},
        stored_v{descale_of(p_, buffers, Role::kVDescale, b, head)};
    for (int64_t i = 0; i < rows.count; ++i) {
      To* to = reinterpret_cast<To*>(k.row(i));
      if (p_.rotates()) {
        rotation.copy(k_new.row<const T>(i), to, stored_k, rows.position + i);
      } else {
        stored_k.copy(k_new.row<const T>(i), p_.head_dim, to);
      }
      stored_v.copy(v_new.row<const T>(i), p_.head_dim_v, reinterpret_cast<To*>(v.row(i)));
    }
  }

  template <class From, class T, class A, class Made>
  void rotate_queries(const Buffers& buffers, const Rotation<T, A>& rotation, int64_t b, int64_t head,
                      const Made& stored, T* q) const {
    const SequenceSpan span = sequence_span(p_, buffers, b);
    if (span.used_q == 0) return;
    const int64_t position = new_rows_of(buffers, b).position;
    const MatrixView from = cpu::rows_of(p_, buffers, Role::kQ, b, head, span.row_q);
    const int64_t first = p_.packed ? span.row_q : b * p_.seqlen_q;
    for (int64_t i = 0; i < span.used_q; ++i) {
      rotation.copy(from.row<const From>(i), q + ((first + i) * p_.heads_q + head) * p_.head_dim, stored,
                    position + (p_.rotary_by_row ? i : 0));
    }
  }

  AttentionProblem p_;
  int num_threads_ = 1;
};

}  // namespace

std::unique_ptr<const AppendStep> prepare_append(const AttentionProblem& problem,
                                                 const PrepareOptions& options) {
  return std::make_unique<Append>(problem, options.num_threads);
}

}  // namespace fovea::cpu
