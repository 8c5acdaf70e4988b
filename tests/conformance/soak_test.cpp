// A server in small, for many steps: sequences come, some with the beginning of another, grow by chunks of a prompt and then row by
// row, and leave; their pages go to others. Each step is one run that rotates, appends and attends. After each, every byte of the
// pages is what it has to be, and at random steps results are compared with attention over the same rows in one piece, in
// float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "conformance/expectations.hpp"
#include "conformance/page_pool.hpp"
#include "fovea/fovea.hpp"
#include "verify/rotary.hpp"

namespace fovea::conformance {
namespace {

/// What is served.
struct Model {
  const char* name;
  Type type;
  int64_t page_size;
  bool e4m3_keys = false;
  int64_t heads_q = 4, heads_kv = 2, head_dim = 64, head_dim_v = 64;
  int64_t rotary = 64;
  bool interleaved = false;
  int64_t window_left = -1;
  bool sink = false;
  int64_t gap = 0;  ///< elements between pages
  bool e4m3_queries = false;
  int64_t most_padding = 0;  ///< rows in front of a sequence that do not exist
  int64_t longest = 150;     ///< rows of a sequence: more than one block of keys of any CPU backend
  int64_t chunk = 12;        ///< rows that a sequence appends in a step, at most
};

const Model kModels[] = {
    {"F32PagesOf16", Type::kF32, 16},
    {"BF16PagesOf16", Type::kBF16, 16, false, 8, 2, 128, 128, 128, false, -1, true},
    {"F16PagesOf7", Type::kF16, 7, false, 3, 1, 40, 24, 16, true, -1, false, 5},
    {"BF16PagesOf1", Type::kBF16, 1, false, 4, 4, 64, 64, 32, false, 20},
    {"F16PagesOf256", Type::kF16, 256, false, 6, 2, 64, 64, 64},
    {"BF16OverE4M3PagesOf16", Type::kBF16, 16, true, 8, 2, 64, 64, 64},
    {"F16OverE4M3PagesOf48", Type::kF16, 48, true, 4, 1, 128, 64, 64, true, 30, true, 16},
    {"F32OverE4M3PagesOf7", Type::kF32, 7, true, 2, 2, 40, 40, 40},
    {"BF16QueriesOf8BitsPagesOf16", Type::kBF16, 16, true, 8, 2, 64, 64, 64, false, -1, false, 0, true},
    {"F16BehindPaddingPagesOf16", Type::kF16, 16, false, 4, 2, 64, 64, 64, false, -1, false, 0, false, 40},
    // So long that keys of a sequence are split, or shared by clusters.
    {"BF16LongPagesOf64", Type::kBF16, 64, false, 2, 1, 64, 64, 64, false, -1, false, 0, false, 0, 3000,
     1000},
};

constexpr int64_t kSlots = 5;          ///< sequences at a time
constexpr int64_t kMostCompared = 16;  ///< rows of a sequence that are compared in a step, at most

/// Fewer pages than the longest sequences in all slots would have, so that sometimes there is none.
constexpr int64_t pages_of(int64_t columns) {
  return std::max(kSlots + 1, kSlots * columns / 2) + 2;
}

void PrintTo(const Model& model, std::ostream* out) {
  *out << model.name;
}

struct Sequence {
  std::vector<int32_t> pages;
  int64_t padding = 0;       ///< rows in front that do not exist
  int64_t rows = 0;          ///< in the cache, with the padding
  int64_t prompt = 0;        ///< rows that are known and not in the cache
  int64_t end = 0;           ///< rows with which it leaves
  std::vector<double> k, v;  ///< what the cache holds of it, row by row
};

struct Counts {
  int64_t sequences = 0, with_a_prefix = 0, pages_copied = 0, without_a_page = 0, appended = 0,
          decode_steps = 0, compared = 0;
};

OwnedTensor compact(Type type, const Sizes& shape) {
  return {type, shape, compact_strides(shape)};
}

/// One form of call, and its tensors: rows of all sequences one after the other, or one row of each.
struct Call {
  OwnedTensor q, k_new, v_new, o, lse;
  std::unique_ptr<Plan> plan;

