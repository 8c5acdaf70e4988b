/* The C ABI from C: results of small problems against the formula, and every function on good and on null
 * arguments. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fovea/fovea.h"

static int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              fovea_last_error());                                                            \
      ++failures;                                                                             \
    }                                                                                         \
  } while (0)

enum { B = 2, SQ = 3, SK = 5, HQ = 4, HKV = 2, D = 8, DV = 6 };

typedef struct {
  float q[B * SQ * HQ * D], k[B * SK * HKV * D], v[B * SK * HKV * DV], o[B * SQ * HQ * DV], lse[B * HQ * SQ];
  float d_o[B * SQ * HQ * DV], dq[B * SQ * HQ * D], dk[B * SK * HKV * D], dv[B * SK * HKV * DV];
  int64_t shape_q[4], shape_k[4], shape_v[4], shape_o[4], shape_lse[3];
  fovea_tensor tensor_q, tensor_k, tensor_v, tensor_o, tensor_lse, tensor_d_o, tensor_dq, tensor_dk,
      tensor_dv;
} example;

static void fill(float* x, size_t count, unsigned seed) {
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static fovea_tensor tensor(void* data, int32_t ndim, const int64_t* shape) {
  fovea_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.type = FOVEA_CPU;
  t.ndim = ndim;
  t.dtype.code = FOVEA_CODE_FLOAT;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

#define COUNT(x) (sizeof(x) / sizeof((x)[0]))

static void init(example* e) {
  const int64_t shape_q[4] = {B, SQ, HQ, D}, shape_k[4] = {B, SK, HKV, D}, shape_v[4] = {B, SK, HKV, DV};
  const int64_t shape_o[4] = {B, SQ, HQ, DV}, shape_lse[3] = {B, HQ, SQ};
  memset(e, 0, sizeof *e);
  memcpy(e->shape_q, shape_q, sizeof shape_q);
  memcpy(e->shape_k, shape_k, sizeof shape_k);
  memcpy(e->shape_v, shape_v, sizeof shape_v);
  memcpy(e->shape_o, shape_o, sizeof shape_o);
  memcpy(e->shape_lse, shape_lse, sizeof shape_lse);
  fill(e->q, COUNT(e->q), 1);
  fill(e->k, COUNT(e->k), 2);
  fill(e->v, COUNT(e->v), 3);
  fill(e->d_o, COUNT(e->d_o), 4);
  e->tensor_q = tensor(e->q, 4, e->shape_q);
  e->tensor_k = tensor(e->k, 4, e->shape_k);
  e->tensor_v = tensor(e->v, 4, e->shape_v);
  e->tensor_o = tensor(e->o, 4, e->shape_o);
  e->tensor_lse = tensor(e->lse, 3, e->shape_lse);
  e->tensor_d_o = tensor(e->d_o, 4, e->shape_o);
  e->tensor_dq = tensor(e->dq, 4, e->shape_q);
  e->tensor_dk = tensor(e->dk, 4, e->shape_k);
  e->tensor_dv = tensor(e->dv, 4, e->shape_v);
}

static fovea_problem forward_of(const example* e) {
  fovea_problem p = FOVEA_PROBLEM_INIT;
  p.q = &e->tensor_q;
  p.k = &e->tensor_k;
  p.v = &e->tensor_v;
  p.o = &e->tensor_o;
  p.lse = &e->tensor_lse;
  p.causal = 1;
  return p;
}

static fovea_problem backward_of(const example* e) {
  fovea_problem p = forward_of(e);
  p.pass = FOVEA_BACKWARD;
  p.d_o = &e->tensor_d_o;
  p.dq = &e->tensor_dq;
  p.dk = &e->tensor_dk;
  p.dv = &e->tensor_dv;
  return p;
}

/* The formula of fovea.h in double, causal. */
static double error_of_forward(const example* e) {
  double worst = 0;
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < HQ; ++h) {
      for (int i = 0; i < SQ; ++i) {
        double weights[SK], sum = 0;
        const int keys = i + SK - SQ + 1;
        for (int j = 0; j < keys; ++j) {
          double score = 0;
          for (int c = 0; c < D; ++c) {
            score += (double)e->q[((b * SQ + i) * HQ + h) * D + c] *
                     (double)e->k[((b * SK + j) * HKV + h / (HQ / HKV)) * D + c];
          }
          weights[j] = exp(score / sqrt((double)D));
          sum += weights[j];
        }
        worst = fmax(worst, fabs(log(sum) - (double)e->lse[(b * HQ + h) * SQ + i]));
        for (int c = 0; c < DV; ++c) {
          double o = 0;
          for (int j = 0; j < keys; ++j) {
            o += weights[j] / sum * (double)e->v[((b * SK + j) * HKV + h / (HQ / HKV)) * DV + c];
          }
          worst = fmax(worst, fabs(o - (double)e->o[((b * SQ + i) * HQ + h) * DV + c]));
        }
      }
    }
  }
  return worst;
}

