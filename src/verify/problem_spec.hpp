// A problem in plain numbers, as tests and `fovea check` draw and print it, and the tensors that one may have.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "verify/known_expressions.hpp"
#include "verify/owned_tensor.hpp"

namespace fovea::verify {

/// What a problem has memory of: kQ, kK, ... by the list of fovea.h, then its named tensors, then their gradients.
enum class Role : uint8_t {
#define FOVEA_VERIFY_ROLE(field, Name, forward, backward, meaning) k##Name,
  FOVEA_TENSORS(FOVEA_VERIFY_ROLE)
#undef FOVEA_VERIFY_ROLE
      kNamed,
  kGradient = kNamed + FOVEA_MAX_NAMED_TENSORS,
  kEnd = kGradient + FOVEA_MAX_NAMED_TENSORS
};
inline constexpr size_t kRoles = static_cast<size_t>(Role::kEnd);
inline constexpr auto kFirstNamed = static_cast<size_t>(Role::kNamed);
inline constexpr auto kFirstGradient = static_cast<size_t>(Role::kGradient);
constexpr Role named_role(size_t i) {
  return static_cast<Role>(kFirstNamed + i);
}
constexpr Role gradient_role(size_t i) {
  return static_cast<Role>(kFirstGradient + i);
}

/// What fovea.h says of a tensor of its list.
struct RoleInfo {
  const char* name;
  std::array<fovea_access, 2> access;  ///< by fovea_pass
  const fovea_tensor* fovea_problem::*tensor;
  void (*set_pointer)(fovea_buffers& buffers, void* pointer);
};
inline constexpr std::array kRoleInfos = {
#define FOVEA_VERIFY_INFO(field, Name, forward, backward, meaning) \
  RoleInfo{                                                        \
      #field, {forward, backward}, &fovea_problem::field, [](fovea_buffers& b, void* p) { b.field = p; }},
    FOVEA_TENSORS(FOVEA_VERIFY_INFO)
#undef FOVEA_VERIFY_INFO
};
static_assert(kRoleInfos.size() == kFirstNamed);

/// The field of fovea_buffers that points to it.
constexpr const char* name_of(Role role) {
  constexpr std::array<const char*, 2 * FOVEA_MAX_NAMED_TENSORS> kNames = {
      "named[0]",           "named[1]",           "named[2]",           "named[3]",
      "named[4]",           "named[5]",           "named[6]",           "named[7]",
      "named_gradients[0]", "named_gradients[1]", "named_gradients[2]", "named_gradients[3]",
      "named_gradients[4]", "named_gradients[5]", "named_gradients[6]", "named_gradients[7]"};
  const auto place = static_cast<size_t>(role);
  return place < kFirstNamed ? kRoleInfos[place].name : kNames[place - kFirstNamed];
}
constexpr fovea_access access_of(Role role, fovea_pass pass) {
  const auto place = static_cast<size_t>(role);
  if (place < kFirstNamed) return kRoleInfos[place].access[pass];
  if (place < kFirstGradient) return FOVEA_READ;
  return pass == FOVEA_BACKWARD ? FOVEA_WRITE : FOVEA_ABSENT;
}
inline void set_pointer(fovea_buffers& buffers, Role role, void* pointer) {
  const auto place = static_cast<size_t>(role);
  if (place < kFirstNamed) {
    kRoleInfos[place].set_pointer(buffers, pointer);
  } else if (place < kFirstGradient) {
    buffers.named[place - kFirstNamed] = pointer;
  } else {
    buffers.named_gradients[place - kFirstGradient] = pointer;
  }
}

/// Order of a tensor's dimensions in memory.
enum class Layout : uint8_t {
  kCompact,
  kHeadsFirst,  ///< (batch, heads, seqlen, size); the transpose for tensors without a head size
  kPadded,      ///< odd gaps after every dimension
  kSliced,      ///< gaps of 8 or 16 elements: rows of a larger array, aligned where that is
  kMixed        ///< any of these, each tensor its own
};

/// What the keys look like.
enum class Keys : uint8_t {
  kNormal,
  kTies,     ///< all keys of a head equal
  kGrowing,  ///< each key's score outgrows all before
  kOneLarge  ///< one key far above all others
};

enum class BiasValues : uint8_t {
  kNormal,
  kSomeMinusInfinity,  ///< a third of the entries
  kRowsMinusInfinity   ///< whole rows
};

struct ProblemSpec {
  Type type = Type::kF32;
  bool o_is_f32 = false;
  bool gradients_are_f32 = false;  ///< dq, dk, dv
  int64_t batch = 1, seqlen_q = 1, seqlen_k = 1, heads_q = 1, heads_kv = 1, head_dim = 8, head_dim_v = 8;

  double scale = 0;
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0, dropout = 0;

  /// Packed when not empty: lengths of the sequences; seqlen_q and seqlen_k then are max_seqlen, at least the
  /// longest. Keys may be a cache beside packed queries: lengths_k is empty then.
  std::vector<int32_t> lengths_q, lengths_k;
  int32_t spare_rows = 0;  ///< rows of packed tensors after the last sequence
  bool plan_knows_data =
      true;  ///< whether the plan sees data pointers; else a packed plan is told max_seqlen

  std::vector<int32_t> used_q, used_k;  ///< seqused, when not empty

  bool bias = false, bias_is_f32 = false, dbias = false, dbias_is_f32 = false;
  int bias_broadcast = 0;  ///< bit a: dimension a has size 1
  bool bias_expanded =
      false;  ///< broadcast dimensions have their full size and stride 0 instead (no dbias then)
  BiasValues bias_values = BiasValues::kNormal;
  bool mask = false;
  int mask_broadcast = 0;
  double mask_density = 0.7;
  bool block_mask = false;
  int block_mask_broadcast = 0;  ///< bits 0 and 1
  int64_t block_q = 0, block_k = 0;
  double block_mask_density = 0.7;
  bool alibi = false, alibi_by_batch = false;
  bool sink = false, dsink = false;
  bool dlse = false;
  bool rng_state = false;

  int64_t list_size = -1;      ///< entries of each list of keys; -1: no lists
  int list_broadcast = 0;      ///< bit a: dimension a has size 1; bit 0 in dense problems alone
  double list_density = 0.8;   ///< share of entries that are keys
  bool list_in_order = false;  ///< each key at most once, from the first on; else any, some twice
  bool list_of_all = false;    ///< dense problems: one list for all queries of a head, by a stride of 0

  int64_t caches = 0;     ///< sequences or pages of k and v, where page_size or cache_batch says so
  int64_t page_size = 0;  ///< of pages, of which seqlen_k is a multiple; 0: no pages
  std::vector<int32_t> cache_batch;  ///< when not empty, the sequence of k and v of each sequence
  std::vector<int32_t> leftpad_k;    ///< when not empty; used_k counts these rows, too

  /// Rows that each sequence appends, when not empty: used_k has the lengths before. All the same unless packed_new.
  std::vector<int32_t> lengths_new;
  bool packed_new = false;
  int64_t rotary = 0;  ///< elements of each row that are rotated; 0: none
  bool rotary_interleaved = false, angles_are_f32 = false;
  std::vector<int32_t> rotary_positions;  ///< when not empty

  bool qv = false;              ///< queries meet values, too
  bool values_in_keys = false;  ///< v is the first head_dim_v columns of k, in the same memory
  bool e4m3_keys = false;       ///< k and v are float8_e4m3fn
  bool e4m3_queries = false;    ///< q, too; `type` is that of o, with which o_is_f32 must not be set
  int descale_broadcast =
      0;  ///< of q_descale, k_descale and v_descale: bit a: dimension a has size 1; -1: there are none

  const KnownExpression *score = nullptr, *sees = nullptr;
  Type named_type = Type::kF32;  ///< of the named tensors of floats
  bool named_gradients = false;  ///< of those of them that the score reads
  int named_broadcast = 0;       ///< bit a: dimension a of named tensors has size 1, where it may
  int64_t named_spare = 0;       ///< more elements than are indexed, in each dimension that names index

  /// Bit a: dimension a of k and v (0: sequences, 2: heads) has stride 0, as of an expanded tensor.
  int expanded_keys = 0;
  Layout layout = Layout::kCompact;
  /// Tensors of layouts other than compact start at a multiple of 64 bytes, too (but for kPageEnd).
  bool aligned = false;
  Placement placement = Placement::kGuarded;
  Keys keys = Keys::kNormal;
  double logit = 1;      ///< standard deviation of scale * q.k, about
  double magnitude = 1;  ///< of v and d_o
  uint64_t seed = 1, offset = 0;
  uint64_t data_seed = 1;

  bool packed() const { return !lengths_q.empty(); }
  bool packed_k() const { return !lengths_k.empty(); }
  /// Whether there is no backward: of caches, of keys of 8 bits, and with qv.
  bool forward_only() const { return has_cache() || e4m3_keys || qv; }
  Type key_type() const { return e4m3_keys ? Type::kE4M3 : type; }
  Type query_type() const { return e4m3_queries ? Type::kE4M3 : type; }
  /// What weights are rounded to before they multiply values.
  Type weight_type() const { return query_type(); }
  /// Whether keys lie in a cache.
  bool has_cache() const {
    return page_size > 0 || !cache_batch.empty() || !leftpad_k.empty() || packed() != packed_k() || appends();
  }
  bool appends() const { return !lengths_new.empty(); }
  /// Position of the first row that a sequence appends, and of its first query.
  int64_t first_position(size_t b) const {
    return rotary_positions.empty() ? used_k[b] : rotary_positions[b];
  }
  /// Whether each query is rotated by a position of its own.
  bool rotary_by_row() const {
    const auto is_window = [&](int64_t width) { return width >= 0 && width < seqlen_k; };
    return causal || is_window(window_left) || is_window(window_right);
  }
  bool has_lists() const { return list_size >= 0; }
  bool has_expressions() const { return score || sees; }
  /// Whether the meaning of all expressions is written by hand, too.
  bool has_meaning() const { return (!score || score->score) && (!sees || sees->sees); }
  /// Elements of a query and of a key that meet in a score.
  int64_t score_dim() const { return head_dim + (qv ? head_dim_v : 0); }
  double resolved_scale() const {
    return scale == 0 ? 1 / std::sqrt(static_cast<double>(score_dim())) : scale;
  }
};

/// The spec in one line.
inline std::string describe(const ProblemSpec& s) {
  std::ostringstream out;
  const auto list = [&](const char* name, const std::vector<int32_t>& values) {
    if (values.empty()) return;
    out << ' ' << name << '=';
    for (size_t i = 0; i < values.size(); ++i) out << (i ? "," : "") << values[i];
  };
  out << name_of(s.type) << " b" << s.batch << " sq" << s.seqlen_q << " sk" << s.seqlen_k << " h" << s.heads_q
      << '/' << s.heads_kv << " d" << s.head_dim << '/' << s.head_dim_v;
  if (s.o_is_f32) out << " o=f32";
  if (s.gradients_are_f32) out << " gradients=f32";
  if (s.scale != 0) out << " scale=" << s.scale;
  if (s.causal) out << " causal";
  if (s.window_left >= 0) out << " left=" << s.window_left;
  if (s.window_right >= 0) out << " right=" << s.window_right;
  if (s.softcap > 0) out << " softcap=" << s.softcap;
  if (s.dropout > 0) out << " dropout=" << s.dropout << " seed=" << s.seed << " offset=" << s.offset;
  list("lengths_q", s.lengths_q);
  list("lengths_k", s.lengths_k);
  if (s.spare_rows > 0) out << " spare=" << s.spare_rows;
  if (!s.plan_knows_data) out << " no_data";
  list("used_q", s.used_q);
  list("used_k", s.used_k);
  if (s.bias) {
    out << " bias=" << (s.bias_is_f32 ? "f32" : name_of(s.type)) << ",broadcast" << s.bias_broadcast
        << (s.bias_expanded ? ",expanded" : "") << ",values" << static_cast<int>(s.bias_values);
  }
  if (s.dbias) out << " dbias" << (s.dbias_is_f32 ? "=f32" : "");
  if (s.mask) out << " mask=" << s.mask_density << ",broadcast" << s.mask_broadcast;
  if (s.block_mask) {
    out << " block_mask=" << s.block_q << 'x' << s.block_k << ',' << s.block_mask_density << ",broadcast"
        << s.block_mask_broadcast;
  }
  if (s.alibi) out << (s.alibi_by_batch ? " alibi(b,h)" : " alibi(h)");
  if (s.sink) out << " sink";
  if (s.dsink) out << " dsink";
  if (s.dlse) out << " dlse";
  if (s.rng_state) out << " rng_state";
  if (s.has_lists()) {
    out << " lists=" << s.list_size << ',' << s.list_density << ",broadcast" << s.list_broadcast
        << (s.list_in_order ? ",in order" : "") << (s.list_of_all ? ",of all queries" : "");
  }
  if (s.page_size > 0 || !s.cache_batch.empty()) out << " caches=" << s.caches;
  if (s.page_size > 0) out << " page=" << s.page_size;
  list("cache_batch", s.cache_batch);
  list("leftpad_k", s.leftpad_k);
  list(s.packed_new ? "packed_new" : "new", s.lengths_new);
  if (s.rotary > 0) {
    out << " rotary=" << s.rotary << (s.rotary_interleaved ? ",interleaved" : "")
        << (s.angles_are_f32 ? ",f32" : "");
  }
  list("rotary_positions", s.rotary_positions);
  if (s.qv) out << " qv";
  if (s.values_in_keys) out << " v in k";
  if (s.e4m3_keys) out << (s.e4m3_queries ? " q=keys" : " keys") << "=e4m3,descale" << s.descale_broadcast;
  if (s.score) out << " score=\"" << s.score->text << '"';
  if (s.sees) out << " sees=\"" << s.sees->text << '"';
  if (s.has_expressions()) {
    out << " named=" << name_of(s.named_type) << ",broadcast" << s.named_broadcast << ",spare"
        << s.named_spare << (s.named_gradients ? ",gradients" : "");
  }
  if (s.expanded_keys != 0) out << " expanded_keys" << s.expanded_keys;
  out << " layout" << static_cast<int>(s.layout) << (s.aligned ? ",aligned" : "") << " placement"
      << static_cast<int>(s.placement) << " keys" << static_cast<int>(s.keys) << " logit=" << s.logit
      << " data=" << s.data_seed;
  return out.str();
}

}  // namespace fovea::verify