  static Call packed(const Model& m) { return Call(m, {kSlots * m.chunk}, {m.heads_q, kSlots * m.chunk}); }
  static Call decode(const Model& m) { return Call(m, {kSlots, 1}, {kSlots, m.heads_q, 1}); }
  bool is_packed() const { return q.shape().size() == 3; }
  /// The place in lse of a row and head.
  size_t place_of_lse(int64_t row, int64_t head) const {
    return static_cast<size_t>(is_packed() ? head * lse.shape()[1] + row : row * lse.shape()[1] + head);
  }

 private:
  Call(const Model& m, const Sizes& rows, const Sizes& of_lse)
      : q(of(m.e4m3_queries ? Type::kE4M3 : m.type, rows, m.heads_q, m.head_dim)),
        k_new(of(m.type, rows, m.heads_kv, m.head_dim)),
        v_new(of(m.type, rows, m.heads_kv, m.head_dim_v)),
        o(of(m.type, rows, m.heads_q, m.head_dim_v)),
        lse(compact(Type::kF32, of_lse)) {}
  static OwnedTensor of(Type type, Sizes shape, int64_t heads, int64_t size) {
    shape.insert(shape.end(), {heads, size});
    return compact(type, shape);
  }
};

class Server {
 public:
  Server(const Model& model, std::string backend)
      : model_(model),
        backend_(std::move(backend)),
        device_(is_cuda(backend_) ? &open_device_memory() : nullptr),
        columns_((model.longest + model.page_size - 1) / model.page_size),
        pool_(model.e4m3_keys ? Type::kE4M3 : model.type, pages_of(columns_), model.page_size, model.heads_kv,
              {model.head_dim, model.head_dim_v}, model.gap),
        table_(compact(Type::kI32, {kSlots, columns_})),
        packed_(Call::packed(model)),
        decode_(Call::decode(model)) {
    const Rotary usual = Rotary::usual(model.longest, model.rotary / 2);
    cos_.assign(usual.cosines);
    sin_.assign(usual.sines);
    rotary_ = {cos_.values(), sin_.values(), model.rotary / 2, model.interleaved};
    for (OwnedTensor* factors : {&q_descale_, &k_descale_, &v_descale_}) {
      for (int64_t h = 0; h < model.heads_kv; ++h) factors->set({0, h}, 0.5 + random_.uniform());
    }
    for (int64_t h = 0; h < model.heads_q; ++h) sink_.set({h}, random_.normal());
    for (Call* call : {&packed_, &decode_}) make_plan(*call);
  }

  /// One step; "" when all is right.
  std::string step() {
    receive();
    const std::vector<int64_t> rows = choose_rows();
    const bool one_each = std::all_of(rows.begin(), rows.end(), [](int64_t n) { return n == 1; });
    Call& call = one_each && random_.chance(0.5) ? decode_ : packed_;
    counts_.decode_steps += call.is_packed() ? 0 : 1;
    fill(call, rows);
    std::string wrong = run(call);
    int64_t first = 0;
    for (size_t b = 0; b < slots_.size(); first += rows[b++]) {
      if (wrong.empty()) wrong = check_appended(call, b, first, rows[b]);
    }
    if (wrong.empty()) wrong = pool_.changed();
    first = 0;
    for (size_t b = 0; b < slots_.size(); first += rows[b++]) {
      if (wrong.empty() && rows[b] > 0 && random_.chance(0.04))
        wrong = compare_with_one_piece(call, b, first, rows[b]);
    }
    send_away();
    return wrong;
  }

  const Counts& counts() const { return counts_; }
  /// Whether the backend computes one form of call at least; another may do the other.
  bool serves() const { return serves_; }

