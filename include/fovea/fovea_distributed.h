/* Fovea over several ranks: one attention problem whose rows of queries and keys lie on several devices or processes. The C ABI.
 *
 * Use: each rank opens a transport to the others -> describes its own rows and where all rows lie -> fovea_distributed_plan_create,
 * which all ranks call with the same numbers, checks that they agree and chooses how keys, heads and gradients travel ->
 * fovea_distributed_run, which all ranks call, as often as wanted. docs/distributed.md explains the methods.
 *
 * Errors are those of fovea.h: a status, and fovea_last_error() of this thread. A rank that fails tells the others, whose calls
 * then fail with its rank and message; a rank that is silent for longer than the transport's deadline does the same. After that the
 * transport is of no more use, and outputs are not to be read. */
#ifndef FOVEA_FOVEA_DISTRIBUTED_H
#define FOVEA_FOVEA_DISTRIBUTED_H

#include "fovea/fovea.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* ---- transports ---- */

/* Memory that is sent to a rank, or received from it. Both sides name the same number of bytes. */
typedef struct fovea_message {
  int32_t peer;
  void* data; /* on the transport's device */
  size_t bytes;
} fovea_message;

/* What carries messages between ranks. The three below are at hand; a program may bring its own.
 *
 * start: begins one step: any number of messages to a peer and from it. Those between two ranks match in the order of the steps, and
 * within a step in that of the lists.
 * finish: ends the oldest step that is started and not finished: on the CPU its messages have arrived when the call returns, on a
 * GPU what is put on `stream` from then on finds them. Memory of messages is the transport's between the two (on a GPU until
 * the work on the stream is done). `stream` is the cudaStream_t that the work goes on; both calls of a step name the same.
 * stop: this rank gives up, because of `reason`; other ranks' steps fail then. May be called from any thread. Does not wait for streams,
 *   which may wait for what comes after it.
 * error: what went wrong last, with the rank where that is known; valid until the next call.
 * Steps come from one thread at a time. */
typedef struct fovea_transport {
  size_t struct_size;
  void* context;
  int32_t rank, size;
  fovea_device device; /* where messages lie */
  fovea_status (*start)(void* context, const fovea_message* sends, int32_t num_sends,
                        const fovea_message* receives, int32_t num_receives, void* stream);
  fovea_status (*finish)(void* context, void* stream);
  void (*stop)(void* context, const char* reason);
  const char* (*error)(void* context);
  /* Not 0: ranks whose memory others reach need no messages; see docs/distributed.md. A plan finds out whether that is so. The caller may
   * set it to 0, on all ranks. */
  int32_t peer_copies;
  int64_t deadline_ms; /* how long a rank waits for the copies of another; 0: for ever */
} fovea_transport;

/* Ranks that are threads of this process. */
typedef struct fovea_thread_group fovea_thread_group;
typedef struct fovea_thread_options {
  size_t struct_size;
  int64_t deadline_ms; /* how long a rank waits for another; 0: 60,000 */
  /* For tests: a rank sleeps up to this long before each step and each arrival, by a stream of random numbers from `seed`. */
  int64_t delay_us;
  uint64_t seed;
  /* Whether ranks reach each other's memory. 0: those on GPUs, where each has its own. 1: always. -1: never. */
  int32_t peer_copies;
} fovea_thread_options;

/* `devices`: that of each rank; NULL: the CPU for all. *group is to be destroyed when no rank uses it. `options` may be NULL. */
FOVEA_API fovea_status fovea_thread_group_create(int32_t size, const fovea_device* devices,
                                                 const fovea_thread_options* options,
                                                 fovea_thread_group** group) FOVEA_NOEXCEPT;
FOVEA_API void fovea_thread_group_destroy(fovea_thread_group* group) FOVEA_NOEXCEPT;
/* The transport of a rank; valid as long as the group. */
FOVEA_API fovea_status fovea_thread_transport(fovea_thread_group* group, int32_t rank,
                                              fovea_transport* transport) FOVEA_NOEXCEPT;
/* Messages that a rank has sent since the group was made, and their bytes. Either pointer may be NULL. */
FOVEA_API fovea_status fovea_thread_sent(const fovea_thread_group* group, int32_t rank, int64_t* messages,
                                         int64_t* bytes) FOVEA_NOEXCEPT;

/* Ranks of an NCCL communicator (an ncclComm_t) of CUDA device `device`, which stays the caller's. The program's own libnccl.so.2 is
 * used, or opened at run time. Steps are put on streams and the host does not wait. Where the messages of a step have not arrived
 * `deadline_ms` after the call that began it (0: no deadline), or this rank stops, the communicator is aborted: streams get past its
 * work with outputs that are not to be read, later calls fail, and the caller no longer uses or destroys the communicator. *transport
 * is to be closed. */
FOVEA_API fovea_status fovea_nccl_transport_open(void* communicator, int32_t device, int64_t deadline_ms,
                                                 fovea_transport* transport) FOVEA_NOEXCEPT;
/* FOVEA_OK, or what went wrong so far: to be asked once the stream is past a run, before results are used. */
FOVEA_API fovea_status fovea_nccl_transport_check(const fovea_transport* transport) FOVEA_NOEXCEPT;
FOVEA_API void fovea_nccl_transport_close(fovea_transport* transport) FOVEA_NOEXCEPT;

/* Ranks that are processes of MPI: fovea_mpi.h, a library of its own. */

/* ---- the problem ---- */