/* sum(d_o * o) after a step of q, k, v along their gradients grows by step * |gradient|^2. */
static void check_gradients(void) {
  static example e;
  init(&e);
  const fovea_problem forward = forward_of(&e), backward = backward_of(&e);
  CHECK(fovea_attend(&forward, NULL, 0, 0) == FOVEA_OK);
  double before = 0, after = 0, norm = 0;
  for (size_t i = 0; i < COUNT(e.o); ++i) before += (double)e.o[i] * (double)e.d_o[i];
  CHECK(fovea_attend(&backward, NULL, 0, 0) == FOVEA_OK);
  const double step = 1e-3;
#define STEP(x, dx)                            \
  for (size_t i = 0; i < COUNT(x); ++i) {      \
    norm += (double)(dx)[i] * (double)(dx)[i]; \
    (x)[i] += (float)(step * (double)(dx)[i]); \
  }
  STEP(e.q, e.dq)
  STEP(e.k, e.dk)
  STEP(e.v, e.dv)
#undef STEP
  CHECK(fovea_attend(&forward, NULL, 0, 0) == FOVEA_OK);
  for (size_t i = 0; i < COUNT(e.o); ++i) after += (double)e.o[i] * (double)e.d_o[i];
  CHECK(norm > 1e-2);
  CHECK(fabs((after - before) / (step * norm) - 1) < 0.02);
}

static void check_one_call(void) {
  static example e;
  init(&e);
  const fovea_problem p = forward_of(&e);
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);
  CHECK(error_of_forward(&e) < 1e-5);
}

static void check_every_backend(void) {
  int can = 0;
  CHECK(fovea_backend_count() >= 1);
  CHECK(strcmp(fovea_backend_name(fovea_backend_count() - 1), "reference") == 0);
  CHECK(fovea_backend_unavailable_because(fovea_backend_count() - 1)[0] == '\0');
  CHECK(fovea_backend_name(-1)[0] == '\0');
  CHECK(fovea_backend_name(fovea_backend_count())[0] == '\0');
  CHECK(fovea_backend_unavailable_because(-1)[0] != '\0');
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    static example e;
    init(&e);
    const fovea_problem p = forward_of(&e);
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = fovea_backend_name(i);
    fovea_plan* plan = NULL;
    const fovea_status status = fovea_plan_create(&p, &options, &plan);
    if (status == FOVEA_UNSUPPORTED) {
      CHECK(plan == NULL);
      CHECK(strstr(fovea_last_error(), options.backend) != NULL);
      continue;
    }
    ++can;
    CHECK(status == FOVEA_OK);
    CHECK(strcmp(fovea_plan_backend(plan), options.backend) == 0);
    CHECK(strstr(fovea_plan_reason(plan), options.backend) != NULL);
    CHECK(fovea_plan_flops(plan) == 2.0 * (D + DV) * (3 + 4 + 5) * B * HQ);
    fovea_buffers buffers = FOVEA_BUFFERS_INIT;
    buffers.q = e.q;
    buffers.k = e.k;
    buffers.v = e.v;
    buffers.o = e.o;
    buffers.lse = e.lse;
    buffers.workspace_size = fovea_plan_workspace_size(plan);
    const size_t rounded = (buffers.workspace_size + 63) / 64 * 64;
    buffers.workspace = rounded ? aligned_alloc(FOVEA_WORKSPACE_ALIGNMENT, rounded) : NULL;
    for (int repeat = 0; repeat < 2; ++repeat) {
      memset(e.o, 0x5a, sizeof e.o);
      CHECK(fovea_run(plan, &buffers) == FOVEA_OK);
      CHECK(error_of_forward(&e) < 1e-5);
    }
    free(buffers.workspace);
    fovea_plan_destroy(plan);
  }
  CHECK(can >= 1);
}