 private:
  // ---- sequences and their pages

  void receive() {
    for (auto& slot : slots_) {
      if (slot || !random_.chance(0.5)) continue;
      Sequence s;
      const auto& other = slots_[static_cast<size_t>(random_.between(0, kSlots - 1))];
      if (other && other->rows > other->padding && random_.chance(0.6)) {
        share_prefix(s, *other);
      } else if (model_.most_padding > 0) {
        s.rows = s.padding = random_.between(0, model_.most_padding);
      }
      s.end = random_.between(s.rows + 1, model_.longest);
      s.prompt = random_.between(0, s.end - s.rows);
      ++counts_.sequences;
      slot = std::move(s);
    }
  }
  /// All of the other's rows, or some.
  void share_prefix(Sequence& s, const Sequence& other) {
    s.padding = other.padding;
    s.rows = random_.chance(0.5) ? other.rows : random_.between(s.padding + 1, other.rows);
    s.rows = std::min(s.rows, model_.longest - 1);
    const int64_t pages = (s.rows + pool_.page_size() - 1) / pool_.page_size();
    s.pages.assign(other.pages.begin(), other.pages.begin() + pages);
    for (const int32_t page : s.pages) pool_.share(page);
    const int64_t rows = s.rows - s.padding;
    s.k.assign(other.k.begin(), other.k.begin() + rows * model_.heads_kv * model_.head_dim);
    s.v.assign(other.v.begin(), other.v.begin() + rows * model_.heads_kv * model_.head_dim_v);
    ++counts_.with_a_prefix;
  }

  /// The rows that each sequence appends now: chunks of prompts, single rows, or none. Sequences without a page leave.
  std::vector<int64_t> choose_rows() {
    std::vector<int64_t> rows(slots_.size(), 0);
    for (size_t b = 0; b < slots_.size(); ++b) {
      auto& slot = slots_[b];
      if (!slot || random_.chance(0.03)) continue;
      rows[b] = slot->prompt > 0 ? random_.between(1, std::min(slot->prompt, model_.chunk)) : 1;
      if (make_room(*slot, rows[b])) continue;
      rows[b] = 0;
      ++counts_.without_a_page;
      leave(slot);
    }
    return rows;
  }
  bool make_room(Sequence& s, int64_t rows) {
    const int64_t in_last = s.rows % pool_.page_size();
    if (in_last > 0 && !s.pages.empty() && pool_.is_shared(s.pages.back())) {
      const auto page = pool_.take(random_);
      if (!page) return false;
      pool_.copy(s.pages.back(), *page, in_last);
      pool_.give_back(std::exchange(s.pages.back(), *page));
      ++counts_.pages_copied;
    }
    while (static_cast<int64_t>(s.pages.size()) * pool_.page_size() < s.rows + rows) {
      const auto page = pool_.take(random_);
      if (!page) return false;
      s.pages.push_back(*page);
    }
    return true;
  }
  void send_away() {
    for (auto& slot : slots_) {
      if (slot && (slot->rows >= slot->end || random_.chance(0.005))) leave(slot);
    }
  }
  void leave(std::optional<Sequence>& slot) {
    for (const int32_t page : slot->pages) pool_.give_back(page);
    slot.reset();
  }

  // ---- one run

