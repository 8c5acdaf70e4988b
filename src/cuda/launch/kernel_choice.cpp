// The clauses against a kernel, one after the other, and the choice of the first kernel without one.
#include "cuda/launch/kernel_choice.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>

#include "cuda/launch/decode_clusters.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/schedule.hpp"
#include "cuda/launch/sizes.hpp"
#include "cuda/launch/tile_order.hpp"
#include "expr/differentiate.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cuda {
namespace {

/// Positions, edges of windows and their sums are 32-bit in kernels: two lengths and a window add up to less
/// than 2^32.
constexpr int64_t kLongestSequence = int64_t{1} << 30;

struct TermName {
  Term term;
  const char* name;
};
constexpr TermName kTermNames[] = {
#define FOVEA_TERM_NAME(Name, name, text, condition) {kTerm##Name, text},
    FOVEA_TERMS(FOVEA_TERM_NAME)
#undef FOVEA_TERM_NAME
};

std::string names_of_terms(uint32_t terms) {
  std::string names;
  for (const TermName& term : kTermNames) {
    if ((terms & term.term) == 0) continue;
    if (!names.empty()) names += ", ";
    names += term.name;
  }
  return names;
}

std::string text_of(const DeviceProperties& device) {
  return "cuda:" + std::to_string(device.id) + " (" + device.name + ")";
}

// The conditions of a kernel, in the order in which they are looked at: each gives "" or the clause that fails.

std::string excluded_clause(const Kernel& k, const KernelRequest& r) {
  const bool is = std::find(r.excluded.begin(), r.excluded.end(), &k) != r.excluded.end();
  return is ? "has shown that it cannot" : "";
}

std::string name_clause(const Kernel& k, const KernelRequest& r) {
  // The kernel for pointers that are not aligned is another one, whose name nobody asks for.
  const bool main = k.kind == KernelKind::kForward || k.kind == KernelKind::kBackward ||
                    k.kind == KernelKind::kBackwardDv || k.kind == KernelKind::kBackwardDq;
  if (r.name_pattern == nullptr || r.any_address || !main || fnmatch(r.name_pattern, k.name, 0) == 0)
    return "";
  return "is not of the name that the environment asks for (FOVEA_KERNEL=" + std::string(r.name_pattern) +
         ")";
}

std::string capability_clause(const Kernel& k, const KernelRequest& r) {
  const auto needs = [&](int capability, const char* bound) {
    const auto text = [](int c) { return std::to_string(c / 10) + "." + std::to_string(c % 10); };
    return "needs compute capability " + text(capability) + bound + ", " + text_of(r.device) + " has " +
           text(r.device.capability);
  };
  if (r.device.capability < k.min_capability) return needs(k.min_capability, " or newer");
  if (k.max_capability != 0 && r.device.capability > k.max_capability)
    return needs(k.max_capability, " or older");
  return "";
}

std::string dtype_clause(const Kernel& k, const KernelRequest& r) {
  if (k.any_dtype || k.dtype == r.problem.dtype) return "";
  return "computes " + std::string(name_of(k.dtype)) + ", this problem is " +
         std::string(name_of(r.problem.dtype));
}

/// Kernels write each gradient in the type of q or in float32, dv as dk.
std::string gradients_clause(const Kernel&, const KernelRequest& r) {
  if (r.problem.pass == Pass::kForward) return "";
  const DType dk = r.problem[Role::kDK].dtype, dv = r.problem[Role::kDV].dtype;
  if (dk == dv) return "";
  return "writes dv in the type of dk, " + std::string(name_of(dk)) + ", this problem has " +
         std::string(name_of(dv));
}

std::string length_clause(const Kernel&, const KernelRequest& r) {
  const int64_t longest = std::max(r.problem.seqlen_q, r.problem.seqlen_k);
  if (longest <= kLongestSequence) return "";
  return "takes sequences up to " + std::to_string(kLongestSequence) + ", this problem has " +
         std::to_string(longest);
}

std::string head_size_clause(const Kernel& k, const KernelRequest& r) {
  const auto too_large = [](const char* tensor, int largest, int64_t size) -> std::string {
    if (largest == 0 || size <= largest) return "";
    return std::string("takes head sizes of ") + tensor + " up to " + std::to_string(largest) +
           ", this problem has " + std::to_string(size);
  };
  const AttentionProblem& p = r.problem;
  std::string clause = too_large("q", k.head_dim, p.head_dim);
  if (clause.empty()) clause = too_large("v", k.head_dim_v, p.head_dim_v);
  if (!clause.empty() || !p.has(Role::kQV) || !k.multiplies_qv || k.head_dim == 0) return clause;
  // Rows [q | qv], of which qv starts with a strip of its own.
  const int64_t whole_strips = (p.head_dim + kTmaColumns - 1) / kTmaColumns * kTmaColumns;
  return too_large("q and qv together", k.head_dim, whole_strips + p.head_dim_v);
}

std::string terms_clause(const Kernel& k, const KernelRequest& r) {
  if ((k.terms & kTermExpressions) != 0 && (r.terms & kTermExpressions) == 0)
    return "is compiled for an expression, which this problem lacks";
  const uint32_t missing = r.terms & ~terms_known_by(k);
  return missing == 0 ? "" : "does not know " + names_of_terms(missing);
}

/// Kernels for keys of 8 bits read no others.
std::string key_dtype_clause(const Kernel& k, const KernelRequest& r) {
  const DType keys = r.problem[Role::kK].dtype;
  if (!k.e4m3_keys || keys == DType::kE4M3) return "";
  return "is for keys and values of float8_e4m3fn, this problem has " + std::string(name_of(keys));
}

/// Kernels that multiply operands of 8 bits have no others. They read V twice, so few queries are for kernels that decode, where
/// those can.
std::string e4m3_operands_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.e4m3_operands) return "";
  const AttentionProblem& p = r.problem;
  if (p[Role::kQ].dtype != DType::kE4M3)
    return "is for queries of float8_e4m3fn, this problem has " + std::string(name_of(p[Role::kQ].dtype));
  constexpr int64_t kFewRows = 32;
  const int64_t rows = p.seqlen_q * (packs_group(p, k) ? p.group() : 1);
  const bool others_decode = !r.splits.batch_invariant && r.splits.most == 0 && k.dtype != DType::kF32;
  if (others_decode && rows <= kFewRows)
    return "is for more than " + std::to_string(kFewRows) + " queries of a key head, this problem has " +
           std::to_string(rows);
  return "";
}