/* A DLTensor has the fields of fovea_tensor in this order. */
static void check_dlpack_layout(void) {
  CHECK(offsetof(fovea_tensor, data) == 0);
  CHECK(offsetof(fovea_tensor, device) == sizeof(void*));
  CHECK(offsetof(fovea_tensor, ndim) == sizeof(void*) + 8);
  CHECK(offsetof(fovea_tensor, dtype) == sizeof(void*) + 12);
  CHECK(offsetof(fovea_tensor, shape) == sizeof(void*) + 16);
  CHECK(offsetof(fovea_tensor, strides) == 2 * sizeof(void*) + 16);
  CHECK(offsetof(fovea_tensor, byte_offset) == 3 * sizeof(void*) + 16);
  CHECK(sizeof(fovea_dtype) == 4);
}

static void check_byte_offset_and_strides(void) {
  static example e, plain;
  static float shifted[COUNT(e.q) + 16];
  init(&e);
  init(&plain);
  const fovea_problem expected = forward_of(&plain);
  CHECK(fovea_attend(&expected, NULL, 0, 0) == FOVEA_OK);

  memcpy(shifted + 16, e.q, sizeof e.q);
  e.tensor_q.data = shifted;
  e.tensor_q.byte_offset = 16 * sizeof(float);
  /* k as (B, HKV, SK, D) in memory. */
  static float swapped[COUNT(e.k)];
  for (int b = 0; b < B; ++b)
    for (int j = 0; j < SK; ++j)
      for (int h = 0; h < HKV; ++h)
        memcpy(&swapped[((b * HKV + h) * SK + j) * D], &e.k[((b * SK + j) * HKV + h) * D], D * sizeof(float));
  const int64_t strides[4] = {HKV * SK * D, D, SK * D, 1};
  e.tensor_k.data = swapped;
  e.tensor_k.strides = strides;
  const fovea_problem p = forward_of(&e);
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);
  CHECK(memcmp(e.o, plain.o, sizeof e.o) == 0);
  CHECK(memcmp(e.lse, plain.lse, sizeof e.lse) == 0);
}

/* Structs of older and newer headers. */
static void check_struct_sizes(void) {
  static example e;
  init(&e);

  /* Older: only q, k, v, o were known; lse and window come from the defaults, whatever lies behind. */
  fovea_problem p = forward_of(&e);
  p.struct_size = offsetof(fovea_problem, lse);
  p.causal = 0;
  p.window_left = 0;
  p.softcap = -1;
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);
  static example full;
  init(&full);
  fovea_problem unmasked = forward_of(&full);
  unmasked.causal = 0;
  CHECK(fovea_attend(&unmasked, NULL, 0, 0) == FOVEA_OK);
  CHECK(memcmp(e.o, full.o, sizeof e.o) == 0);
  p.struct_size = offsetof(fovea_problem, o);
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_INVALID_ARGUMENT);
  CHECK(strcmp(fovea_last_error_argument(), "problem") == 0);

  /* Before there were expressions. */
  p = forward_of(&full);
  p.causal = 0;
  p.struct_size = offsetof(fovea_problem, score);
  p.score = "nonsense";
  p.num_named = 5;
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);
  CHECK(memcmp(e.o, full.o, sizeof e.o) == 0);

  /* Newer: more fields, all zero, or one that is not. */
  struct {
    fovea_problem known;
    int64_t later[4];
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.known = forward_of(&e);
  newer.known.struct_size = sizeof newer;
  CHECK(fovea_attend(&newer.known, NULL, 0, 0) == FOVEA_OK);
  newer.later[3] = 1;
  CHECK(fovea_attend(&newer.known, NULL, 0, 0) == FOVEA_INVALID_ARGUMENT);
  CHECK(strcmp(fovea_last_error_argument(), "problem") == 0);

  /* Buffers of an older header. */
  p = forward_of(&e);
  p.lse = NULL;
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = "reference";
  fovea_plan* plan = NULL;
  CHECK(fovea_plan_create(&p, &options, &plan) == FOVEA_OK);
  fovea_buffers b = FOVEA_BUFFERS_INIT;
  b.struct_size = offsetof(fovea_buffers, lse);
  b.q = e.q;
  b.k = e.k;
  b.v = e.v;
  b.o = e.o;
  b.lse = e.lse; /* behind the end: not read, or it would be one too many */
  CHECK(fovea_run(plan, &b) == FOVEA_OK);
  b.struct_size = sizeof b;
  CHECK(fovea_run(plan, &b) == FOVEA_INVALID_ARGUMENT);
  fovea_plan_destroy(plan);

  options.struct_size = sizeof(size_t); /* an options struct that knew no field at all */
  options.backend = "nonsense";
  CHECK(fovea_plan_create(&p, &options, &plan) == FOVEA_OK);
  fovea_plan_destroy(plan);
}