  void make_plan(Call& call) {
    const fovea_device device = device_ ? device_->device() : cpu();
    const auto form = [&](const OwnedTensor& t) {
      return Tensor(nullptr, dtype_of(t.type()), t.shape(), t.strides()).on(device);
    };
    Problem p = {.q = form(call.q), .k = form(pool_.halves()[0].tensor), .v = form(pool_.halves()[1].tensor)};
    p.o = form(call.o);
    p.lse = form(call.lse);
    p.seqused_k = form(used_);
    p.page_table = form(table_);
    p.k_new = form(call.k_new);
    p.v_new = form(call.v_new);
    p.rotary_cos = form(cos_);
    p.rotary_sin = form(sin_);
    p.rotary_interleaved = model_.interleaved;
    p.causal = true;
    p.window_left = model_.window_left;
    if (model_.sink) p.sink = form(sink_);
    if (model_.e4m3_keys) {
      p.k_descale = form(k_descale_);
      p.v_descale = form(v_descale_);
    }
    if (model_.e4m3_queries) p.q_descale = form(q_descale_);
    if (model_.most_padding > 0) p.leftpad_k = form(padding_);
    if (call.is_packed()) {
      p.cu_seqlens_q = p.cu_seqlens_k_new = form(starts_);
      p.max_seqlen_q = model_.chunk;
    }
    try {
      call.plan = std::make_unique<Plan>(p, Options{.backend = backend_, .num_threads = 2});
      serves_ = true;
    } catch (const Error& error) {
      if (error.status() != FOVEA_UNSUPPORTED) throw;
      call.plan = std::make_unique<Plan>(p);
    }
  }

  /// Numbers for the rows, NaN in rows behind them, and in the table numbers of no page where a sequence has none.
  void fill(Call& call, const std::vector<int64_t>& rows) {
    int64_t total = 0;
    starts_.set({0}, 0);
    for (size_t b = 0; b < slots_.size(); ++b) {
      const auto slot = static_cast<int64_t>(b);
      used_.set({slot}, slots_[b] ? static_cast<double>(slots_[b]->rows) : 0);
      padding_.set({slot}, slots_[b] ? static_cast<double>(slots_[b]->padding) : 0);
      total += rows[b];
      starts_.set({slot + 1}, static_cast<double>(total));
      for (int64_t column = 0; column < columns_; ++column) {
        const bool has = slots_[b] && column < static_cast<int64_t>(slots_[b]->pages.size());
        const auto none = random_.one_of<int32_t>(
            {-1, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()});
        table_.set({slot, column}, has ? slots_[b]->pages[static_cast<size_t>(column)] : none);
      }
    }
    for (OwnedTensor* tensor : {&call.q, &call.k_new, &call.v_new}) {
      tensor->poison();
      const auto count =
          static_cast<size_t>(total * tensor->shape().back() * tensor->shape()[tensor->shape().size() - 2]);
      tensor->for_each([&](size_t place, unsigned char* at) {
        if (place < count) store(at, tensor->type(), random_.normal());
      });
    }
    call.o.poison();
    call.lse.poison();
  }

