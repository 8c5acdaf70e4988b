/* Nanoseconds of one fovea_run beside the attention itself: a batch of no sequences, with every tensor that a
 * backward pass of packed sequences can have. Fails above 1 microsecond: the best of many rounds, so other
 * load does not matter. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "fovea/fovea.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static fovea_tensor tensor(fovea_dtype_code code, int bits, int32_t ndim, const int64_t* shape) {
  fovea_tensor t;
  memset(&t, 0, sizeof t);
  t.device.type = FOVEA_CPU;
  t.ndim = ndim;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

/* A backward of packed sequences, of which there are none: 11 tensors with memory. */
static double packed_backward(const fovea_options* options) {
  static float q[64], k[64], v[64], o[64], lse[8], d_o[64], dq[64], dk[64], dv[64];
  static int32_t starts[1] = {0};
  static unsigned char workspace[1 << 20] __attribute__((aligned(FOVEA_WORKSPACE_ALIGNMENT)));
  const int64_t rows[3] = {1, 1, 64}, stats[2] = {1, 1}, one[1] = {1};
  const fovea_tensor t = tensor(FOVEA_CODE_FLOAT, 32, 3, rows),
                     t_lse = tensor(FOVEA_CODE_FLOAT, 32, 2, stats);
  const fovea_tensor t_starts = tensor(FOVEA_CODE_INT, 32, 1, one);
  fovea_problem p = FOVEA_PROBLEM_INIT;
  p.pass = FOVEA_BACKWARD;
  p.q = p.k = p.v = p.o = p.d_o = p.dq = p.dk = p.dv = &t;
  p.lse = &t_lse;
  p.cu_seqlens_q = p.cu_seqlens_k = &t_starts;
  fovea_plan* plan = NULL;
  if (fovea_plan_create(&p, options, &plan) != FOVEA_OK ||
      fovea_plan_workspace_size(plan) > sizeof workspace) {
    fprintf(stderr, "no plan: %s\n", fovea_last_error());
    return -1;
  }
  fovea_buffers b = FOVEA_BUFFERS_INIT;
  b.q = q;
  b.k = k;
  b.v = v;
  b.o = o;
  b.lse = lse;
  b.d_o = d_o;
  b.dq = dq;
  b.dk = dk;
  b.dv = dv;
  b.cu_seqlens_q = b.cu_seqlens_k = starts;
  b.workspace = workspace;
  b.workspace_size = sizeof workspace;
  double best = 1e9;
  for (int round = 0; round < 200; ++round) {
    enum { RUNS = 200 };
    const double start = now();
    for (int i = 0; i < RUNS; ++i) {
      if (fovea_run(plan, &b) != FOVEA_OK) {
        fprintf(stderr, "%s\n", fovea_last_error());
        return -1;
      }
    }
    const double each = (now() - start) / RUNS;
    if (each < best) best = each;
  }
  fovea_plan_destroy(plan);
  return best;
}

int main(void) {
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = "reference";
  const double nanoseconds = packed_backward(&options);
  printf("fovea_run of an empty packed backward: %.0f ns\n", nanoseconds);
  return nanoseconds >= 0 && nanoseconds <= 1000 ? 0 : 1;
}