std::string keys_clause(const Kernel& k, const KernelRequest& r) {
  if (k.most_keys > 0 && r.problem.seqlen_k > k.most_keys)
    return "is for up to " + std::to_string(k.most_keys) + " keys, this problem has " +
           std::to_string(r.problem.seqlen_k);
  if (r.problem.seqlen_q < k.min_queries)
    return "is for " + std::to_string(k.min_queries) + " queries or more, this problem has " +
           std::to_string(r.problem.seqlen_q);
  if (r.problem.seqlen_k >= k.min_keys) return "";
  return "is for " + std::to_string(k.min_keys) + " keys or more, this problem has " +
         std::to_string(r.problem.seqlen_k);
}

bool computes_scores(const Kernel& k) {
  return k.kind == KernelKind::kForward || k.kind == KernelKind::kBackward ||
         k.kind == KernelKind::kBackwardDv || k.kind == KernelKind::kBackwardDq ||
         k.kind == KernelKind::kListKeys || k.kind == KernelKind::kDBias ||
         k.kind == KernelKind::kNamedGradients || k.kind == KernelKind::kNamedPeaks ||
         k.kind == KernelKind::kNamedSums;
}

/// Kernels for lists walk over lists alone.
std::string lists_clause(const Kernel& k, const KernelRequest& r) {
  if (!computes_scores(k) || (k.terms & kTermLists) == 0) return "";
  if (!r.problem.has(Role::kKeys)) return "is for lists of keys";
  // Rows are 32-bit in kernels, and step by the size of a group.
  constexpr int64_t kMostRows = int64_t{1} << 30;
  if (r.problem.seqlen_q <= kMostRows / std::max<int64_t>(1, r.problem.group())) return "";
  return "takes up to " + std::to_string(kMostRows) + " rows of a group, this problem has " +
         std::to_string(r.problem.seqlen_q) + " x " + std::to_string(r.problem.group());
}

