// How a problem is laid out over the SMs and in the workspace: which heads share a tile, into how many parts
// keys are split, where intermediate results lie. Decided once, when a plan is made; plain C++ over plain
// data, so that it is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/launch/device_properties.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// Parts of the workspace start at multiples of this: the widest segment that the L2 cache fetches at once is
/// 128 bytes, and cudaMalloc itself aligns to 256.
inline constexpr int64_t kPartAlignment = 256;
/// Most bytes that the parts of splits take: a larger workspace costs more traffic than splitting saves.
inline constexpr int64_t kMaxPartBytes = int64_t{1} << 30;
/// Of one sequence, where the batch takes no part in the choice: as many as make 64 sequences the same.
inline constexpr int64_t kMaxPartBytesOfSequence = kMaxPartBytes / 64;

/// CTAs of the second and third dimension of a grid.
inline constexpr int64_t kMostOfGrid = 65535;
/// CTAs of a cluster that every GPU with clusters takes: the most blocks of keys of a chain.
inline constexpr int kMostChained = 8;

/// Tiles of query rows of one head (of a group of heads when packed).
int64_t m_blocks(const AttentionProblem& problem, bool pack_group, int tile_m);

/// Whether the query heads of a group are packed into one tile: where rows are few, so that tiles would be
/// mostly empty.
bool packs_group(const AttentionProblem& problem, const Kernel& kernel);

/// SMs that are counted where nothing may depend on the batch, nor on how much of a GPU is free: those of a large one.
inline constexpr int kInvariantSms = 128;

/// Relative time of a forward or backward on `sm_count` SMs, to compare kernels that have a `rate`: a forward with the keys in as many
/// parts as end soonest, where many_rows() and the kernel can.
double time_of_tiles(const AttentionProblem& problem, const Kernel& kernel, int sm_count,
                     const KeySplits& asked = {});

/// Whether tiles are many enough that time_of_tiles() decides on parts of the keys; else best_num_splits().
bool many_rows(const AttentionProblem& problem, const Kernel& kernel);

/// Parts of the keys of a problem with many_rows() that end soonest, at most `largest`.
int64_t soonest_parts(const AttentionProblem& problem, const Kernel& kernel, int sm_count, int64_t largest);
/// Query rows of all heads and sequences, each of which has a row in every part.
int64_t rows_of_parts(const AttentionProblem& problem);
/// Parts of the results that take at most `most_bytes`.
int64_t largest_parts(const AttentionProblem& problem, int64_t most_bytes);
/// Parts of a row that the merge holds at a time: one a thread of its lanes.
inline constexpr int64_t kMostSplits = 128;

/// The number of splits of keys that ends soonest where tiles have few rows: `ctas` CTAs of `steps` blocks of keys each, `slots` of which run at
/// the same time. 1: no split. At most `largest`, which is what memory allows.
int best_num_splits(int64_t ctas, int64_t steps, int64_t slots, int64_t largest);

/// Stream-K (tile/stream_k.hpp): how many heads neighbouring CTAs read at the same keys. Heads lie side by side in memory, so
/// memory gives whole rows then, not pieces of the size of a head. A divisor of `heads`.
int stream_lanes(int64_t heads, int64_t slots);
/// Tiles of a kernel whose tiles hold all queries of a (key) head, and the keys that one of them sees at most.
int64_t tiles_of_few_rows(const AttentionProblem& problem, const Kernel& kernel);
int64_t keys_of_tile(const AttentionProblem& problem, const Kernel& kernel);
/// Query heads (key heads where packed) whose K and V share the L2 cache; see ForwardArgs.
int heads_at_once(const AttentionProblem& problem, bool pack_group, size_t l2_bytes);

/// Where copies of float32 operands as bf16x3 lie.
struct Bf16x3Copies {
  int64_t q = -1, k = -1, v = -1;
};

/// Whether the kernel passes over blocks of the problem that lie beyond the reach of ALiBi's slopes (tile/alibi_reach.hpp): where sequences are so
/// long that finding the norms pays. The layout may have other reasons not to.
bool may_have_reach(const AttentionProblem& problem, const Kernel& kernel);

/// Where the answers of tile/seen_blocks.hpp lie.
struct SeenBlocksParts {
  int64_t blocks = -1, pairs = -1;

