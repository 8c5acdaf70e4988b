// The definitions of distributed_plan.hpp.
#include "distributed/distributed_plan.hpp"

#include <algorithm>
#include <cstring>
#include <exception>

#include "capi/run_part.hpp"
#include "core/status.hpp"
#include "distributed/agreement.hpp"
#include "distributed/choose.hpp"
#include "distributed/terms.hpp"

namespace fovea::distributed {
namespace {

/// What reasons call the kinds of Step, in their order.
constexpr std::array kStepNames = {"send", "receive", "attend", "merge", "move", "fill", "order"};

/// What each rank tells all others when a plan is made.
struct Record {
  std::array<uint64_t, kSharedArguments> fingerprints{};
  char failure[248] = "";  ///< "": none
};

/// A part of a text, with zeros behind its end.
struct Chunk {
  std::array<char, 1024> text{};
};

/// Addresses of one run.
class Addresses {
 public:
  /// Where views of the workspace, and the workspace of calls, begin.
  Addresses(const fovea_buffers& b, char* workspace, char* attention)
      : workspace_(workspace), attention_(attention) {
#define FOVEA_ADDRESS(Place, field) \
  base_[Place] = static_cast<char*>(const_cast<void*>(static_cast<const void*>(b.field)));
    FOVEA_DISTRIBUTED_TENSORS(FOVEA_ADDRESS)
#undef FOVEA_ADDRESS
    for (size_t i = 0; i < FOVEA_MAX_NAMED_TENSORS; ++i) {
      base_[named_place(i)] = static_cast<char*>(const_cast<void*>(b.named[i]));
      base_[named_gradient_place(i)] = static_cast<char*>(b.named_gradients[i]);
    }
  }
  char* of(const View& view) const {
    return (view.place < 0 ? workspace_ : base_[static_cast<size_t>(view.place)]) + view.offset;
  }
  char* base(Place place) const {
    return base_[place];
  }
  char* attention_workspace() const {
    return attention_;
  }

 private:
  std::array<char*, kPlaces> base_{};
  char *workspace_, *attention_;
};

/// The steps of one run.
class Execution {
 public:
  Execution(const LocalProblem& problem, const Program& program, const Transport& transport, Memory& memory,
            Windows* windows, const fovea_buffers& buffers, const DropoutStream& dropout)
      : problem_(problem),
        program_(program),
        transport_(transport),
        memory_(memory),
        windows_(windows),
        at_(addresses(program, windows, buffers)),
        dropout_(dropout) {
    if (!problem.backward() && problem.has(kRngState)) write_rng_state();
  }

