/* Nanoseconds of one fovea_run beside the attention itself.
 *
 * On the CPU: a batch of no sequences, with every tensor that a backward pass of packed sequences can have.
 * Fails above 1 microsecond. Also a step of decoding: one query over two rows of a cache in pages, alone, and behind a
 * new row that is rotated and appended. Fails above 6 microseconds. Each round's time is divided by how much
 * slower than usual the core sorts right behind it, because a core's other thread may be busy all the time.
 *
 * On a GPU: the call that puts a tiny problem on a stream whose queue is not full, forward and backward,
 * beside the driver's own launch of an empty kernel. Fails when the median of a forward is above 3
 * microseconds, unless the bare launch takes most of them: then when it is more than 1 microsecond above
 * that. The same steps of decoding fail when their medians are above 6 microseconds and more than 1 microsecond a
 * launch above the bare one. Without a GPU this part is left out, and the output says so. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
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

enum { ROUNDS = 51, RUNS = 100 }; /* a backward is at most 8 launches, and a stream's queue holds 1,024 */

static int by_size(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* each) {
  qsort(each, ROUNDS, sizeof each[0], by_size);
  return each[ROUNDS / 2];
}

/* How many times as long as on an idle core of an EPYC the core needs now to sort 64 numbers; at least 1. On that core
 * the sort takes 1.5 microseconds, and 2.4 while the core's other thread is busy. */
static double slowness(void) {
  enum { SIZE = 64, SORTS = 20 };
  double numbers[SIZE], best = 1e9;
  for (int i = 0; i < SORTS; ++i) {
    unsigned state = 1;
    for (int j = 0; j < SIZE; ++j) numbers[j] = state = state * 1664525u + 1013904223u;
    const double start = now();
    qsort(numbers, SIZE, sizeof numbers[0], by_size);
    const double each = now() - start;
    if (each < best) best = each;
  }
  return best > 1500 ? best / 1500 : 1;
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
  double each[ROUNDS];
  for (int round = 0; round < ROUNDS; ++round) {
    const double start = now();
    for (int i = 0; i < RUNS; ++i) {
      if (fovea_run(plan, &b) != FOVEA_OK) {
        fprintf(stderr, "%s\n", fovea_last_error());
        return -1;
      }
    }
    each[round] = (now() - start) / RUNS;
    each[round] /= slowness();
  }
  fovea_plan_destroy(plan);
  return median(each);
}

/* Memory of the GPU, which the process keeps. */
static void* gpu_memory(size_t size) {
  const fovea_device device = {FOVEA_CUDA, 0};
  void* memory = NULL;
  if (fovea_workspace_create(device, size, &memory) != FOVEA_OK) {
    fprintf(stderr, "%s\n", fovea_last_error());
    exit(1);
  }
  return memory;
}

/* Making and destroying memory waits for the GPU. */
static void wait_for_gpu(void) {
  const fovea_device device = {FOVEA_CUDA, 0};
  fovea_workspace_destroy(device, gpu_memory(64));
}

/* Median of the driver's launch of an empty kernel, whose parameters are as large as those of ours; -1 when
 * something fails. By the names of cuda.h, which this file does without so that it compiles everywhere. */
static double bare_launch(void) {
  static const char ptx[] =
      ".version 7.0\n.target sm_75\n.address_size 64\n"
      ".visible .entry empty(.param .align 8 .b8 p[768]) { ret; }\n";
  static char parameters[768];
  void* arguments[1] = {parameters};
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL, *module = NULL, *kernel = NULL;
  if (!library) return -1;
  int (*retain)(void**, int), (*set_current)(void*), (*load)(void**, const void*),
      (*find)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                void**);
  /* POSIX has function pointers come out of dlsym like this. */
  *(void**)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
  *(void**)&set_current = dlsym(library, "cuCtxSetCurrent");
  *(void**)&load = dlsym(library, "cuModuleLoadData");
  *(void**)&find = dlsym(library, "cuModuleGetFunction");
  *(void**)&launch = dlsym(library, "cuLaunchKernel");
  if (!retain || !set_current || !load || !find || !launch) return -1;
  if (retain(&context, 0) || set_current(context) || load(&module, ptx) || find(&kernel, module, "empty"))
    return -1;
  double each[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) {
    wait_for_gpu();
    const double start = now();
    for (int i = 0; i < RUNS; ++i) {
      if (launch(kernel, 1, 1, 1, 128, 1, 1, 0, NULL, arguments, NULL)) return -1;
    }
    if (round >= 0) each[round] = (now() - start) / RUNS;
  }
  return median(each);
}