std::string tma_clause(const Kernel& k, const KernelRequest& r) {
  return k.tma ? tma_cannot_because(r.problem, k.bf16x3) : "";
}

/// TMA copies boxes of keys that lie in one page.
std::string pages_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.tma || !r.problem.has(Role::kPageTable)) return "";
  if (r.problem.has(Role::kLeftPadK))
    return "copies pages by TMA from their first row on: not with leftpad_k";
  const int box = tma_box_keys(k.tile_n, static_cast<int>(r.problem.cache_rows));
  if (box % kTmaFewestKeys == 0) return "";
  return "copies pages by TMA in boxes of a multiple of " + std::to_string(kTmaFewestKeys) +
         " keys that divide a page and its tile of " + std::to_string(k.tile_n) + ", pages of " +
         std::to_string(r.problem.cache_rows) + " allow " + std::to_string(box);
}

/// TMA copies boxes of keys that lie in one of two tensors.
std::string arriving_clause(const Kernel& k, const KernelRequest& r) {
  const int64_t arriving = r.problem.arriving_keys;
  if (!computes_scores(k) || (k.terms & kTermArriving) == 0) return "";
  if (arriving == 0) return "is for keys that arrive while it runs";
  const int box = tma_box_keys(k.tile_n, static_cast<int>(arriving));
  if (box % kTmaFewestKeys == 0) return "";
  return "copies keys by TMA in boxes of a multiple of " + std::to_string(kTmaFewestKeys) +
         " that divide those that arrive, " + std::to_string(arriving) + " allow " + std::to_string(box);
}

/// Of kernels whose tiles hold all queries of a key head.
std::string few_rows_clause(const Kernel& k, const KernelRequest& r) {
  const bool packs = packs_group(r.problem, k);
  const int64_t rows = r.problem.seqlen_q * (packs ? r.problem.group() : 1);
  if (k.copies_pieces && !packs && r.problem.group() > 1) {
    // A key head's keys would be read by several tiles, which is better than no tensor cores, not than tiles of more rows. Above this head size
    // only clusters have these, and one tile is fewer CTAs than its heads have (H200, head size 256, 8 heads, four queries, 8,192 keys: 11.0
    // us for 13.8; 16,384 keys 16.7 for 15.3).
    constexpr int64_t kFewRows = 32, kFewRowsHeadDim = 128, kKeysOfFewCtas = 1 << 13;
    const AttentionProblem& p = r.problem;
    const bool few = p.seqlen_q * p.group() <= kFewRows,
               few_ctas = p.batch * p.heads_kv == 1 && p.seqlen_k <= kKeysOfFewCtas,
               has_more_rows = p.head_dim <= kFewRowsHeadDim || (k.splits_in_cluster && !few_ctas);
    if (few ? has_more_rows : p[Role::kQ].dtype == DType::kE4M3)
      return "leaves groups that do not fit its tile of " + std::to_string(k.tile_m) +
             " rows to kernels of more";
  }
  if (rows <= k.tile_m) return "";
  return "is for queries of a key head that fit a tile of " + std::to_string(k.tile_m) +
         " rows, this problem has " + std::to_string(rows);
}

/// Kernels that take V from the columns of K. Those that share no loads leave tiles of more rows to those that do; these leave prompts over
/// keys in one piece to kernels that load V once more, whose products wait less for each other (64 sequences of 8,192 keys, 128 heads, one
/// query: 247 us for 255; two queries, before a lane issued a strip each, 597 for 547; H200), and qv there, which was not timed.
std::string values_in_keys_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.values_in_keys) return "";
  const bool qv = r.problem.has(Role::kQV);
  if (!r.values_in_keys && !qv) return "is for values that are the first columns of keys";
  if (qv && r.problem.head_dim > kTmaColumns)
    return "takes head sizes of q up to " + std::to_string(kTmaColumns) + " beside qv, this problem has " +
           std::to_string(r.problem.head_dim);
  if (k.cluster > 1 && r.problem.has(Role::kPageTable)) return "";
  if (k.cluster > 1 && qv) return "is for keys in pages where there is qv";
  return few_rows_clause(k, r);
}