/* Rows [begin, end) of an axis lie on rank `rank`, behind the rows of the pieces of that rank that stand before this one. */
typedef struct fovea_piece {
  int32_t rank;
  int64_t begin, end;
} fovea_piece;

/* One problem, the same on all ranks but for `local`.
 *
 * local: q, k, v, o, lse, d_o, dlse, dq, dk, dv hold this rank's rows: (B, rows, heads, size), lse and dlse (B, Hq, rows); with
 * sequences (below) B is left out. Types: float32, float16, bfloat16. Terms: scale, causal, window, softcap, dropout, sinks, ALiBi,
 * bias, mask, block mask, score and sees; others are refused by name. Seed and offset of dropout come with a run, the same on all
 * ranks: on CPUs a run compares them. rng_state is a rank's own: the forward writes it, the backward reads it. Terms count positions, sequences and heads of the whole problem. Their tensors are whole, and the same on all ranks: sink,
 * alibi, bias, mask, block_mask and those of `named` as fovea.h has them, with Sq and Sk all rows of the axes, or with sequences
 * the longest. dsink, dbias and gradients of named tensors are whole, too, and all ranks get the same sums. `named` has room for
 * one tensor less than FOVEA_MAX_NAMED_TENSORS, and for one less for each of alibi and block_mask. max_seqlen_q and max_seqlen_k of
 * `local` are ignored.
 * queries, keys: where the rows of each axis lie. Each row of an axis belongs to one piece; pieces may be empty, in any order, and a
 * rank may have none. `keys` may be NULL: as the queries. `queries` may be NULL beside keys: each rank holds all queries, and gets the
 * whole result (decoding over a cache that is divided; forward only).
 * Sequences: rows of an axis are those of num_sequences sequences behind each other, which start at cu_seqlens_q and cu_seqlens_k
 * (num_sequences + 1 numbers in memory of the host, read by fovea_distributed_plan_create); 0: one sequence, for each of B. */
typedef struct fovea_distributed_problem {
  size_t struct_size;
  const fovea_problem* local;
  const fovea_piece* queries;
  int64_t num_queries;
  const fovea_piece* keys;
  int64_t num_keys;
  int64_t num_sequences;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k; /* NULL: cu_seqlens_q */
} fovea_distributed_problem;

/* How to do it. Zeros choose by the model of docs/distributed.md. */
typedef struct fovea_distributed_options {
  size_t struct_size;
  const fovea_options* attention; /* of the calls on each rank; may be NULL */
  int32_t heads_ranks; /* ranks in a row that exchange rows for heads; divides their number. 0: chosen */
  int32_t
      stages; /* steps in which keys come, at most one for each group of heads_ranks ranks; where all ranks share heads, parts of a rank's heads. 0: chosen */
  int32_t ranks_per_host; /* 0: all ranks are on one host */
  int64_t memory_limit;   /* bytes of the workspace of a rank that choices keep to; 0: none */
  double flops_per_second, link_bytes_per_second,
      host_link_bytes_per_second; /* 0: of the device's usual kind */
} fovea_distributed_options;

typedef struct fovea_distributed_plan fovea_distributed_plan;

/* All ranks call it, with the same problem but for `local`, the same pieces and options; what differs is an error on all, which names
 * it and says what each rank passed. `transport` is used until the plan is destroyed. */
FOVEA_API fovea_status fovea_distributed_plan_create(const fovea_transport* transport,
                                                     const fovea_distributed_problem* problem,
                                                     const fovea_distributed_options* options,
                                                     fovea_distributed_plan** plan) FOVEA_NOEXCEPT;
FOVEA_API void fovea_distributed_plan_destroy(fovea_distributed_plan* plan) FOVEA_NOEXCEPT;
/* Bytes that each run of this rank needs as workspace, aligned to 256. */
FOVEA_API size_t fovea_distributed_plan_workspace_size(const fovea_distributed_plan* plan) FOVEA_NOEXCEPT;
/* Messages and bytes that a run of this rank sends. Either pointer may be NULL. */
FOVEA_API void fovea_distributed_plan_sends(const fovea_distributed_plan* plan, int64_t* messages,
                                            int64_t* bytes) FOVEA_NOEXCEPT;
/* The methods that were weighed, one line each, the chosen one first, and what this rank does in each step. Lives as long as the
 * plan. */
FOVEA_API const char* fovea_distributed_plan_reason(const fovea_distributed_plan* plan) FOVEA_NOEXCEPT;

/* On paper: every method for `ranks` ranks on devices of the kind of the problem's tensors, of which none has to be there. One line
 * each, the fastest first: by the model of docs/distributed.md, and, for up to 64 ranks, on a simulated clock. problem->local
 * describes the rows of the first rank, without memory. *text lives until this thread calls this again. */
FOVEA_API fovea_status fovea_distributed_on_paper(int32_t ranks, const fovea_distributed_problem* problem,
                                                  const fovea_distributed_options* options,
                                                  const char** text) FOVEA_NOEXCEPT;

/* Runs the plan on this rank's tensors: those of the problem, workspace, workspace_size and stream of `buffers`. All ranks call it. On
 * a GPU the work is put on buffers->stream and on one stream of the plan's. One run of a plan
 * at a time. */
FOVEA_API fovea_status fovea_distributed_run(const fovea_distributed_plan* plan,
                                             const fovea_buffers* buffers) FOVEA_NOEXCEPT;

#if defined(__cplusplus)
}
#endif
#endif /* FOVEA_FOVEA_DISTRIBUTED_H */
