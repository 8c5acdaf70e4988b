// Checks every field of a problem and rewrites it into the form that backends get.
#include "plan/validate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "core/status.hpp"
#include "plan/caches.hpp"
#include "plan/expressions.hpp"
#include "plan/shapes.hpp"
#include "plan/tensor_checks.hpp"
#include "plan/text.hpp"

namespace fovea::plan {
namespace {

void check_starts(Role role, const int32_t* starts, int64_t batch, int64_t total, int64_t longest) {
  if (starts[0] != 0) {
    throw_invalid(name_of(role), "first element " + whole(starts[0]), "0",
                  "start the first sequence at row 0");
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{starts[b + 1]} - starts[b];
    if (length < 0) {
      throw_invalid(name_of(role),
                    "element " + whole(b) + " = " + whole(starts[b]) + " and then " + whole(starts[b + 1]),
                    "non-decreasing elements", "sum up the sequence lengths");
    }
    if (length > longest) {
      throw_invalid(name_of(role), "a sequence of length " + whole(length) + " at " + whole(b),
                    "at most " + whole(longest) + ", the longest that the plan was made for",
                    "raise max_seqlen, or make a plan for these sequences");
    }
  }
  if (starts[batch] > total) {
    throw_invalid(name_of(role), "last element " + whole(starts[batch]),
                  "at most " + whole(total) + ", the rows of the packed tensors",
                  "check the sequence lengths");
  }
}

void check_used(Role role, const int32_t* used, const int32_t* starts, int64_t batch, int64_t seqlen) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = starts ? int64_t{starts[b + 1]} - starts[b] : seqlen;
    if (used[b] < 0 || used[b] > length) {
      throw_invalid(name_of(role), "element " + whole(b) + " = " + whole(used[b]),
                    "0 to " + whole(length) + ", the length of the sequence",
                    "give how many of its rows take part");
    }
  }
}

/// Whether no entry is below -1 or at least `length`.
bool all_listed(const int32_t* list, int64_t count, int64_t length) {
  // As unsigned numbers, -1 comes to 0, and what is below it past every length.
  const auto last = static_cast<uint32_t>(length);
  uint32_t largest = 0;
  for (int64_t n = 0; n < count; ++n) largest = std::max(largest, static_cast<uint32_t>(list[n]) + 1u);
  return largest <= last;
}

/// The lists of one key head, of queries whose keys are [0, length).
void check_lists(const AttentionProblem& p, const int32_t* lists, int64_t queries, int64_t length,
                 const std::string& where) {
  const int64_t stride = p[Role::kKeys].stride[2];
  for (int64_t i = 0; i < queries; ++i) {
    const int32_t* list = lists + i * stride;
    if (all_listed(list, p.list_size, length)) continue;
    int64_t n = 0;
    while (list[n] >= -1 && list[n] < length) ++n;
    throw_invalid("keys", whole(list[n]) + " at entry " + whole(n) + " of query " + whole(i) + where,
                  "-1 to " + whole(length - 1) + ", as the sequence has " + whole(length) + " keys",
                  "list positions within the sequence, and -1 for none");
  }
}

class Validator {
 public:
  explicit Validator(const ProblemDescription& description) : in_(description) {
    p_.pass = in_.pass;
    p_.tensors = in_.tensors;
  }

  AttentionProblem run() {
    check_presence();
    for_each_tensor([&](Role role) { check_tensor(role); });
    find_sizes();
    find_sequences();
    check_numbers();
    check_block_size("block_q", in_.block_q);
    check_block_size("block_k", in_.block_k);
    for_each_tensor([&](Role role) { check_shape(p_, role); });
    for_each_tensor([&](Role role) { to_common_form(p_, role, at(role)); });
    read_expressions(in_, p_);
    check_sequence_lengths(p_, data_of(p_));
    return p_;
  }

 private:
  TensorDesc& at(Role r) { return p_.tensors[index_of(r)]; }
  bool has(Role r) const { return p_.has(r); }
  template <class Visit>
  void for_each_tensor(Visit&& visit) const {
    for (size_t i = 0; i < kRoleCount; ++i) {
      if (p_.tensors[i].present) visit(static_cast<Role>(i));
    }
  }

  // --- which tensors there are ---

