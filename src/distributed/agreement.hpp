// What all ranks have to pass alike, and the error that says which rank passed what.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "distributed/local_problem.hpp"
#include "distributed/memory.hpp"
#include "distributed/transport.hpp"

namespace fovea::distributed {

/// Ranks passed different values: each of them finds the same at the same time, so none has to be told.
class Disagreement : public RequestError {
 public:
  using RequestError::RequestError;
};

/// One argument, or what follows from all, as text: equal texts are equal values.
struct SharedArgument {
  const char* name = "";
  std::string value;
};
inline constexpr size_t kSharedArguments = 20;
using SharedArguments = std::array<SharedArgument, kSharedArguments>;
SharedArguments shared_arguments(const LocalProblem& problem, const fovea_distributed_options& options,
                                 const Method& chosen);

uint64_t fingerprint(const std::string& text);

/// Throws a Disagreement that names the argument and what each rank passed, by rank.
[[noreturn]] void throw_disagreement(const std::string& argument, const std::vector<std::string>& values,
                                     const std::string& remedy);

/// What every rank has to say, by rank; all give as many bytes.
template <class T>
std::vector<T> told_by_all(const Transport& transport, Memory& memory, const T& own) {
  const int ranks = transport.size(), rank = transport.rank();
  std::vector<T> told(static_cast<size_t>(ranks));
  told[static_cast<size_t>(rank)] = own;
  const std::shared_ptr<void> kept = memory.keep(told.data(), told.size() * sizeof(T));
  std::vector<fovea_message> sends, receives;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    sends.push_back({peer, static_cast<T*>(kept.get()) + rank, sizeof(T)});
    receives.push_back({peer, static_cast<T*>(kept.get()) + peer, sizeof(T)});
  }
  void* const stream = memory.stream(Lane::kLink);
  transport.start(sends, receives, stream);
  transport.finish(stream);
  memory.copy_and_wait(told.data(), kept.get(), told.size() * sizeof(T));
  // On GPUs finish() has not waited, and of messages that were given up memory holds anything.
  if (transport.device().type == FOVEA_CUDA) transport.ask();
  return told;
}

}  // namespace fovea::distributed
