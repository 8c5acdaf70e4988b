// The definitions of simulate.hpp.
#include "distributed/simulate.hpp"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>

namespace fovea::distributed {
namespace {

/// Bytes that moves read and write; sums are read, too.
double touched_by(const std::vector<PlannedMove>& moves) {
  int64_t bytes = 0;
  for (const PlannedMove& move : moves) {
    const int64_t each = bytes_of(move.how.from) + bytes_of(move.how.to) * (move.how.add ? 2 : 1);
    for (const PlannedBox& box : move.boxes) bytes += each * box.batch * box.rows * box.heads * box.elements;
  }
  return static_cast<double>(bytes);
}

class Simulation {
 public:
  Simulation(const std::vector<Program>& programs, const Machine& machine)
      : programs_(programs),
        machine_(machine),
        ranks_(programs.size()),
        mail_(programs.size() * programs.size()) {}

  double run() {
    bool moved = true, done = false;
    while (!done) {
      if (!moved) throw std::logic_error("a rank waits for a message that nobody sends");
      moved = false;
      done = true;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        while (ranks_[rank].next < programs_[rank].steps.size() && step(rank)) moved = true;
        done = done && ranks_[rank].next == programs_[rank].steps.size();
      }
    }
    double last = 0;
    for (const Rank& rank : ranks_) last = std::max({last, rank.compute, rank.link});
    return last;
  }

 private:
  struct Rank {
    size_t next = 0;               ///< step
    double compute = 0, link = 0;  ///< when the lanes are done
    double out = 0, in = 0;        ///< when the last message left, and arrived
  };

  /// What lies on a lane begins when the lane is free: both of them, where they are one.
  void work(Rank& rank, double Rank::*lane, double seconds) {
    const double begin = machine_.overlaps ? rank.*lane : std::max(rank.compute, rank.link);
    rank.*lane = begin + seconds;
    if (!machine_.overlaps) rank.compute = rank.link = rank.*lane;
  }
  double moving(double bytes) const { return bytes / machine_.memory; }
  double rate(size_t a, size_t b) const {
    const auto hosts = static_cast<size_t>(machine_.ranks_per_host);
    return hosts == 0 || a / hosts == b / hosts ? machine_.link : machine_.host_link;
  }
  std::deque<double>& mail(size_t from, size_t to) { return mail_[from * ranks_.size() + to]; }

  /// Does the next step of a rank; false where it has to wait for another rank.
  bool step(size_t number) {
    Rank& rank = ranks_[number];
    const Program& program = programs_[number];
    const Step& step = program.steps[rank.next];
    if (const auto* start = std::get_if<Start>(&step)) {
      begin_messages(number, *start, program.exchanges[start->exchange]);
    } else if (const auto* finish = std::get_if<Finish>(&step)) {
      if (!end_messages(number, program.exchanges[finish->exchange])) return false;
      if (finish->is_read) rank.compute = std::max(rank.compute, rank.link);
    } else {
      work(rank, &Rank::compute, seconds_of(step));
    }
    ++rank.next;
    return true;
  }

  void begin_messages(size_t number, const Start& start, const Exchange& exchange) {
    Rank& rank = ranks_[number];
    if (start.waits) rank.link = std::max(rank.link, rank.compute);
    double kept =
        touched_by(exchange.kept);  // bytes that a rank copies within its own memory, each read and written
    for (const PeerCopy& copy : exchange.copies) {
      if (copy.peer == static_cast<int>(number)) kept += 2 * static_cast<double>(copy.bytes());
    }
    work(rank, &Rank::link, moving(touched_by(exchange.pack)));
    rank.out = std::max(rank.out, rank.link);
    work(rank, &Rank::link, moving(kept));  // beside messages
    for (const Exchange::Message& message : exchange.sends) {
      const auto peer = static_cast<size_t>(message.peer);
      rank.out += static_cast<double>(message.bytes) / rate(number, peer);
      mail(number, peer).push_back(rank.out);
    }
  }
  bool end_messages(size_t number, const Exchange& exchange) {
    std::vector<size_t> wanted(ranks_.size());
    for (const Exchange::Message& message : exchange.receives) {
      const auto peer = static_cast<size_t>(message.peer);
      if (mail(peer, number).size() < ++wanted[peer]) return false;
    }
    Rank& rank = ranks_[number];
    double arrived = rank.link;
    for (const Exchange::Message& message : exchange.receives) {
      const auto peer = static_cast<size_t>(message.peer);
      const double seconds = static_cast<double>(message.bytes) / rate(peer, number);
      rank.in = std::max(mail(peer, number).front(), rank.in + seconds);
      mail(peer, number).pop_front();
      arrived = std::max(arrived, rank.in);
    }
    const bool some = !exchange.receives.empty() || !exchange.sends.empty();
    rank.link = arrived;
    work(rank, &Rank::link, (some ? machine_.step : 0) + moving(touched_by(exchange.unpack)));
    return true;
  }

  double seconds_of(const Step& step) const {
    if (const auto* attend = std::get_if<Attend>(&step)) {
      Machine machine = machine_;
      if (attend->lane == Lane::kBeside) machine.call *= 2.0 / 3;  // it begins while the one before it ends
      // Of calls that wait for keys, fitted: 8,192 tokens 0.244 ms, 65,536 12.77, 131,072 50.2 (two H200s).
      constexpr double kRateOfWaiting = 0.96;
      if (attend->arriving) machine.flops *= kRateOfWaiting;
      return distributed::seconds_of(machine, attend->flops, attend->longest_tile) + moving(attend->copies);
    }
    if (const auto* move = std::get_if<MoveBoxes>(&step)) return moving(touched_by({move->move}));
    if (const auto* fill = std::get_if<Fill>(&step))
      return moving(sizeof(uint32_t) * static_cast<double>(fill->words));
    if (const auto* merge = std::get_if<Merge>(&step)) {
      int64_t element = bytes_of(merge->into.o.type);
      for (const Merge::Part& part : merge->parts) element += bytes_of(part.o.type);
      return moving(
          static_cast<double>(element * merge->batch * merge->rows * merge->heads * merge->elements));
    }
    return 0;
  }

  const std::vector<Program>& programs_;
  const Machine& machine_;
  std::vector<Rank> ranks_;
  std::vector<std::deque<double>>
      mail_;  ///< when each message that nobody took yet had left; by sender and receiver
};

}  // namespace

double simulate(const std::vector<Program>& of_rank, const Machine& machine) {
  return Simulation(of_rank, machine).run();
}

}  // namespace fovea::distributed