  void point_into(char* workspace, tile::SeenBlocksView& view) const;
};

/// A forward as it is laid out. Offsets are of parts of the workspace; -1: there is no such part.
struct ForwardLayout {
  using Args = ForwardArgs;

  Args args;                                            ///< no pointers
  int64_t part_o = -1, part_lse = -1, part_flags = -1;  ///< results of splits
  Bf16x3Copies bf16x3;
  int64_t transposed_v = -1;
  int64_t tile_counter = -1;  ///< of a persistent kernel; clear_counter makes it 0
  SeenBlocksParts seen;
  int64_t alibi_norms = -1;
  int64_t arriving_keys = 0, arriving_heads = 1;
  int64_t workspace_size = 0;

  /// Sets the pointers of `args` into the workspace.
  void point_into(char* workspace, Args& args) const;
};
/// `ctas_per_sm`: how many CTAs of the kernel an SM runs at a time; `may_split`: there is a kernel that
/// merges.
ForwardLayout forward_layout(const AttentionProblem& problem, const Kernel& kernel,
                             const DeviceProperties& device, int ctas_per_sm, bool may_split,
                             const KeySplits& splits = {});

/// A backward as it is laid out; offsets likewise.
struct BackwardLayout {
  using Args = BackwardArgs;

  Args args;                                       ///< no pointers
  int64_t lse_log2 = -1, delta = -1, dq_sum = -1;  ///< see BackwardArgs
  int64_t dq_semaphore = -1;
  int64_t tile_counter = -1;  ///< of a persistent kernel; bwd_preprocess makes it 0
  int64_t key_sums = -1;      ///< of dk and dv, where queries have lists; list_zeros clears them
  /// In their place, of BackwardArgs::inverse: `end` and `counts`, which list_zeros clears, and the others.
  int64_t list_counts = -1, list_starts = -1, list_queries = -1;
  Bf16x3Copies bf16x3;
  int64_t bf16x3_do = -1;   ///< d_o likewise
  int64_t not_finite = -1;  ///< see BackwardArgs; bwd_preprocess makes it 0
  SeenBlocksParts seen;
  int64_t alibi_norms = -1;
  /// Of all elements of gradients of named tensors that are to have the same bits each time: integer sums, and behind them
  /// peaks (NamedSumsArgs). named_peaks clears them.
  int64_t named_sums = -1;
  int64_t named_elements = 0;
  int named_log2_count = 0;  ///< each adds up at most 2^named_log2_count numbers
  int64_t workspace_size = 0;

  void point_into(char* workspace, Args& args) const;
};
/// A sum of 64 bits and a peak of 32 bits.
inline constexpr int64_t kNamedSumBytes = 12;
/// Whether kernels add to gradients of named tensors that have memory: else these are zeros.
bool adds_to_named(const AttentionProblem& problem);
/// Whether the queries that name a key can be found (list_inverse.cuh): entries of a head are counted in 32 bits.
bool can_invert_lists(const AttentionProblem& problem);
/// A gradient of a named tensor adds up at most 2^this numbers.
int log2_of_named_count(const AttentionProblem& problem);
BackwardLayout backward_layout(const AttentionProblem& problem, const Kernel& kernel,
                               const DeviceProperties& device, int ctas_per_sm, bool deterministic);

/// The grid of a kernel whose family gives none:
///   kForward    (m_blocks * heads * batch, num_splits, value slices); heads of k where packed
///   kBackward   (key_blocks * heads_kv * batch, 1, 1)
///   kPreprocess, kPostprocess   (blocks of tile_m rows, heads_q, batch)
/// The other kinds have no default: x is -1.
Grid default_grid(const Kernel& kernel, const ForwardArgs& args);
Grid default_grid(const Kernel& kernel, const BackwardArgs& args);

/// "" when CUDA can launch the grid, else what is wrong.
std::string grid_cannot_because(const Grid& grid);

/// Gives out parts of a workspace one after the other.
class Parts {
 public:
  /// Offset of `bytes`; the sum saturates at kTooMuch.
  int64_t take(int64_t count, int64_t element_bytes);
  int64_t size() const { return end_; }
  /// More than the address space has: a workspace of this size cannot be.
  static constexpr int64_t kTooMuch = int64_t{1} << 57;

 private:
  int64_t end_ = 0;
};

}  // namespace fovea::cuda
