// Wrong requests to fovea_run, refused before it writes anything.

#include "request.hpp"

namespace fovea_test {
namespace {

using Make = Request (*)();
constexpr Make kForward = Request::forward, kBackward = Request::backward, kPacked = Request::packed;

/// Lists of two entries for each query, shared by the batch and its heads.
Request forward_with_lists() {
  Request r = Request::forward();
  r.add("keys", kInt32, {1, 1, 3, 2}).fill<int32_t>({4, 0, -1, 2, -1, -1});
  return r;
}
Request packed_with_lists() {
  Request r = Request::packed();
  r.add("keys", kInt32, {2, 6, 2});
  return r;
}

void* at(const void* p, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(p)) + bytes;
}

struct Case {
  const char* name;
  Make make;
  void (*spoil)(Request&, fovea_buffers&);
  const char* argument;
  const char* got;
  const char* expected;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class RunErrors : public testing::TestWithParam<Case> {};

TEST_P(RunErrors, AreReportedAndNothingIsWritten) {
  const Case& c = GetParam();
  Request request = c.make();
  PlannedRun run(request);
  ASSERT_TRUE(run.valid());
  fovea_buffers buffers = run.buffers(request);
  c.spoil(request, buffers);
  run.expect_refused(buffers, request, c.argument, c.got, c.expected);
  Request unspoilt = c.make();  // the plan is valid
  run.expect_ok(run.buffers(unspoilt));
}

const Case kCases[] = {
    {"no_q", kForward, [](Request&, fovea_buffers& b) { b.q = nullptr; }, "q", "a null pointer", "memory"},
    {"no_o", kForward, [](Request&, fovea_buffers& b) { b.o = nullptr; }, "o", "a null pointer", "memory"},
    {"no_lse", kForward, [](Request&, fovea_buffers& b) { b.lse = nullptr; }, "lse", "a null pointer",
     "memory"},
    {"no_dv", kBackward, [](Request&, fovea_buffers& b) { b.dv = nullptr; }, "dv", "a null pointer",
     "memory"},
    {"no_cu_seqlens", kPacked, [](Request&, fovea_buffers& b) { b.cu_seqlens_k = nullptr; }, "cu_seqlens_k",
     "a null pointer", "memory"},
    {"surplus_bias", kForward, [](Request&, fovea_buffers& b) { b.bias = b.q; }, "bias", "a pointer", "NULL"},
    {"surplus_rng_state", kForward, [](Request&, fovea_buffers& b) { b.rng_state = b.o; }, "rng_state",
     "a pointer", "NULL"},
    {"misaligned_q", kForward, [](Request&, fovea_buffers& b) { b.q = at(b.q, 2); }, "q", "no multiple of 4",
     "multiples of their size"},
    {"misaligned_o", kForward, [](Request&, fovea_buffers& b) { b.o = at(b.o, 1); }, "o", "no multiple of 4",
     "multiples of their size"},

    // Outputs over inputs, outputs over outputs.
    {"o_is_q", kForward, [](Request&, fovea_buffers& b) { b.o = const_cast<void*>(b.q); }, "o", "overlaps q",
     "memory of its own"},
    {"o_ends_in_v", kForward, [](Request&, fovea_buffers& b) { b.v = at(b.o, (2 * 3 * 4 * 6 - 1) * 4); }, "o",
     "overlaps v", "memory of its own"},
    {"o_begins_in_k", kForward, [](Request&, fovea_buffers& b) { b.k = at(b.o, -(2 * 5 * 2 * 8 - 1) * 4); },
     "o", "overlaps k", "memory of its own"},
    {"lse_in_o", kForward, [](Request&, fovea_buffers& b) { b.lse = at(b.o, 64); }, "o", "overlaps lse",
     "memory of its own"},
    {"dq_is_q", kBackward, [](Request&, fovea_buffers& b) { b.dq = const_cast<void*>(b.q); }, "dq",
     "overlaps q", "memory of its own"},
    {"dk_is_dv", kBackward, [](Request&, fovea_buffers& b) { b.dk = b.dv; }, "dk", "overlaps dv",
     "memory of its own"},
    {"dv_is_d_o", kBackward, [](Request&, fovea_buffers& b) { b.dv = const_cast<void*>(b.d_o); }, "dv",
     "overlaps d_o", "memory of its own"},
    {"dq_is_lse", kBackward, [](Request&, fovea_buffers& b) { b.dq = b.lse; }, "dq", "overlaps lse",
     "memory of its own"},
    {"o_is_cu_seqlens", kPacked, [](Request&, fovea_buffers& b) { b.o = const_cast<void*>(b.cu_seqlens_q); },
     "o", "overlaps cu_seqlens_q", "memory of its own"},

    // The contents of cu_seqlens and seqused may change from run to run.
    {"cu_seqlens_start", kPacked,
     [](Request& r, fovea_buffers&) {
       r["cu_seqlens_q"].fill<int32_t>({2, 2, 2, 6});
     },
     "cu_seqlens_q", "first element 2", "0"},
    {"cu_seqlens_decreasing", kPacked,
     [](Request& r, fovea_buffers&) {
       r["cu_seqlens_k"].fill<int32_t>({0, 2, 1, 2});
     },
     "cu_seqlens_k", "element 1 = 2 and then 1", "non-decreasing"},
    {"cu_seqlens_past_the_end", kPacked,
     [](Request& r, fovea_buffers&) {
       r["cu_seqlens_q"].fill<int32_t>({0, 4, 8, 8});
     },
     "cu_seqlens_q", "last element 8", "at most 6"},
    {"sequence_longer_than_planned", kPacked,
     [](Request& r, fovea_buffers&) {
       r["cu_seqlens_q"].fill<int32_t>({0, 5, 5, 6});
     },
     "cu_seqlens_q", "length 5 at 0", "at most 4"},

    // So may lists.
    {"no_keys", forward_with_lists, [](Request&, fovea_buffers& b) { b.keys = nullptr; }, "keys",
     "a null pointer", "memory"},
    {"surplus_keys", kForward, [](Request&, fovea_buffers& b) { b.keys = b.q; }, "keys", "a pointer", "NULL"},
    {"o_is_keys", forward_with_lists, [](Request&, fovea_buffers& b) { b.o = const_cast<void*>(b.keys); },
     "o", "overlaps keys", "memory of its own"},
    {"entry_past_the_keys", forward_with_lists,
     [](Request& r, fovea_buffers&) {
       r["keys"].fill<int32_t>({4, 0, 2, 5});
     },
     "keys", "5 at entry 1 of query 1, key head 0 of sequence 0", "-1 to 4"},
    {"entry_below_none", forward_with_lists,
     [](Request& r, fovea_buffers&) {
       r["keys"].fill<int32_t>({4, 0, 2, 2, -2});
     },
     "keys", "-2 at entry 0 of query 2", "-1 to 4"},
    {"entry_past_the_sequence", packed_with_lists,
     [](Request& r, fovea_buffers&) {
       r["keys"].fill<int32_t>({0, 2, 1, 1, 0, 1});
     },
     "keys", "1 at entry 1 of query 0, key head 0 of sequence 2", "-1 to 0"},

    {"buffers_size_zero", kForward, [](Request&, fovea_buffers& b) { b.struct_size = 0; }, "buffers",
     "struct_size 0", "another version"},
};

INSTANTIATE_TEST_SUITE_P(Each, RunErrors, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

/// A plan and memory for it.
struct Ready {
  explicit Ready(Make make, const char* backend = nullptr) : request(make()) {
    request.options.backend = backend;
    EXPECT_EQ(fovea_plan_create(&request.c_problem(), &request.options, &plan), FOVEA_OK)
        << fovea_last_error();
    size = fovea_plan_workspace_size(plan);
    workspace = AlignedMemory(size + FOVEA_WORKSPACE_ALIGNMENT);
    buffers = request.c_buffers();
    buffers.workspace = workspace.get();
    buffers.workspace_size = size;
  }
  ~Ready() { fovea_plan_destroy(plan); }
  Ready(const Ready&) = delete;
  Ready& operator=(const Ready&) = delete;

  Request request;
  fovea_plan* plan = nullptr;
  size_t size = 0;
  AlignedMemory workspace{0};
  fovea_buffers buffers = FOVEA_BUFFERS_INIT;
};

TEST(RunWorkspace, IsChecked) {
  int checked = 0;
  for (const Make make : {kForward, kBackward, kPacked}) {
    for (int32_t i = 0; i < fovea_backend_count(); ++i) {
      Request probe = make();
      probe.options.backend = fovea_backend_name(i);
      fovea_plan* plan = nullptr;
      if (fovea_plan_create(&probe.c_problem(), &probe.options, &plan) == FOVEA_UNSUPPORTED) continue;
      fovea_plan_destroy(plan);
      Ready ready(make, fovea_backend_name(i));
      if (ready.size == 0) continue;
      ++checked;
      const auto before = ready.request.bytes();
      fovea_buffers b = ready.buffers;
      b.workspace = nullptr;
      EXPECT_EQ(fovea_run(ready.plan, &b), FOVEA_INVALID_ARGUMENT);
      expect_message("workspace", "a null pointer", std::to_string(ready.size));
      b = ready.buffers;
      b.workspace_size -= 1;
      EXPECT_EQ(fovea_run(ready.plan, &b), FOVEA_INVALID_ARGUMENT);
      expect_message("workspace_size", std::to_string(ready.size - 1),
                     "at least " + std::to_string(ready.size));
      b = ready.buffers;
      b.workspace = at(b.workspace, 8);
      EXPECT_EQ(fovea_run(ready.plan, &b), FOVEA_INVALID_ARGUMENT);
      expect_message("workspace", "no multiple of 64", "FOVEA_WORKSPACE_ALIGNMENT");
      b = ready.buffers;
      b.k = b.workspace;
      EXPECT_EQ(fovea_run(ready.plan, &b), FOVEA_INVALID_ARGUMENT);
      expect_message("workspace", "overlaps k", "nothing else uses");
      EXPECT_TRUE(ready.request.bytes() == before) << "bytes were written";
      EXPECT_EQ(fovea_run(ready.plan, &ready.buffers), FOVEA_OK) << fovea_last_error();
    }
  }
  if (checked == 0) GTEST_SKIP() << "no backend here asks for a workspace";
}

TEST(RunAccepts, GradientsInterleavedInOneArray) {
  // dq, dk, dv as the slices of a (B, S, 3, H, D) array, and of a (B, S, H, 3, D) one.
  for (const int64_t head_stride : {8, 24}) {
    const int64_t slice_stride = head_stride == 8 ? 4 * 8 : 8;
    Request request = Request::backward();
    for (const char* name : {"q", "k", "v", "o", "d_o", "dq", "dk", "dv"})
      request[name].set_shape({2, 3, 4, 8});
    for (const char* name : {"dq", "dk", "dv"}) request[name].set_strides({288, 96, head_stride, 1});
    request["lse"].set_shape({2, 4, 3});
    PlannedRun run(request);
    ASSERT_TRUE(run.valid());
    fovea_buffers b = run.buffers(request);
    b.dk = at(b.dq, slice_stride * 4);
    b.dv = at(b.dq, 2 * slice_stride * 4);
    run.expect_ok(b);

    b.dv = at(b.dq, (2 * slice_stride - 1) * 4);  // one element into dk
    run.expect_refused(b, request, "dk", "overlaps dv", "memory of its own");
  }
}

TEST(RunAccepts, SequencesThatChangeWithinThePlan) {
  Ready ready(kPacked);
  ready.request["cu_seqlens_q"].fill<int32_t>({0, 1, 4, 5});
  ready.request["cu_seqlens_k"].fill<int32_t>({0, 0, 3, 4});
  EXPECT_EQ(fovea_run(ready.plan, &ready.buffers), FOVEA_OK) << fovea_last_error();
}

TEST(RunErrorsOfPackedPlans, AreFoundWithoutDataInThePlan) {
  Request request = Request::packed();
  request.add("seqused_q", kInt32, {3}).fill<int32_t>({2, 0, 5});
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k", "seqused_q"}) request[name].c.data = nullptr;
  PlannedRun run(request);
  ASSERT_TRUE(run.valid());
  run.expect_refused(run.buffers(request), request, "seqused_q", "element 2 = 5", "0 to 4");
}

TEST(RunErrorsOfNull, PlanAndBuffers) {
  Ready ready(kForward);
  EXPECT_EQ(fovea_run(nullptr, &ready.buffers), FOVEA_INVALID_ARGUMENT);
  expect_message("plan", "NULL", "a plan");
  EXPECT_EQ(fovea_run(ready.plan, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_message("buffers", "NULL", "a struct");
  EXPECT_EQ(fovea_plan_create(&ready.request.c_problem(), nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  expect_message("plan", "NULL", "where to store the plan");
  fovea_plan* plan = nullptr;
  EXPECT_EQ(fovea_plan_create(nullptr, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  expect_message("problem", "NULL", "a struct");
  EXPECT_EQ(fovea_attend(nullptr, nullptr, 0, 0), FOVEA_INVALID_ARGUMENT);
  expect_message("problem", "NULL", "a struct");
}

TEST(AttendErrors, NullDataIsNamedAndNothingIsWritten) {
  for (const Make make : {kForward, kBackward, kPacked}) {
    for (const char* name : {"q", "k", "v", "o", "lse"}) {
      Request request = make();
      request[name].c.data = nullptr;
      const auto before = request.bytes();
      EXPECT_EQ(fovea_attend(&request.c_problem(), nullptr, 0, 0), FOVEA_INVALID_ARGUMENT);
      expect_message(name, "a null pointer", "memory");
      EXPECT_TRUE(request.bytes() == before);
    }
  }
}

}  // namespace
}  // namespace fovea_test