/// Where instructions for other layouts of keys would cost time, kernels that decode are compiled for one.
std::string layout_clause(const Kernel& k, const AttentionProblem& p) {
  return !k.one_piece && !p.has(Role::kPageTable) ? "is for keys in pages" : "";
}

/// Kernels with warps that copy for others have too few of them where each row of keys has to be found.
std::string copying_clause(const Kernel& k, const AttentionProblem& p) {
  constexpr int64_t kPiece = 16;
  if (!k.copies_pieces || !p.has(Role::kPageTable)) return "";
  return p.cache_rows % kPiece != 0 || p.has(Role::kLeftPadK)
             ? "is for pages of multiples of " + std::to_string(kPiece) + " rows, without leftpad_k"
             : "";
}

/// Of keys of 16 bits. Boxes of 16 rows take TMA 2 % longer than rows that warps copy (64 sequences of 8,192, H200), boxes of 64 less long; beside
/// more than 16 rows of queries boxes of 16 take 8 to 12 % less. Pages of other sizes than multiples of 8, and queries of groups that no box holds, are not for
/// boxes at all.
bool tma_reads_faster(const Kernel& k, const AttentionProblem& p) {
  constexpr int64_t kLargePages = 64, kBox = 8;
  constexpr int kFewRows = 16;
  if (p.has(Role::kLeftPadK) || !fits_boxes(p)) return false;
  if (!p.has(Role::kPageTable)) return true;
  return k.tile_m > kFewRows ? p.cache_rows % kBox == 0 : p.cache_rows >= kLargePages;
}

std::string stream_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.stream_k) return "";
  if (r.splits.batch_invariant)
    return "cuts the keys of all sequences together into equal shares, so that others of the batch move the "
           "cuts";
  if (r.splits.most > 0)
    return "cuts the keys of all sequences together into equal shares, not those of a tile into parts";
  const AttentionProblem& p = r.problem;
  // Other kernels know better what to do with lengths that the host knows, but none of them reads keys of 8 bits as fast.
  if (k.tma && !k.e4m3_keys && !p.packed_k && !p.has(Role::kSeqUsedK))
    return "is for keys whose number the GPU alone knows (seqused_k, cu_seqlens_k)";
  if (std::string clause = layout_clause(k, p); !clause.empty()) return clause;
  if (std::string clause = copying_clause(k, p); !clause.empty()) return clause;
  if (!k.tma && !k.e4m3_keys && tma_reads_faster(k, p))
    return "leaves to TMA what it reads as fast, or faster: pages of 64 rows and more (with more than 16 "
           "rows of queries, of multiples of 8), and "
           "one piece without leftpad_k, of groups of 1, 2, 4, 8 ... heads";
  if (std::string clause = few_rows_clause(k, r); !clause.empty()) return clause;
  if (p.batch > kStreamSequences)
    return "is for up to " + std::to_string(kStreamSequences) + " sequences, this problem has " +
           std::to_string(p.batch);
  return "";
}

/// Clusters share keys so that the whole GPU reads them, and leave to other kernels what these read as fast, or faster.
std::string cluster_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.splits_in_cluster) return "";
  if (r.splits.batch_invariant || r.splits.most > 0)
    return "shares keys among as many CTAs as a GPU has idle, so that others of the batch move the cuts";
  if (std::string clause = few_rows_clause(k, r); !clause.empty()) return clause;
  const AttentionProblem& p = r.problem;
  if (std::string clause = layout_clause(k, p); !clause.empty()) return clause;
  if (std::string clause = copying_clause(k, p); !clause.empty()) return clause;
  return cluster_size_clause(p, k, r.device);
}

