// Checks every field of a problem and rewrites it into the form that backends get.
#include "plan/validate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>

#include "core/status.hpp"
#include "plan/layout.hpp"
#include "plan/roles.hpp"
#include "plan/text.hpp"

namespace fovea::plan {
namespace {

using Shape = std::initializer_list<int64_t>;

std::string whole(int64_t x) {
  return std::to_string(x);
}

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

class Validator {
 public:
  explicit Validator(const ProblemDescription& description) : in_(description) {
    p_.pass = in_.pass;
    p_.tensors = in_.tensors;
  }

  AttentionProblem run() {
    check_presence();
    for (size_t i = 0; i < p_.tensors.size(); ++i) {
      if (p_.tensors[i].present) check_tensor(static_cast<Role>(i));
    }
    check_queries_keys_values();
    check_sequences();
    check_numbers();
    check_outputs_and_gradients();
    check_score_terms();
    to_common_form();
    check_sequence_lengths(p_, data_of(p_));
    return p_;
  }

 private:
  TensorDesc& at(Role r) { return p_.tensors[index_of(r)]; }
  bool has(Role r) const { return p_.has(r); }

  // --- which tensors there are ---

  void require(Role role, const char* what_for) const {
    if (!has(role)) throw_invalid(name_of(role), "no tensor", what_for, "set this field of the problem");
  }
  void require_together(Role given, Role missing) const {
    if (has(given) && !has(missing)) {
      throw_invalid(name_of(missing), "no tensor",
                    std::string("a tensor, because there is ") + name_of(given),
                    std::string("set it, or leave out ") + name_of(given));
    }
  }

  void check_presence() const {
    const bool backward = p_.pass == Pass::kBackward;
    for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kO}) require(role, "a tensor");
    if (backward) {
      for (const Role role : {Role::kLse, Role::kDO, Role::kDQ, Role::kDK, Role::kDV}) {
        require(role, "a tensor, as the backward pass needs it");
      }
    }
    for (size_t i = 0; i < p_.tensors.size(); ++i) {
      const Role role = static_cast<Role>(i);
      if (!backward && has(role) && traits_of(role, p_.pass).backward_only) {
        throw_invalid(name_of(role), "a tensor", "none in a forward problem",
                      "leave it out, or set pass to FOVEA_BACKWARD");
      }
    }
    require_together(Role::kDBias, Role::kBias);
    require_together(Role::kDSink, Role::kSink);
    require_together(Role::kCuSeqlensQ, Role::kCuSeqlensK);
    require_together(Role::kCuSeqlensK, Role::kCuSeqlensQ);
  }

  // --- each tensor by itself ---