  std::string run(const Call& call) {
    struct Place {
      const OwnedTensor* tensor;
      const void* address;
    };
    std::vector<Place> places;
    std::vector<DeviceMemory::Block> blocks;
    for (const OwnedTensor* t : tensors_of(call)) {
      places.push_back({t, t->data()});
      blocks.push_back({"a tensor of the step", t->memory().data(), t->memory().size()});
    }
    const size_t size = call.plan->workspace_size();
    const Memory workspace(device_ ? 0 : size, 0, Placement::kGuarded);
    void* workspace_address = workspace.data();
    if (device_) {
      const std::vector<void*> mirrors = device_->place(blocks, size, kPattern);
      for (size_t i = 0; i < places.size(); ++i) places[i].address = mirrors[i];
      workspace_address = mirrors.back();
    }
    const auto address = [&](const OwnedTensor& t) {
      const auto found =
          std::find_if(places.begin(), places.end(), [&](const Place& place) { return place.tensor == &t; });
      return const_cast<void*>(found == places.end() ? nullptr : found->address);
    };
    Buffers b = {
        .q = address(call.q), .k = address(pool_.halves()[0].tensor), .v = address(pool_.halves()[1].tensor)};
    b.o = address(call.o);
    b.lse = address(call.lse);
    b.seqused_k = address(used_);
    b.page_table = address(table_);
    b.k_new = address(call.k_new);
    b.v_new = address(call.v_new);
    b.rotary_cos = address(cos_);
    b.rotary_sin = address(sin_);
    b.sink = address(sink_);
    b.leftpad_k = address(padding_);
    b.q_descale = address(q_descale_);
    b.k_descale = address(k_descale_);
    b.v_descale = address(v_descale_);
    b.cu_seqlens_q = b.cu_seqlens_k_new = address(starts_);
    b.stream = device_ ? device_->stream() : nullptr;
    call.plan->run(b, size > 0 ? workspace_address : nullptr, size);
    if (device_) {
      if (std::string wrong = device_->finish(blocks); !wrong.empty()) return wrong;
    } else if (!workspace.guards_intact()) {
      return "workspace: written outside";
    }
    const std::string wrong_o = call.o.check_written(), wrong_lse = call.lse.check_written();
    return wrong_o.empty() ? (wrong_lse.empty() ? "" : "lse: " + wrong_lse) : "o: " + wrong_o;
  }
  std::vector<const OwnedTensor*> tensors_of(const Call& call) const {
    std::vector<const OwnedTensor*> all = {&call.q,
                                           &call.k_new,
                                           &call.v_new,
                                           &call.o,
                                           &call.lse,
                                           &used_,
                                           &table_,
                                           &cos_,
                                           &sin_,
                                           &pool_.halves()[0].tensor,
                                           &pool_.halves()[1].tensor};
    if (call.is_packed()) all.push_back(&starts_);
    if (model_.sink) all.push_back(&sink_);
    if (model_.e4m3_keys) all.insert(all.end(), {&k_descale_, &v_descale_});
    if (model_.e4m3_queries) all.push_back(&q_descale_);
    if (model_.most_padding > 0) all.push_back(&padding_);
    return all;
  }

  // ---- what a run left

  /// The rows that sequence b appended, which lie from `first` on in the new ones: they are what the rule says, and belong to it from
  /// now on.
  std::string check_appended(const Call& call, size_t b, int64_t first, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      Sequence& s = *slots_[b];
      const int32_t page = s.pages[static_cast<size_t>(s.rows / pool_.page_size())];
      const int64_t row = s.rows % pool_.page_size();
      for (const size_t which : {size_t{0}, size_t{1}}) {
        const std::vector<double> stored = PagePool::row(pool_.halves()[which], page, row);
        const std::string wrong = wrong_row(call, which, first + i, s.rows, stored);
        if (!wrong.empty())
          return "slot " + std::to_string(b) + ", row " + std::to_string(s.rows) + ": " + wrong;
        pool_.keep(which, page, row);
        auto& history = which == 0 ? s.k : s.v;
        history.insert(history.end(), stored.begin(), stored.end());
      }
      ++s.rows;
      s.prompt = std::max<int64_t>(s.prompt - 1, 0);
      ++counts_.appended;
    }
    return {};
  }
  std::string wrong_row(const Call& call, size_t which, int64_t from, int64_t position,
                        const std::vector<double>& stored) const {
    const bool keys = which == 0;
    const Type type = pool_.halves()[which].tensor.type();
    const OwnedTensor &given = keys ? call.k_new : call.v_new, &factors = keys ? k_descale_ : v_descale_;
    const int64_t size = keys ? model_.head_dim : model_.head_dim_v;
    for (int64_t h = 0; h < model_.heads_kv; ++h) {
      const std::vector<double> row = row_of(given, from, h);
      const StoredRow expected = stored_row(row.data(), size, keys ? rotary_ : Rotary{}, position,
                                            model_.e4m3_keys ? factors.get({0, h}) : 1, type);
      for (int64_t c = 0; c < size; ++c) {
        const auto at = static_cast<size_t>(c);
        const double is = stored[static_cast<size_t>(h * size + c)],
                     wanted = rounded(expected.values[at], type);
        if (is == wanted || (keys && std::abs(is - wanted) <= expected.slack[at])) continue;
        return std::string(pool_.halves()[which].name) + " of head " + std::to_string(h) + ", element " +
               std::to_string(c) + ": is " + std::to_string(is) + ", expected " + std::to_string(wanted);
      }
    }
    return {};
  }
  /// Row `row` and head `head` of a tensor (rows, heads, size) or (rows, 1, heads, size).
  static std::vector<double> row_of(const OwnedTensor& t, int64_t row, int64_t head) {
    const int64_t heads = t.shape()[t.shape().size() - 2], size = t.shape().back();
    const auto* from = static_cast<const unsigned char*>(t.data()) +
                       static_cast<size_t>((row * heads + head) * size) * size_of(t.type());
    std::vector<double> values(static_cast<size_t>(size));
    for (size_t c = 0; c < values.size(); ++c) values[c] = load(from + c * size_of(t.type()), t.type());
    return values;
  }