/* A score that reads a number (a tensor without dimensions) and a bias: as scale and bias say it. */
static void check_expressions(void) {
  static example expected, e;
  static float bias[HQ * SQ * SK], dbias[HQ * SQ * SK];
  float gain = 0.5f, dgain = 77;
  init(&expected);
  init(&e);
  fill(bias, COUNT(bias), 5);
  const int64_t shape_of_argument[4] = {1, HQ, SQ, SK}, shape[3] = {HQ, SQ, SK};
  fovea_tensor tensor_argument = tensor(bias, 4, shape_of_argument), tensor_bias = tensor(bias, 3, shape);
  fovea_tensor tensor_gain = tensor(&gain, 0, NULL), tensor_dgain = tensor(&dgain, 0, NULL);
  fovea_tensor tensor_dbias = tensor(dbias, 3, shape);
  fovea_problem p = forward_of(&expected);
  p.scale = 0.5 / sqrt((double)D);
  p.bias = &tensor_argument;
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);

  fovea_named_tensor named[2] = {{"gain", &tensor_gain, NULL}, {"bias", &tensor_bias, NULL}};
  p = forward_of(&e);
  p.causal = 0;
  p.score = "gain * s + bias[h, q, k]";
  p.sees = "k <= q + nk - nq";
  p.named = named;
  p.num_named = 2;
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);
  double worst = 0;
  for (size_t i = 0; i < COUNT(e.o); ++i) worst = fmax(worst, fabs((double)e.o[i] - (double)expected.o[i]));
  CHECK(worst < 1e-5);

  /* The same by a plan, with the pointers of a run; and the gradients. */
  static example planned;
  init(&planned);
  fovea_plan* plan = NULL;
  CHECK(fovea_plan_create(&p, NULL, &plan) == FOVEA_OK);
  fovea_buffers b = FOVEA_BUFFERS_INIT;
  b.q = planned.q;
  b.k = planned.k;
  b.v = planned.v;
  b.o = planned.o;
  b.lse = planned.lse;
  b.named[0] = &gain;
  b.named[1] = bias;
  b.workspace_size = fovea_plan_workspace_size(plan);
  CHECK(fovea_workspace_create(fovea_plan_device(plan), b.workspace_size, &b.workspace) == FOVEA_OK);
  CHECK(fovea_run(plan, &b) == FOVEA_OK);
  CHECK(memcmp(planned.o, e.o, sizeof e.o) == 0);
  fovea_workspace_destroy(fovea_plan_device(plan), b.workspace);
  fovea_plan_destroy(plan);

  fovea_problem backward = backward_of(&e);
  named[0].gradient = &tensor_dgain;
  named[1].gradient = &tensor_dbias;
  backward.causal = 0;
  backward.score = p.score;
  backward.sees = p.sees;
  backward.named = named;
  backward.num_named = 2;
  CHECK(fovea_attend(&backward, NULL, 0, 0) == FOVEA_OK);
  double of_gain = 0; /* gain scales what q does */
  for (size_t i = 0; i < COUNT(e.q); ++i) of_gain += (double)e.q[i] * (double)e.dq[i] / (double)gain;
  CHECK(fabs(of_gain - (double)dgain) < 1e-5);
  CHECK(dbias[SK - 1] == 0); /* the first query does not see the last key */
}