/* Median of one call of 16 queries and keys, one head of 64, bfloat16; -1 when something fails. */
static double tiny_on_gpu(int32_t pass) {
  enum { BYTES = 16 * 64 * 2 };
  const int64_t shape[4] = {1, 16, 1, 64}, stats[3] = {1, 1, 16};
  fovea_tensor t = tensor(FOVEA_CODE_BFLOAT, 16, 4, shape), t_lse = tensor(FOVEA_CODE_FLOAT, 32, 3, stats);
  t.device.type = t_lse.device.type = FOVEA_CUDA;
  fovea_problem p = FOVEA_PROBLEM_INIT;
  p.q = p.k = p.v = p.o = &t;
  p.lse = &t_lse;
  fovea_buffers b = FOVEA_BUFFERS_INIT;
  b.q = gpu_memory(BYTES);
  b.k = gpu_memory(BYTES);
  b.v = gpu_memory(BYTES);
  b.o = gpu_memory(BYTES);
  b.lse = gpu_memory(BYTES);
  p.pass = pass;
  if (pass == FOVEA_BACKWARD) {
    p.d_o = p.dq = p.dk = p.dv = &t;
    b.d_o = gpu_memory(BYTES);
    b.dq = gpu_memory(BYTES);
    b.dk = gpu_memory(BYTES);
    b.dv = gpu_memory(BYTES);
  }
  fovea_plan* plan = NULL;
  if (fovea_plan_create(&p, NULL, &plan) != FOVEA_OK) {
    fprintf(stderr, "no plan: %s\n", fovea_last_error());
    return -1;
  }
  b.workspace_size = fovea_plan_workspace_size(plan);
  b.workspace = b.workspace_size > 0 ? gpu_memory(b.workspace_size) : NULL;
  double each[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) { /* the first loads the kernels */
    wait_for_gpu();
    const double start = now();
    for (int i = 0; i < RUNS; ++i) {
      if (fovea_run(plan, &b) != FOVEA_OK) {
        fprintf(stderr, "%s\n", fovea_last_error());
        return -1;
      }
    }
    if (round >= 0) each[round] = (now() - start) / RUNS;
  }
  wait_for_gpu();
  const double middle = median(each);
  printf("fovea_run of a tiny %s on %s: median %.0f ns, fastest %.0f ns\n",
         pass == FOVEA_FORWARD ? "forward" : "backward", fovea_plan_backend(plan), middle, each[0]);
  fovea_plan_destroy(plan);
  return middle;
}

