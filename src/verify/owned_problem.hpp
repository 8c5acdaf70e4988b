// A problem that owns its tensors, made from a ProblemSpec; it gives the structs of fovea.h.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "verify/known_expressions.hpp"
#include "verify/owned_tensor.hpp"
#include "verify/problem_spec.hpp"
#include "verify/random.hpp"
#include "verify/rotary.hpp"
#include "verify/term_values.hpp"

namespace fovea::verify {

class OwnedProblem {
 public:
  explicit OwnedProblem(const ProblemSpec& given) : spec(given), random_(given.data_seed) {
    make_integers();
    make_inputs();
    make_outputs();
    make_named();
    if (spec.has_lists()) make_lists();
    if (spec.appends()) make_new_rows();
  }

  ProblemSpec spec;

  OwnedTensor& operator[](Role role) const { return *tensors_[static_cast<size_t>(role)]; }
  bool has(Role role) const { return tensors_[static_cast<size_t>(role)] != nullptr; }
  /// The tensors that the expressions read, by place: each once, those of the score first.
  const std::vector<const KnownTensor*>& named() const { return named_; }
  Role named(const std::string& name) const {
    size_t i = 0;
    while (i < named_.size() && named_[i]->name != name) ++i;
    return named_role(i);
  }

  /// The same problem in float64, compact, for the oracle.
  OwnedProblem in_float64() const {
    ProblemSpec s = spec;
    s.type = Type::kF64;
    s.o_is_f32 = s.gradients_are_f32 = s.bias_is_f32 = s.dbias_is_f32 = s.bias_expanded = false;
    s.layout = Layout::kCompact;
    s.placement = Placement::kGuarded;
    s.plan_knows_data = true;
    OwnedProblem copy(s, Empty{});
    copy.named_ = named_;
    copy.pages_ = pages_;
    for (size_t i = 0; i < kRoles; ++i) {
      const auto role = static_cast<Role>(i);
      if (!has(role)) continue;
      const OwnedTensor& t = (*this)[role];
      const bool real = t.type() == Type::kF16 || t.type() == Type::kBF16 || t.type() == Type::kF32;
      const bool keeps_type = role == Role::kLse || role == Role::kDLse || role == Role::kDSink ||
                              role == Role::kAlibi || role == Role::kSink || role == Role::kQDescale ||
                              role == Role::kKDescale || role == Role::kVDescale || role >= Role::kNamed;
      copy.tensors_[i] = std::make_shared<OwnedTensor>(real && !keeps_type ? Type::kF64 : t.type(), t.shape(),
                                                       compact_strides(t.shape()));
      if (role == Role::kRngState) continue;
      copy[role].assign(t.values());
    }
    return copy;
  }

  /// The same problem with the numbers of `s`, and other tensors in some places, none for null. Shares all others.
  OwnedProblem with(const ProblemSpec& s, const std::map<Role, std::shared_ptr<OwnedTensor>>& changed) const {
    OwnedProblem other(s, Empty{});
    other.named_ = named_;
    other.pages_ = pages_;
    other.tensors_ = tensors_;
    for (const auto& [role, tensor] : changed) other.tensors_[static_cast<size_t>(role)] = tensor;
    return other;
  }

  /// Whether a run of the problem writes to it.
  bool is_written(Role role, fovea_pass pass) const {
    return is_output(role, pass) || (spec.appends() && (role == Role::kK || role == Role::kV));
  }
  static bool is_output(Role role, fovea_pass pass) { return access_of(role, pass) == FOVEA_WRITE; }
  bool takes_part(Role role, fovea_pass pass) const {
    return has(role) && access_of(role, pass) != FOVEA_ABSENT;
  }