std::string alignment_clause(const Kernel& k, const KernelRequest& r) {
  const uint32_t inputs = input_bits(r.problem);
  if (!k.aligned_only || (!r.any_address && (r.aligned16 & inputs) == inputs)) return "";
  return "needs rows of q, k and v that start at multiples of 16 bytes";
}

std::string shared_memory_clause(const Kernel& k, const KernelRequest& r) {
  if (k.shared_bytes <= r.device.shared_per_cta) return "";
  return "needs " + std::to_string(k.shared_bytes) + " bytes of shared memory, " + text_of(r.device) +
         " gives a CTA " + std::to_string(r.device.shared_per_cta);
}

/// For kernels that write dq themselves: nobody clears rows that no key sees, or keys beyond the last.
std::string complete_clause(const AttentionProblem& p) {
  if (p.packed || p.packed_k || p.has(Role::kSeqUsedQ) || p.has(Role::kSeqUsedK))
    return "is for sequences of one length";
  if (p.window_left >= 0) return "is for no windows to the left";
  if (p.window_right >= 0 && p.seqlen_k - p.seqlen_q + p.window_right < 0)
    return "is for queries that all see a key";
  return "";
}

/// What an order of additions that nobody asks for costs, and a branch in each step, is less than zeros in the sums of dq and
/// bwd_postprocess where heads are short and many. Under a causal mask a block of keys is the last to add at few of its queries. (H200, 16,384
/// tokens, causal: d64 13 % faster at 512 keys, 5 % at 1,024; d128 6 % at 1,024; d192 35, 18 and 6 % at 256, 512 and 1,024; d256 18, 8 and 0 %.
/// Without a mask d64 and d128 up to 6 % slower, d192 14 and 9 % faster at 256 and 512, 1 % slower at 1,024, d256 1 to 5 % slower from 512 on.)
std::string fixed_order_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.fixed_order) return "";
  const AttentionProblem& p = r.problem;
  if (std::string clause = complete_clause(p); !clause.empty()) return clause;
  if (p.window_right < 0) {
    if (k.last_queries_first == LastQueriesFirst::kAlways) return "is for causal masks";
    constexpr int64_t kFewKeys = 512;
    if (!r.same_bits && !(k.last_writes && p.seqlen_k <= kFewKeys))
      return "is for causal masks, " +
             (k.last_writes ? "up to " + std::to_string(kFewKeys) + " keys, " : "") +
             "or the same bits each time";
  }
  if (k.last_writes && (p[Role::kDQ].dtype != k.dtype || (r.aligned16 & tile::kAlignedDQ) == 0))
    return "writes dq in the type of q, in rows that start at multiples of 16 bytes";
  if (!r.same_bits && !has_many_tiles(p, k, r.device.sm_count))
    return "is for many heads, or the same bits each time";
  return "";
}

