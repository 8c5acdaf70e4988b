// The arguments of a rung: its problem. All arrays are dense and row-major; rungs of GPUs get memory of the
// GPU.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

namespace ladder {

/// Three sizes, named by the family of the problem: (m, n, k), (rows, columns, -), (batch, length,
/// head size).
struct Shape {
  int a = 1, b = 1, c = 1;
};

/// A problem before its family is known: tensors in the order of `tensors_of` (family.hpp).
struct Task {
  Shape shape;
  std::array<void*, 9> tensors{};
  float* workspace = nullptr;

  template <class T>
  T* tensor(size_t index) const {
    return static_cast<T*>(tensors[index]);
  }
};

/// C = A B: a (m, k), b (k, n), c (m, n).
struct Matmul {
  int m, n, k;
  const float *a, *b;
  float* c;

  explicit Matmul(const Task& t)
      : m(t.shape.a),
        n(t.shape.b),
        k(t.shape.c),
        a(t.tensor<float>(0)),
        b(t.tensor<float>(1)),
        c(t.tensor<float>(2)) {}
};

/// y = softmax(x) of each row.
struct Softmax {
  int rows, columns;
  const float* x;
  float* y;

  explicit Softmax(const Task& t)
      : rows(t.shape.a), columns(t.shape.b), x(t.tensor<float>(0)), y(t.tensor<float>(1)) {}
};

/// O = softmax(scale Q K^T) V and L, the logarithm of the sum of exponentials of each row of scores.
/// q, k, v, o (batch, seqlen, head_dim); lse (batch, seqlen). Heads are batch entries here.
template <class T>
struct Attention {
  int batch, seqlen, head_dim;
  float scale;
  const T *q, *k, *v;
  T* o;
  float *lse, *workspace;

  explicit Attention(const Task& t)
      : batch(t.shape.a),
        seqlen(t.shape.b),
        head_dim(t.shape.c),
        scale(1.0f / std::sqrt(static_cast<float>(t.shape.c))),
        q(t.tensor<T>(0)),
        k(t.tensor<T>(1)),
        v(t.tensor<T>(2)),
        o(t.tensor<T>(3)),
        lse(t.tensor<float>(4)),
        workspace(t.workspace) {}
};

/// The gradients of q, k, v, given that of o. dq, dk, dv are float32 for every T.
template <class T>
struct AttentionGradient {
  int batch, seqlen, head_dim;
  float scale;
  const T *q, *k, *v, *o;
  const float* lse;
  const T* d_o;
  float *dq, *dk, *dv, *workspace;

  explicit AttentionGradient(const Task& t)
      : batch(t.shape.a),
        seqlen(t.shape.b),
        head_dim(t.shape.c),
        scale(1.0f / std::sqrt(static_cast<float>(t.shape.c))),
        q(t.tensor<T>(0)),
        k(t.tensor<T>(1)),
        v(t.tensor<T>(2)),
        o(t.tensor<T>(3)),
        lse(t.tensor<float>(4)),
        d_o(t.tensor<T>(5)),
        dq(t.tensor<float>(6)),
        dk(t.tensor<float>(7)),
        dv(t.tensor<float>(8)),
        workspace(t.workspace) {}
};

}  // namespace ladder