  /// Numbers of one sequence: where its queries start (in rows of the dense tensors), how many rows there are and take
  /// part.
  struct Sequence {
    int64_t row_q, length_q, length_k, used_q, used_k;
  };
  Sequence sequence(int64_t b) const {
    const auto at = static_cast<size_t>(b);
    Sequence s{b * spec.seqlen_q, spec.seqlen_q, spec.seqlen_k, 0, 0};
    if (spec.packed()) {
      s.row_q = 0;
      s.length_q = spec.lengths_q[at];
      for (size_t before = 0; before < at; ++before) s.row_q += spec.lengths_q[before];
    }
    if (spec.packed_k()) s.length_k = spec.lengths_k[at];
    s.used_q = spec.used_q.empty() ? s.length_q : spec.used_q[at];
    s.used_k = spec.used_k.empty() ? s.length_k : spec.used_k[at];
    s.length_k -= leftpad(b);
    s.used_k -= leftpad(b);
    return s;
  }
  /// Where key j of a sequence lies, in rows of the dense k.
  int64_t key_row(int64_t b, int64_t j) const {
    const int64_t row = leftpad(b) + j;
    if (spec.page_size > 0) {
      const int64_t columns = spec.seqlen_k / spec.page_size;
      return int64_t{pages_[static_cast<size_t>(b * columns + row / spec.page_size)]} * spec.page_size +
             row % spec.page_size;
    }
    if (!spec.packed_k())
      return (spec.cache_batch.empty() ? b : spec.cache_batch[static_cast<size_t>(b)]) * spec.seqlen_k + row;
    int64_t first = 0;
    for (size_t before = 0; before < static_cast<size_t>(b); ++before) first += spec.lengths_k[before];
    return first + row;
  }

  /// What the elements of q, k or v of a sequence and key head are multiplied by.
  double descale(Role role, int64_t b, int64_t head_kv) const {
    if (!has(role)) return 1;
    const OwnedTensor& t = (*this)[role];
    return t.get({t.shape()[0] == 1 ? 0 : b, t.shape()[1] == 1 ? 0 : head_kv});
  }

  /// The problem for fovea_plan_create. Points into this object.
  struct Description {
    fovea_problem problem = FOVEA_PROBLEM_INIT;
    std::array<fovea_tensor, kRoles> tensors{};
    std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named{};
  };
  /// Addresses of the tensors somewhere else than on the host (device_memory.hpp); null where there is none.
  using Addresses = std::array<void*, kRoles>;

  /// With `elsewhere` the tensors are those of `device`.
  std::unique_ptr<Description> description(fovea_pass pass, const Addresses* elsewhere = nullptr,
                                           fovea_device device = {FOVEA_CPU, 0}) const {
    auto d = std::make_unique<Description>();
    fovea_problem& p = d->problem;
    for (size_t i = 0; i < kRoles; ++i) {
      if (!takes_part(static_cast<Role>(i), pass)) continue;
      d->tensors[i] = tensors_[i]->view(spec.plan_knows_data);
      d->tensors[i].device = device;
      if (elsewhere && d->tensors[i].data) d->tensors[i].data = (*elsewhere)[i];
      if (i < kFirstNamed) p.*kRoleInfos[i].tensor = &d->tensors[i];
    }
    describe_expressions(*d, pass);
    p.pass = pass;
    p.scale = spec.scale;
    p.causal = spec.causal ? 1 : 0;
    p.window_left = spec.window_left;
    p.window_right = spec.window_right;
    p.softcap = spec.softcap;
    p.dropout = spec.dropout;
    p.rotary_interleaved = spec.rotary_interleaved ? 1 : 0;
    p.block_q = spec.block_mask ? spec.block_q : 0;
    p.block_k = spec.block_mask ? spec.block_k : 0;
    if (spec.packed()) p.max_seqlen_q = spec.seqlen_q;
    if (spec.packed_k()) p.max_seqlen_k = spec.seqlen_k;
    return d;
  }

  fovea_buffers buffers(fovea_pass pass, const Addresses* elsewhere = nullptr) const {
    const auto at = [&](Role role) -> void* {
      if (!takes_part(role, pass) || (*this)[role].data() == nullptr) return nullptr;
      return elsewhere ? (*elsewhere)[static_cast<size_t>(role)] : (*this)[role].data();
    };
    fovea_buffers b = FOVEA_BUFFERS_INIT;
    for (size_t i = 0; i < kRoles; ++i) set_pointer(b, static_cast<Role>(i), at(static_cast<Role>(i)));
    // A backward with rng_state must ignore these two; a wrong one gives wrong results.
    const bool from_state = pass == FOVEA_BACKWARD && spec.rng_state;
    b.seed = from_state ? ~spec.seed : spec.seed;
    b.offset = from_state ? ~spec.offset : spec.offset;
    return b;
  }

 private:
  struct Empty {};
  OwnedProblem(const ProblemSpec& given, Empty) : spec(given), random_(given.data_seed) {}