  void check_presence() const {
    const bool backward = p_.pass == Pass::kBackward;
    for (const TensorSpec& spec : tensor_table::kTable) {
      if (has(spec.role) || spec.need == Need::kOptional || (spec.need == Need::kBackward && !backward))
        continue;
      throw_invalid(name_of(spec.role), "no tensor",
                    std::string("a tensor, the ") + meaning_of(spec.role) +
                        (spec.need == Need::kBackward ? ", as the backward pass needs it" : ""),
                    "set this field of the problem");
    }
    for_each_tensor([&](Role role) {
      if (access_of(role, p_.pass) != FOVEA_ABSENT) return;
      if (backward) {
        throw_invalid(name_of(role), "a tensor", "none in a backward problem",
                      role == Role::kQV
                          ? "leave it out: it has no gradient; give rows [q | qv] as q and rows [k | v] as k"
                      : is_descale(role)
                          ? "leave it out: values of 8 bits have no gradients; convert them"
                          : "leave it out: caches have no gradients; gather the keys that take part");
      }
      throw_invalid(name_of(role), "a tensor", "none in a forward problem",
                    "leave it out, or set pass to FOVEA_BACKWARD");
    });
    if (backward && has(Role::kCuSeqlensQ) && !has(Role::kCuSeqlensK)) {
      throw_invalid("cu_seqlens_k", "no tensor", "a tensor, as a backward problem has cu_seqlens_q",
                    "pack the keys as well");
    }
    check_cache_tensors(p_);
    for_each_tensor([&](Role role) {
      const Role with = spec_of(role).with;
      if (has(with)) return;
      throw_invalid(name_of(with), "no tensor", std::string("a tensor, because there is ") + name_of(role),
                    std::string("set it, or leave out ") + name_of(role));
    });
  }

  // --- each tensor by itself ---

  void check_tensor(Role role) {
    TensorDesc& t = at(role);
    check_rank(spec_of(role), p_.tensors);
    check_dtype(spec_of(role), p_.tensors);
    check_memory(name_of(role), t, p_[Role::kQ],
                 {.contiguous = spec_of(role).contiguous, .output = p_.writes(index_of(role))});
  }

  // --- tensors together ---

  /// Sizes that q, k and v tell.
  void find_sizes() {
    const TensorDesc &q = at(Role::kQ), &k = at(Role::kK), &v = at(Role::kV);
    p_.packed = has(Role::kCuSeqlensQ);
    p_.packed_k = has(Role::kCuSeqlensK);
    p_.dtype = q.dtype == DType::kE4M3 ? at(Role::kO).dtype : q.dtype;
    // The dimensions that count rows; heads and size follow.
    const size_t rows = p_.packed ? 0 : 1, rows_k = p_.packed_k ? 0 : 1;
    p_.heads_q = q.shape[rows + 1];
    p_.heads_kv = k.shape[rows_k + 1];
    p_.head_dim = q.shape[rows + 2];
    p_.head_dim_v = v.shape[rows_k + 2];
    check_head_size("q", p_.head_dim);
    check_head_size("v", p_.head_dim_v);
    if (p_.heads_q < 1) throw_invalid("q", "0 heads", "at least 1", "check the order of the dimensions");
    if (p_.heads_kv < 1) throw_invalid("k", "0 heads", "at least 1", "check the order of the dimensions");
    if (p_.heads_q % p_.heads_kv != 0) {
      throw_invalid("k", whole(p_.heads_kv) + " heads",
                    "a number that divides the " + whole(p_.heads_q) + " heads of q",
                    "repeat or drop heads of k and v");
    }
    if (p_.packed) {
      p_.total_q = q.shape[0];
      p_.batch =
          std::max<int64_t>(at(Role::kCuSeqlensQ).shape[0] - 1, 0);  // without one, find_sequences() refuses
    } else {
      p_.batch = q.shape[0];
      p_.seqlen_q = q.shape[1];
      p_.total_q = p_.batch * p_.seqlen_q;
    }
    if (p_.packed_k) {
      p_.total_k = k.shape[0];
    } else {
      find_cache(k);
      p_.total_k = p_.batch * p_.seqlen_k;
    }
    find_new_rows();
    if (const TensorDesc& keys = at(Role::kKeys); keys.present)
      p_.list_size = keys.shape[static_cast<size_t>(keys.ndim - 1)];
    check_shape(p_, Role::kK);
    check_shape(p_, Role::kV);
  }
  /// Sizes of keys that are not packed.
  void find_cache(const TensorDesc& k) {
    p_.seqlen_k = k.shape[1];
    if (!has(Role::kPageTable) && !has(Role::kCacheBatch)) return;
    p_.caches = k.shape[0];
    p_.cache_rows = k.shape[1];
    if (!has(Role::kPageTable)) return;
    p_.table_columns = at(Role::kPageTable).shape[1];
    if (p_.cache_rows < 1) {
      throw_invalid("k", "shape " + shape_text(k) + ", pages of 0 rows",
                    "pages of 1 row or more, as there is page_table",
                    "check the order of the dimensions: (pages, page size, heads, head size)");
    }
    p_.seqlen_k = p_.table_columns * p_.cache_rows;
    if (p_.seqlen_k > kMaxDimension) {
      throw_invalid("page_table",
                    whole(p_.table_columns) + " pages of " + whole(p_.cache_rows) + " rows for each sequence",
                    "at most " + whole(kMaxDimension) + " rows", "leave out columns that no sequence uses");
    }
  }
  /// Sizes of what is appended, and of the tables of angles.
  void find_new_rows() {
    if (!p_.appends()) return;
    const TensorDesc &rows = at(Role::kKNew), &angles = at(Role::kRotaryCos);
    if (p_.packed_new()) {
      p_.total_new = p_.new_rows = rows.shape[0];
    } else {
      p_.new_rows = rows.shape[1];
      p_.total_new = p_.batch * p_.new_rows;
    }
    if (!p_.rotates()) return;
    p_.positions = angles.shape[0];
    p_.rotary_half = angles.shape[1];
    if (p_.rotary_half < 1 || 2 * p_.rotary_half > p_.head_dim) {
      throw_invalid("rotary_cos", "shape " + shape_text(angles),
                    "1 to " + whole(p_.head_dim / 2) + " columns, half of the head size of q at most",
                    "give each pair of elements that is rotated a column");
    }
  }
  static void check_head_size(const char* argument, int64_t size) {
    if (size >= 1 && size <= kMaxHeadSize) return;
    throw_invalid(argument, "head size " + whole(size), "1 to " + whole(kMaxHeadSize),
                  "check the order of the dimensions: the last one is the head size");
  }

