// The table of roles against the structs of fovea.h and the parameters of GPU kernels; what backends say of a problem.
#include "core/roles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>

#include "cpu/backends.hpp"
#include "tile/attention_params.hpp"

namespace fovea {
namespace {

TEST(Roles, EveryPointerOfTheStructsHasARole) {
  // What the structs hold besides tensors, as C lays it out.
  struct ProblemNumbers {
    size_t struct_size;
    int32_t pass;
    double scale;
    int32_t causal;
    int64_t window_left, window_right;
    double softcap, dropout;
    int64_t block_q, block_k, max_seqlen_q, max_seqlen_k;
    const char *score, *sees;
    const fovea_named_tensor* named;
    int64_t num_named, rotary_interleaved;
  };
  struct BufferNumbers {
    size_t struct_size;
    uint64_t seed, offset;
    void* workspace;
    size_t workspace_size;
    void* stream;
    const void* named[FOVEA_MAX_NAMED_TENSORS];
    void* named_gradients[FOVEA_MAX_NAMED_TENSORS];
  };
  EXPECT_EQ(sizeof(fovea_problem), sizeof(ProblemNumbers) + kRoleCount * sizeof(void*));
  EXPECT_EQ(sizeof(fovea_buffers), sizeof(BufferNumbers) + kRoleCount * sizeof(void*));
}

TEST(Roles, RowsAreConsistent) {
  std::set<std::string> names;
  for (const TensorSpec& spec : tensor_table::kTable) {
    SCOPED_TRACE(name_of(spec.role));
    EXPECT_TRUE(names.insert(name_of(spec.role)).second);
    EXPECT_STRNE(meaning_of(spec.role), "");
    EXPECT_STRNE(spec.remedy, "");
    EXPECT_GT(spec.dims.rank(), 0);
    EXPECT_TRUE(spec.types.set != 0 || spec.types.also_as);
    // The common form has one dimension more than the other forms, that of the batch.
    for (const Dims& other : {spec.packed, spec.shorter}) {
      EXPECT_TRUE(other.rank() == 0 || other.rank() + 1 == spec.dims.rank());
    }
    EXPECT_TRUE(spec.need != Need::kAlways || access_of(spec.role, Pass::kForward) != FOVEA_ABSENT);
    EXPECT_TRUE(spec.need == Need::kOptional || access_of(spec.role, Pass::kBackward) != FOVEA_ABSENT);
    if (spec.same_shape) {
      const Dims& as = spec_of(spec.with).dims;
      EXPECT_EQ(spec.dims.sizes, as.sizes);
      EXPECT_EQ(spec.dims.broadcast, as.broadcast);
    }
  }
}

TEST(Roles, ElementTypesAreTheirNumbers) {
  for (const DTypeInfo& info : kDTypes) {
    EXPECT_EQ(info_of(info.type).name, info.name);
    EXPECT_EQ(size_of(info.type), info.bits / 8);
    EXPECT_EQ(std::count_if(kDTypes.begin(), kDTypes.end(),
                            [&](const DTypeInfo& other) {
                              return other.type == info.type ||
                                     (other.code == info.code && other.bits == info.bits);
                            }),
              1);
  }
}

const Backend& backend(const std::string& name) {
  for (const Backend* each : cpu::backends()) {
    if (name == each->name) return *each;
  }
  throw std::out_of_range(name);
}

TEST(Backends, PrepareOrSayWhatTheyCannotDo) {
  AttentionProblem p;
  p.dtype = DType::kF64;
  p.batch = p.heads_q = p.heads_kv = p.seqlen_q = p.seqlen_k = 1;
  p.head_dim = p.head_dim_v = 8;
  const Preparation refused = backend("cpu_generic").try_prepare(p, {});
  EXPECT_EQ(refused.prepared, nullptr);
  EXPECT_EQ(refused.clause, "float64 is computed by the reference only");
  const Preparation reference = backend("reference").try_prepare(p, {});
  ASSERT_NE(reference.prepared, nullptr);
  EXPECT_EQ(reference.clause, "");
  EXPECT_EQ(reference.prepared->workspace_size, 0u);

  p.dtype = DType::kF32;
  const Preparation one = backend("cpu_generic").try_prepare(p, {.num_threads = 1});
  const Preparation four = backend("cpu_generic").try_prepare(p, {.num_threads = 4});
  ASSERT_TRUE(one.prepared && four.prepared);
  EXPECT_GT(one.prepared->workspace_size, 0u);
  EXPECT_GT(four.prepared->workspace_size, one.prepared->workspace_size) << "scratch memory for each thread";
}

}  // namespace
}  // namespace fovea