  void operator()(const Start& step) {
    const Exchange& exchange = program_.exchanges[step.exchange];
    // What was computed before is there to be sent, and no longer read where messages arrive.
    if (step.waits) memory_.order(step.after, Lane::kLink);
    if (windows_ != nullptr) {
      windows_->start(exchange, step.exchange, [&](const PeerCopy& copy) { return box_of(copy); });
      for (const PlannedMove& move : exchange.kept) move_boxes(move, Lane::kLink);
      return;
    }
    for (const PlannedMove& move : exchange.pack) move_boxes(move, Lane::kLink);
    transport_.start(messages(exchange.sends), messages(exchange.receives), memory_.stream(Lane::kLink));
  }
  void operator()(const Finish& step) {
    if (step.heard && windows_ != nullptr) return;
    const Exchange& exchange = program_.exchanges[step.exchange];
    Lane lane = Lane::kLink;
    if (windows_ != nullptr) {
      // Nothing has to go by the lane of links on its way to what is computed next.
      const bool on_compute = exchange.alone || (step.on_compute && exchange.unpack.empty());
      lane = on_compute ? step.reader : Lane::kLink;
      windows_->finish(exchange, step.exchange, lane);
      if (on_compute && !exchange.alone) return;
    } else {
      transport_.finish(memory_.stream(Lane::kLink));
    }
    for (const PlannedMove& move : exchange.unpack) move_boxes(move, lane);
    // What arrived may be computed with.
    if (step.is_read) memory_.order(Lane::kLink, Lane::kCompute);
  }
  void operator()(const Attend& step) {
    if (step.arriving && !in_vectors(step)) {
      for (const PlannedMove& move : step.arriving->copies) move_boxes(move, step.lane);
      (*this)(*step.arriving->over_copies);
      return;
    }
    if (const Arriving* a = step.behind.get())
      windows_->finish_part(a->exchange, a->peer, a->first_part, step.lane);
    fovea_buffers b = FOVEA_BUFFERS_INIT;
#define FOVEA_POINTER(Place, field) \
  if (step.operands[Place].present) b.field = at_.of(step.operands[Place].view);
    FOVEA_DISTRIBUTED_TENSORS(FOVEA_POINTER)
#undef FOVEA_POINTER
    set_named(step, b);
    b.cu_seqlens_q = step.starts_q.get();
    b.cu_seqlens_k = step.starts_k.get();
    const bool beside = step.lane == Lane::kBeside;
    b.workspace = at_.attention_workspace() +
                  (beside ? aligned(static_cast<int64_t>(program_.attention_workspace_size)) : 0);
    b.workspace_size = program_.attention_workspace_size;
    b.stream = memory_.stream(step.lane);
    b.seed = dropout_.seed;
    b.offset = dropout_.offset;
    capi::run_part(*step.plan, b, step.dropout, arriving(step));
  }
  void operator()(const Order& step) {
    memory_.order(step.sooner, step.later);
  }
  void operator()(const Merge& step) {
    if (step.batch == 0 || step.rows == 0 || step.heads == 0) return;
    std::vector<Described> tensors;
    tensors.reserve(2 * step.parts.size() + 2);
    std::vector<const fovea_tensor*> o, lse;
    for (const Merge::Part& part : step.parts) {
      o.push_back(tensors.emplace_back(*this, step, part.o, false).get());
      lse.push_back(tensors.emplace_back(*this, step, part.lse, true).get());
    }
    const fovea_tensor* into_o = tensors.emplace_back(*this, step, step.into.o, false).get();
    const fovea_tensor* into_lse =
        step.into.lse.present ? tensors.emplace_back(*this, step, step.into.lse, true).get() : nullptr;
    check_call(fovea_merge(static_cast<int32_t>(o.size()), o.data(), lse.data(), into_o, into_lse,
                           memory_.stream(Lane::kCompute)));
  }
  void operator()(const MoveBoxes& step) {
    move_boxes(step.move, Lane::kCompute);
  }
  void operator()(const Fill& step) {
    memory_.set_words(at_.of(step.view), step.word, static_cast<size_t>(step.words), Lane::kCompute);
  }

 private:
  /// Seed and offset, by the rank itself, which may have nothing to compute.
  void write_rng_state() const {
    int64_t words = 0;
    for (const uint64_t number : {dropout_.seed, dropout_.offset}) {
      for (const int shift : {0, 32}) {
        View view = problem_[kRngState].view;
        view.offset += int64_t{sizeof(uint32_t)} * words++;
        memory_.set_words(at_.of(view), static_cast<uint32_t>(number >> shift), 1, Lane::kCompute);
      }
    }
  }
  /// Whether kernels that copy vectors of 16 bytes can read what the step does.
  bool in_vectors(const Attend& step) const {
    constexpr uintptr_t kVector = 16;
    constexpr std::array kRead = {kQ, kK, kV};
    return std::all_of(kRead.begin(), kRead.end(), [&](Place place) {
      return reinterpret_cast<uintptr_t>(at_.of(step.operands[place].view)) % kVector == 0;
    });
  }
  ArrivingKeys arriving(const Attend& step) {
    if (!step.arriving) return {};
    const Arriving& a = *step.arriving;
    if (windows_->shares_device(a.peer))
      windows_->finish(program_.exchanges[a.exchange], a.exchange, step.lane);
    const auto strides = [](const Operand& o) -> std::array<int64_t, 3> {
      const int64_t bytes = bytes_of(o.type);
      return {o.view.stride_batch / bytes, o.view.stride_row / bytes, o.view.stride_head / bytes};
    };
    return {at_.of(a.k.view),
            at_.of(a.v.view),
            strides(a.k),
            strides(a.v),
            windows_->words_of_parts(a.exchange, a.peer),
            windows_->run()};
  }
  void set_named(const Attend& step, fovea_buffers& b) const {
    size_t count = 0;
    for (size_t i = 0; i < FOVEA_MAX_NAMED_TENSORS; ++i) {
      const Operand &tensor = step.operands[named_place(i)],
                    &gradient = step.operands[named_gradient_place(i)];
      if (tensor.present) b.named[count++] = at_.of(tensor.view);
      if (gradient.present) b.named_gradients[i] = at_.of(gradient.view);
    }
    if (step.numbers) b.named[count] = step.numbers.get();
  }

