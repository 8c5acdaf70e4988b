/* One plan, run twice: attention over 512 tokens in a window of 128 keys. */
#include <fovea/fovea.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQLEN = 512, HEADS = 4, SIZE = 64, COUNT = SEQLEN * HEADS * SIZE };
static float q[COUNT], k[COUNT], v[COUNT], o[COUNT];

int main(void) {
  const int64_t shape[4] = {1, SEQLEN, HEADS, SIZE}; /* batch, sequence, heads, head size */
  const fovea_tensor tensor = {.device = {FOVEA_CPU, 0},
                               .ndim = 4,
                               .dtype = {FOVEA_CODE_FLOAT, 32, 1},
                               .shape = shape}; /* no data: it only describes */
  fovea_problem problem = FOVEA_PROBLEM_INIT;
  problem.q = problem.k = problem.v = problem.o = &tensor;
  problem.causal = 1;
  problem.window_left = 127;

  fovea_plan* plan = NULL;
  if (fovea_plan_create(&problem, NULL, &plan) != FOVEA_OK) {
    fprintf(stderr, "%s\n", fovea_last_error());
    return 1;
  }
  printf("%s\n", fovea_plan_reason(plan)); /* a line for each backend: chosen, or why not */

  size_t bytes = fovea_plan_workspace_size(plan);
  bytes = (bytes + FOVEA_WORKSPACE_ALIGNMENT - 1) / FOVEA_WORKSPACE_ALIGNMENT * FOVEA_WORKSPACE_ALIGNMENT;
  fovea_buffers buffers = FOVEA_BUFFERS_INIT;
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.o = o;
  buffers.workspace = bytes > 0 ? aligned_alloc(FOVEA_WORKSPACE_ALIGNMENT, bytes) : NULL;
  buffers.workspace_size = bytes;

  int wrong = 0;
  for (int run = 1; run <= 2; ++run) { /* values of 1, then of 2: weights sum to 1, so o is the same */
    for (int i = 0; i < COUNT; ++i) {
      q[i] = (float)(i % 7) - 3;
      k[i] = (float)(i % 11) - 5;
      v[i] = (float)run;
    }
    if (fovea_run(plan, &buffers) != FOVEA_OK) {
      fprintf(stderr, "%s\n", fovea_last_error());
      return 1;
    }
    printf("o[last] = %f\n", o[COUNT - 1]);
    wrong += fabsf(o[COUNT - 1] - (float)run) > 1e-4f;
  }
  free(buffers.workspace);
  fovea_plan_destroy(plan);
  return wrong;
}
