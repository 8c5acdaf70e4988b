// One compiled kernel: what it can do, how it is launched, what its parameter is.
//
// Generated translation units (tools/make_instances.py) define the kernels: each a few of one family, or of several families of
// small ones. A unit includes their headers from cuda/kernels and defines a function that lists its kernels:
//
//   namespace fovea::cuda {
//   std::span<const Kernel> kernels_fwd_sm80_2() {
//     static const Kernel kernels[] = {
//         {.name = "fwd_sm80_bf16_d128",
//          .kind = KernelKind::kForward,
//          .family = Family::kMmaSm80,
//          .dtype = DType::kBF16,
//          .entry = reinterpret_cast<const void*>(&fwd_mma<instances::fwd_sm80_bf16_d128>),
//          ...},
//     };
//     return kernels;
//   }
//   }
//
// Another generated unit (plain C++) lists these functions: it defines kernel_units(). A build without CUDA has no
// units and takes the empty kernel_units() of no_kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.hpp"
#include "cuda/kernels/args.hpp"
#include "cuda/launch/terms.hpp"

namespace fovea::cuda {

/// A family becomes a backend:
///   kSm90     cuda_sm90   TMA and wgmma
///   kMmaSm80  cuda_sm80   mma.sync, 16-bit types
///   kTf32     cuda_tf32   mma.sync, float32
///   kMmaSm75  cuda_sm75   mma.sync of Turing, float16
///   kSimt     cuda_simt   CUDA cores
///   kAny      (none)      kernels that serve every family: combine, dsink, ...
/// The order is the order of preference.
enum class Family : uint8_t { kSm90, kMmaSm80, kTf32, kMmaSm75, kSimt, kAny };
inline constexpr int kFamilyCount = 5;  ///< without kAny

/// What a kernel does. Forward kinds take ForwardArgs, backward kinds BackwardArgs, or what their ArgsBinding makes
/// of them.
enum class KernelKind : uint8_t {
  kAppend,           ///< before a forward: writes new rows to k and v, rotates q; takes AppendArgs
  kMerge,            ///< alone: results over disjoint keys become one; takes MergeArgs
  kMove,             ///< alone: boxes of elements are copied or added; takes MoveArgs
  kForward,          ///< o and lse, or the parts of splits
  kBf16x3,           ///< forward: float32 operands as bf16x3, before kForward
  kTransposeValues,  ///< forward: v of 8 bits with its keys side by side, before kForward
  kSeenBlocks,       ///< forward: looks which blocks of keys a tile sees, before kForward
  kAlibiNorms,       ///< forward: norms of q and k, before a kForward that passes over what is beyond reach
  kClearCounter,     ///< forward: the counter of tiles becomes 0, before a kForward that takes tiles from it
  kCombine,          ///< forward: merges the parts of splits
  kBackward,         ///< dk, dv, sums of dq
  kPreprocess,       ///< backward: row statistics; zeros where sums are accumulated
  kBackwardSeenBlocks,  ///< backward: looks which blocks of queries see a tile, before kBackward
  kBackwardAlibiNorms,  ///< backward: norms of q and k likewise
  kBackwardBf16x3,      ///< backward: float32 operands as bf16x3, behind kPreprocess
  kBackwardDv,          ///< backward: dv, behind a kBackward that is dk_alone
  kBackwardDq,          ///< backward: dq likewise
  kPostprocess,         ///< backward: dq from its sums
  kListZeros,           ///< backward: clears the sums of dk and dv, or counters, where queries have lists
  kListCounts,          ///< backward: how many entries of lists name each key
  kListOffsets,         ///< backward: where the queries of each key begin, behind kListCounts
  kListInverse,         ///< backward: the queries that name each key, behind kListOffsets
  kListKeys,            ///< backward: dk and dv over these
  kListGradients,       ///< backward: dk and dv from their sums, where queries have lists
  kDBias,               ///< backward: dbias
  kDSink,               ///< backward: dsink
  kNamedZeros,          ///< backward: clears the gradients of named tensors
  kNamedGradients,      ///< backward: adds to them
  kNamedPeaks,    ///< backward: the largest magnitudes that are to be added, where the order is not to count
  kNamedSums,     ///< backward: their integer sums, behind kNamedPeaks
  kNamedResults,  ///< backward: the gradients from these
};

/// CTAs of a launch. Any of them 0: nothing is launched.
struct Grid {
  int64_t x = 0, y = 1, z = 1;
};

/// Makes a kernel's parameter from ForwardArgs or BackwardArgs (args_binding.hpp).
struct ArgsBinding;

/// What a kernel is compiled from at run time (runtime_kernel.hpp).
struct KernelSource {
  const char* text = nullptr;   ///< a translation unit; null: it is not compiled at run time
  const char* entry = nullptr;  ///< the __global__ function, with its template arguments
  bool specific = false;        ///< uses features of one architecture alone ("sm_90a")
};

struct Kernel {
  const char* name = "";  ///< "fwd_sm80_bf16_d128": unique; errors and `fovea explain` say it
  KernelKind kind = KernelKind::kForward;
  Family family = Family::kAny;
  DType dtype = DType::kF32;  ///< of q, k, v
  bool any_dtype = false;     ///< reads no tensor of the problem's type (dsink)
  /// The __global__ function. Null where the kernel is compiled at run time only, and in tests of the table.
  const void* entry = nullptr;
  KernelSource source = {};
  /// Null: the kernel's parameter is ForwardArgs or BackwardArgs as it is.
  const ArgsBinding* binding = nullptr;
  /// CTAs of a launch, from a host function in the family's header. Called once, when a plan is made: sizes,
  /// pack_group and num_splits of the arguments are set, pointers are not. Forward kinds set the first, backward
  /// kinds the second; null takes default_grid (schedule.hpp).
  Grid (*forward_grid)(const ForwardArgs& args) = nullptr;
  Grid (*backward_grid)(const BackwardArgs& args) = nullptr;
  int head_dim = 0;    ///< largest head size of q and k (smaller ones are padded); 0: any
  int head_dim_v = 0;  ///< likewise of v and o; 0: any
  /// Columns of v and o that one CTA computes; 0: all. The grid is larger by ceil(head_dim_v / value_slice).
  int value_slice = 0;
  uint32_t terms = kAllTerms;  ///< which terms it knows
  bool can_split = true;       ///< forward: num_splits > 1
  bool can_pack = true;        ///< forward: pack_group
  int group_divides = 0;       ///< packs only groups whose size divides this, or is a multiple of it; 0: any
  /// Forward: a grid of at most as many CTAs as the GPU holds, each of which takes one tile after the other.
  bool persistent = false;
  /// Reads q, k, v and d_o in vectors of 16 bytes only. Plans then hold other kernels as well, for runs whose
  /// pointers are no multiples of 16.
  bool aligned_only = false;
  bool tma = false;  ///< copies q, k, v (and d_o) by TMA, which takes neither every stride nor empty tensors
  bool bf16x3 =
      false;  ///< reads q, k, v (and d_o) as a kBf16x3 or kBackwardBf16x3 kernel before it writes them
  bool e4m3_keys = false;     ///< forward, append: k and v are float8_e4m3fn, with factors
  bool e4m3_queries = false;  ///< forward: q may be float8_e4m3fn, with factors; dtype is that of o then
  /// Forward: multiplies q, k and v of 8 bits as they are, v as a kTransposeValues kernel before it writes it.
  bool e4m3_operands = false;
  bool pages = false;     ///< forward: finds keys by a table of pages, where there is one
  bool one_piece = true;  ///< forward: takes keys in one piece, too
  bool copies_pieces =
      false;  ///< forward for few queries: some warps copy, in pieces of 16 keys that lie side by side
  bool multiplies_qv = false;  ///< forward: adds the products of qv and v to the scores, where there is qv
  /// Forward: of values that are the first columns of keys, which are read once; with qv, of [K | V].
  bool values_in_keys = false;
  bool stream_k =
      false;  ///< forward: of tiles that hold all queries of a key head, cut into equal shares of all keys
  bool splits_in_cluster =
      false;  ///< forward: of such tiles whose keys the CTAs of a cluster share, as many as the launch says
  bool seen_blocks = false;  ///< walks over the blocks that a kSeenBlocks or kBackwardSeenBlocks kernel finds
  /// Passes over blocks beyond the reach of ALiBi's slopes, by the norms that a kAlibiNorms or kBackwardAlibiNorms kernel finds.
  bool alibi_norms = false;
  bool writes_dq = false;  ///< backward: dq is complete, with no sums to finish
  bool dk_alone = false;   ///< backward: dk; kBackwardDv and kBackwardDq kernels compute the others
  bool adds_dbias =
      false;  ///< backward: it (or the kBackwardDq behind it) adds dS to dbias, where that is its gradient (can_add_dbias)
  bool any_order = false;  ///< backward: adds to the sums of dq in any order
  LastQueriesFirst last_queries_first = LastQueriesFirst::kNever;  ///< backward, one that stays
  bool first_stores =
      false;  ///< backward: where blocks wait, the first to add to a sum of dq stores (BackwardArgs::turn_rows)
  bool fixed_order = false;   ///< backward: adds in a fixed order always
  bool last_writes = false;   ///< backward: the last block to add in such an order writes dq
  bool chain = false;         ///< backward: the blocks of keys of a head are the CTAs of a cluster
  bool begins_early = false;  ///< waits itself for the launches before it, which may not have ended
  /// Backward by TMA: columns of the boxes of k, and of those of q, v and d_o; kTmaColumns or parts of it.
  int box_columns_k = kTmaColumns, box_columns = kTmaColumns;
  int tile_m = 0, tile_n = 0;  ///< rows of queries and keys of one tile
  int threads = 0;
  int cluster = 1;          ///< CTAs of a cluster, which take a tile together
  int ctas_per_sm = 1;      ///< forward, with a rate: CTAs that an SM is meant to hold
  size_t shared_bytes = 0;  ///< dynamic shared memory of one CTA
  int64_t min_keys = 0;     ///< longest sequence of keys below which kernels of smaller tiles are faster
  int64_t most_keys = 0;    ///< longest sequence of keys above which other kernels are faster; 0: none
  int64_t min_queries = 0;  ///< forward: fewer queries are left to other kernels
  /// Percent of the rate that the fastest kernel of the same head sizes reaches on large problems (an SM with ctas_per_sm CTAs). Kernels that
  /// have one are chosen by the time that their tiles would take: large tiles waste less, small ones fill more SMs.
  int rate = 0;
  int unequal_rate =
      0;  ///< likewise on problems whose tiles are of many lengths (a causal mask); 0: as `rate`
  int min_capability = 75;  ///< 10 * major + minor
  int max_capability = 0;   ///< 0: no limit
};

using KernelUnit = std::span<const Kernel> (*)();
/// Generated: every unit of this build.
std::span<const KernelUnit> kernel_units();
/// Generated: the names of their kernels in the order of instances.toml, which is that of preference. Units are by chip.
std::span<const char* const> kernel_names();

}  // namespace fovea::cuda
