// What one rank does in a run: a list of steps, made when the plan is made.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/dropout_place.hpp"
#include "core/status.hpp"
#include "distributed/exchange.hpp"
#include "distributed/local_problem.hpp"
#include "distributed/schedule.hpp"

namespace fovea::distributed {

/// A status of the C ABI that is no success, as an exception with the message that this thread has.
inline void check_call(fovea_status status) {
  if (status == FOVEA_OK) return;
  throw RequestError(static_cast<Status>(status), fovea_last_error_argument(), fovea_last_error());
}

/// A tensor of a step.
struct Operand {
  View view;
  fovea_dtype type{};
  bool present = false;
};

/// Begins messages: packs them and hands them to the transport.
struct Start {
  size_t exchange = 0;
  /// What is there to be sent, and memory that is no longer read, once this lane has computed; nothing has to be waited for else.
  bool waits = true;
  Lane after = Lane::kCompute;
};
/// Ends the oldest ones: waits and unpacks.
struct Finish {
  size_t exchange = 0;
  bool is_read = true;  ///< whether later steps compute with what arrived
  /// By copies: the lane of computing waits for nothing but that, where nothing is unpacked.
  bool on_compute = false;
  bool heard = false;  ///< by copies: calls have waited for all of it themselves
  Lane reader = Lane::kCompute;
};
/// What is put on `later` from now on waits for what lies on `sooner`.
struct Order {
  Lane sooner, later;
};
/// One plain call of attention.
struct Attend {
  std::shared_ptr<fovea_plan> plan;
  std::array<Operand, kPlaces> operands;
  std::shared_ptr<void> starts_q, starts_k;  ///< of packed sequences, where the plan reads them
  std::shared_ptr<void> numbers;             ///< of the part: the named tensor behind those of the operands
  bool reads_numbers = false;
  Lane lane = Lane::kCompute;
  DropoutPlace dropout;
  double flops = 0, longest_tile = 0, copies = 0;   ///< see choose.hpp
  std::shared_ptr<const struct Arriving> arriving;  ///< null: all keys are there when the call begins
  /// Begins once first keys of these are there, so that the call that waits for them has all SMs before, and this those that it leaves idle
  /// at its end. Null: at once.
  std::shared_ptr<const struct Arriving> behind;
};
/// Keys of another rank that may be on their way while a call runs.
struct Arriving {
  Operand k, v;
  size_t exchange = 0;
  int peer = 0;
  int first_part = 0;  ///< of those in which they come
  /// In place of the call where pointers of the caller's are no multiples of 16 bytes: the call over copies, which are made first.
  std::shared_ptr<const Attend> over_copies;
  std::vector<PlannedMove> copies;
};
/// Parts over disjoint keys become one result.
struct Merge {
  struct Part {
    Operand o, lse;
  };
  std::vector<Part> parts;
  Part into;  ///< lse may be absent
  int64_t batch = 0, rows = 0, heads = 0, elements = 0;
};
/// Boxes within this rank's memory.
struct MoveBoxes {
  PlannedMove move;
};
/// Words of 32 bits of one value, side by side.
struct Fill {
  View view;
  int64_t words = 0;
  uint32_t word = 0;
};

using Step = std::variant<Start, Finish, Attend, Merge, MoveBoxes, Fill, Order>;

struct Program {
  std::vector<Exchange> exchanges;
  std::vector<Step> steps;
  int64_t workspace = 0;                ///< bytes of what views lie in
  size_t attention_workspace_size = 0;  ///< of calls on one lane
  int lanes = 1;                        ///< of computing
};

/// How the calls on a rank are computed.
struct ProgramOptions {
  const fovea_options* attention = nullptr;  ///< may be null
  Memory* memory = nullptr;                  ///< keeps what calls read
  bool only_sizes = false;                   ///< no plans are made, the workspace lacks theirs
};

/// Throws RequestError where a call cannot be planned.
Program make_program(const LocalProblem& problem, const Schedule& schedule, int rank,
                     const ProgramOptions& options);

}  // namespace fovea::distributed