  /// A tensor of a merge.
  class Described {
   public:
    Described(const Execution& run, const Merge& step, const Operand& o, bool statistic) {
      const int64_t bytes = o.type.bits / 8;
      const View& v = o.view;
      if (statistic) {
        shape_ = {step.batch, step.heads, step.rows, 1};
        strides_ = {v.stride_batch / bytes, v.stride_head / bytes, v.stride_row / bytes, 1};
      } else {
        shape_ = {step.batch, step.rows, step.heads, step.elements};
        strides_ = {v.stride_batch / bytes, v.stride_row / bytes, v.stride_head / bytes, 1};
      }
      tensor_.data = run.at_.of(v);
      tensor_.device = run.problem_.device;
      tensor_.ndim = statistic ? 3 : 4;
      tensor_.dtype = o.type;
    }
    const fovea_tensor* get() {
      tensor_.shape = shape_.data();
      tensor_.strides = strides_.data();
      return &tensor_;
    }

   private:
    fovea_tensor tensor_{};
    std::array<int64_t, 4> shape_{}, strides_{};
  };

  std::vector<fovea_message> messages(const std::vector<Exchange::Message>& planned) const {
    std::vector<fovea_message> made;
    for (const Exchange::Message& m : planned)
      made.push_back({m.peer, at_.of(m.view), static_cast<size_t>(m.bytes)});
    return made;
  }
  static Box box_at(const PlannedBox& planned, const char* from, char* to) {
    return {from,
            to,
            {planned.from.stride_batch, planned.from.stride_row, planned.from.stride_head},
            {planned.to.stride_batch, planned.to.stride_row, planned.to.stride_head},
            {planned.batch, planned.rows, planned.heads},
            planned.elements};
  }
  void move_boxes(const PlannedMove& move, Lane lane) {
    std::vector<Box> boxes;
    for (const PlannedBox& planned : move.boxes) {
      if (planned.batch > 0) boxes.push_back(box_at(planned, at_.of(planned.from), at_.of(planned.to)));
    }
    memory_.move(boxes, move.how, lane);
  }
  Box box_of(const PeerCopy& copy) const {
    const View &from = copy.box.from, &to = copy.box.to;
    if (copy.peer == transport_.rank()) return box_at(copy.box, at_.of(from), at_.of(to));
    char* const workspace = windows_->workspace(copy.peer);
    return copy.puts ? box_at(copy.box, at_.of(from), workspace + to.offset)
                     : box_at(copy.box, workspace + from.offset, at_.of(to));
  }
  static Addresses addresses(const Program& program, const Windows* windows, const fovea_buffers& b) {
    char* const given = static_cast<char*>(b.workspace);
    return windows ? Addresses(b, windows->own(), given) : Addresses(b, given, given + program.workspace);
  }

