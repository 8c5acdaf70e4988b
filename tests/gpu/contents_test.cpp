// What lengths, tables and factors hold, on a GPU: graphs are replayed with other ones, wrong ones read nothing outside of the tensors, and
// plans that check contents refuse them before anything is written.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "device_problem.hpp"
#include "errors/request.hpp"

namespace fovea_test {
namespace {

constexpr int32_t kHuge = std::numeric_limits<int32_t>::max(), kTiny = std::numeric_limits<int32_t>::min();

/// One query of three sequences over a cache in pages.
ProblemSpec pages() {
  ProblemSpec spec;
  spec.type = Type::kBF16;
  spec.batch = 3;
  spec.heads_q = 8;
  spec.heads_kv = 2;
  spec.seqlen_q = 1;
  spec.seqlen_k = 1920;
  spec.head_dim = spec.head_dim_v = 128;
  spec.causal = true;
  spec.page_size = 16;
  spec.caches = 400;
  spec.used_k = {1800, 700, 33};
  return spec;
}
ProblemSpec growing() {
  ProblemSpec spec = pages();
  spec.lengths_new = {2, 2, 2};
  spec.rotary = 64;
  return spec;
}
ProblemSpec packed_queries() {
  ProblemSpec spec = pages();
  spec.lengths_q = {5, 0, 40};
  spec.seqlen_q = 64;
  spec.plan_knows_data = false;
  return spec;
}
ProblemSpec chosen() {
  ProblemSpec spec = pages();
  spec.page_size = 0;
  spec.caches = 5;
  spec.cache_batch = {4, 0, 4};
  spec.leftpad_k = {10, 0, 33};
  return spec;
}
ProblemSpec with(ProblemSpec spec, const std::function<void(ProblemSpec&)>& change) {
  change(spec);
  return spec;
}
void of_8_bits(ProblemSpec& spec) {
  spec.e4m3_keys = true;
}
void of_float32(ProblemSpec& spec) {
  spec.type = Type::kF32;
}
void of_many_queries(ProblemSpec& spec) {
  spec.seqlen_q = 200;
}

/// A problem, and another of the same shapes with other contents.
struct Replay {
  const char* name;
  ProblemSpec captured;
  std::function<void(ProblemSpec&)> change;
};
std::vector<Replay> replays() {
  const auto lengths = [](ProblemSpec& spec) { spec.used_k = {17, 1800, 0}; };  // as many angles
  return {{"pages", pages(), lengths},
          {"pages of one row",
           with(pages(), [](ProblemSpec& spec) { spec.page_size = 1, spec.caches = 6000; }), lengths},
          {"pages, float32", with(pages(), of_float32), lengths},
          {"pages, 8 bits", with(pages(), of_8_bits), lengths},
          {"pages, many queries", with(pages(), of_many_queries), lengths},
          {"growing", growing(), lengths},
          {"growing, 8 bits", with(growing(), of_8_bits), lengths},
          {"packed queries", packed_queries(),
           [](ProblemSpec& spec) {
             spec.lengths_q = {0, 44, 1};
             spec.used_k = {0, 1000, 1920};
           }},
          {"chosen sequences", chosen(), [](ProblemSpec& spec) {
             spec.used_k = {0, 1920, 900};
             spec.cache_batch = {1, 2, 3};
             spec.leftpad_k = {0, 1900, 1};
           }}};
}

class Contents : public testing::Test {
 protected:
  void SetUp() override { FOVEA_SKIP_WITHOUT_CUDA_BACKEND(); }
};

/// Whether the backend can do it.
bool expect_replays(const Replay& replay, const std::string& backend) {
  ProblemSpec other = replay.captured;
  replay.change(other);
  ++other.data_seed;  // another table, too
  const DeviceProblem x(replay.captured, FOVEA_FORWARD, backend), y(other, FOVEA_FORWARD, backend);
  if (x.plan() == nullptr) return false;
  const Bytes of_captured = x.outputs_alone(), of_other = y.outputs_alone();
  EXPECT_NE(of_captured, of_other);
  x.upload();
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  EXPECT_EQ(x.run(stream.get()), FOVEA_OK) << fovea_last_error();
  cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
  cuda_ok(cudaGraphInstantiate(&executable, graph, 0));
  for (int turn = 0; turn < 2; ++turn) {
    x.take_inputs_of(y);
    cuda_ok(cudaGraphLaunch(executable, stream.get()));
    EXPECT_TRUE(x.outputs() == of_other) << "other lengths and tables, turn " << turn;
    x.upload();
    cuda_ok(cudaGraphLaunch(executable, stream.get()));
    EXPECT_TRUE(x.outputs() == of_captured) << "those of the capture, turn " << turn;
  }
  cuda_ok(cudaGraphExecDestroy(executable));
  cuda_ok(cudaGraphDestroy(graph));
  return true;
}

TEST_F(Contents, OfReplayedGraphsMayBeOthers) {
  for (const Replay& replay : replays()) {
    int done = 0;
    for (const std::string& backend : cuda_backends()) {
      SCOPED_TRACE(std::string(replay.name) + ", " + backend);
      done += expect_replays(replay, backend);
    }
    EXPECT_GT(done, 0) << replay.name;
  }
}

/// A tensor of contents, one element of which is made wrong, and what a plan that checks says of it.
struct Wrong {
  ProblemSpec spec;
  Role role;
  const void* fovea_buffers::*address;
  size_t element;
  int32_t value;
  const char *argument, *got;
};
std::vector<Wrong> wrongs() {
  std::vector<Wrong> all;
  for (const ProblemSpec& spec : {pages(), with(pages(), of_8_bits), with(pages(), of_many_queries)}) {
    for (const int32_t page : {400, -1, kHuge, kTiny})
      all.push_back({spec, Role::kPageTable, &fovea_buffers::page_table, 1, page, "page_table", "entry 1"});
    for (const int32_t length : {1921, -1, kHuge, kTiny})
      all.push_back({spec, Role::kSeqUsedK, &fovea_buffers::seqused_k, 1, length, "seqused_k", "element 1"});
  }
  for (const int32_t sequence : {5, -1, kHuge, kTiny})
    all.push_back(
        {chosen(), Role::kCacheBatch, &fovea_buffers::cache_batch, 2, sequence, "cache_batch", "element 2"});
  for (const int32_t rows : {1801, -1, kHuge, kTiny})
    all.push_back({chosen(), Role::kLeftPadK, &fovea_buffers::leftpad_k, 0, rows, "leftpad_k", "element 0"});
  for (const int32_t start : {46, -1, kHuge, kTiny})
    all.push_back({packed_queries(), Role::kCuSeqlensQ, &fovea_buffers::cu_seqlens_q, 2, start,
                   "cu_seqlens_q", start == kHuge ? "a sequence of length" : "element"});
  for (const int32_t length : {1919, -1, kHuge, kTiny})
    all.push_back({growing(), Role::kSeqUsedK, &fovea_buffers::seqused_k, 0, length,
                   length == 1919 ? "k_new" : "seqused_k",
                   length == 1919 ? "2 rows behind the 1919" : "element 0"});
  all.push_back(
      {growing(), Role::kPageTable, &fovea_buffers::page_table, 0, -7, "page_table", "-7 at entry 0"});
  return all;
}
void spoil(const DeviceProblem& x, const Wrong& wrong) {
  auto* const elements = static_cast<int32_t*>(const_cast<void*>(x.buffers(nullptr).*wrong.address));
  cuda_ok(cudaMemcpy(elements + wrong.element, &wrong.value, sizeof wrong.value, cudaMemcpyHostToDevice));
}

TEST_F(Contents, AreRefusedByPlansThatCheck) {
  for (const Wrong& wrong : wrongs()) {
    int done = 0;
    for (const std::string& backend : cuda_backends()) {
      const DeviceProblem x(wrong.spec, FOVEA_FORWARD, backend, {.check_contents = true});
      if (x.plan() == nullptr) continue;
      ++done;
      SCOPED_TRACE(backend + ", " + wrong.argument + " " + std::to_string(wrong.value));
      x.upload();
      const Bytes before = x.outputs();
      spoil(x, wrong);
      ASSERT_EQ(x.run(nullptr), FOVEA_INVALID_ARGUMENT) << fovea_last_error();
      expect_message(wrong.argument, wrong.got, "");
      EXPECT_TRUE(x.outputs() == before) << "something was written";
    }
    EXPECT_GT(done, 0) << wrong.argument;
  }
}

TEST_F(Contents, AreRefusedWhereTheEnvironmentAsks) {
  const Wrong wrong = wrongs().front();
  ASSERT_EQ(setenv("FOVEA_CHECK_CONTENTS", "1", 1), 0);
  const DeviceProblem x(wrong.spec, FOVEA_FORWARD, cuda_backends().front());
  ASSERT_EQ(unsetenv("FOVEA_CHECK_CONTENTS"), 0);
  ASSERT_NE(x.plan(), nullptr);
  spoil(x, wrong);
  EXPECT_EQ(x.run(nullptr), FOVEA_INVALID_ARGUMENT);
  expect_message(wrong.argument, wrong.got, "");
}

/// compute-sanitizer tells reads outside of tensors, each of which has memory of its own.
TEST_F(Contents, ThatAreWrongReadNothingOutside) {
  for (const Wrong& wrong : wrongs()) {
    if (wrong.role == Role::kCuSeqlensQ) continue;  // has to be right: o is written by it
    for (const std::string& backend : cuda_backends()) {
      const DeviceProblem x(wrong.spec, FOVEA_FORWARD, backend);
      if (x.plan() == nullptr) continue;
      SCOPED_TRACE(backend + ", " + wrong.argument + " " + std::to_string(wrong.value));
      x.upload();
      spoil(x, wrong);
      EXPECT_EQ(x.run(nullptr), FOVEA_OK) << fovea_last_error();
      cuda_ok(cudaDeviceSynchronize());
    }
  }
}

TEST_F(Contents, ThatAreRightGiveTheSameBitsWhereTheyAreChecked) {
  for (const ProblemSpec& spec :
       {pages(), growing(), packed_queries(), chosen(), with(growing(), of_8_bits)}) {
    for (const std::string& backend : cuda_backends()) {
      const DeviceProblem x(spec, FOVEA_FORWARD, backend);
      if (x.plan() == nullptr) continue;
      SCOPED_TRACE(backend + " " + describe(spec));
      const DeviceProblem checked(spec, FOVEA_FORWARD, backend, {.check_contents = true});
      EXPECT_TRUE(x.outputs_alone() == checked.outputs_alone());
    }
  }
}

TEST_F(Contents, AreNotCheckedWhileAStreamIsCaptured) {
  const DeviceProblem x(pages(), FOVEA_FORWARD, cuda_backends().front(), {.check_contents = true});
  ASSERT_NE(x.plan(), nullptr);
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  EXPECT_EQ(x.run(stream.get()), FOVEA_INVALID_ARGUMENT);
  expect_message("check_contents", "captured", "wait for");
  cuda_ok(cudaStreamEndCapture(stream.get(), &graph));  // which the refusal leaves whole
  cuda_ok(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace fovea_test
