// The tensors of a problem: what each is, once. FOVEA_TENSORS (fovea.h) has their names and meanings and which pass reads
// or writes them; the table below says the rest. Validation, the common form, the checks of a run, the conversion of the C
// structs and the parameters of GPU kernels follow from both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/dtype.hpp"
#include "fovea/fovea.h"

namespace fovea {

enum class Pass : uint8_t { kForward, kBackward };

/// kQ, kK, ... in the order in which errors are looked for.
enum class Role : uint8_t {
#define FOVEA_ROLE(field, Name, forward, backward, meaning) k##Name,
  FOVEA_TENSORS(FOVEA_ROLE)
#undef FOVEA_ROLE
};
#define FOVEA_COUNT_ROLE(field, Name, forward, backward, meaning) +1
inline constexpr size_t kRoleCount = 0 FOVEA_TENSORS(FOVEA_COUNT_ROLE);
#undef FOVEA_COUNT_ROLE
/// The first of those that attention itself knows nothing of: FOVEA_APPEND_TENSORS.
inline constexpr size_t kAttentionRoleCount = static_cast<size_t>(Role::kKNew);

constexpr size_t index_of(Role r) {
  return static_cast<size_t>(r);
}

/// A size that dimensions of tensors have.
enum class Size : uint8_t {
  kNone,
  kBatch,
  kSeqlenQ,
  kSeqlenK,
  kTotalQ,
  kTotalK,
  kHeadsQ,
  kHeadsKv,
  kHeadDim,
  kHeadDimV,
  kBlocksQ,
  kBlocksK,
  kStarts,  ///< batch + 1
  kTwo,
  kCount,         ///< entries of a list of keys
  kCaches,        ///< sequences of k, where queries choose among them
  kPages,         ///< of k and v
  kPageRows,      ///< rows of a page
  kTableColumns,  ///< entries of a row of the page table
  kNewRows,       ///< rows that each sequence appends
  kTotalNew,
  kPositions,  ///< rows of the tables of angles
  kRotaryHalf  ///< pairs of elements that are rotated
};
inline constexpr std::array<const char*, 23> kSizeNames = {"",
                                                           "batch",
                                                           "seqlen_q",
                                                           "seqlen_k",
                                                           "total_q",
                                                           "total_k",
                                                           "heads_q",
                                                           "heads_kv",
                                                           "head size of q",
                                                           "head size of v",
                                                           "ceil(seqlen_q / block_q)",
                                                           "ceil(seqlen_k / block_k)",
                                                           "batch + 1",
                                                           "2",
                                                           "count",
                                                           "sequences of k",
                                                           "pages of k",
                                                           "page size of k",
                                                           "most pages",
                                                           "new rows",
                                                           "total_new",
                                                           "positions",
                                                           "half of the rotated size"};
constexpr const char* name_of(Size size) {
  return kSizeNames[static_cast<size_t>(size)];
}

inline constexpr int kMaxRank = 4;

/// The dimensions of a tensor, the slowest first.
struct Dims {
  std::array<Size, kMaxRank> sizes{};
  int broadcast = 0;  ///< bit i: dimension i may be 1 instead, and then stands for all

  constexpr int rank() const {
    int n = 0;
    while (n < kMaxRank && sizes[static_cast<size_t>(n)] != Size::kNone) ++n;
    return n;
  }
  constexpr bool broadcasts(size_t i) const { return (broadcast >> i & 1) != 0; }
};

/// Element types that a tensor may have: those of `set`, and that of `as`. A q of 8 bits changes what stands for its type
/// (plan/shapes.cpp).
struct Types {
  uint32_t set = 0;  ///< bit i: the DType of that number
  Role as = Role::kQ;
  bool also_as = false;

