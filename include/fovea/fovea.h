/* Fovea: exact attention, tile by tile. The C ABI.
 *
 *   O = softmax(scale * Q K^T + terms) V        and its gradients, in memory that grows with the sequence.
 *
 * Use: describe the problem (shapes, strides, types, features) -> fovea_plan_create validates it once and
 * picks a backend -> fovea_run executes it on pointers, as often as wanted, from as many threads as wanted
 * (each call with a workspace of its own). fovea_attend does all three for one call.
 *
 * Errors: every function that can fail returns a fovea_status; fovea_last_error() then holds a message of
 * this thread that names the argument, what came, what was expected and the remedy. Nothing is written to any
 * output when the status is not FOVEA_OK. No function throws, prints or exits.
 *
 * Structs carry their size in `struct_size` so that they can grow: fill them with the FOVEA_*_INIT macros. A
 * smaller struct comes from an older header: what it lacks takes its default. A larger one comes from a newer
 * header: it is accepted when all that this library does not know is zero, for zero is the default of every
 * field added later.
 *
 * Sizes: a dimension is at most 2^31 - 1, a tensor at most 2^57 bytes, head sizes are 1 to 576. Batch and
 * sequence lengths may be 0. Strides are not negative; those of outputs leave each element memory of its own.
 */
#ifndef FOVEA_FOVEA_H
#define FOVEA_FOVEA_H

#include <stddef.h>
#include <stdint.h>

#if defined(FOVEA_STATIC)
#define FOVEA_API
#elif defined(_WIN32)
#if defined(FOVEA_BUILDING)
#define FOVEA_API __declspec(dllexport)
#else
#define FOVEA_API __declspec(dllimport)
#endif
#else
#define FOVEA_API __attribute__((visibility("default")))
#endif