  /// The batch and the longest sequences of packed problems.
  void find_sequences() {
    check_max_seqlen("max_seqlen_q", in_.max_seqlen_q, p_.packed);
    check_max_seqlen("max_seqlen_k", in_.max_seqlen_k, p_.packed_k);
    if (p_.packed) {
      const TensorDesc& starts = at(Role::kCuSeqlensQ);
      if (starts.shape[0] < 1) {
        throw_invalid("cu_seqlens_q", "shape " + shape_text(starts), "(batch + 1): at least 1 element",
                      "give where each sequence starts, and the end");
      }
      p_.seqlen_q = longest_sequence(Role::kCuSeqlensQ, p_.total_q, in_.max_seqlen_q);
    }
    if (p_.packed_k) {
      check_shape(p_, Role::kCuSeqlensK);  // its elements are read
      p_.seqlen_k = longest_sequence(Role::kCuSeqlensK, p_.total_k, in_.max_seqlen_k);
    }
  }
  static void check_max_seqlen(const char* argument, int64_t length, bool packed) {
    if (length < 0 || length > kMaxDimension) {
      throw_invalid(argument, whole(length), "0 to " + whole(kMaxDimension),
                    "give the longest sequence, or 0 to have it found");
    }
    if (length > 0 && !packed) {
      throw_invalid(argument, whole(length), "0, as the sequences are not packed",
                    "leave it out, or pass cu_seqlens_q and cu_seqlens_k");
    }
  }
  /// What the caller names, else what cu_seqlens tells, else all rows.
  int64_t longest_sequence(Role role, int64_t total, int64_t named) const {
    const TensorDesc& t = p_[role];
    if (t.data == nullptr || t.device != DeviceType::kCpu) return named > 0 ? named : total;
    const auto* starts = static_cast<const int32_t*>(t.data);
    check_starts(role, starts, p_.batch, total, named > 0 ? named : std::numeric_limits<int64_t>::max());
    if (named > 0) return named;
    int64_t longest = 0;
    for (int64_t b = 0; b < p_.batch; ++b) longest = std::max(longest, int64_t{starts[b + 1]} - starts[b]);
    return longest;
  }

