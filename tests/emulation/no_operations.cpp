// The CPU backends of a build with the oracle alone (FOVEA_ORACLE_ALONE): none has operations.
#include "cpu/ops.hpp"

namespace fovea::cpu {

const Ops* generic_ops() {
  return nullptr;
}
const Ops* neon_ops() {
  return nullptr;
}
const Ops* avx2_ops() {
  return nullptr;
}
const Ops* avx512_ops() {
  return nullptr;
}
const Ops* avx512_ops_without_vbmi() {
  return nullptr;
}
const Ops* avx512_bf16_ops() {
  return nullptr;
}
const Ops* avx512_bf16_ops_without_vbmi() {
  return nullptr;
}
const Ops* amx_bf16_ops() {
  return nullptr;
}
const Ops* amx_f16_ops() {
  return nullptr;
}
const Ops* amx_f32_ops() {
  return nullptr;
}

}  // namespace fovea::cpu
