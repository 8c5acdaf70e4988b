// The tables of vector operations that tests go through.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "cpu/backends.hpp"
#include "cpu/ops.hpp"

namespace fovea::cpu {

/// The tables whose instructions this machine has.
inline std::vector<const Ops*> tables_of_this_machine() {
  std::vector<const Ops*> found;
  const std::array candidates = {std::pair{"cpu_avx512_bf16", avx512_bf16_ops()},
                                 std::pair{"cpu_avx512", avx512_ops()}, std::pair{"cpu_avx2", avx2_ops()},
                                 std::pair{"cpu_neon", neon_ops()}, std::pair{"cpu_generic", generic_ops()}};
  for (const Backend* backend : backends()) {
    for (const auto& [name, ops] : candidates) {
      if (ops != nullptr && name == std::string(backend->name) && backend->unavailable_because().empty())
        found.push_back(ops);
    }
  }
  return found;
}

}  // namespace fovea::cpu