/* One query of a head of 64 over the second row of a cache in pages of 16. `appends`: that row is new, and rotated. */
static double decode_step(fovea_device device, int appends) {
  enum { PAGES = 4, PAGE = 16, SIZE = 64, BYTES = PAGES * PAGE * SIZE * 4 };
  const int on_gpu = device.type == FOVEA_CUDA;
  const int code = on_gpu ? FOVEA_CODE_BFLOAT : FOVEA_CODE_FLOAT, bits = on_gpu ? 16 : 32;
  const int64_t row[4] = {1, 1, 1, SIZE}, pages[4] = {PAGES, PAGE, 1, SIZE}, one[1] = {1},
                entries[2] = {1, 2}, angles[2] = {2 * PAGE, SIZE / 2};
  fovea_tensor t_row = tensor((fovea_dtype_code)code, bits, 4, row),
               t_pages = tensor((fovea_dtype_code)code, bits, 4, pages),
               t_angles = tensor((fovea_dtype_code)code, bits, 2, angles),
               t_used = tensor(FOVEA_CODE_INT, 32, 1, one), t_table = tensor(FOVEA_CODE_INT, 32, 2, entries);
  t_row.device = t_pages.device = t_angles.device = t_used.device = t_table.device = device;
  fovea_problem p = FOVEA_PROBLEM_INIT;
  p.q = p.o = &t_row;
  p.k = p.v = &t_pages;
  p.seqused_k = &t_used;
  p.page_table = &t_table;
  p.causal = 1;
  if (appends) {
    p.k_new = p.v_new = &t_row;
    p.rotary_cos = p.rotary_sin = &t_angles;
  }
  static float zeros[8][BYTES / sizeof(float)];
  static int32_t used[1] = {1}, table[2] = {2, 0};
  void* at[8];
  for (int i = 0; i < 8; ++i) at[i] = on_gpu ? gpu_memory(BYTES) : zeros[i];
  fovea_buffers b = FOVEA_BUFFERS_INIT;
  b.q = at[0];
  b.k = at[1];
  b.v = at[2];
  b.o = at[3];
  if (appends) {
    b.k_new = at[4];
    b.v_new = at[5];
    b.rotary_cos = at[6];
    b.rotary_sin = at[7];
  }
  /* On a GPU lengths and tables are whatever its memory holds: that stays inside the pages, and the host does not read it. */
  b.seqused_k = on_gpu ? gpu_memory(64) : used;
  b.page_table = on_gpu ? gpu_memory(64) : table;
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.num_threads = 1;
  fovea_plan* plan = NULL;
  if (fovea_plan_create(&p, &options, &plan) != FOVEA_OK) {
    fprintf(stderr, "no plan: %s\n", fovea_last_error());
    return -1;
  }
  b.workspace_size = fovea_plan_workspace_size(plan);
  if (fovea_workspace_create(device, b.workspace_size, &b.workspace) != FOVEA_OK) return -1;
  double each[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) {
    if (on_gpu) wait_for_gpu();
    const double start = now();
    for (int i = 0; i < RUNS; ++i) {
      if (fovea_run(plan, &b) != FOVEA_OK) {
        fprintf(stderr, "%s\n", fovea_last_error());
        return -1;
      }
    }
    if (round < 0) continue;
    each[round] = (now() - start) / RUNS;
    if (!on_gpu) each[round] /= slowness();
  }
  if (on_gpu) wait_for_gpu();
  const double middle = median(each);
  printf("fovea_run of a step of decoding%s on %s: median %.0f ns, fastest %.0f ns\n",
         appends ? " that appends and rotates" : "", fovea_plan_backend(plan), middle, each[0]);
  fovea_plan_destroy(plan);
  fovea_workspace_destroy(device, b.workspace);
  return middle;
}

int main(void) {
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = "reference";
  const double nanoseconds = packed_backward(&options);
  printf("fovea_run of an empty packed backward: median %.0f ns\n", nanoseconds);
  int wrong = nanoseconds < 0 || nanoseconds > 1000;
  const fovea_device cpu = {FOVEA_CPU, 0}, gpu = {FOVEA_CUDA, 0};
  for (int appends = 0; appends < 2; ++appends) {
    const double step = decode_step(cpu, appends);
    wrong |= step < 0 || step > 6000;
  }
  if (fovea_cuda_device_count() == 0) {
    printf("no GPU, so nothing is measured there: %s\n", fovea_cuda());
  } else {
    const double forward = tiny_on_gpu(FOVEA_FORWARD), backward = tiny_on_gpu(FOVEA_BACKWARD),
                 bare = bare_launch();
    printf("the driver's launch of an empty kernel: median %.0f ns\n", bare);
    wrong |= forward < 0 || backward < 0 || bare < 0 || (forward > 3000 && forward > bare + 1000);
    for (int appends = 0; appends < 2; ++appends) {
      const double step = decode_step(gpu, appends);
      wrong |= step < 0 || (step > 6000 && step > (1 + appends) * (bare + 1000));
    }
  }
  return wrong;
}