/// The blocks of keys of a head are a cluster, and dQ is complete when it has passed all of them. Where heads are many others are faster: 120
/// of 132 SMs hold clusters of four, and consumers read, add and send beside what they compute. (H200, 16,384 tokens, the kernels that are chosen
/// instead: causal 1.13 and 1.18 times as fast at d64 with 128 and 256 keys, 1.12, 0.99, 1.09 and 1.14 at d128 with 128, 256, 384 and 512; 512
/// keys without a mask 1.12.) So they are where heads are few:
/// - of four blocks, unless causal heads fill the SMs three times. 32, 64, 128 heads of 128, 512 keys: 55, 83, 135 us for 36, 65, 121, causal 44,
///   68, 107 for 32, 54, 115;
/// - where tiles of half as many keys find an SM each, or of one and two blocks every second one does. 16 heads of 128, 128, 256, 384, 512 keys:
///   11.7, 18.1, 25.5, 32.8 us for 10.7, 14.2, 19.1, 26.2; 32 heads, 256 keys 18.9 for 20.8; of 64, 128 keys, 16, 32, 64 heads 9.7, 9.7, 10.2 for
///   8.2, 9.6, 12.4.
/// With the same bits each time these others would wait for one another.
std::string chain_clause(const Kernel& k, const KernelRequest& r) {
  if (!k.chain) return "";
  const AttentionProblem& p = r.problem;
  if (std::string clause = complete_clause(p); !clause.empty()) return clause;
  const bool causal = p.window_right >= 0;
  const int64_t blocks = ceil_div(p.seqlen_k, k.tile_n), heads = p.batch * p.heads_kv,
                sms = r.device.sm_count;
  if (blocks > kMostChained)
    return "is for up to " + std::to_string(kMostChained * k.tile_n) + " keys, which a cluster holds";
  constexpr int64_t kBlocksOfMany = 3;
  if (has_many_tiles(p, k, sms)) {
    if (causal) return "is for few heads under a causal mask";
    if (blocks > kBlocksOfMany)
      return "is for up to " + std::to_string(kBlocksOfMany * k.tile_n) + " keys where heads are many";
  }
  if (causal && p.group() > 1)
    return "takes no groups of heads under a causal mask, where their key blocks have unequal work";
  if (r.same_bits) return "";
  if (blocks > kBlocksOfMany && (!causal || blocks * heads <= 3 * sms))
    return "is for up to " + std::to_string(kBlocksOfMany * k.tile_n) +
           " keys, causal heads that fill the GPU three times, or the same bits each time";
  if (ceil_div(p.seqlen_k, k.tile_n / 2) * heads <= (blocks > 2 ? sms : sms / 2))
    return "is for more heads than have an SM for each tile of half as many keys, or the same bits each time";
  return "";
}

std::string order_clause(const Kernel& k, const KernelRequest& r) {
  return k.any_order && r.same_bits ? "adds to dq in any order, not with the same bits each time" : "";
}

/// Why a kernel that reads the bias pair by pair, in rows of elements of `dtype` side by side, cannot take dS for its gradient;
/// "" when it can.
std::string ds_is_not_dbias(const AttentionProblem& p, DType dtype) {
  const TensorDesc &bias = p[Role::kBias], &dbias = p[Role::kDBias];
  if (bias.dtype != dtype || dbias.dtype != dtype)
    return "takes a bias and a gradient in " + std::string(name_of(dtype));
  if (bias.stride[3] != 1 || dbias.stride[3] != 1 || bias.stride[2] == 0 || dbias.stride[2] == 0)
    return "takes a bias with an element for each query and key, those of a query side by side";
  if (!p.expressions || !p.expressions->score || !expr::slope_is_one(*p.expressions->score))
    return "takes scores whose derivative by that of the bias is 1";
  return "";
}

std::string dbias_clause(const Kernel& k, const KernelRequest& r) {
  if (k.kind != KernelKind::kDBias || (k.terms & kTermExpressions) == 0) return "";
  if (!r.terms_in_expression)
    return "goes with a main kernel that is compiled for all terms as one expression";
  return ds_is_not_dbias(r.problem, k.dtype);
}

/// Elements of a dimension: one where it is broadcast.
int64_t extent_of(const TensorDesc& t, size_t dimension) {
  return t.stride[dimension] == 0 ? 1 : t.shape[dimension];
}
/// Whether elements lie side by side, in the order of the dimensions.
bool lies_without_gaps(const TensorDesc& t) {
  int64_t elements = 1;
  for (auto d = static_cast<size_t>(t.ndim); d-- > 0;) {
    if (extent_of(t, d) > 1 && t.stride[d] != elements) return false;
    elements *= extent_of(t, d);
  }
  return true;
}

constexpr std::array kConditions = {
    excluded_clause,       name_clause,          capability_clause, dtype_clause,     gradients_clause,
    length_clause,         head_size_clause,     terms_clause,      key_dtype_clause, e4m3_operands_clause,
    keys_clause,           lists_clause,         tma_clause,        pages_clause,     arriving_clause,
    values_in_keys_clause, stream_clause,        cluster_clause,    chain_clause,     fixed_order_clause,
    alignment_clause,      shared_memory_clause, dbias_clause,      order_clause};