  void check_tensor(Role role) {
    TensorDesc& t = at(role);
    const RoleTraits traits = traits_of(role, p_.pass);
    check_rank(role);
    check_dtype(role);
    const TensorDesc& q = at(Role::kQ);
    if (t.device != q.device || t.device_id != q.device_id) {
      throw_invalid(name_of(role), "memory of " + device_text(t.device, t.device_id),
                    "memory of " + device_text(q.device, q.device_id) + ", as q",
                    "move all tensors to one device");
    }
    for (int i = 0; i < t.ndim; ++i) {
      const int64_t size = t.shape[static_cast<size_t>(i)];
      if (size < 0 || size > kMaxDimension) {
        throw_invalid(name_of(role), "shape " + shape_text(t),
                      "sizes from 0 to " + whole(kMaxDimension) + " in every dimension",
                      "check the shape; split the problem if it is that large");
      }
    }
    const auto bytes = compact_bytes(t);
    if (!bytes || *bytes > kMaxTensorBytes) {
      throw_invalid(name_of(role), "shape " + shape_text(t) + " of " + std::string(name_of(t.dtype)),
                    "at most 2^57 bytes", "check the shape; split the problem if it is that large");
    }
    canonicalise_strides(t);
    check_strides(role, traits);
    if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size_of(t.dtype)) != 0) {
      throw_invalid(name_of(role), "an address that is no multiple of " + whole(size_of(t.dtype)) + " bytes",
                    "elements of " + std::string(name_of(t.dtype)) + " at multiples of their size",
                    "check data and byte_offset, or copy the tensor");
    }
  }

  void check_rank(Role role) const {
    const TensorDesc& t = p_[role];
    const bool packed = has(Role::kCuSeqlensQ);
    const auto expect = [&](bool good, const char* expected, const char* remedy) {
      if (!good) {
        throw_invalid(name_of(role), whole(t.ndim) + " dimensions, " + shape_text(t), expected, remedy);
      }
    };
    switch (role) {
      case Role::kQ:
      case Role::kK:
      case Role::kV:
      case Role::kO:
      case Role::kDO:
      case Role::kDQ:
      case Role::kDK:
      case Role::kDV:
        if (packed) {
          return expect(t.ndim == 3, "3 dimensions (total, heads, size), as there is cu_seqlens_q",
                        "drop the batch dimension, or leave out cu_seqlens_q and cu_seqlens_k");
        }
        return expect(
            t.ndim == 4, "4 dimensions (batch, seqlen, heads, size)",
            "add the missing dimensions, or pass cu_seqlens_q and cu_seqlens_k for packed sequences");
      case Role::kLse:
      case Role::kDLse:
        if (packed) {
          return expect(t.ndim == 2, "2 dimensions (heads_q, total_q), as there is cu_seqlens_q",
                        "drop the batch dimension");
        }
        return expect(t.ndim == 3, "3 dimensions (batch, heads_q, seqlen_q)", "add the missing dimensions");
      case Role::kBias:
      case Role::kDBias:
      case Role::kMask:
        return expect(t.ndim == 4, "4 dimensions (batch, heads_q, seqlen_q, seqlen_k)",
                      "add dimensions of size 1 where it broadcasts");
      case Role::kBlockMask:
        return expect(t.ndim == 4, "4 dimensions (batch, heads_q, blocks of queries, blocks of keys)",
                      "add dimensions of size 1 where it broadcasts");
      case Role::kAlibi:
        return expect(t.ndim == 1 || t.ndim == 2, "1 dimension (heads_q) or 2 (batch, heads_q)",
                      "give one slope per head");
      case Role::kSink:
      case Role::kDSink:
        return expect(t.ndim == 1, "1 dimension (heads_q)", "give one value per query head");
      case Role::kCuSeqlensQ:
      case Role::kCuSeqlensK:
        return expect(t.ndim == 1, "1 dimension (batch + 1)", "give where each sequence starts, and the end");
      case Role::kSeqUsedQ:
      case Role::kSeqUsedK:
        return expect(t.ndim == 1, "1 dimension (batch)", "give one length per sequence");
      case Role::kRngState:
        return expect(t.ndim == 1, "1 dimension (2)", "give room for seed and offset");
    }
  }

  void check_dtype(Role role) const {
    const DType dtype = p_[role].dtype;
    const DType of_q = at_dtype(Role::kQ);
    const auto expect = [&](bool good, const std::string& expected) {
      if (!good) throw_invalid(name_of(role), name_of(dtype), expected, "convert the tensor");
    };
    switch (role) {
      case Role::kQ:
        return expect(
            dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF64,
            "float32, float16, bfloat16 or float64");
      case Role::kK:
      case Role::kV:
      case Role::kDO:
      case Role::kDQ:
      case Role::kDK:
      case Role::kDV:
        return expect(dtype == of_q, std::string(name_of(of_q)) + ", the type of q");
      case Role::kO:
      case Role::kBias:
        return expect(
            dtype == of_q || dtype == DType::kF32,
            of_q == DType::kF32 ? "float32" : std::string(name_of(of_q)) + ", the type of q, or float32");
      case Role::kDBias: {
        const DType of_bias = at_dtype(Role::kBias);
        return expect(dtype == of_bias || dtype == DType::kF32,
                      of_bias == DType::kF32
                          ? "float32"
                          : std::string(name_of(of_bias)) + ", the type of bias, or float32");
      }
      case Role::kLse:
      case Role::kDLse:
      case Role::kDSink:
      case Role::kAlibi:
      case Role::kSink:
        return expect(dtype == DType::kF32, "float32");
      case Role::kMask:
      case Role::kBlockMask:
        return expect(dtype == DType::kBool || dtype == DType::kU8, "bool or uint8");
      case Role::kCuSeqlensQ:
      case Role::kCuSeqlensK:
      case Role::kSeqUsedQ:
      case Role::kSeqUsedK:
        return expect(dtype == DType::kI32, "int32");
      case Role::kRngState:
        return expect(dtype == DType::kI64, "int64");
    }
  }
  DType at_dtype(Role role) const { return p_[role].dtype; }

  /// Strides of dimensions that are never stepped along become plain: arrays come with anything there.
  static void canonicalise_strides(TensorDesc& t) {
    const bool empty = !has_elements(t);
    int64_t compact = 1;
    for (size_t i = static_cast<size_t>(t.ndim); i-- > 0;) {
      if (empty || t.shape[i] == 1) t.stride[i] = compact;
      if (!empty) compact *= t.shape[i];
    }
  }

  void check_strides(Role role, const RoleTraits& traits) const {
    const TensorDesc& t = p_[role];
    const auto strides = std::span(t.stride).first(static_cast<size_t>(t.ndim));
    if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s < 0; })) {
      throw_invalid(name_of(role), strides_text(t), "no negative stride", "copy the tensor to a compact one");
    }
    if ((traits.rows_of_heads || traits.array) && strides.back() != 1) {
      throw_invalid(name_of(role), strides_text(t), "1 as the last stride: a contiguous last dimension",
                    "copy the tensor, or swap its dimensions");
    }
    const auto extent = extent_bytes(t);
    if (!extent || *extent > kMaxTensorBytes) {
      throw_invalid(name_of(role), "shape " + shape_text(t) + " with " + strides_text(t),
                    "all elements within 2^57 bytes", "check the strides: they count elements, not bytes");
    }
    if (traits.output && !elements_are_disjoint(t)) {
      throw_invalid(name_of(role), "shape " + shape_text(t) + " with " + strides_text(t),
                    "memory of its own for each element of an output",
                    "give strides that step over all smaller dimensions; outputs cannot broadcast");
    }
  }

  // --- tensors together ---

  void expect_shape(Role role, const char* dimensions, Shape shape) const {
    const TensorDesc& t = p_[role];
    const std::span<const int64_t> expected(shape.begin(), shape.size());
    if (t.ndim == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), t.shape.begin()))
      return;
    throw_invalid(name_of(role), "shape " + shape_text(t), dimensions + (" = " + shape_text(expected)),
                  "make it agree with the other tensors");
  }

  void check_queries_keys_values() {
    const TensorDesc &q = at(Role::kQ), &k = at(Role::kK), &v = at(Role::kV);
    p_.packed = has(Role::kCuSeqlensQ);
    p_.dtype = q.dtype;
    const size_t rows = p_.packed ? 0 : 1;  // the dimension that counts rows; heads and size follow
    p_.heads_q = q.shape[rows + 1];
    p_.heads_kv = k.shape[rows + 1];
    p_.head_dim = q.shape[rows + 2];
    p_.head_dim_v = v.shape[rows + 2];

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
      p_.total_k = k.shape[0];
      expect_shape(Role::kK, "(total_k, heads_kv, head size of q)", {p_.total_k, p_.heads_kv, p_.head_dim});
      expect_shape(Role::kV, "(total_k, heads_kv, head size of v)", {p_.total_k, p_.heads_kv, p_.head_dim_v});
    } else {
      p_.batch = q.shape[0];
      p_.seqlen_q = q.shape[1];
      p_.seqlen_k = k.shape[1];
      p_.total_q = p_.batch * p_.seqlen_q;
      p_.total_k = p_.batch * p_.seqlen_k;
      expect_shape(Role::kK, "(batch, seqlen_k, heads_kv, head size of q)",
                   {p_.batch, p_.seqlen_k, p_.heads_kv, p_.head_dim});
      expect_shape(Role::kV, "(batch, seqlen_k, heads_kv, head size of v)",
                   {p_.batch, p_.seqlen_k, p_.heads_kv, p_.head_dim_v});
    }
  }
  static void check_head_size(const char* argument, int64_t size) {
    if (size >= 1 && size <= kMaxHeadSize) return;
    throw_invalid(argument, "head size " + whole(size), "1 to " + whole(kMaxHeadSize),
                  "check the order of the dimensions: the last one is the head size");
  }

  void check_sequences() {
    check_max_seqlen("max_seqlen_q", in_.max_seqlen_q);
    check_max_seqlen("max_seqlen_k", in_.max_seqlen_k);
    if (p_.packed) {
      const TensorDesc& starts = at(Role::kCuSeqlensQ);
      if (starts.shape[0] < 1) {
        throw_invalid("cu_seqlens_q", "shape " + shape_text(starts), "(batch + 1): at least 1 element",
                      "give where each sequence starts, and the end");
      }
      p_.batch = starts.shape[0] - 1;
      expect_shape(Role::kCuSeqlensK, "(batch + 1), as cu_seqlens_q", {p_.batch + 1});
      p_.seqlen_q = longest_sequence(Role::kCuSeqlensQ, p_.total_q, in_.max_seqlen_q);
      p_.seqlen_k = longest_sequence(Role::kCuSeqlensK, p_.total_k, in_.max_seqlen_k);
    }
    if (has(Role::kSeqUsedQ)) expect_shape(Role::kSeqUsedQ, "(batch)", {p_.batch});
    if (has(Role::kSeqUsedK)) expect_shape(Role::kSeqUsedK, "(batch)", {p_.batch});
    if (has(Role::kRngState)) expect_shape(Role::kRngState, "(seed, offset)", {2});
  }
  void check_max_seqlen(const char* argument, int64_t length) const {
    if (length < 0 || length > kMaxDimension) {
      throw_invalid(argument, whole(length), "0 to " + whole(kMaxDimension),
                    "give the longest sequence, or 0 to have it found");
    }
    if (length > 0 && !p_.packed) {
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
    p_.scale = in_.scale == 0 ? 1 / std::sqrt(static_cast<double>(p_.head_dim)) : in_.scale;
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
    // A window as wide as the sequence is none; smaller ones cannot overflow sums of positions.
    p_.window_left = in_.window_left >= p_.seqlen_k ? -1 : in_.window_left;
    p_.window_right = in_.causal ? 0 : in_.window_right >= p_.seqlen_q ? -1 : in_.window_right;
  }
  static void check_window(const char* argument, int64_t keys) {
    if (keys < -1) throw_invalid(argument, whole(keys), "-1 or more keys", "use -1 for no limit");
  }

  void check_outputs_and_gradients() const {
    const int64_t batch = p_.batch, heads_q = p_.heads_q, heads_kv = p_.heads_kv;
    const int64_t size = p_.head_dim, size_v = p_.head_dim_v;
    const auto rows = [&](Role role, const char* dimensions, const char* packed_dimensions, int64_t seqlen,
                          int64_t total, int64_t heads, int64_t columns) {
      if (!has(role)) return;
      if (p_.packed) {
        expect_shape(role, packed_dimensions, {total, heads, columns});
      } else {
        expect_shape(role, dimensions, {batch, seqlen, heads, columns});
      }
    };
    const auto like_o = [&](Role role) {
      rows(role, "(batch, seqlen_q, heads_q, head size of v)", "(total_q, heads_q, head size of v)",
           p_.seqlen_q, p_.total_q, heads_q, size_v);
    };
    const auto per_row = [&](Role role) {
      if (!has(role)) return;
      if (p_.packed) {
        expect_shape(role, "(heads_q, total_q)", {heads_q, p_.total_q});
      } else {
        expect_shape(role, "(batch, heads_q, seqlen_q)", {batch, heads_q, p_.seqlen_q});
      }
    };
    like_o(Role::kO);
    per_row(Role::kLse);
    like_o(Role::kDO);
    per_row(Role::kDLse);
    rows(Role::kDQ, "the shape of q", "the shape of q", p_.seqlen_q, p_.total_q, heads_q, size);
    rows(Role::kDK, "the shape of k", "the shape of k", p_.seqlen_k, p_.total_k, heads_kv, size);
    rows(Role::kDV, "the shape of v", "the shape of v", p_.seqlen_k, p_.total_k, heads_kv, size_v);
  }

  // --- terms of the score ---

  void check_score_terms() {
    const std::array<int64_t, 4> pairs = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k};
    const char* dimensions = "(batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1)";
    expect_broadcastable(Role::kBias, dimensions, pairs);
    expect_broadcastable(Role::kMask, dimensions, pairs);
    check_block_mask();
    if (has(Role::kDBias)) {
      const TensorDesc& bias = at(Role::kBias);
      expect_shape(Role::kDBias, "the shape of bias",
                   {bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]});
    }
    if (has(Role::kAlibi)) {
      if (at(Role::kAlibi).ndim == 1) {
        expect_shape(Role::kAlibi, "(heads_q) or (batch, heads_q)", {p_.heads_q});
      } else {
        expect_shape(Role::kAlibi, "(heads_q) or (batch, heads_q)", {p_.batch, p_.heads_q});
      }
    }
    if (has(Role::kSink)) expect_shape(Role::kSink, "(heads_q)", {p_.heads_q});
    if (has(Role::kDSink)) expect_shape(Role::kDSink, "(heads_q)", {p_.heads_q});
  }

  void expect_broadcastable(Role role, const char* dimensions, const std::array<int64_t, 4>& full) const {
    if (!has(role)) return;
    const TensorDesc& t = p_[role];
    for (size_t i = 0; i < full.size(); ++i) {
      if (t.shape[i] == full[i] || t.shape[i] == 1) continue;
      throw_invalid(name_of(role), "shape " + shape_text(t),
                    dimensions + (" with the sizes " + shape_text(full)),
                    p_.packed ? "make it agree with batch, heads_q, max_seqlen_q and max_seqlen_k"
                              : "make it agree with the other tensors");
    }
  }

  void check_block_mask() {
    check_block_size("block_q", in_.block_q);
    check_block_size("block_k", in_.block_k);
    p_.block_q = in_.block_q;
    p_.block_k = in_.block_k;
    if (!has(Role::kBlockMask)) return;
    const auto blocks = [](int64_t rows, int64_t block) {
      return rows / block + (rows % block != 0 ? 1 : 0);
    };
    // Block dimensions do not broadcast: one block is told by a block size that covers the sequence.
    const std::array<int64_t, 4> full = {p_.batch, p_.heads_q, blocks(p_.seqlen_q, p_.block_q),
                                         blocks(p_.seqlen_k, p_.block_k)};
    const TensorDesc& t = p_[Role::kBlockMask];
    const bool good = (t.shape[0] == full[0] || t.shape[0] == 1) &&
                      (t.shape[1] == full[1] || t.shape[1] == 1) && t.shape[2] == full[2] &&
                      t.shape[3] == full[3];
    if (!good) {
      throw_invalid(
          "block_mask", "shape " + shape_text(t),
          "(batch or 1, heads_q or 1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)) with the sizes " +
              shape_text(full),
          "make it agree with the block sizes and the other tensors");
    }
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

  // --- the common form ---

  static void set(TensorDesc& t, const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& stride,
                  int ndim) {
    t.shape = shape;
    t.stride = stride;
    t.ndim = ndim;
  }
  /// A new first dimension of `batch` that is never stepped along.
  void insert_batch(TensorDesc& t) const {
    set(t, {p_.batch, t.shape[0], t.shape[1], t.shape[2]}, {0, t.stride[0], t.stride[1], t.stride[2]},
        t.ndim + 1);
  }

  void to_common_form() {
    if (p_.packed) {
      for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kO, Role::kLse, Role::kDO, Role::kDLse,
                              Role::kDQ, Role::kDK, Role::kDV}) {
        if (has(role)) insert_batch(at(role));
      }
    }
    const std::array<int64_t, 4> pairs = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k};
    for (const Role role : {Role::kBias, Role::kDBias, Role::kMask}) {
      if (has(role)) broadcast(at(role), pairs);
    }
    if (has(Role::kBlockMask)) {
      TensorDesc& t = at(Role::kBlockMask);
      broadcast(t, {p_.batch, p_.heads_q, t.shape[2], t.shape[3]});
    }
    if (has(Role::kAlibi)) {
      TensorDesc& t = at(Role::kAlibi);
      if (t.ndim == 1) insert_batch(t);
    }
  }
  static void broadcast(TensorDesc& t, const std::array<int64_t, 4>& full) {
    for (size_t i = 0; i < full.size(); ++i) {
      if (t.shape[i] == 1) t.stride[i] = 0;
      t.shape[i] = full[i];
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
  // Without starts a packed sequence is known to be no longer than the longest; its own length is checked in
  // runs.
  if (used_q) check_used(Role::kSeqUsedQ, used_q, starts_q, p.batch, p.seqlen_q);
  if (used_k) check_used(Role::kSeqUsedK, used_k, starts_k, p.batch, p.seqlen_k);
}

AttentionProblem validate(const ProblemDescription& description) {
  return Validator(description).run();
}

}  // namespace fovea::plan