#if defined(__cplusplus)
#define FOVEA_NOEXCEPT noexcept
extern "C" {
#else
#define FOVEA_NOEXCEPT
#endif

#define FOVEA_VERSION_MAJOR 0
#define FOVEA_VERSION_MINOR 1
#define FOVEA_VERSION_PATCH 0

typedef enum fovea_status {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1, /* the caller's input is wrong; the message names the argument and the remedy */
  FOVEA_UNSUPPORTED = 2, /* valid, but the backend asked for cannot do it; the message names the clause */
  FOVEA_OUT_OF_MEMORY = 3,
  FOVEA_INTERNAL = 4,
  FOVEA_CUDA_ERROR = 5, /* CUDA refused, or earlier work on the device failed; the message names the kernel */
  FOVEA_STATUS_WIDTH = 0x7fffffff /* no status: makes the enum as wide as int in every language */
} fovea_status;

/* ---- tensors ---- */

/* The three type fields, the device and the order of fovea_tensor are those of DLPack 0.8 (dlpack.h,
 * DLTensor): a DLTensor* may be passed where a fovea_tensor* is expected. */
typedef struct fovea_dtype {
  uint8_t code; /* one of fovea_dtype_code */
  uint8_t bits;
  uint16_t lanes; /* always 1 */
} fovea_dtype;

typedef enum fovea_dtype_code {
  FOVEA_CODE_INT = 0,
  FOVEA_CODE_UINT = 1,
  FOVEA_CODE_FLOAT = 2,
  FOVEA_CODE_BFLOAT = 4,
  FOVEA_CODE_BOOL = 6,
  FOVEA_CODE_FLOAT8_E4M3FN = 10
} fovea_dtype_code;

typedef enum fovea_device_type { FOVEA_CPU = 1, FOVEA_CUDA = 2 } fovea_device_type;

typedef struct fovea_device {
  int32_t type; /* one of fovea_device_type */
  int32_t id;
} fovea_device;

typedef struct fovea_tensor {
  void* data; /* may be NULL in a description given to fovea_plan_create */
  fovea_device device;
  int32_t ndim;
  fovea_dtype dtype;
  const int64_t* shape;
  const int64_t* strides; /* in elements; NULL means compact, row-major */
  uint64_t byte_offset;
} fovea_tensor;

/* ---- the problem ---- */

typedef enum fovea_pass { FOVEA_FORWARD = 0, FOVEA_BACKWARD = 1 } fovea_pass;

/* What is asked. Tensors are read during fovea_plan_create only: their data pointers are not kept.
 * Where data of a NULL pointer would tell more (cu_seqlens), the plan takes the worst case.
 *
 * Dimensions: B batch, Sq/Sk query/key length, Hq/Hkv query/key heads (Hq % Hkv == 0), D head size, Dv value
 * head size. Types: q, k, v (but for those of 8 bits, below) and d_o share one of float32, float16, bfloat16 (float64: reference
 * backend only); o, dq, dk and dv have that type or float32. The last dimension of q k v o d_o dq dk dv is contiguous, and so
 * are the one-dimensional tensors (but alibi); all other strides are free. Packed sequences: with
 * cu_seqlens_q (B+1 int32, from 0, non-decreasing), q, o, d_o, dq are (total_q, Hq, D) and lse is (Hq,
 * total_q); likewise k, v with cu_seqlens_k, which needs cu_seqlens_q; the backward takes both or neither. Rows past
 * the last sequence give o = 0, lse = -inf, gradients 0. Where a shape below names Sq or Sk, packed problems mean the longest sequence:
 * max_seqlen. Contents of cu_seqlens and seqused on the CPU are checked by fovea_plan_create when there is
 * data, and by every run.
 *
 * Key-value caches (forward only): k and v may hold more than one call reads. With `page_table`
 * they are pools of pages, (pages, page, Hkv, D) and (pages, page, Hkv, Dv), of any page size from 1, and row r of sequence
 * b is row r % page of page page_table[b][r / page]: Sk is (most pages) * page, seqused_k is needed, and entries of pages that
 * hold no used key are never read. With `cache_batch` the batch of k and v may be any, and sequence b is sequence
 * cache_batch[b] of it. With `leftpad_k` the first rows of each sequence do not exist: key j is row leftpad_k[b] + j, and
 * the sequence has seqused_k[b] - leftpad_k[b] keys. What these three hold is checked as cu_seqlens is (on GPUs with `check_contents`);
 * what GPUs read by them lies inside of k and v whatever they hold.
 *
 * Keys and values of 8 bits (forward only): k and v may be float8_e4m3fn beside a q of any type. Element x of sequence b and key head
 * h stands for x * k_descale[b][h], or x * v_descale[b][h]; rows of k_new and v_new are divided by these and rounded to the nearest,
 * at most 448 in size. CPUs check that the factors are finite and above 0; GPUs take them as they are without `check_contents`.
 *
 * Queries of 8 bits (forward only): q may be float8_e4m3fn where k and v are. Element x of sequence b and query head h stands for
 * x * q_descale[b][h / (Hq / Hkv)]. o has any of float32, float16, bfloat16, float64 then, and what is of the type of q has the type of
 * o instead: qv, k_new, v_new, and bias and rotary_cos where they are not float32. A rotated q is multiplied by its factor before it is
 * rounded to that type.
 *
 * Queries of values (forward only): with `qv` the values are a part of the keys, as in the latent attention of DeepSeek: the product
 * of a pair is dot(q_i, k_j) + dot(qv_i, v_j), v_j times v_descale where it is of 8 bits. The caller need not hold rows [k | v].
 *
 * Appending: with `k_new` and `v_new` the run first writes their rows to k and v, which are outputs then: row i of sequence b
 * becomes row seqused_k[b] + i of its keys, and the sequence has seqused_k[b] + Snew of them (seqused_k, which is needed, holds
 * the lengths before, and stays as it is). Rows that do not fit are an error that writes nothing on CPUs, and on GPUs
 * with `check_contents`; without it GPUs leave them out.
 * Two sequences that append to one row leave either's there.
 * Rotary embedding: with `rotary_cos` and `rotary_sin` the new rows of k are rotated before, and q for the scores (its memory
 * stays as it is): of the first R elements, pair j becomes (x cos - y sin, x sin + y cos) by column j of row `position`,
 * computed in float32 and rounded once. A pair is (2j, 2j + 1) with `rotary_interleaved`, else (j, j + R/2). New row i is at
 * position rotary_positions[b] + i, or seqused_k[b] + i without them; query i, too, under causal or a window of fewer than Sk
 * keys, else all queries of a sequence at that of i = 0. Positions behind the table are an error on CPUs, NaN on GPUs.
 *
 * Score of query i and key j of one sequence (lengths sq, sk):
 *   s = scale * dot(q_i, k_j), with qv scale * (dot(q_i, k_j) + dot(qv_i, v_j));  s = softcap * tanh(s / softcap) when softcap > 0;
 *   s += -slope * |i + sk - sq - j| (ALiBi);  s += bias[i][j];  masked keys are left out;  a sink adds
 * exp(sink) to the denominator. Row without any key: o = 0, lse = -inf (the sink when there is one),
 * gradients 0.
 *
 * Expressions (docs/expressions.md): with `score` the score is what this text makes of s, the score so far; with
 * `sees` a query sees, of the keys that causal, window and masks leave, those for which this text is true.
 *
 * Lists: with `keys` query i of all heads that share a key head attends to the keys of its list and to no others, in time
 * and memory that grow with the lists. Each entry is a key of its own, so one that stands twice has twice the weight.
 * Entries are positions within the sequence. Causal, window, masks and `sees` leave entries out as they leave out keys.
 * Runs on the CPU check the entries: one below -1, or not below the sequence's length, is an error. On a GPU, where the host
 * does not read them, it makes the query's results NaN, and the gradients of the keys of its list; no memory outside of the
 * tensors is read. Of the GPU backends cuda_simt takes lists. */

/* A tensor that expressions read by its name.
 *
 * name: a letter or _, then letters, digits and _; no name of the language.
 * tensor: 0 to 4 dimensions; float32, float16, bfloat16, int32, uint8 or bool; any strides. A dimension that b, h,
 * hk, q, k, nq or nk alone indexes has room for all its values, or size 1, which then stands for all.
 * gradient: optional output of the backward, for a tensor of floats in a problem with a score: its shape, float32;
 * 0 for elements that the score does not depend on. */
#define FOVEA_MAX_NAMED_TENSORS 8
typedef struct fovea_named_tensor {
  const char* name;
  const fovea_tensor* tensor;
  const fovea_tensor* gradient;
} fovea_named_tensor;

typedef struct fovea_problem {
  size_t struct_size;
  int32_t pass; /* one of fovea_pass */

  /* Inputs of both passes. */
  const fovea_tensor* q; /* (B, Sq, Hq, D) */
  const fovea_tensor* k; /* (B, Sk, Hkv, D) */
  const fovea_tensor* v; /* (B, Sk, Hkv, Dv) */

  /* Forward: outputs. Backward: inputs. */
  const fovea_tensor* o;   /* (B, Sq, Hq, Dv) */
  const fovea_tensor* lse; /* (B, Hq, Sq) float32, natural logarithm; optional in the forward */

  /* Backward only. */
  const fovea_tensor* d_o;   /* (B, Sq, Hq, Dv) */
  const fovea_tensor* dlse;  /* as lse; optional: the gradient that arrives at lse */
  const fovea_tensor* dq;    /* as q, or float32; output */
  const fovea_tensor* dk;    /* as k, or float32; output */
  const fovea_tensor* dv;    /* as v, or float32; output */
  const fovea_tensor* dbias; /* as bias, float32 or bias' type, no broadcast stride; optional output */
  const fovea_tensor* dsink; /* (Hq) float32; optional output */

  /* Optional inputs. A dimension of size 1 broadcasts. */
  const fovea_tensor* bias;         /* (B|1, Hq|1, Sq|1, Sk|1), float32 or the type of q; any strides */
  const fovea_tensor* mask;         /* (B|1, Hq|1, Sq|1, Sk|1), bool or uint8: nonzero = attend */
  const fovea_tensor* block_mask;   /* (B|1, Hq|1, ceil(Sq/block_q), ceil(Sk/block_k)), bool or uint8 */
  const fovea_tensor* alibi;        /* (Hq) or (B, Hq), float32: slopes */
  const fovea_tensor* sink;         /* (Hq) float32: one logit per head */
  const fovea_tensor* cu_seqlens_q; /* (B+1) int32 */
  const fovea_tensor* cu_seqlens_k; /* (B+1) int32 */
  const fovea_tensor* seqused_q; /* (B) int32: used length of each sequence; rows beyond give 0, lse -inf */
  const fovea_tensor* seqused_k; /* (B) int32 */
  const fovea_tensor* rng_state; /* (2) int64: seed, offset; the forward writes it, the backward reads it */

  double scale;                       /* 0 = 1/sqrt(D), with qv 1/sqrt(D + Dv); may be negative */
  int32_t causal;                     /* key j is seen by query i when j <= i + sk - sq */
  int64_t window_left;                /* -1 = unlimited; W keeps i + sk - sq - W <= j */
  int64_t window_right;               /* -1 = unlimited; W keeps j <= i + sk - sq + W */
  double softcap;                     /* 0 = none */
  double dropout;                     /* probability of dropping a weight, in [0, 1) */
  int64_t block_q, block_k;           /* block sizes of block_mask */
  int64_t max_seqlen_q, max_seqlen_k; /* packed only; 0 = read from cu_seqlens, or the total when it has no
                                         data. Runs with a longer sequence are refused */

  const char* score;               /* NULL: s */
  const char* sees;                /* NULL: true */
  const fovea_named_tensor* named; /* the tensors of both */
  int64_t num_named;               /* at most FOVEA_MAX_NAMED_TENSORS */

  const fovea_tensor*
      keys; /* (B|1, Hkv|1, Sq, count) int32, the last dimension contiguous; packed (Hkv|1, total_q,
                               count): the positions of the keys that each query attends to, -1 for none */

  /* Key-value caches. */
  const fovea_tensor*
      page_table; /* (B, most pages) int32, the last dimension contiguous: where rows of k and v lie */
  const fovea_tensor* cache_batch; /* (B) int32: the sequence of k and v that each sequence of q reads */
  const fovea_tensor* leftpad_k;   /* (B) int32: rows in front of the first key, which seqused_k counts */

  /* Appending to the cache. */
  const fovea_tensor* k_new;            /* (B, Snew, Hkv, D), the type of q; packed (total_new, Hkv, D) */
  const fovea_tensor* v_new;            /* (B, Snew, Hkv, Dv); packed (total_new, Hkv, Dv) */
  const fovea_tensor* cu_seqlens_k_new; /* (B+1) int32: packs k_new and v_new */
  const fovea_tensor* rotary_cos;       /* (positions, R/2), float32 or the type of q; R at most D */
  const fovea_tensor* rotary_sin;       /* as rotary_cos */
  const fovea_tensor* rotary_positions; /* (B) int32: where the new rows of each sequence start */
  int64_t rotary_interleaved;           /* not 0: elements 2j and 2j + 1 are a pair */

  /* Keys and values of 8 bits. */
  const fovea_tensor*
      k_descale; /* (B|1, Hkv|1) float32, above 0: what the elements of k are multiplied by; NULL: 1 */
  const fovea_tensor* v_descale; /* the same for v */

  const fovea_tensor* qv; /* (B, Sq, Hq, Dv), the type of q; packed as q: queries that meet the values */

  const fovea_tensor* q_descale; /* as k_descale, for a q of 8 bits: a factor for each key head */
} fovea_problem;

/* What a pass does with a tensor. A forward with k_new writes k and v, too. */
typedef enum fovea_access { FOVEA_ABSENT = 0, FOVEA_READ = 1, FOVEA_WRITE = 2 } fovea_access;

/* The tensors of a problem, once, for code that goes through all of them: X(field, Name, forward, backward, meaning)
 * with the field of fovea_problem and fovea_buffers, the name in CamelCase, the fovea_access of each pass, and what the
 * elements are, in words. */
#define FOVEA_TENSORS(X) FOVEA_ATTENTION_TENSORS(X) FOVEA_APPEND_TENSORS(X)
#define FOVEA_ATTENTION_TENSORS(X)                                                               \
  X(q, Q, FOVEA_READ, FOVEA_READ, "queries")                                                     \
  X(k, K, FOVEA_READ, FOVEA_READ, "keys")                                                        \
  X(v, V, FOVEA_READ, FOVEA_READ, "values")                                                      \
  X(o, O, FOVEA_WRITE, FOVEA_READ, "result")                                                     \
  X(lse, Lse, FOVEA_WRITE, FOVEA_READ, "log-sum-exp of each row's scores")                       \
  X(d_o, DO, FOVEA_ABSENT, FOVEA_READ, "gradient of o")                                          \
  X(dlse, DLse, FOVEA_ABSENT, FOVEA_READ, "gradient of lse")                                     \
  X(dq, DQ, FOVEA_ABSENT, FOVEA_WRITE, "gradient of q")                                          \
  X(dk, DK, FOVEA_ABSENT, FOVEA_WRITE, "gradient of k")                                          \
  X(dv, DV, FOVEA_ABSENT, FOVEA_WRITE, "gradient of v")                                          \
  X(dbias, DBias, FOVEA_ABSENT, FOVEA_WRITE, "gradient of bias")                                 \
  X(dsink, DSink, FOVEA_ABSENT, FOVEA_WRITE, "gradient of sink")                                 \
  X(bias, Bias, FOVEA_READ, FOVEA_READ, "added to the scores")                                   \
  X(mask, Mask, FOVEA_READ, FOVEA_READ, "nonzero where a query attends to a key")                \
  X(block_mask, BlockMask, FOVEA_READ, FOVEA_READ,                                               \
    "nonzero where a block of queries attends to a block of keys")                               \
  X(alibi, Alibi, FOVEA_READ, FOVEA_READ, "slopes of ALiBi")                                     \
  X(sink, Sink, FOVEA_READ, FOVEA_READ, "a logit for each head")                                 \
  X(cu_seqlens_q, CuSeqlensQ, FOVEA_READ, FOVEA_READ, "where each sequence of queries starts")   \
  X(cu_seqlens_k, CuSeqlensK, FOVEA_READ, FOVEA_READ, "where each sequence of keys starts")      \
  X(seqused_q, SeqUsedQ, FOVEA_READ, FOVEA_READ, "how many queries of each sequence take part")  \
  X(seqused_k, SeqUsedK, FOVEA_READ, FOVEA_READ, "how many keys of each sequence take part")     \
  X(rng_state, RngState, FOVEA_WRITE, FOVEA_READ, "seed and offset of dropout")                  \
  X(keys, Keys, FOVEA_READ, FOVEA_READ, "a list of keys for each query")                         \
  X(page_table, PageTable, FOVEA_READ, FOVEA_ABSENT, "the pages of each sequence of keys")       \
  X(cache_batch, CacheBatch, FOVEA_READ, FOVEA_ABSENT, "which sequence of keys each one reads")  \
  X(leftpad_k, LeftPadK, FOVEA_READ, FOVEA_ABSENT, "rows in front of the keys of each sequence") \
  X(q_descale, QDescale, FOVEA_READ, FOVEA_ABSENT, "factors of the elements of q")               \
  X(k_descale, KDescale, FOVEA_READ, FOVEA_ABSENT, "factors of the elements of k")               \
  X(v_descale, VDescale, FOVEA_READ, FOVEA_ABSENT, "factors of the elements of v")               \
  X(qv, QV, FOVEA_READ, FOVEA_ABSENT, "queries that meet the values")
/* What appending reads, before attention; attention itself knows nothing of it. */
#define FOVEA_APPEND_TENSORS(X)                                                           \
  X(k_new, KNew, FOVEA_READ, FOVEA_ABSENT, "keys to append")                              \
  X(v_new, VNew, FOVEA_READ, FOVEA_ABSENT, "values to append")                            \
  X(cu_seqlens_k_new, CuSeqlensKNew, FOVEA_READ, FOVEA_ABSENT,                            \
    "where each sequence of keys to append starts")                                       \
  X(rotary_cos, RotaryCos, FOVEA_READ, FOVEA_ABSENT, "cosines of each position's angles") \
  X(rotary_sin, RotarySin, FOVEA_READ, FOVEA_ABSENT, "sines of each position's angles")   \
  X(rotary_positions, RotaryPositions, FOVEA_READ, FOVEA_ABSENT,                          \
    "positions of the first key that each sequence appends")

#if defined(__cplusplus)
static inline fovea_problem fovea_problem_defaults() noexcept {
  fovea_problem problem{};
  problem.struct_size = sizeof(fovea_problem);
  problem.window_left = problem.window_right = -1;
  return problem;
}
#define FOVEA_PROBLEM_INIT fovea_problem_defaults()
#else
#define FOVEA_PROBLEM_INIT \
  { .struct_size = sizeof(fovea_problem), .window_left = -1, .window_right = -1 }
#endif

/* How to do it. */
typedef struct fovea_options {
  size_t struct_size;
  const char* backend;   /* NULL = the first backend of the list that can do the problem */
  int32_t num_threads;   /* CPU: 0 = all that the process may use */
  int32_t deterministic; /* backward: bit for bit repeatable */
  void* stream;          /* CUDA: the cudaStream_t of fovea_attend; fovea_buffers has that of fovea_run */
  int32_t num_splits;    /* forward: parts of the keys of a tile of queries, at most, which are computed apart
                            and merged; 0 = as many as pay, 1 = none */
  /* forward: not 0 = the bits of o and lse of a sequence do not depend on which other sequences are in the batch, how many,
   * and where it lies among them. They still depend on its own data, on the problem's head counts, head sizes, types, terms,
   * strides, Sq and Sk, and on num_splits. Packed queries need max_seqlen_q, packed keys max_seqlen_k: bounds that do not come from
   * the batch. Backends that cannot promise it are passed over. */
  int32_t batch_invariant;
  /* CUDA: multiprocessors left to other kernels that run at the same time, as those of NCCL. Kernels whose CTAs stay for the whole
   * launch heed it (Hopper's); others fill the GPU, tile by tile. */
  int32_t sm_margin;
  /* CUDA: not 0 = each run copies its lengths, tables, lists and factors to the host, waits for them, and checks them as CPUs do, before
   * it launches anything. For debugging: such a run waits for its stream, and cannot be captured by a graph. With
   * FOVEA_CHECK_CONTENTS=1 in the environment every plan does so. */
  int32_t check_contents;
} fovea_options;

#if defined(__cplusplus)
static inline fovea_options fovea_options_defaults() noexcept {
  fovea_options options{};
  options.struct_size = sizeof(fovea_options);
  return options;
}
#define FOVEA_OPTIONS_INIT fovea_options_defaults()
#else
#define FOVEA_OPTIONS_INIT \
  { .struct_size = sizeof(fovea_options) }
#endif

/* Pointers of one run, to the first element (any byte_offset added); names as in fovea_problem. A field must
 * be non-NULL when the plan's problem had the tensor and it has elements, and NULL when the problem had no
 * such tensor. Elements lie at multiples of their size. Outputs share no byte with each other, with inputs or
 * with the workspace, though they may interleave as slices of one array do. */
typedef struct fovea_buffers {
  size_t struct_size;
  const void *q, *k, *v; /* k and v are written where the problem has k_new */
  void* o;               /* read in the backward */
  void* lse;             /* read in the backward */
  const void *d_o, *dlse;
  void *dq, *dk, *dv, *dbias, *dsink;
  const void *bias, *mask, *block_mask, *alibi, *sink;
  const void *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  void* rng_state;
  uint64_t seed, offset; /* dropout: say which weights are kept; the backward prefers rng_state where given */
  void* workspace;       /* fovea_plan_workspace_size() bytes, aligned to FOVEA_WORKSPACE_ALIGNMENT */
  size_t workspace_size;
  void* stream; /* CUDA: a cudaStream_t of the plan's device; NULL is the default stream */
  /* In the order of fovea_problem's `named`. */
  const void* named[FOVEA_MAX_NAMED_TENSORS];
  void* named_gradients[FOVEA_MAX_NAMED_TENSORS];
  const void* keys;
  const void *page_table, *cache_batch, *leftpad_k;
  const void *k_new, *v_new, *cu_seqlens_k_new, *rotary_cos, *rotary_sin, *rotary_positions;
  const void *k_descale, *v_descale;
  const void* qv;
  const void* q_descale;
} fovea_buffers;

#if defined(__cplusplus)
static inline fovea_buffers fovea_buffers_defaults() noexcept {
  fovea_buffers buffers{};
  buffers.struct_size = sizeof(fovea_buffers);
  return buffers;
}
#define FOVEA_BUFFERS_INIT fovea_buffers_defaults()
#else
#define FOVEA_BUFFERS_INIT \
  { .struct_size = sizeof(fovea_buffers) }
#endif
#define FOVEA_WORKSPACE_ALIGNMENT 64

/* ---- plans ---- */

typedef struct fovea_plan fovea_plan;

/* Validates `problem` and chooses a backend. `options` may be NULL. On success *plan is to be destroyed by
 * fovea_plan_destroy; on failure *plan is NULL. */
FOVEA_API fovea_status fovea_plan_create(const fovea_problem* problem, const fovea_options* options,
                                         fovea_plan** plan) FOVEA_NOEXCEPT;
FOVEA_API void fovea_plan_destroy(fovea_plan* plan) FOVEA_NOEXCEPT;

/* Bytes that every fovea_run of this plan needs as workspace (may be 0). */
FOVEA_API size_t fovea_plan_workspace_size(const fovea_plan* plan) FOVEA_NOEXCEPT;
/* Name of the backend chosen. Lives as long as the plan. */
FOVEA_API const char* fovea_plan_backend(const fovea_plan* plan) FOVEA_NOEXCEPT;
/* Where its tensors and its workspace lie. */
FOVEA_API fovea_device fovea_plan_device(const fovea_plan* plan) FOVEA_NOEXCEPT;
/* Floating-point operations of the products over the pairs that causal and window keep, or that lists name (multiply and
 * add counted as two; forward 2(D+Dv), with qv 2(D+2Dv), backward 6D+4Dv per pair and query head). Lengths of packed or partly used
 * sequences count where the plan was made with their data; else every sequence counts as the longest. */
FOVEA_API double fovea_plan_flops(const fovea_plan* plan) FOVEA_NOEXCEPT;
/* One line a backend, in order of preference: what was chosen, and the clause that ruled out each other one. */
FOVEA_API const char* fovea_plan_reason(const fovea_plan* plan) FOVEA_NOEXCEPT;
/* The expressions of the problem as the library reads them, one line each: a name, a tab, a text. The names are "score", "d score /
 * d s", "d score / d slope[h]" for each element of a float tensor, and "sees". "" when there are none. Valid until this
 * thread asks again. */
FOVEA_API const char* fovea_plan_expressions(const fovea_plan* plan) FOVEA_NOEXCEPT;

/* ---- blocks that are seen ---- */

typedef enum fovea_seen { FOVEA_SEEN_NONE = 0, FOVEA_SEEN_ALL = 1, FOVEA_SEEN_SOME = 2 } fovea_seen;

/* How many pairs of each block are seen by what causal, window and `sees` say, without computing a score: one fovea_seen for each
 * block of block_q queries and block_k keys of query head `head` of sequence `batch`, row after row of
 * ceil(Sq / block_q) * ceil(Sk / block_k) bytes, which is `size`. None and all are certain; some may stand for either. Named
 * tensors count with their values where they have data on the CPU. Masks, block masks and lists of keys take no part. */
FOVEA_API fovea_status fovea_seen_blocks(const fovea_problem* problem, int64_t batch, int64_t head,
                                         int64_t block_q, int64_t block_k, uint8_t* seen,
                                         size_t size) FOVEA_NOEXCEPT;

/* ---- kernels compiled ahead of time ---- */

/* Compiles the kernels that a plan for `problem` would compile at run time on a GPU of `chip` ("sm_90"), and keeps them in `folder`,
 * an absolute path (NULL: the user's cache), where plans of processes without NVRTC find them too (FOVEA_CACHE_DIR). Needs NVRTC
 * for those that the folder lacks, and no GPU. Tensors need no data, and their device means nothing; shapes, strides and types count as for
 * fovea_plan_create. `num_sms` decides among tile sizes: 0 takes that of the chip's usual GPU. `options` may be NULL. *report, where
 * it is not NULL, gets a line for each kernel, "" when the library holds all: name, registers and spilled bytes of a thread (-1:
 * not known), seconds, "compiled" or "kept", file, with tabs between them. It is valid until this thread asks again.
 * FOVEA_INVALID_ARGUMENT names problem, chip, num_sms, folder or backend; FOVEA_UNSUPPORTED says what is missing. */
FOVEA_API fovea_status fovea_compile(const fovea_problem* problem, const fovea_options* options,
                                     const char* chip, int32_t num_sms, const char* folder,
                                     const char** report) FOVEA_NOEXCEPT;

/* ---- runs ---- */

/* Memory for runs, aligned to 256 bytes, for callers that have no better source: device is
 * fovea_plan_device(), size fovea_plan_workspace_size(). *workspace is NULL when size is 0. On a GPU both
 * calls synchronise with it: make the workspace once, not for each run. */
FOVEA_API fovea_status fovea_workspace_create(fovea_device device, size_t size,
                                              void** workspace) FOVEA_NOEXCEPT;
FOVEA_API void fovea_workspace_destroy(fovea_device device, void* workspace) FOVEA_NOEXCEPT;

/* Runs the plan. No allocation, lock or environment look-up; several threads may run one plan at the same
 * time, each with a workspace of its own.
 *
 * On a GPU the work is put on buffers->stream, and FOVEA_OK says that it was: results are there once the
 * stream gets past it. Nothing synchronises, so the call may be captured in a CUDA graph, and workspace and
 * tensors are in use until the work is done. The caller's current device stays what it is. Host pointers,
 * pointers and streams of another GPU and misaligned pointers are refused before anything is launched; what
 * cu_seqlens and seqused hold is not read by the host without `check_contents`, which synchronises, and must be right. */
FOVEA_API fovea_status fovea_run(const fovea_plan* plan, const fovea_buffers* buffers) FOVEA_NOEXCEPT;

/* Plan, workspace and run in one call, with the data pointers of the tensors in `problem`. On a GPU the
 * workspace comes from the device's memory pool, in the order of options->stream (cudaMallocAsync). */
FOVEA_API fovea_status fovea_attend(const fovea_problem* problem, const fovea_options* options, uint64_t seed,
                                    uint64_t offset) FOVEA_NOEXCEPT;

/* Merges partial results over disjoint sets of keys: parts o_i with lse_i become o = sum_i exp(lse_i - lse)
 * o_i and lse = log sum_i exp(lse_i). o_parts[i] and o: (B, S, H, Dv), one type of float32, float16, bfloat16
 * each, the last dimension contiguous; lse_parts[i] and lse: (B, H, S) float32. `lse` may be NULL. A part may
 * be the same memory as the output (o_parts[i] as o, lse_parts[i] as lse: same address, strides and type).
 * All tensors lie on one device. On a GPU the work is put on `stream` (a cudaStream_t) and nothing synchronises;
 * more than 48 parts take memory of the device's pool in the order of the stream (cudaMallocAsync). */
FOVEA_API fovea_status fovea_merge(int32_t num_parts, const fovea_tensor* const* o_parts,
                                   const fovea_tensor* const* lse_parts, const fovea_tensor* o,
                                   const fovea_tensor* lse, void* stream) FOVEA_NOEXCEPT;

/* ---- the library and the machine ---- */

/* "major.minor.patch". */
FOVEA_API const char* fovea_version(void) FOVEA_NOEXCEPT;
FOVEA_API const char* fovea_status_name(fovea_status status) FOVEA_NOEXCEPT;
/* Message and argument name of the last failure in this thread; "" when there was none. */
FOVEA_API const char* fovea_last_error(void) FOVEA_NOEXCEPT;
FOVEA_API const char* fovea_last_error_argument(void) FOVEA_NOEXCEPT;

/* Backends in order of preference: index in [0, count). `unavailable_because` gives "" when this machine has
 * it; its text is valid until this thread asks again. */
FOVEA_API int32_t fovea_backend_count(void) FOVEA_NOEXCEPT;
FOVEA_API const char* fovea_backend_name(int32_t index) FOVEA_NOEXCEPT;
FOVEA_API const char* fovea_backend_unavailable_because(int32_t index) FOVEA_NOEXCEPT;
/* Where the tensors of the backend's problems lie: one of fovea_device_type; 0 for an index that is none. */
FOVEA_API int32_t fovea_backend_device_type(int32_t index) FOVEA_NOEXCEPT;
/* Versions of the CUDA runtime in this library and of the driver, or what is missing, as one line of text. */
FOVEA_API const char* fovea_cuda(void) FOVEA_NOEXCEPT;
/* GPUs that CUDA gives this process; 0 when there is none, no driver or no CUDA in this build. */
FOVEA_API int32_t fovea_cuda_device_count(void) FOVEA_NOEXCEPT;
/* Name, compute capability, SMs and memory of one, as one line of text that is valid until this thread asks
 * again; "" for an index that is none. */
FOVEA_API const char* fovea_cuda_device(int32_t index) FOVEA_NOEXCEPT;
/* Processor, instruction sets and threads that the library sees, as one line of text. */
FOVEA_API const char* fovea_machine(void) FOVEA_NOEXCEPT;
/* Threads that a plan uses when num_threads is 0. */
FOVEA_API int32_t fovea_default_threads(void) FOVEA_NOEXCEPT;

#if defined(__cplusplus)
}
#endif
#endif /* FOVEA_FOVEA_H */