  /// Of the results of sequence b, `all` rows from `first` on, some that follow each other: against the oracle over the rows of keys that
  /// they see, in one piece.
  std::string compare_with_one_piece(const Call& call, size_t b, int64_t first, int64_t all) {
    ++counts_.compared;
    const Sequence& s = *slots_[b];
    const int64_t rows = std::min(all, kMostCompared), skipped = random_.between(0, all - rows),
                  end = s.rows - all + skipped + rows;  // of the last row's keys
    const ProblemSpec spec = spec_of(rows, end - s.padding);
    const OwnedProblem x(spec);
    first += skipped;
    std::vector<double> q, o;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < model_.heads_q; ++h) {
        const std::vector<double> given = row_of(call.q, first + i, h), got = row_of(call.o, first + i, h);
        const double factor =
            model_.e4m3_queries ? q_descale_.get({0, h * model_.heads_kv / model_.heads_q}) : 1;
        for (const double value : rotary_.turned(given.data(), model_.head_dim, end - rows + i, nullptr))
          q.push_back(value * factor);
        o.insert(o.end(), got.begin(), got.end());
      }
    }
    x[Role::kQ].assign(q);
    const auto seen = [&](const std::vector<double>& history, int64_t size) {
      return std::vector(history.begin(), history.begin() + spec.seqlen_k * model_.heads_kv * size);
    };
    x[Role::kK].assign(seen(s.k, model_.head_dim));
    x[Role::kV].assign(seen(s.v, model_.head_dim_v));
    if (model_.sink) x[Role::kSink].assign(sink_.values());
    if (model_.e4m3_keys) {
      x[Role::kKDescale].assign(k_descale_.values());
      x[Role::kVDescale].assign(v_descale_.values());
    }
    const std::string wrong = compare_with_oracle(x, o, statistics_of(call, first, rows));
    return wrong.empty()
               ? wrong
               : "slot " + std::to_string(b) + " with " + std::to_string(s.rows) + " rows: " + wrong;
  }
  /// Queries of 8 bits are rotated, and then have the type of o.
  ProblemSpec spec_of(int64_t rows, int64_t keys) const {
    ProblemSpec spec;
    spec.type = model_.type;
    spec.e4m3_keys = model_.e4m3_keys;
    spec.descale_broadcast = 1;
    spec.seqlen_q = rows;
    spec.seqlen_k = keys;
    spec.heads_q = model_.heads_q;
    spec.heads_kv = model_.heads_kv;
    spec.head_dim = model_.head_dim;
    spec.head_dim_v = model_.head_dim_v;
    spec.causal = true;
    spec.window_left = model_.window_left;
    spec.sink = model_.sink;
    return spec;
  }
  std::vector<double> statistics_of(const Call& call, int64_t first, int64_t rows) const {
    const std::vector<float> all = call.lse.floats();
    std::vector<double> lse;
    for (int64_t h = 0; h < model_.heads_q; ++h) {
      for (int64_t i = 0; i < rows; ++i)
        lse.push_back(static_cast<double>(all[call.place_of_lse(first + i, h)]));
    }
    return lse;
  }
  static std::string compare_with_oracle(const OwnedProblem& x, const std::vector<double>& o,
                                         const std::vector<double>& lse) {
    Plain plain(x);
    plain.allow_for_rotation();
    plain.forward();
    const OwnedProblem oracle = x.in_float64();
    if (const std::string failure = run_pass(oracle, FOVEA_FORWARD, {kOracle}).failure; !failure.empty())
      return failure;
    x[Role::kO].assign(o);
    x[Role::kLse].assign(lse);
    const std::string wrong = compare(Role::kO, x.spec.type, x[Role::kO], oracle[Role::kO].values(), plain);
    if (!wrong.empty()) return wrong;
    return compare(Role::kLse, Type::kF32, x[Role::kLse], oracle[Role::kLse].values(), plain);
  }

  const Model& model_;
  const std::string backend_;
  DeviceMemory* const device_;  ///< null: the backend works on host memory
  bool serves_ = false;
  const int64_t columns_;  ///< pages of a sequence, at most
  Random random_{20261124};
  PagePool pool_;
  OwnedTensor used_ = compact(Type::kI32, {kSlots}), starts_ = compact(Type::kI32, {kSlots + 1}), table_;
  OwnedTensor padding_ = compact(Type::kI32, {kSlots});
  OwnedTensor cos_ = compact(Type::kF32, {model_.longest, model_.rotary / 2}),
              sin_ = compact(Type::kF32, cos_.shape());
  OwnedTensor q_descale_ = compact(Type::kF32, {1, model_.heads_kv}),
              k_descale_ = compact(Type::kF32, q_descale_.shape()),
              v_descale_ = compact(Type::kF32, q_descale_.shape());
  OwnedTensor sink_ = compact(Type::kF32, {model_.heads_q});
  Call packed_, decode_;
  Rotary rotary_;
  std::vector<std::optional<Sequence>> slots_ = std::vector<std::optional<Sequence>>(kSlots);
  Counts counts_;
};