/// A clause, and how many of the conditions before it held: the kernel that got furthest tells most.
struct Verdict {
  int passed = 0;
  std::string clause;
};

Verdict judge(const Kernel& kernel, const KernelRequest& request) {
  Verdict verdict;
  for (const auto condition : kConditions) {
    verdict.clause = condition(kernel, request);
    if (!verdict.clause.empty()) break;
    ++verdict.passed;
  }
  return verdict;
}

bool serves(const Kernel& k, KernelKind kind, Family family) {
  return k.kind == kind && (k.family == family || k.family == Family::kAny);
}

/// Whether others like this kernel may end sooner. Where the blocks of keys of a head add in a fixed order, more of them wait longer.
bool compares_times(const Kernel& kernel, const KernelRequest& request) {
  return kernel.rate > 0 && !(kernel.kind == KernelKind::kBackward && request.same_bits);
}

/// Of the kernels with a rate and the head sizes of `first`, the one whose tiles would end soonest.
const Kernel* fastest_like(const Kernel& first, std::span<const Kernel* const> table, Family family,
                           const KernelRequest& request) {
  const Kernel* fastest = &first;
  const bool of_one = request.splits.batch_invariant;
  const AttentionProblem& problem = of_one ? request.problem.of_one_sequence() : request.problem;
  const auto time_of = [&](const Kernel& kernel) {
    return time_of_tiles(problem, kernel, of_one ? kInvariantSms : request.device.sm_count, request.splits);
  };
  double shortest = time_of(first);
  for (const Kernel* other : table) {
    if (other->rate == 0 || !serves(*other, first.kind, family) || other->head_dim != first.head_dim ||
        other->head_dim_v != first.head_dim_v || !cannot_because(*other, request).empty()) {
      continue;
    }
    const double time = time_of(*other);
    if (time < shortest) {
      shortest = time;
      fastest = other;
    }
  }
  return fastest;
}

}  // namespace

KernelRequest::KernelRequest(const AttentionProblem& p, const DeviceProperties& d, bool any,
                             const char* pattern, const KeySplits& key_splits)
    : problem(p),
      device(d),
      any_address(any),
      name_pattern(pattern),
      splits(key_splits),
      terms(terms_of(p)),
      aligned16(params_of(p).aligned16) {}

const char* kernel_name_pattern() {
  const char* pattern = std::getenv("FOVEA_KERNEL");
  return pattern != nullptr && *pattern != '\0' ? pattern : nullptr;
}

bool can_add_dbias(const Kernel& main, const AttentionProblem& p, bool deterministic) {
  // Sums of dS of one element are rounded to 16 bits each time. Of eight they are off by 1.6 times as much, in the mean, as
  // eight roundings of dS and one of the sum; of 16 by 2.2 times as much.
  constexpr int64_t kMostSums = 8;
  if (!main.adds_dbias || !ds_is_not_dbias(p, main.dtype).empty()) return false;
  const TensorDesc& dbias = p[Role::kDBias];
  constexpr int64_t kVectorBytes = 16;  // of an addition, and of what TMA takes: rows are whole vectors
  if (dbias.shape[3] * size_of(dbias.dtype) % kVectorBytes != 0) return false;
  if (!lies_without_gaps(dbias) || (params_of(p).aligned16 & tile::kAlignedDBias) == 0) return false;
  const int64_t sums = (extent_of(dbias, 0) == 1 ? p.batch : 1) * (extent_of(dbias, 1) == 1 ? p.heads_q : 1);
  return sums <= (deterministic ? 1 : kMostSums);
}

uint32_t terms_of(const AttentionProblem& p) {
  uint32_t terms = 0;
#define FOVEA_ADD_TERM(Name, name, text, condition) \
  if (condition) terms |= kTerm##Name;
  FOVEA_TERMS(FOVEA_ADD_TERM)
#undef FOVEA_ADD_TERM
  return terms;
}

