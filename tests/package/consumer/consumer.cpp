// As consumer.c, through the C++ face.
#include <cmath>
#include <cstdio>
#include <fovea/fovea.hpp>
#include <vector>

int main() {
  const std::vector<float> q_data = {0, 1}, k_data = {0, 2}, v_data = {1, 3};
  std::vector<float> o_data(2);
  const auto shape = {int64_t{1}, int64_t{2}, int64_t{1}, int64_t{1}};
  const fovea::Tensor q(q_data.data(), shape), k(k_data.data(), shape), v(v_data.data(), shape),
      o(o_data.data(), shape);
  fovea::attend(q, k, v, o, {.scale = 1});

  const double weight = 1 / (1 + std::exp(-2.0));
  const bool good = std::fabs(o_data[0] - 2.0) < 1e-6 && std::fabs(o_data[1] - (1 + 2 * weight)) < 1e-6;
  bool refused = false;
  try {
    fovea::attend(q, k, v, o, {.softcap = -1});
  } catch (const fovea::Error& error) {
    refused = error.argument() == "softcap";
  }
  std::printf("fovea %s: o = %g, %g: %s", fovea_version(), o_data[0], o_data[1],
              good && refused ? "right" : "WRONG");
  return good && refused ? 0 : 1;
}