  constexpr bool has(DType type) const { return (set >> static_cast<int>(type) & 1) != 0; }
};

/// When a problem must have the tensor.
enum class Need : uint8_t { kOptional, kBackward, kAlways };

struct TensorSpec {
  Role role;
  Dims dims;          ///< where sequences have one length each
  Dims packed = {};   ///< with `packed_by`; no rank: as dims
  Dims cached = {};   ///< rows of keys with cache_batch
  Dims paged = {};    ///< rows of keys with page_table
  Dims shorter = {};  ///< allowed as well; no rank: nothing is
  Types types;
  Need need = Need::kOptional;
  bool contiguous = false;  ///< the last dimension has stride 1: read in vectors, or indexed directly
  Role packed_by = Role::kCuSeqlensQ;
  Role with = Role::kQ;     ///< the tensor without which this one means nothing
  bool same_shape = false;  ///< as `with`
  const char* remedy = "";  ///< for a wrong number of dimensions
};

namespace tensor_table {

constexpr Types one_of(std::initializer_list<DType> types) {
  Types t;
  for (const DType type : types) t.set |= uint32_t{1} << static_cast<int>(type);
  return t;
}
constexpr Types as(Role role) {
  return {.as = role, .also_as = true};
}
constexpr Types as_or_e4m3(Role role) {
  return {.set = one_of({DType::kE4M3}).set, .as = role, .also_as = true};
}
/// What o may have beside a q of 8 bits.
inline constexpr Types kReals = one_of({DType::kF32, DType::kF16, DType::kBF16, DType::kF64});
constexpr Types as_or_f32(Role role) {
  return {.set = one_of({DType::kF32}).set, .as = role, .also_as = true};
}

inline constexpr const char* kRowsRemedy =
    "add the missing dimensions, or pass cu_seqlens_q and cu_seqlens_k for packed sequences";

/// Rows of heads of queries.
constexpr TensorSpec queries(Role role, Size columns, Types types, Need need) {
  return {.role = role,
          .dims = {{Size::kBatch, Size::kSeqlenQ, Size::kHeadsQ, columns}},
          .packed = {{Size::kTotalQ, Size::kHeadsQ, columns}},
          .types = types,
          .need = need,
          .contiguous = true,
          .remedy = kRowsRemedy};
}
/// Rows of heads of keys.
constexpr TensorSpec keys(Role role, Size columns, Types types, Need need) {
  return {.role = role,
          .dims = {{Size::kBatch, Size::kSeqlenK, Size::kHeadsKv, columns}},
          .packed = {{Size::kTotalK, Size::kHeadsKv, columns}},
          .cached = {{Size::kCaches, Size::kSeqlenK, Size::kHeadsKv, columns}},
          .paged = {{Size::kPages, Size::kPageRows, Size::kHeadsKv, columns}},
          .types = types,
          .need = need,
          .contiguous = true,
          .packed_by = Role::kCuSeqlensK,
          .remedy = kRowsRemedy};
}
/// Rows of heads of keys that are appended.
constexpr TensorSpec new_keys(Role role, Size columns) {
  return {.role = role,
          .dims = {{Size::kBatch, Size::kNewRows, Size::kHeadsKv, columns}},
          .packed = {{Size::kTotalNew, Size::kHeadsKv, columns}},
          .types = as(Role::kQ),
          .contiguous = true,
          .packed_by = Role::kCuSeqlensKNew,
          .with = Role::kSeqUsedK,
          .remedy = "add the missing dimensions, or pass cu_seqlens_k_new for packed rows"};
}
/// A table of numbers for each position and pair of elements.
constexpr TensorSpec angles(Role role, Types types, Role with) {
  return {.role = role,
          .dims = {{Size::kPositions, Size::kRotaryHalf}},
          .types = types,
          .contiguous = true,
          .with = with,
          .remedy = "give each position a row"};
}
/// One number for each row of queries.
constexpr TensorSpec statistic(Role role, Need need) {
  return {.role = role,
          .dims = {{Size::kBatch, Size::kHeadsQ, Size::kSeqlenQ}},
          .packed = {{Size::kHeadsQ, Size::kTotalQ}},
          .types = one_of({DType::kF32}),
          .need = need,
          .remedy = "add the missing dimensions"};
}
/// One element for each pair of a query and a key; any dimension broadcasts.
constexpr TensorSpec pairs(Role role, Types types) {
  return {.role = role,
          .dims = {{Size::kBatch, Size::kHeadsQ, Size::kSeqlenQ, Size::kSeqlenK}, 0b1111},
          .types = types,
          .remedy = "add dimensions of size 1 where it broadcasts"};
}
/// Of the shape of `with`.
constexpr TensorSpec shaped_as(Role with, TensorSpec spec) {
  spec.with = with;
  spec.same_shape = true;
  return spec;
}
/// A factor of the elements of `with` for each sequence and key head.
constexpr TensorSpec descale(Role role, Role with) {
  return {
      .role = role,
      .dims = {{Size::kBatch, Size::kHeadsKv}, 0b11},
      .types = one_of({DType::kF32}),
      .with = with,
      .remedy = "give one factor per sequence and key head, with dimensions of size 1 where they are shared"};
}
/// An array of one dimension.
constexpr TensorSpec array(Role role, Size size, DType type, const char* remedy, Role with = Role::kQ) {
  return {.role = role,
          .dims = {{size}},
          .types = one_of({type}),
          .contiguous = true,
          .with = with,
          .remedy = remedy};
}

inline constexpr const char* kStartsRemedy = "give where each sequence starts, and the end";
inline constexpr const char* kLengthsRemedy = "give one length per sequence";
inline constexpr const char* kHeadsRemedy = "give one value per query head";

inline constexpr std::array<TensorSpec, kRoleCount> kTable = {
    queries(Role::kQ, Size::kHeadDim,
            one_of({DType::kF32, DType::kF16, DType::kBF16, DType::kF64, DType::kE4M3}), Need::kAlways),
    keys(Role::kK, Size::kHeadDim, as_or_e4m3(Role::kQ), Need::kAlways),
    keys(Role::kV, Size::kHeadDimV, as(Role::kK), Need::kAlways),
    queries(Role::kO, Size::kHeadDimV, as_or_f32(Role::kQ), Need::kAlways),
    statistic(Role::kLse, Need::kBackward),
    queries(Role::kDO, Size::kHeadDimV, as(Role::kQ), Need::kBackward),
    statistic(Role::kDLse, Need::kOptional),
    shaped_as(Role::kQ, queries(Role::kDQ, Size::kHeadDim, as_or_f32(Role::kQ), Need::kBackward)),
    shaped_as(Role::kK, keys(Role::kDK, Size::kHeadDim, as_or_f32(Role::kQ), Need::kBackward)),
    shaped_as(Role::kV, keys(Role::kDV, Size::kHeadDimV, as_or_f32(Role::kQ), Need::kBackward)),
    shaped_as(Role::kBias, pairs(Role::kDBias, as_or_f32(Role::kBias))),
    shaped_as(Role::kSink, array(Role::kDSink, Size::kHeadsQ, DType::kF32, kHeadsRemedy)),
    pairs(Role::kBias, as_or_f32(Role::kQ)),
    pairs(Role::kMask, one_of({DType::kBool, DType::kU8})),
    {.role = Role::kBlockMask,
     // Block dimensions do not broadcast: a block size that covers the sequence says the same.
     .dims = {{Size::kBatch, Size::kHeadsQ, Size::kBlocksQ, Size::kBlocksK}, 0b0011},
     .types = one_of({DType::kBool, DType::kU8}),
     .remedy = "add dimensions of size 1 where it broadcasts"},
    {.role = Role::kAlibi,
     .dims = {{Size::kBatch, Size::kHeadsQ}},
     .shorter = {{Size::kHeadsQ}},
     .types = one_of({DType::kF32}),
     .remedy = "give one slope per head"},
    array(Role::kSink, Size::kHeadsQ, DType::kF32, kHeadsRemedy),
    array(Role::kCuSeqlensQ, Size::kStarts, DType::kI32, kStartsRemedy),
    array(Role::kCuSeqlensK, Size::kStarts, DType::kI32, kStartsRemedy, Role::kCuSeqlensQ),
    array(Role::kSeqUsedQ, Size::kBatch, DType::kI32, kLengthsRemedy),
    array(Role::kSeqUsedK, Size::kBatch, DType::kI32, kLengthsRemedy),
    array(Role::kRngState, Size::kTwo, DType::kI64, "give room for seed and offset"),
    {.role = Role::kKeys,
     .dims = {{Size::kBatch, Size::kHeadsKv, Size::kSeqlenQ, Size::kCount}, 0b0011},
     .packed = {{Size::kHeadsKv, Size::kTotalQ, Size::kCount}, 0b001},
     .types = one_of({DType::kI32}),
     .contiguous = true,
     .remedy = "give each query of each key head a list, with dimensions of size 1 where lists are shared"},
    {.role = Role::kPageTable,
     .dims = {{Size::kBatch, Size::kTableColumns}},
     .types = one_of({DType::kI32}),
     .contiguous = true,
     .with = Role::kSeqUsedK,
     .remedy = "give each sequence a row of page numbers"},
    array(Role::kCacheBatch, Size::kBatch, DType::kI32, "give one sequence of k and v for each of q"),
    array(Role::kLeftPadK, Size::kBatch, DType::kI32, kLengthsRemedy),
    descale(Role::kQDescale, Role::kQ),
    descale(Role::kKDescale, Role::kK),
    descale(Role::kVDescale, Role::kV),
    queries(Role::kQV, Size::kHeadDimV, as(Role::kQ), Need::kOptional),
    new_keys(Role::kKNew, Size::kHeadDim),
    new_keys(Role::kVNew, Size::kHeadDimV),
    array(Role::kCuSeqlensKNew, Size::kStarts, DType::kI32, kStartsRemedy, Role::kKNew),
    angles(Role::kRotaryCos, as_or_f32(Role::kQ), Role::kKNew),
    shaped_as(Role::kRotaryCos, angles(Role::kRotarySin, as(Role::kRotaryCos), Role::kRotaryCos)),
    array(Role::kRotaryPositions, Size::kBatch, DType::kI32, "give one position per sequence",
          Role::kRotaryCos),
};

constexpr bool is_in_order() {
  for (size_t i = 0; i < kTable.size(); ++i) {
    if (index_of(kTable[i].role) != i) return false;
  }
  return true;
}
static_assert(is_in_order(), "the table has one row for each role, in their order");

inline constexpr std::array<const char*, kRoleCount> kNames = {
#define FOVEA_ROLE_NAME(field, Name, forward, backward, meaning) #field,
    FOVEA_TENSORS(FOVEA_ROLE_NAME)
#undef FOVEA_ROLE_NAME
};
inline constexpr std::array<const char*, kRoleCount> kMeanings = {
#define FOVEA_ROLE_MEANING(field, Name, forward, backward, meaning) meaning,
    FOVEA_TENSORS(FOVEA_ROLE_MEANING)
#undef FOVEA_ROLE_MEANING
};
inline constexpr std::array<std::array<fovea_access, 2>, kRoleCount> kAccess = {{
#define FOVEA_ROLE_ACCESS(field, Name, forward, backward, meaning) {forward, backward},
    FOVEA_TENSORS(FOVEA_ROLE_ACCESS)
#undef FOVEA_ROLE_ACCESS
}};

}  // namespace tensor_table

constexpr const TensorSpec& spec_of(Role r) {
  return tensor_table::kTable[index_of(r)];
}
/// The field of fovea_problem and fovea_buffers.
constexpr const char* name_of(Role r) {
  return tensor_table::kNames[index_of(r)];
}
/// What its elements are, in words.
constexpr const char* meaning_of(Role r) {
  return tensor_table::kMeanings[index_of(r)];
}
constexpr fovea_access access_of(Role r, Pass pass) {
  return tensor_table::kAccess[index_of(r)][static_cast<size_t>(pass)];
}
/// Whether it is a tensor of rows of keys, which cu_seqlens_k packs and a cache may hold.
constexpr bool has_keys(const TensorSpec& spec) {
  return spec.paged.rank() > 0;
}
/// Whether it holds the keys that queries attend to: an output, too, of a forward that appends to it.
constexpr bool is_cache(Role r) {
  return r == Role::kK || r == Role::kV;
}
/// Whether it holds factors of elements of 8 bits.
constexpr bool is_descale(Role r) {
  return r == Role::kQDescale || r == Role::kKDescale || r == Role::kVDescale;
}
constexpr bool is_output(Role r, Pass pass) {
  return access_of(r, pass) == FOVEA_WRITE;
}

}  // namespace fovea