static void check_merge(void) {
  static example all, first, second;
  init(&all);
  fovea_problem p = forward_of(&all);
  p.causal = 0;
  CHECK(fovea_attend(&p, NULL, 0, 0) == FOVEA_OK);

  init(&first);
  init(&second);
  const int64_t strides_k[4] = {SK * HKV * D, HKV * D, D, 1}, strides_v[4] = {SK * HKV * DV, HKV * DV, DV, 1};
  enum { SPLIT = 2 };
  first.shape_k[1] = first.shape_v[1] = SPLIT;
  second.shape_k[1] = second.shape_v[1] = SK - SPLIT;
  first.tensor_k.strides = second.tensor_k.strides = strides_k;
  first.tensor_v.strides = second.tensor_v.strides = strides_v;
  second.tensor_k.data = second.k + SPLIT * HKV * D;
  second.tensor_v.data = second.v + SPLIT * HKV * DV;
  fovea_problem p1 = forward_of(&first), p2 = forward_of(&second);
  p1.causal = p2.causal = 0;
  CHECK(fovea_attend(&p1, NULL, 0, 0) == FOVEA_OK);
  CHECK(fovea_attend(&p2, NULL, 0, 0) == FOVEA_OK);

  const fovea_tensor* o_parts[2] = {&first.tensor_o, &second.tensor_o};
  const fovea_tensor* lse_parts[2] = {&first.tensor_lse, &second.tensor_lse};
  CHECK(fovea_merge(2, o_parts, lse_parts, &first.tensor_o, &first.tensor_lse, NULL) ==
        FOVEA_OK); /* in place */
  double worst = 0;
  for (size_t i = 0; i < COUNT(all.o); ++i) worst = fmax(worst, fabs((double)all.o[i] - (double)first.o[i]));
  for (size_t i = 0; i < COUNT(all.lse); ++i)
    worst = fmax(worst, fabs((double)all.lse[i] - (double)first.lse[i]));
  CHECK(worst < 1e-5);
}

static void check_texts(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR,
           FOVEA_VERSION_PATCH);
  CHECK(strcmp(fovea_version(), version) == 0);
  CHECK(strcmp(fovea_status_name(FOVEA_OK), "ok") == 0);
  CHECK(strcmp(fovea_status_name(FOVEA_UNSUPPORTED), "unsupported") == 0);
  CHECK(strcmp(fovea_status_name((fovea_status)77), "unknown status") == 0);
  CHECK(fovea_machine()[0] != '\0');
  CHECK(fovea_default_threads() >= 1);
}

static void check_null_plans(void) {
  fovea_plan_destroy(NULL);
  CHECK(fovea_plan_workspace_size(NULL) == 0);
  CHECK(fovea_plan_backend(NULL)[0] == '\0');
  CHECK(fovea_plan_reason(NULL)[0] == '\0');
  CHECK(fovea_plan_flops(NULL) == 0);
  CHECK(fovea_run(NULL, NULL) == FOVEA_INVALID_ARGUMENT);
}

/* A backend name longer than the room for messages: cut, and still a string. */
static void check_long_messages(void) {
  static example e;
  static char name[10000];
  init(&e);
  memset(name, 'x', sizeof name - 1);
  const fovea_problem p = forward_of(&e);
  fovea_options options = FOVEA_OPTIONS_INIT;
  options.backend = name;
  fovea_plan* plan = NULL;
  CHECK(fovea_plan_create(&p, &options, &plan) == FOVEA_INVALID_ARGUMENT);
  const size_t length = strlen(fovea_last_error());
  CHECK(length > 100 && length < 5000);
  CHECK(strcmp(fovea_last_error() + length - 3, "...") == 0);
}

int main(void) {
  CHECK(fovea_last_error()[0] == '\0'); /* before any failure */
  check_texts();
  check_dlpack_layout();
  check_one_call();
  check_every_backend();
  check_gradients();
  check_byte_offset_and_strides();
  check_struct_sizes();
  check_expressions();
  check_merge();
  check_null_plans();
  check_long_messages();
  printf("C ABI of fovea %s on %s: %d failures\n", fovea_version(), fovea_machine(), failures);
  return failures ? 1 : 0;
}
