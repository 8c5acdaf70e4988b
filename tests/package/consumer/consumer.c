/* Attention of two queries over two keys, checked by hand: scale 1, values 1 and 3. */
#include <fovea/fovea.h>
#include <math.h>
#include <stdio.h>

int main(void) {
  float q_data[2] = {0, 1}, k_data[2] = {0, 2}, v_data[2] = {1, 3}, o_data[2] = {0, 0};
  const int64_t shape[4] = {1, 2, 1, 1};
  fovea_tensor q = {.data = q_data,
                    .device = {FOVEA_CPU, 0},
                    .ndim = 4,
                    .dtype = {FOVEA_CODE_FLOAT, 32, 1},
                    .shape = shape};
  fovea_tensor k = q, v = q, o = q;
  k.data = k_data;
  v.data = v_data;
  o.data = o_data;
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  problem.q = &q;
  problem.k = &k;
  problem.v = &v;
  problem.o = &o;
  problem.scale = 1;
  if (fovea_attend(&problem, NULL, 0, 0) != FOVEA_OK) {
    fprintf(stderr, "%s\n", fovea_last_error());
    return 1;
  }
  const double weight = 1 / (1 + exp(-2.0)); /* of the second key, for the second query */
  const int good = fabs(o_data[0] - 2.0) < 1e-6 && fabs(o_data[1] - (1 + 2 * weight)) < 1e-6;
  printf("fovea %s: o = %g, %g: %s", fovea_version(), o_data[0], o_data[1], good ? "right" : "WRONG");
  return good ? 0 : 1;
}
