// One rank's description of a distributed problem, checked: what all ranks share (Shape), and where its own rows lie.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "distributed/exchange.hpp"
#include "distributed/schedule.hpp"
#include "fovea/fovea_distributed.h"

namespace fovea::distributed {

inline constexpr fovea_dtype kFloat32{FOVEA_CODE_FLOAT, 32, 1}, kInt32{FOVEA_CODE_INT, 32, 1},
    kInt64{FOVEA_CODE_INT, 64, 1};

struct Terms;

/// The caller's tensors that a distributed problem knows.
enum Place : uint8_t {
  kQ,
  kK,
  kV,
  kO,
  kLse,
  kDO,
  kDLse,
  kDQ,
  kDK,
  kDV,
  kSink,
  kDSink,
  kRngState,
  kAlibi,
  kBias,
  kMask,
  kBlockMask,
  kDBias,
  kNamed,  ///< and those behind it
  kNamedGradient = kNamed + FOVEA_MAX_NAMED_TENSORS,
  kPlaces = kNamedGradient + FOVEA_MAX_NAMED_TENSORS
};
constexpr Place named_place(size_t i) {
  return static_cast<Place>(kNamed + i);
}
constexpr Place named_gradient_place(size_t i) {
  return static_cast<Place>(kNamedGradient + i);
}

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
  X(kDSink, dsink)                   \
  X(kRngState, rng_state)            \
  X(kAlibi, alibi)                   \
  X(kBias, bias)                     \
  X(kMask, mask)                     \
  X(kBlockMask, block_mask)          \
  X(kDBias, dbias)

/// Numbers in rng_state: seed and offset.
inline constexpr int64_t kRngStateSize = 2;

/// Of those that are fields.
constexpr const char* name_of(Place place) {
  constexpr std::array<const char*, kNamed> kNames = {
#define FOVEA_NAME(Place, field) #field,
      FOVEA_DISTRIBUTED_TENSORS(FOVEA_NAME)
#undef FOVEA_NAME
  };
  return kNames[place];
}

struct LocalTensor {
  bool present = false;
  fovea_dtype type{};
  View view;             ///< rows and heads of the caller's tensor
  int64_t elements = 0;  ///< of a row and head; of terms all
};

struct LocalProblem {
  fovea_pass pass = FOVEA_FORWARD;
  Shape shape;
  fovea_device device{};
  double scale = 0, softcap = 0, dropout = 0;
  std::array<LocalTensor, kPlaces> tensors;
  std::shared_ptr<const Terms> terms;  ///< null: none
  bool by_copies = false;              ///< ranks reach each other's workspaces, and need no messages

  const LocalTensor& operator[](Place place) const { return tensors[place]; }
  bool has(Place place) const { return tensors[place].present; }
  bool backward() const { return pass == FOVEA_BACKWARD; }
  /// What messages call a tensor.
  std::string name(Place place) const;
};

/// Throws RequestError(kInvalidArgument or kUnsupported) with the argument, what came, what was expected and the remedy.
LocalProblem read_local_problem(const fovea_distributed_problem& problem, int rank, int ranks,
                                fovea_device device);

}  // namespace fovea::distributed
