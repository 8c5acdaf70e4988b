// One rank's description of a distributed problem, checked: what all ranks share (Shape), and where its own rows lie.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "distributed/exchange.hpp"
#include "distributed/schedule.hpp"
#include "fovea/fovea_distributed.h"

namespace fovea::distributed {

/// The caller's tensors that a distributed problem knows.
enum Place : uint8_t { kQ, kK, kV, kO, kLse, kDO, kDLse, kDQ, kDK, kDV, kSink, kDSink, kPlaces };

/// X(Place, field of fovea_problem and fovea_buffers)
#define FOVEA_DISTRIBUTED_TENSORS(X) \
  X(kQ, q)                           \
  X(kK, k)                           \
  X(kV, v)                           \
  X(kO, o)                           \
  X(kLse, lse)                       \
  X(kDO, d_o)                        \
  X(kDLse, dlse)                     \
  X(kDQ, dq)                         \
  X(kDK, dk)                         \
  X(kDV, dv)                         \
  X(kSink, sink)                     \
  X(kDSink, dsink)

constexpr const char* name_of(Place place) {
  constexpr std::array<const char*, kPlaces> kNames = {
#define FOVEA_NAME(Place, field) #field,
      FOVEA_DISTRIBUTED_TENSORS(FOVEA_NAME)
#undef FOVEA_NAME
  };
  return kNames[place];
}

struct LocalTensor {
  bool present = false;
  fovea_dtype type{};
  View view;  ///< rows and heads of the caller's tensor
  int64_t elements = 0;
};

struct LocalProblem {
  fovea_pass pass = FOVEA_FORWARD;
  Shape shape;
  fovea_device device{};
  double scale = 0, softcap = 0;
  std::array<LocalTensor, kPlaces> tensors;

  const LocalTensor& operator[](Place place) const { return tensors[place]; }
  bool has(Place place) const { return tensors[place].present; }
  bool backward() const { return pass == FOVEA_BACKWARD; }
};

/// Throws RequestError(kInvalidArgument or kUnsupported) with the argument, what came, what was expected and the remedy.
LocalProblem read_local_problem(const fovea_distributed_problem& problem, int rank, int ranks,
                                fovea_device device);

/// What has to be the same on all ranks, as one number.
uint64_t fingerprint(const LocalProblem& problem, const fovea_distributed_options& options);

}  // namespace fovea::distributed