  void describe_expressions(Description& d, fovea_pass pass) const {
    for (size_t i = 0; i < named_.size(); ++i) {
      d.named[i] = {named_[i]->name, &d.tensors[kFirstNamed + i], nullptr};
      if (takes_part(gradient_role(i), pass)) d.named[i].gradient = &d.tensors[kFirstGradient + i];
    }
    if (spec.score) d.problem.score = spec.score->text;
    if (spec.sees) d.problem.sees = spec.sees->text;
    d.problem.named = named_.empty() ? nullptr : d.named.data();
    d.problem.num_named = static_cast<int64_t>(named_.size());
  }

  /// Strides for `shape`: its dimensions in the order that the layout asks for, with gaps. `rows` tensors
  /// keep their last dimension contiguous.
  Sizes strides_for(const Sizes& shape, bool rows) {
    Layout layout = spec.layout;
    if (layout == Layout::kMixed)
      layout = random_.one_of({Layout::kCompact, Layout::kHeadsFirst, Layout::kPadded, Layout::kSliced});
    std::vector<size_t> inner_to_outer;
    for (size_t axis = shape.size(); axis-- > 0;) inner_to_outer.push_back(axis);
    if (layout == Layout::kHeadsFirst && shape.size() >= 3) {
      const size_t inner = rows ? 1 : 0;
      std::swap(inner_to_outer[inner], inner_to_outer[inner + 1]);
    }
    Sizes strides(shape.size());
    int64_t next = 1;
    for (const size_t axis : inner_to_outer) {
      strides[axis] = next;
      next *= std::max<int64_t>(shape[axis], 1);
      if (layout == Layout::kPadded) next += random_.one_of<int64_t>({0, 1, 3, 5});
      if (layout == Layout::kSliced) next += random_.one_of<int64_t>({0, 8, 16});
    }
    return strides;
  }
  OwnedTensor& make(Role role, Type type, Sizes shape, Sizes strides) {
    auto& place = tensors_[static_cast<size_t>(role)];
    const bool skewed = spec.layout != Layout::kCompact && !spec.aligned;
    const auto skew = skewed ? static_cast<size_t>(random_.between(0, 7)) : size_t{0};
    place = std::make_shared<OwnedTensor>(type, std::move(shape), std::move(strides), spec.placement, skew);
    return *place;
  }
  OwnedTensor& make_rows(Role role, Type type, bool queries, int64_t heads, int64_t size) {
    Sizes shape = {spec.batch, queries ? spec.seqlen_q : spec.seqlen_k, heads, size};
    if (!queries && spec.page_size > 0) shape[1] = spec.page_size;
    if (!queries && (spec.page_size > 0 || !spec.cache_batch.empty())) shape[0] = spec.caches;
    if (queries ? spec.packed() : spec.packed_k()) shape = {total(queries), heads, size};
    int expanded = role == Role::kK || role == Role::kV ? spec.expanded_keys : 0;
    if (shape.size() == 3) expanded >>= 1;  // packed tensors have no sequences
    Sizes strides = strides_for(broadcast(shape, expanded), true);
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (expanded >> axis & 1) strides[axis] = 0;
    }
    return make(role, type, shape, strides);
  }
  int64_t leftpad(int64_t b) const {
    return spec.leftpad_k.empty() ? 0 : spec.leftpad_k[static_cast<size_t>(b)];
  }
  OwnedTensor& make_statistic(Role role) {
    const Sizes shape =
        spec.packed() ? Sizes{spec.heads_q, total(true)} : Sizes{spec.batch, spec.heads_q, spec.seqlen_q};
    return make(role, Type::kF32, shape, strides_for(shape, false));
  }
  int64_t total(bool queries) const {
    int64_t sum = spec.spare_rows;
    for (const int32_t length : queries ? spec.lengths_q : spec.lengths_k) sum += length;
    return sum;
  }
  static Sizes broadcast(Sizes full, int bits) {
    for (size_t axis = 0; axis < full.size(); ++axis) {
      if (bits >> axis & 1) full[axis] = 1;
    }
    return full;
  }