  void check_numbers() {
    if (!std::isfinite(in_.scale)) {
      throw_invalid("scale", number_text(in_.scale), "a finite number", "leave it 0 for 1/sqrt(head size)");
    }
    p_.scale = in_.scale == 0 ? 1 / std::sqrt(static_cast<double>(p_.score_dim())) : in_.scale;
    if (!std::isfinite(in_.softcap) || in_.softcap < 0) {
      throw_invalid("softcap", number_text(in_.softcap), "a finite number, 0 or more",
                    "leave it 0 for no cap");
    }
    p_.softcap = in_.softcap;
    if (!(in_.dropout >= 0 && in_.dropout < 1)) {
      throw_invalid("dropout", number_text(in_.dropout), "a probability in [0, 1)",
                    "give the share of weights to drop");
    }
    p_.dropout = in_.dropout;
    check_window("window_left", in_.window_left);
    check_window("window_right", in_.window_right);
    p_.causal = in_.causal;
    const auto is_window = [&](int64_t keys) { return keys >= 0 && keys < p_.seqlen_k; };
    p_.rotary_by_row = in_.causal || is_window(in_.window_left) || is_window(in_.window_right);
    p_.rotary_interleaved = in_.rotary_interleaved;
    p_.block_q = in_.block_q;
    p_.block_k = in_.block_k;
    // A window as wide as the sequence is none; smaller ones cannot overflow sums of positions.
    p_.window_left = in_.window_left >= p_.seqlen_k ? -1 : in_.window_left;
    p_.window_right = in_.causal ? 0 : in_.window_right >= p_.seqlen_q ? -1 : in_.window_right;
  }
  static void check_window(const char* argument, int64_t keys) {
    if (keys < -1) throw_invalid(argument, whole(keys), "-1 or more keys", "use -1 for no limit");
  }

  void check_block_size(const char* argument, int64_t size) const {
    if (has(Role::kBlockMask) && (size < 1 || size > kMaxDimension)) {
      throw_invalid(argument, whole(size), "1 to " + whole(kMaxDimension) + ", as there is block_mask",
                    "give the rows or keys that one element of block_mask stands for");
    }
    if (!has(Role::kBlockMask) && size != 0) {
      throw_invalid(argument, whole(size), "0, as there is no block_mask",
                    "leave it out, or pass block_mask");
    }
  }

  static Buffers data_of(const AttentionProblem& p) {
    Buffers buffers;
    for (size_t i = 0; i < p.tensors.size(); ++i) {
      const TensorDesc& t = p.tensors[i];
      if (t.present && t.device == DeviceType::kCpu) buffers.data[i] = t.data;
    }
    return buffers;
  }

  const ProblemDescription& in_;
  AttentionProblem p_;
};

}  // namespace

void check_sequence_lengths(const AttentionProblem& p, const Buffers& buffers) {
  const auto* starts_q = buffers.get<const int32_t>(Role::kCuSeqlensQ);
  const auto* starts_k = buffers.get<const int32_t>(Role::kCuSeqlensK);
  const auto* used_q = buffers.get<const int32_t>(Role::kSeqUsedQ);
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  if (starts_q) check_starts(Role::kCuSeqlensQ, starts_q, p.batch, p.total_q, p.seqlen_q);
  if (starts_k) check_starts(Role::kCuSeqlensK, starts_k, p.batch, p.total_k, p.seqlen_k);
  // Without starts a packed sequence is known to be no longer than the longest; its own length is checked in runs.
  if (used_q) check_used(Role::kSeqUsedQ, used_q, starts_q, p.batch, p.seqlen_q);
  if (used_k) check_used(Role::kSeqUsedK, used_k, starts_k, p.batch, p.seqlen_k);
  if (const auto* starts_new = buffers.get<const int32_t>(Role::kCuSeqlensKNew))
    check_starts(Role::kCuSeqlensKNew, starts_new, p.batch, p.total_new, p.new_rows);
  check_cache_contents(p, buffers);
}

void check_key_lists(const AttentionProblem& p, const Buffers& buffers) {
  const auto* lists = buffers.get<const int32_t>(Role::kKeys);
  if (lists == nullptr) return;
  const TensorDesc& t = p[Role::kKeys];
  const auto* starts_q = buffers.get<const int32_t>(Role::kCuSeqlensQ);
  const auto* starts_k = buffers.get<const int32_t>(Role::kCuSeqlensK);
  const auto* used_q = buffers.get<const int32_t>(Role::kSeqUsedQ);
  const auto* pads = buffers.get<const int32_t>(Role::kLeftPadK);
  const int64_t heads = t.stride[1] == 0 ? 1 : p.heads_kv;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = p.packed ? starts_q[b] : 0;
    const int64_t queries = used_q ? used_q[b] : p.packed ? starts_q[b + 1] - first : p.seqlen_q;
    const int64_t rows = p.packed_k ? int64_t{starts_k[b + 1]} - starts_k[b] : p.seqlen_k;
    const int64_t length = pads ? rows - pads[b] : rows;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t offset = b * t.stride[0] + head * t.stride[1] + first * t.stride[2];
      check_lists(p, lists + offset, queries, length,
                  ", key head " + whole(head) + " of sequence " + whole(b));
    }
  }
}

AttentionProblem validate(const ProblemDescription& description) {
  return Validator(description).run();
}

}  // namespace fovea::plan