  const LocalProblem& problem_;
  const Program& program_;
  const Transport& transport_;
  Memory& memory_;
  Windows* windows_;
  Addresses at_;
  DropoutStream dropout_;
};

void check_buffers(const LocalProblem& problem, int64_t workspace, int rank, const fovea_buffers& b) {
  const Addresses given(b, nullptr, nullptr);
  const auto ranks_rows = [&](const Placement& placement) {
    return count(placement.of_rank[static_cast<size_t>(rank)]);
  };
  for (int i = 0; i < kPlaces; ++i) {
    const auto place = static_cast<Place>(i);
    const bool keys = place == kK || place == kV || place == kDK || place == kDV;
    const bool heads = place == kSink || place == kDSink || place == kRngState;
    const bool term = place >= kAlibi;
    const int64_t rows = term    ? problem[place].elements
                         : heads ? 1
                                 : ranks_rows(keys ? problem.shape.keys : problem.shape.queries);
    const bool wanted = problem.has(place) && rows > 0 && (heads || term || problem.shape.batch > 0);
    if (wanted && given.base(place) == nullptr)
      throw_invalid(problem.name(place), "NULL", "memory, as the plan's problem has the tensor",
                    "set the pointer");
    if (!problem.has(place) && given.base(place) != nullptr)
      throw_invalid(problem.name(place), "a pointer", "NULL: the plan's problem has no such tensor",
                    "make a plan with the tensor");
  }
  if (workspace > 0 && (b.workspace == nullptr || b.workspace_size < static_cast<size_t>(workspace)))
    throw_invalid("workspace", std::to_string(b.workspace ? b.workspace_size : 0) + " bytes",
                  std::to_string(workspace), "pass fovea_distributed_plan_workspace_size() bytes");
  if (reinterpret_cast<uintptr_t>(b.workspace) % kPartAlignment != 0)
    throw_invalid("workspace", "an address that is no multiple of " + std::to_string(kPartAlignment),
                  "an aligned one", "allocate it aligned");
}

}  // namespace

DistributedPlan::DistributedPlan(const Transport& transport, const fovea_distributed_problem& problem,
                                 const fovea_distributed_options& options)
    : transport_(transport), memory_(open_memory(transport.device())) {
  make(problem, options, transport.peer_copies() && transport.size() > 1);
  if (!problem_.by_copies) return;
  windows_ = Windows::open(transport_, *memory_, program_.workspace, program_.exchanges.size());
  if (!windows_) make(problem, options, false);
}

void DistributedPlan::make(const fovea_distributed_problem& problem, const fovea_distributed_options& options,
                           bool by_copies) {
  std::exception_ptr failure;
  std::string why;
  SharedArguments shared;
  try {
    shared = plan(problem, options, by_copies);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    why = error.what();
  }
  try {
    agree(shared, why);
  } catch (const std::exception&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

SharedArguments DistributedPlan::plan(const fovea_distributed_problem& problem,
                                      const fovea_distributed_options& options, bool by_copies) {
  problem_ = read_local_problem(problem, transport_.rank(), transport_.size(), transport_.device());
  problem_.by_copies = by_copies;
  const std::vector<Estimate> weighed = weigh(problem_, options);
  const Schedule schedule(problem_.shape, weighed.front().method);
  ProgramOptions how;
  how.attention = options.attention;
  how.memory = memory_.get();
  program_ = make_program(problem_, schedule, transport_.rank(), how);
  explain(weighed, options);
  return shared_arguments(problem_, options, schedule.method());
}

void DistributedPlan::explain(const std::vector<Estimate>& weighed,
                              const fovea_distributed_options& options) {
  reason_.clear();
  for (size_t i = 0; i < weighed.size(); ++i) {
    reason_ += i == 0 ? "chosen: " : "passed over: ";
    reason_ += describe(weighed[i], problem_.shape);
    if (options.memory_limit > 0 && weighed[i].workspace > options.memory_limit)
      reason_ += ", above memory_limit";
    reason_ += '\n';
  }
  if (problem_.terms) reason_ += "terms of the whole problem: " + problem_.terms->text + '\n';
  reason_ += "rank " + std::to_string(transport_.rank()) + ": " + std::to_string(messages()) + " messages, " +
             std::to_string(bytes()) + " bytes" +
             (problem_.by_copies ? ", copied between the memories of ranks" : "") + ", steps:";
  for (const Step& step : program_.steps) {
    reason_ += ' ';
    reason_ += kStepNames[step.index()];
    if (const auto* attend = std::get_if<Attend>(&step); attend != nullptr && attend->arriving)
      reason_ += "-as-keys-arrive";
  }
  reason_ += '\n';
}

void DistributedPlan::agree(const SharedArguments& shared, const std::string& failure) const {
  Record own;
  for (size_t i = 0; i < kSharedArguments; ++i) own.fingerprints[i] = fingerprint(shared[i].value);
  std::strncpy(own.failure, failure.c_str(), sizeof own.failure - 1);
  memory_->begin(nullptr);
  const std::vector<Record> records = told_by_all(transport_, *memory_, own);
  for (size_t peer = 0; peer < records.size(); ++peer) {
    if (records[peer].failure[0] != '\0' && peer != static_cast<size_t>(transport_.rank()))
      throw RequestError(Status::kInvalidArgument, "transport",
                         "rank " + std::to_string(peer) + " could not plan: " + records[peer].failure);
  }
  if (!failure.empty()) return;
  for (size_t i = 0; i < kSharedArguments; ++i) {
    const auto same = [&](const Record& r) { return r.fingerprints[i] == records[0].fingerprints[i]; };
    if (!std::all_of(records.begin(), records.end(), same)) tell_difference(shared[i]);
  }
}

/// All ranks call it for the same argument, and show each other what they have as far as the first difference.
void DistributedPlan::tell_difference(const SharedArgument& argument) const {
  std::vector<std::string> values(static_cast<size_t>(transport_.size()));
  for (size_t at = 0;; at += sizeof(Chunk)) {
    Chunk own;
    if (at < argument.value.size()) argument.value.copy(own.text.data(), sizeof own, at);
    const std::vector<Chunk> chunks = told_by_all(transport_, *memory_, own);
    bool differ = false;
    for (size_t rank = 0; rank < chunks.size(); ++rank) {
      const char* text = chunks[rank].text.data();
      values[rank].append(text, strnlen(text, sizeof(Chunk)));
      differ = differ || chunks[rank].text != chunks[0].text;
    }
    if (differ) throw_disagreement(argument.name, values, "pass one value on every rank");
  }
}

bool DistributedPlan::agrees_on_dropout() const {
  return problem_.dropout > 0 && problem_.device.type == FOVEA_CPU && transport_.size() > 1;
}

/// What drops weights in a run. A backward of CPUs reads rng_state, as its calls do.
DropoutStream DistributedPlan::dropout_of(const fovea_buffers& buffers) const {
  DropoutStream stream{buffers.seed, buffers.offset};
  if (problem_.backward() && problem_.has(kRngState) && problem_.device.type == FOVEA_CPU)
    std::memcpy(&stream, buffers.rng_state, sizeof stream);
  return stream;
}

void DistributedPlan::agree_on(const DropoutStream& own) const {
  if (!agrees_on_dropout()) return;
  const std::vector<DropoutStream> all = told_by_all(transport_, *memory_, own);
  for (const auto& [name, number] :
       {std::pair{"seed", &DropoutStream::seed}, {"offset", &DropoutStream::offset}}) {
    std::vector<std::string> values;
    for (const DropoutStream& stream : all) values.push_back(std::to_string(stream.*number));
    if (std::any_of(values.begin(), values.end(), [&](const std::string& v) { return v != values[0]; }))
      throw_disagreement(name, values, "pass one value on every rank");
  }
}

/// "rank 1, step 3 (attend)".
std::string DistributedPlan::place_in_run(size_t steps_begun) const {
  std::string place = "rank " + std::to_string(transport_.rank());
  if (steps_begun > 0)
    place += ", step " + std::to_string(steps_begun) + " (" +
             kStepNames[program_.steps[steps_begun - 1].index()] + ")";
  return place;
}

void DistributedPlan::run_steps(const fovea_buffers& buffers, size_t& begun) const {
  memory_->begin(buffers.stream);
  const DropoutStream dropout = dropout_of(buffers);
  agree_on(dropout);
  if (windows_) windows_->begin_run();
  Execution execution(problem_, program_, transport_, *memory_, windows_.get(), buffers, dropout);
  for (const Step& step : program_.steps) {
    ++begun;
    std::visit(execution, step);
  }
  if (windows_) windows_->end_run();
}

void DistributedPlan::run(const fovea_buffers& buffers) const {
  size_t begun = 0;
  try {
    check_buffers(problem_, workspace_size(), transport_.rank(), buffers);
    run_steps(buffers, begun);
  } catch (const Disagreement&) {
    throw;  // on all ranks
  } catch (const RequestError& error) {
    const std::string where = place_in_run(begun);
    give_up(where + ": " + error.what(), begun);
    if (begun == 0) throw;
    throw RequestError(error.status(), error.argument(), std::string(error.what()) + ", in " + where);
  } catch (const std::exception& error) {
    give_up(place_in_run(begun) + ": " + error.what(), begun);
    throw;
  }
}

void DistributedPlan::give_up(const std::string& reason, size_t steps_begun) const {
  transport_.stop(reason);
  if (windows_ && steps_begun > 0) windows_->abandon();
}

int64_t DistributedPlan::messages() const {
  int64_t sum = agrees_on_dropout() ? transport_.size() - 1 : 0;
  for (const Exchange& exchange : program_.exchanges) sum += static_cast<int64_t>(exchange.sends.size());
  return sum;
}
int64_t DistributedPlan::bytes() const {
  int64_t sum =
      agrees_on_dropout() ? (transport_.size() - 1) * static_cast<int64_t>(sizeof(DropoutStream)) : 0;
  for (const Exchange& exchange : program_.exchanges) sum += exchange.bytes_sent();
  return sum;
}

}  // namespace fovea::distributed