  void make_integers() {
    const auto list = [&](Role role, const std::vector<int32_t>& values) {
      OwnedTensor& t = make(role, Type::kI32, {static_cast<int64_t>(values.size())}, {1});
      t.assign(std::vector<double>(values.begin(), values.end()));
    };
    const auto starts = [&](Role role, const std::vector<int32_t>& lengths) {
      std::vector<int32_t> cu{0};
      for (const int32_t length : lengths) cu.push_back(cu.back() + length);
      list(role, cu);
    };
    if (spec.packed()) {
      spec.batch = static_cast<int64_t>(spec.lengths_q.size());
      starts(Role::kCuSeqlensQ, spec.lengths_q);
    }
    if (spec.packed_k()) starts(Role::kCuSeqlensK, spec.lengths_k);
    if (!spec.used_q.empty()) list(Role::kSeqUsedQ, spec.used_q);
    if (!spec.used_k.empty()) list(Role::kSeqUsedK, spec.used_k);
    if (!spec.cache_batch.empty()) list(Role::kCacheBatch, spec.cache_batch);
    if (!spec.leftpad_k.empty()) list(Role::kLeftPadK, spec.leftpad_k);
    if (spec.page_size > 0) make_pages();
  }

  /// Pages of each sequence in any order, some of them those of others; entries of pages without a key are no pages.
  void make_pages() {
    const Sizes shape = {spec.batch, spec.seqlen_k / spec.page_size};
    if (spec.appends()) return make_own_pages();
    for (int64_t b = 0; b < spec.batch; ++b) {
      const Sequence s = sequence(b);
      const int64_t begin = leftpad(b), end = begin + s.used_k, step = random_.between(-1, 2);
      int64_t page = random_.between(0, std::max<int64_t>(spec.caches - 1, 0));
      for (int64_t n = 0; n < shape[1]; ++n) {
        const bool read = begin < end && n >= begin / spec.page_size && n * spec.page_size < end;
        const auto none = random_.one_of<int32_t>({-1, 0x7fffffff, std::numeric_limits<int32_t>::min()});
        pages_.push_back(read ? static_cast<int32_t>(page) : none);
        page = step == 2 ? random_.between(0, std::max<int64_t>(spec.caches - 1, 0))
                         : (page + step + spec.caches) % std::max<int64_t>(spec.caches, 1);
      }
    }
    make_table();
  }
  /// No page belongs to two sequences: what each appends is its own.
  void make_own_pages() {
    const int64_t columns = spec.seqlen_k / spec.page_size;
    std::vector<int32_t> pool(static_cast<size_t>(spec.caches));
    for (size_t page = 0; page < pool.size(); ++page) pool[page] = static_cast<int32_t>(page);
    for (int64_t b = 0; b < spec.batch; ++b) {
      const auto at = static_cast<size_t>(b);
      const int64_t end = spec.used_k[at] + spec.lengths_new[at];
      for (int64_t n = 0; n < columns; ++n) {
        const bool used = leftpad(b) < end && n >= leftpad(b) / spec.page_size && n * spec.page_size < end;
        const auto chosen = static_cast<size_t>(random_.between(0, static_cast<int64_t>(pool.size()) - 1));
        pages_.push_back(used ? pool[chosen] : -1);
        if (used) pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(chosen));
      }
    }
    make_table();
  }
  void make_table() {
    const Sizes shape = {spec.batch, spec.seqlen_k / spec.page_size};
    OwnedTensor& table = make(Role::kPageTable, Type::kI32, shape, strides_for(shape, true));
    table.assign(std::vector<double>(pages_.begin(), pages_.end()));
  }

  /// What sequences append, and the tables of angles: the last position that is needed, and one more.
  void make_new_rows() {
    int64_t total = 0, positions = 1;
    std::vector<double> starts{0};
    for (size_t b = 0; b < spec.lengths_new.size(); ++b) {
      total += spec.lengths_new[b];
      starts.push_back(static_cast<double>(total));
      positions = std::max(
          positions, spec.first_position(b) + std::max<int64_t>(spec.lengths_new[b], spec.seqlen_q) + 1);
    }
    const auto rows = [&](Role role, int64_t size, double deviation) {
      const Sizes shape = spec.packed_new ? Sizes{total, spec.heads_kv, size}
                                          : Sizes{spec.batch, spec.lengths_new[0], spec.heads_kv, size};
      OwnedTensor& t = make(role, spec.type, shape, strides_for(shape, true));
      t.assign(normals(random_, t.count(), deviation));
    };
    rows(Role::kKNew, spec.head_dim, 1);
    rows(Role::kVNew, spec.head_dim_v, spec.magnitude);
    if (spec.packed_new) make(Role::kCuSeqlensKNew, Type::kI32, {spec.batch + 1}, {1}).assign(starts);
    if (spec.rotary == 0) return;
    const Sizes shape = {positions, spec.rotary / 2};
    const Type type = spec.angles_are_f32 ? Type::kF32 : spec.type;
    OwnedTensor &cosines = make(Role::kRotaryCos, type, shape, strides_for(shape, true)),
                &sines = make(Role::kRotarySin, type, shape, strides_for(shape, true));
    const Rotary rotary = Rotary::usual(positions, shape[1]);
    cosines.assign(rotary.cosines);
    sines.assign(rotary.sines);
    if (spec.rotary_positions.empty()) return;
    OwnedTensor& first = make(Role::kRotaryPositions, Type::kI32, {spec.batch}, {1});
    first.assign(std::vector<double>(spec.rotary_positions.begin(), spec.rotary_positions.end()));
  }

  void make_inputs() {
    const ProblemSpec& s = spec;
    // The product of a pair of normal numbers has deviation sqrt(D), with qv sqrt(D + Dv); q and qv get the factor that makes the
    // logits as large as wanted.
    const double q_deviation =
        s.logit / (std::abs(s.resolved_scale()) * std::sqrt(static_cast<double>(s.score_dim())));
    OwnedTensor& q = make_rows(Role::kQ, s.query_type(), true, s.heads_q, s.head_dim);
    q.assign(normals(random_, q.count(), q_deviation));
    make_rows(Role::kK, s.key_type(), false, s.heads_kv, s.head_dim);
    fill_keys();
    if (s.values_in_keys) {
      tensors_[static_cast<size_t>(Role::kV)] =
          std::make_shared<OwnedTensor>((*this)[Role::kK].first_columns(s.head_dim_v));
    } else {
      OwnedTensor& v = make_rows(Role::kV, s.key_type(), false, s.heads_kv, s.head_dim_v);
      v.assign(normals(random_, v.count(), s.magnitude));
    }
    if (s.qv) {
      OwnedTensor& qv = make_rows(Role::kQV, s.type, true, s.heads_q, s.head_dim_v);
      qv.assign(normals(random_, qv.count(), q_deviation / s.magnitude));
    }
    if (s.e4m3_keys && s.descale_broadcast >= 0) make_descales();
    OwnedTensor& d_o = make_rows(Role::kDO, s.type, true, s.heads_q, s.head_dim_v);
    d_o.assign(normals(random_, d_o.count(), s.magnitude));
    if (s.dlse) {
      OwnedTensor& dlse = make_statistic(Role::kDLse);
      dlse.assign(normals(random_, dlse.count(), s.magnitude));
    }
    spoil_unused_rows();

    const Sizes pairs = {s.batch, s.heads_q, s.seqlen_q, s.seqlen_k};
    if (s.bias) {
      const Sizes shape = broadcast(pairs, s.bias_broadcast);
      Sizes strides = strides_for(shape, false);
      if (s.bias_expanded) {
        for (size_t axis = 0; axis < 4; ++axis) {
          if (shape[axis] == 1) strides[axis] = 0;
        }
      }
      OwnedTensor& bias =
          make(Role::kBias, s.bias_is_f32 ? Type::kF32 : s.type, s.bias_expanded ? pairs : shape, strides);
      bias.assign(bias_values(random_, spec.bias_values, shape, bias));
    }
    if (s.mask) {
      const Sizes shape = broadcast(pairs, s.mask_broadcast);
      OwnedTensor& mask =
          make(Role::kMask, random_.chance(0.5) ? Type::kBool : Type::kU8, shape, strides_for(shape, false));
      mask.assign(mask_values(random_, mask, s.mask_density));
    }
    if (s.block_mask) {
      const Sizes shape = broadcast({s.batch, s.heads_q, (s.seqlen_q + s.block_q - 1) / s.block_q,
                                     (s.seqlen_k + s.block_k - 1) / s.block_k},
                                    s.block_mask_broadcast & 3);
      OwnedTensor& mask = make(Role::kBlockMask, random_.chance(0.5) ? Type::kBool : Type::kU8, shape,
                               strides_for(shape, false));
      mask.assign(mask_values(random_, mask, s.block_mask_density));
    }
    if (s.alibi) {
      const Sizes shape = s.alibi_by_batch ? Sizes{s.batch, s.heads_q} : Sizes{s.heads_q};
      OwnedTensor& alibi = make(Role::kAlibi, Type::kF32, shape, strides_for(shape, false));
      std::vector<double> slopes(static_cast<size_t>(alibi.count()));
      for (double& slope : slopes) {
        slope = std::exp2(-random_.uniform() * 8);
        if (random_.chance(0.15)) slope *= 100;  // so steep that a key is nothing beside its neighbour
        if (random_.chance(0.15)) slope = -slope;
      }
      alibi.assign(slopes);
    }
    if (s.sink) {
      OwnedTensor& sink = make(Role::kSink, Type::kF32, {s.heads_q}, {1});
      sink.assign(normals(random_, s.heads_q, 1.5));
    }
  }

  /// Powers of two and others, of about 1.
  void make_descales() {
    for (const Role role : {Role::kKDescale, Role::kVDescale, Role::kQDescale}) {
      if (role == Role::kQDescale && !spec.e4m3_queries) continue;
      const Sizes shape = broadcast({spec.batch, spec.heads_kv}, spec.descale_broadcast);
      OwnedTensor& t = make(role, Type::kF32, shape, strides_for(shape, false));
      std::vector<double> factors(static_cast<size_t>(t.count()));
      for (double& x : factors) x = random_.one_of({0.5, 1.0, 2.0, 0.5 + random_.uniform()});
      t.assign(factors);
    }
  }

  void fill_keys() {
    OwnedTensor& k = (*this)[Role::kK];
    std::vector<double> values = normals(random_, k.count(), 1.0);
    const int64_t row = spec.heads_kv * spec.head_dim;
    const int64_t rows = row > 0 ? k.count() / row : 0;
    const auto key = [&](int64_t r, int64_t c) -> double& {
      return values[static_cast<size_t>(r * row + c)];
    };
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < row; ++c) {
        if (spec.keys == Keys::kTies) key(r, c) = key(0, c);
        if (spec.keys == Keys::kGrowing)
          key(r, c) = key(0, c) * static_cast<double>(r + 1) / static_cast<double>(rows);
        if (spec.keys == Keys::kOneLarge && r == rows / 2) key(r, c) *= 8;
      }
    }
    k.assign(values);
  }

  /// Fills rows that take no part (spare rows of packed tensors, rows beyond seqused) with NaN, which must reach no
  /// result.
  void spoil_unused_rows() {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<bool> live_q(static_cast<size_t>(spec.packed() ? total(true) : spec.batch * spec.seqlen_q));
    std::vector<bool> live_k(
        static_cast<size_t>((*this)[Role::kK].count() / std::max<int64_t>(spec.heads_kv * spec.head_dim, 1)));
    for (int64_t b = 0; b < spec.batch; ++b) {
      const Sequence s = sequence(b);
      for (int64_t i = 0; i < s.used_q; ++i) live_q[static_cast<size_t>(s.row_q + i)] = true;
      for (int64_t j = 0; j < s.used_k; ++j) live_k[static_cast<size_t>(key_row(b, j))] = true;
    }
    for (const Role role : {Role::kQ, Role::kQV, Role::kK, Role::kV, Role::kDO}) {
      if (!has(role)) continue;
      OwnedTensor& t = (*this)[role];
      const auto& live = role == Role::kK || role == Role::kV ? live_k : live_q;
      if (live.empty()) continue;
      const size_t row = static_cast<size_t>(t.count()) / live.size();
      t.for_each([&](size_t place, unsigned char* at) {
        if (!live[place / row]) store(at, t.type(), nan);
      });
    }
    if (!has(Role::kDLse)) return;
    OwnedTensor& dlse = (*this)[Role::kDLse];
    const auto seqlen = static_cast<size_t>(dlse.shape().back());
    const auto heads = static_cast<size_t>(spec.heads_q);
    dlse.for_each([&](size_t place, unsigned char* at) {
      const size_t b = spec.packed() ? 0 : place / seqlen / heads;
      if (!live_q[b * seqlen + place % seqlen]) store(at, Type::kF32, nan);
    });
  }

  void make_outputs() {
    const ProblemSpec& s = spec;
    make_rows(Role::kO, s.o_is_f32 ? Type::kF32 : s.type, true, s.heads_q, s.head_dim_v);
    make_statistic(Role::kLse);
    const Type gradients = s.gradients_are_f32 ? Type::kF32 : s.type;
    make_rows(Role::kDQ, gradients, true, s.heads_q, s.head_dim);
    make_rows(Role::kDK, gradients, false, s.heads_kv, s.head_dim);
    make_rows(Role::kDV, gradients, false, s.heads_kv, s.head_dim_v);
    if (s.bias && s.dbias) {
      const Sizes& shape = (*this)[Role::kBias].shape();
      make(Role::kDBias, s.dbias_is_f32 ? Type::kF32 : (*this)[Role::kBias].type(), shape,
           strides_for(shape, false));
    }
    if (s.sink && s.dsink) make(Role::kDSink, Type::kF32, {s.heads_q}, {1});
    if (s.rng_state) make(Role::kRngState, Type::kI64, {2}, {1});
  }

  /// After all others, so that these are the same with and without expressions.
  void make_named() {
    for (const KnownExpression* expression : {spec.score, spec.sees}) {
      if (!expression) continue;
      for (const KnownTensor& tensor : expression->tensors) {
        if (has(named(tensor.name))) continue;
        named_.push_back(&tensor);
        make_named(named_.size() - 1, expression == spec.score);
      }
    }
  }
  void make_named(size_t i, bool of_score) {
    const KnownTensor& known = *named_[i];
    const PairSizes sizes = {spec.batch, spec.heads_q, spec.heads_kv, spec.seqlen_q, spec.seqlen_k};
    const Sizes shape = shape_of(known, sizes, spec.named_broadcast, spec.named_spare);
    Sizes strides = strides_for(shape, false);
    // No dimension of a named tensor need be contiguous.
    const int64_t step = spec.layout == Layout::kPadded ? random_.between(1, 2) : 1;
    for (int64_t& stride : strides) stride *= step;
    OwnedTensor& tensor = make(named_role(i), element_type(known, spec.named_type, random_), shape, strides);
    std::vector<double> values;
    for (int64_t place = 0; known.given == nullptr && place < tensor.count(); ++place)
      values.push_back(known.value(random_, index_at(shape, place)));
    tensor.assign(known.given == nullptr ? values : *known.given);
    if (spec.named_gradients && of_score && known.elements == Elements::kReal)
      make(gradient_role(i), Type::kF32, shape, strides_for(shape, false));
  }

  /// After all others, too. Lists of queries that take no part hold what no list may hold.
  void make_lists() {
    const bool packed = spec.packed();
    const Sizes full = packed ? Sizes{spec.heads_kv, total(true), spec.list_size}
                              : Sizes{spec.batch, spec.heads_kv, spec.seqlen_q, spec.list_size};
    const Sizes shape = broadcast(full, packed ? spec.list_broadcast >> 1 & 1 : spec.list_broadcast & 3);
    Sizes strides = strides_for(shape, true);
    const bool of_all = spec.list_of_all && !packed;
    if (of_all) strides[shape.size() - 2] = 0;
    OwnedTensor& lists = make(Role::kKeys, Type::kI32, shape, strides);
    const auto size = static_cast<size_t>(spec.list_size);
    std::vector<double> values(static_cast<size_t>(lists.count()), 0x7fffffff);
    const size_t rows = static_cast<size_t>(shape[shape.size() - 2]),
                 heads = static_cast<size_t>(shape[shape.size() - 3]);
    for (int64_t b = 0; b < spec.batch; ++b) {
      const Sequence s = sequence(b);
      if (!packed && b >= shape[0]) break;
      int64_t used = s.used_q, keys = s.length_k;  // of all sequences that share the lists
      for (int64_t other = b; shape[0] == 1 && !packed && other < spec.batch; ++other) {
        used = std::max(used, sequence(other).used_q);
        keys = std::min(keys, sequence(other).length_k);
      }
      for (size_t head = 0; head < heads; ++head) {
        const size_t first = packed ? head * rows + static_cast<size_t>(s.row_q)
                                    : (static_cast<size_t>(b) * heads + head) * rows;
        for (size_t i = 0; i < static_cast<size_t>(used); ++i)
          fill_list(random_, spec, values.data() + (first + i) * size, size, keys);
        for (size_t i = 1; of_all && i < rows; ++i)
          std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(first * size), size,
                      values.begin() + static_cast<std::ptrdiff_t>((first + i) * size));
      }
    }
    lists.assign(values);
  }

  Random random_;
  std::array<std::shared_ptr<OwnedTensor>, kRoles> tensors_;
  std::vector<const KnownTensor*> named_;
  std::vector<int32_t> pages_;  ///< the page table
};

}  // namespace fovea::verify