class Soak : public testing::TestWithParam<Model> {};

TEST_P(Soak, EveryStepIsRight) {
  constexpr uint64_t kEnoughForAll = 100;  // steps in which each kind of event happens
  const uint64_t steps = environment_number("FOVEA_TEST_STEPS", 30);
  int served = 0;
  for (const std::string& backend : backends_under_test()) {
    announce(backend + ": soak of " + GetParam().name);
    const auto server = std::make_unique<Server>(GetParam(), backend);
    if (!server->serves()) continue;
    ++served;
    for (uint64_t step = 0; step < steps; ++step) {
      const std::string wrong = server->step();
      ASSERT_EQ(wrong, "") << backend << " at step " << step;
    }
    const Counts& c = server->counts();
    std::printf(
        "%s: %lld sequences, %lld with the beginning of another, %lld pages copied, %lld left for want of a "
        "page, %lld rows "
        "appended, %lld steps of one row each, %lld results compared\n",
        backend.c_str(), static_cast<long long>(c.sequences), static_cast<long long>(c.with_a_prefix),
        static_cast<long long>(c.pages_copied), static_cast<long long>(c.without_a_page),
        static_cast<long long>(c.appended), static_cast<long long>(c.decode_steps),
        static_cast<long long>(c.compared));
    if (steps < kEnoughForAll) continue;
    EXPECT_GT(std::min({c.with_a_prefix, c.decode_steps, c.compared}), 0);
    if (GetParam().page_size > 1) {
      EXPECT_GT(c.pages_copied, 0);
    }
  }
  EXPECT_TRUE(served > 0 || only_one_backend()) << "no backend can do it";
}

INSTANTIATE_TEST_SUITE_P(Servers, Soak, testing::ValuesIn(kModels),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace fovea::conformance
