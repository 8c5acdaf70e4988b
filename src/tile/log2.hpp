// Constants between natural units and exponents of 2: kernels use exp2, callers see natural logarithms.
#pragma once

namespace fovea::tile {

inline constexpr float kLog2e = 1.4426950408889634f;  ///< log2(e): natural units to exponents of 2
inline constexpr float kLn2 = 0.6931471805599453f;    ///< ln(2): exponents of 2 to natural units

}  // namespace fovea::tile
