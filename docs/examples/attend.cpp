// Causal attention and its gradients, over 2 sequences of 1,000 tokens.
#include <cmath>
#include <cstdio>
#include <fovea/fovea.hpp>
#include <random>
#include <vector>

int main() {
  // (batch, sequence, heads, head size); eight query heads share two heads of keys and values.
  const auto q_shape = {int64_t{2}, int64_t{1000}, int64_t{8}, int64_t{64}};
  const auto k_shape = {int64_t{2}, int64_t{1000}, int64_t{2}, int64_t{64}};
  const auto lse_shape = {int64_t{2}, int64_t{8}, int64_t{1000}};

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto filled = [&](size_t count) {
    std::vector<float> x(count);
    for (float& value : x) value = normal(random);
    return x;
  };
  const std::vector<float> q = filled(2 * 1000 * 8 * 64), d_o = filled(q.size());
  const std::vector<float> k = filled(2 * 1000 * 2 * 64), v = filled(k.size());
  std::vector<float> o(q.size()), lse(2 * 8 * 1000), dq(q.size()), dk(k.size()), dv(v.size());

  // Views: they own their shape and no memory.
  const fovea::Tensor Q(q.data(), q_shape), K(k.data(), k_shape), V(v.data(), k_shape), O(o.data(), q_shape);
  const fovea::Tensor LSE(lse.data(), lse_shape);
  try {
    fovea::attend(Q, K, V, O, {.lse = LSE, .causal = true});
    fovea::attend_backward({.q = Q,
                            .k = K,
                            .v = V,
                            .o = O,
                            .lse = LSE,
                            .d_o = {d_o.data(), q_shape},
                            .dq = {dq.data(), q_shape},
                            .dk = {dk.data(), k_shape},
                            .dv = {dv.data(), k_shape},
                            .causal = true});
  } catch (const fovea::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  // The first query of a sequence sees one key only, so its output is that key's value.
  std::printf("o[0] = %.6f, v[0] = %.6f, dq[last] = %.6f\n", o.front(), v.front(), dq.back());
  return std::abs(o.front() - v.front()) < 1e-6f ? 0 : 1;
}
