// What each tensor of a problem is, whatever the problem.
#pragma once

#include "core/problem.hpp"

namespace fovea::plan {

struct RoleTraits {
  bool rows_of_heads = false;  ///< rows of heads, read as vectors: the last dimension is contiguous
  bool array = false;          ///< one dimension that backends index directly: contiguous
  bool output = false;         ///< written by the pass
  bool backward_only = false;
};

constexpr RoleTraits traits_of(Role role, Pass pass) {
  switch (role) {
    case Role::kQ:
    case Role::kK:
    case Role::kV:
      return {.rows_of_heads = true};
    case Role::kO:
      return {.rows_of_heads = true, .output = pass == Pass::kForward};
    case Role::kLse:
      return {.output = pass == Pass::kForward};
    case Role::kDO:
      return {.rows_of_heads = true, .backward_only = true};
    case Role::kDLse:
      return {.backward_only = true};
    case Role::kDQ:
    case Role::kDK:
    case Role::kDV:
      return {.rows_of_heads = true, .output = true, .backward_only = true};
    case Role::kDBias:
      return {.output = true, .backward_only = true};
    case Role::kDSink:
      return {.array = true, .output = true, .backward_only = true};
    case Role::kBias:
    case Role::kMask:
    case Role::kBlockMask:
    case Role::kAlibi:
      return {};
    case Role::kSink:
    case Role::kCuSeqlensQ:
    case Role::kCuSeqlensK:
    case Role::kSeqUsedQ:
    case Role::kSeqUsedK:
      return {.array = true};
    case Role::kRngState:
      return {.array = true, .output = pass == Pass::kForward};
  }
  return {};
}

}  // namespace fovea::plan
