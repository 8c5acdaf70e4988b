// Which nodes are taken: docs/guide/llama_cpp.md has these rules as a table.
#include "operation.hpp"

#include <fovea/fovea.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "blocks.hpp"

namespace fovea_ggml {
namespace {

bool multiples_of_elements(const ggml_tensor& t) {
  const size_t size = ggml_type_size(t.type);
  return t.nb[0] == size && t.nb[1] % size == 0 && t.nb[2] % size == 0 && t.nb[3] % size == 0;
}

bool has_conversion(ggml_type type) {
  return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

const char* layout_declined(const Operation& a) {
  if (a.k->ne[2] != a.v->ne[2] || a.heads() % a.key_heads() != 0) return "heads of K and V differ";
  if (a.k->ne[3] != a.batches() || a.v->ne[3] != a.batches()) return "K or V broadcast over the batch";
  if (!multiples_of_elements(*a.q) || !multiples_of_elements(*a.k) || !multiples_of_elements(*a.v)) {
    return "rows that are not contiguous";
  }
  if (a.mask == nullptr) return nullptr;
  if (a.mask->type != GGML_TYPE_F16 || !multiples_of_elements(*a.mask)) return "a mask that is not float16";
  if ((a.mask->ne[2] != 1 && a.mask->ne[2] != a.heads()) ||
      (a.mask->ne[3] != 1 && a.mask->ne[3] != a.batches())) {
    return "a mask repeated over some heads or some of the batch";
  }
  return a.mask->ne[0] == a.keys() && a.mask->ne[1] >= a.queries() ? nullptr : "a mask of another size";
}

// Where ggml is faster, by `ggml_compare least` on two cores (docs/guide/llama_cpp.md). Rows are queries times the query heads
// of a key head: a cache that is converted is converted once for all of them.

/// Pairs of a row and a key below which setting up costs more than it brings.
constexpr int64_t kLeastPairs = 96, kLeastConvertedPairs = 512;

const char* slower_because(const Operation& a) {
  if (a.most_keys > 0) return "a mask that promises few keys: ggml goes through those alone";
  const int64_t rows = a.rows(), pairs = rows * a.keys();
  const ggml_type type = computed_type(a, false);
  if (reads_blocks(a) || (a.k->type == type && a.v->type == type)) {
    return pairs < kLeastPairs ? "too few queries and keys" : nullptr;
  }
  if (rows == 1) return "a cache that is converted for one row";
  return pairs < kLeastConvertedPairs ? "too few queries and keys for a conversion" : nullptr;
}

}  // namespace

Operation::Operation(const ggml_tensor& node)
    : q(node.src[0]), k(node.src[1]), v(node.src[2]), mask(node.src[3]), sinks(node.src[4]), o(&node) {
  std::memcpy(&scale, node.op_params, sizeof(float));
  std::memcpy(&max_bias, node.op_params + 1, sizeof(float));
  std::memcpy(&softcap, node.op_params + 2, sizeof(float));
  most_keys = node.op_params[4];
}

float Operation::slope(int64_t head) const {
  if (max_bias <= 0) return 1.0f;
  const auto power = static_cast<int64_t>(1) << static_cast<int>(std::floor(std::log2(heads())));
  const float first = std::exp2(-max_bias / static_cast<float>(power));
  const float second = std::exp2(-max_bias / 2 / static_cast<float>(power));
  return head < power ? std::pow(first, static_cast<float>(head + 1))
                      : std::pow(second, static_cast<float>(2 * (head - power) + 1));
}

namespace {

bool has_backend(const char* name) {
  for (int32_t i = 0; i < fovea_backend_count(); ++i) {
    if (std::strcmp(fovea_backend_name(i), name) == 0) return *fovea_backend_unavailable_because(i) == '\0';
  }
  return false;
}

/// Whether pairs are multiplied as fast as numbers: on AMD's processors, not on Intel's.
bool vectors_multiply_bfloat16_fast() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") && has_backend("cpu_avx512_bf16");
#else
  return false;
#endif
}

/// From how many rows on a conversion to bfloat16 takes less time than it saves.
struct Bfloat16 {
  int64_t least_of_short;        ///< over a cache of 16 bits
  int64_t least_of_expressions;  ///< the same where scores have expressions
  int64_t least_of_quantised;    ///< over a cache that is converted anyway
};

Bfloat16 bfloat16_here() {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const char* const wanted = std::getenv("FOVEA_GGML_BFLOAT16");
  const bool allowed = wanted == nullptr || std::strcmp(wanted, "0") != 0;
  // Rows of float16 below these are few for Fovea, which takes them to parts or to float32 as it reads them.
  if (allowed && has_backend("cpu_amx_bf16")) return {17, kFewRowsOfExpressions + 1, 1};
  if (allowed && vectors_multiply_bfloat16_fast()) return {33, kFewRowsOfExpressions + 1, 1};
  return {kNever, kNever, kNever};
}

/// Rows up to which blocks are read as they are. More take less time once they are bfloat16 where that is multiplied fast, conversion and all: on
/// tiles of AMX by `ggml_compare rows`, on AMD's processors by reasoning.
int64_t most_block_rows() {
  constexpr int64_t kBesideTiles = 12, kBesidePairs = 16;
  const int64_t most = block_ways().front().most_rows;
  if (has_backend("cpu_amx_bf16")) return std::min(most, kBesideTiles);
  return vectors_multiply_bfloat16_fast() ? std::min(most, kBesidePairs) : most;
}

}  // namespace

ggml_type computed_type(const Operation& a, bool has_expressions) {
  const ggml_type k = a.k->type, v = a.v->type;
  const bool is_quantised = ggml_is_quantized(k) && ggml_is_quantized(v);
  const bool is_short = k != GGML_TYPE_F32 && v != GGML_TYPE_F32;
  static const Bfloat16 bfloat16 = bfloat16_here();
  const int64_t least = has_expressions ? bfloat16.least_of_expressions : bfloat16.least_of_short;
  if (is_quantised && a.rows() >= bfloat16.least_of_quantised) return GGML_TYPE_BF16;
  if (is_short && a.rows() >= least) return GGML_TYPE_BF16;
  const bool native = k == GGML_TYPE_F16 || k == GGML_TYPE_BF16;
  return native && v == k ? k : GGML_TYPE_F32;
}

std::optional<BlockType> block_type_of(ggml_type type) {
  constexpr std::pair<ggml_type, BlockType> kKnown[] = {
      {GGML_TYPE_Q8_0, BlockType::kQ8_0}, {GGML_TYPE_Q4_0, BlockType::kQ4_0},
      {GGML_TYPE_Q4_1, BlockType::kQ4_1}, {GGML_TYPE_Q5_0, BlockType::kQ5_0},
      {GGML_TYPE_Q5_1, BlockType::kQ5_1}, {GGML_TYPE_IQ4_NL, BlockType::kIq4Nl}};
  const ggml_type_traits& traits = *ggml_get_type_traits(type);
  for (const auto& [of_ggml, block] : kKnown) {
    if (type == of_ggml && traits.blck_size == kBlockElements &&
        static_cast<int64_t>(traits.type_size) == block_bytes(block))
      return block;
  }
  return std::nullopt;
}

bool reads_blocks(const Operation& a) {
  static const int64_t most = most_block_rows();
  return a.rows() <= most && block_type_of(a.k->type) && block_type_of(a.v->type);
}

const char* declined_because(const ggml_tensor& node) {
  const Operation a(node);
  if (a.q->type != GGML_TYPE_F32 || node.type != GGML_TYPE_F32) return "queries that are not float32";
  if (!has_conversion(a.k->type) || !has_conversion(a.v->type)) return "a cache of a type without conversion";
  if (a.k->ne[0] > kMostHeadSize || a.v->ne[0] > kMostHeadSize) return "a head size above 576";
  if (a.scale == 0) return "a scale of 0";
  const char* declined = layout_declined(a);
  return declined != nullptr ? declined : slower_because(a);
}

}  // namespace fovea_ggml