uint32_t terms_known_by(const Kernel& k) {
  const bool general = k.source.text != nullptr && (k.terms & kAllTerms) == kAllTerms;
  if (!computes_scores(k))
    return k.terms | kTermExpressions | kTermLists | kTermCache | kTermPages | kTermKeysOf8Bits |
           kTermQueriesOf8Bits | kTermQueriesOfValues | kTermArriving;
  const bool by_lists = (k.terms & kTermLists) != 0;
  // A copy of float32 operands as bf16x3 has the rows of the tensors.
  const bool of_cache = k.kind == KernelKind::kForward && !k.bf16x3 && !by_lists;
  return k.terms | (general ? kTermExpressions : 0u) | (of_cache ? uint32_t{kTermCache} : 0u) |
         (k.pages ? uint32_t{kTermPages} : 0u) | (k.e4m3_keys ? uint32_t{kTermKeysOf8Bits} : 0u) |
         (k.e4m3_queries ? uint32_t{kTermQueriesOf8Bits} : 0u) |
         (k.multiplies_qv ? uint32_t{kTermQueriesOfValues} : 0u);
}

std::string tma_cannot_because(const AttentionProblem& p, bool copies) {
  constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;  // coordinates are signed
  const int64_t rows = std::max(p.packed ? p.total_q : p.seqlen_q, p.packed_k ? p.total_k : p.seqlen_k);
  if (rows > kMostRows)
    return "takes up to " + std::to_string(kMostRows) + " rows, this problem has " + std::to_string(rows);
  constexpr std::array<Role, 5> kLoaded = {Role::kQ, Role::kQV, Role::kK, Role::kV, Role::kDO};
  for (const Role role : kLoaded) {
    if (!p.has(role)) continue;
    for (const int64_t size : p[role].shape) {
      if (size == 0) return "copies by TMA, which takes no empty tensors";
    }
  }
  for (const Role role : kLoaded) {
    if (!p.has(role)) continue;
    const TensorDesc& t = p[role];
    const bool packed = has_keys(spec_of(role)) ? p.packed_k : p.packed;
    for (size_t i = packed ? 1 : 0; i < 3; ++i) {  // packed sequences have no stride of batches
      const int64_t bytes = t.stride[i] * size_of(t.dtype);
      if (!copies && t.shape[i] > 1 && (bytes < 0 || bytes >= kTmaStrideLimit)) {
        return std::string("copies by TMA, which takes strides from 0 to 2^40 bytes; ") + name_of(role) +
               " has one of " + std::to_string(bytes);
      }
    }
  }
  return "";
}

bool values_may_be_in_keys(const AttentionProblem& p) {
  const TensorDesc &k = p[Role::kK], &v = p[Role::kV];
  constexpr int64_t kNarrow = 256;  // other kernels hold all of K and of V
  const int64_t of_keys_alone = p.head_dim - p.head_dim_v;
  if (p.head_dim <= kNarrow || p.has(Role::kQV) || k.dtype != v.dtype || of_keys_alone < 0 ||
      of_keys_alone > kTmaColumns)
    return false;
  for (size_t i = 0; i < 3; ++i)
    if (k.shape[i] > 1 && k.stride[i] != v.stride[i]) return false;
  return true;
}

std::string cannot_because(const Kernel& kernel, const KernelRequest& request) {
  return judge(kernel, request).clause;
}

Choice choose_kernel(std::span<const Kernel* const> table, KernelKind kind, Family family,
                     const KernelRequest& request) {
  Verdict closest{-1, ""};
  for (const Kernel* k : table) {
    if (!serves(*k, kind, family)) continue;
    Verdict verdict = judge(*k, request);
    if (verdict.clause.empty())
      return {compares_times(*k, request) ? fastest_like(*k, table, family, request) : k, ""};
    // Of those that get equally far the last one says most: the table rises to the largest head sizes.
    if (verdict.passed >= closest.passed) closest = std::move(verdict);
  }
  if (closest.passed < 0) return {nullptr, std::string("has no ") + name_of(kind) + " kernel in this build"};
  return {nullptr, std::move(closest.clause)};
}

}  // namespace fovea::cuda
