// What goes wrong on one rank is an error on all, in time, and names the rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea_distributed.h"

namespace fovea {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kRows = 4, kHeads = 2, kSize = 8, kAll = kRanks * kRows;

/// One rank's tensors: (1, 4, 2, 8) float32.
struct Tensors {
  std::array<int64_t, 4> shape{1, kRows, kHeads, kSize};
  std::vector<float> q, k, v, o;
  std::array<fovea_tensor, 4> views{};
  fovea_problem problem = FOVEA_PROBLEM_INIT;

  Tensors() : q(kRows * kHeads * kSize, 0.5f), k(q), v(q), o(q.size(), -7.0f) {
    for (size_t i = 0; i < 4; ++i) {
      views[i].data = std::array{&q, &k, &v, &o}[i]->data();
      views[i].device = {FOVEA_CPU, 0};
      views[i].ndim = 4;
      views[i].dtype = {FOVEA_CODE_FLOAT, 32, 1};
      views[i].shape = shape.data();
    }
    problem.q = &views[0];
    problem.k = &views[1];
    problem.v = &views[2];
    problem.o = &views[3];
  }
};

struct Setting {
  std::vector<fovea_piece> pieces = {{0, 0, kRows}, {1, kRows, 2 * kRows}, {2, 2 * kRows, kAll}};
  Tensors tensors;
  fovea_distributed_problem problem{};
  fovea_distributed_options options{};
  bool stays_away = false;  ///< makes no plan at all
  bool bad_run = false;     ///< runs without a workspace
  uint64_t seed = 0, offset = 0;
  bool never_runs = false, wants_messages = false;
  bool cut_link = false;  ///< begins no messages once the plan is made

  Setting() {
    problem.struct_size = sizeof problem;
    options.struct_size = sizeof options;
    options.heads_ranks = 1;
  }
};

/// A transport that begins as many steps as it is told.
struct CutLink {
  fovea_transport inner;
  int steps_left;

  fovea_transport transport() {
    fovea_transport t = inner;
    t.context = this;
    t.start = [](void* context, const fovea_message* sends, int32_t num_sends, const fovea_message* receives,
                 int32_t num_receives, void* stream) {
      auto& link = *static_cast<CutLink*>(context);
      if (link.steps_left-- <= 0) return FOVEA_INTERNAL;
      return link.inner.start(link.inner.context, sends, num_sends, receives, num_receives, stream);
    };
    t.finish = [](void* context, void* stream) {
      const fovea_transport& whole = static_cast<CutLink*>(context)->inner;
      return whole.finish(whole.context, stream);
    };
    t.stop = [](void* context, const char* reason) {
      const fovea_transport& whole = static_cast<CutLink*>(context)->inner;
      whole.stop(whole.context, reason);
    };
    t.error = [](void*) { return "the link is cut"; };
    return t;
  }
};

/// Errors of the ranks, "" for none.
std::array<std::string, kRanks> run_ranks(const std::function<void(int rank, Setting&)>& change,
                                          bool by_copies = false) {
  fovea_thread_options options{};
  options.struct_size = sizeof options;
  options.peer_copies = by_copies ? 1 : 0;
  options.deadline_ms = 300;
  fovea_thread_group* group = nullptr;
  EXPECT_EQ(fovea_thread_group_create(kRanks, nullptr, &options, &group), FOVEA_OK);
  std::array<std::string, kRanks> errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Setting s;
      change(rank, s);
      if (s.stays_away) return;
      s.problem.local = &s.tensors.problem;
      s.problem.queries = s.pieces.data();
      s.problem.num_queries = static_cast<int64_t>(s.pieces.size());
      fovea_transport transport{};
      ASSERT_EQ(fovea_thread_transport(group, rank, &transport), FOVEA_OK);
      CutLink link{transport, 1};
      if (s.cut_link) transport = link.transport();
      if (s.wants_messages) transport.peer_copies = 0;
      fovea_distributed_plan* plan = nullptr;
      std::string& error = errors[static_cast<size_t>(rank)];
      if (fovea_distributed_plan_create(&transport, &s.problem, &s.options, &plan) != FOVEA_OK) {
        error = fovea_last_error();
        return;
      }
      const size_t size = fovea_distributed_plan_workspace_size(plan);
      std::vector<unsigned char> memory(size + 256);
      fovea_buffers b = FOVEA_BUFFERS_INIT;
      b.q = s.tensors.q.data();
      b.k = s.tensors.k.data();
      b.v = s.tensors.v.data();
      b.o = s.tensors.o.data();
      b.seed = s.seed;
      b.offset = s.offset;
      b.workspace = memory.data() + 256 - reinterpret_cast<uintptr_t>(memory.data()) % 256;
      b.workspace_size = s.bad_run ? 0 : size;
      if (!s.never_runs && fovea_distributed_run(plan, &b) != FOVEA_OK) error = fovea_last_error();
      fovea_distributed_plan_destroy(plan);
    });
  }
  for (std::thread& thread : threads) thread.join();
  fovea_thread_group_destroy(group);
  return errors;
}

void expect_in(const std::string& error, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(error.find(part), std::string::npos) << error << "\nlacks " << part;
}

TEST(Faults, NoneOnRightRanks) {
  for (const std::string& error : run_ranks([](int, Setting&) {})) EXPECT_EQ(error, "");
}

TEST(Faults, RankThatCannotPlanTellsTheOthers) {
  const auto errors = run_ranks([](int rank, Setting& s) {
    if (rank == 1) s.tensors.problem.dropout = 1;
  });
  expect_in(errors[1], {"local.dropout: got 1", "a probability in [0, 1)"});
  for (const size_t rank : {size_t{0}, size_t{2}})
    expect_in(errors[rank], {"rank 1 could not plan", "local.dropout"});
}

/// What one rank passes otherwise than the others, and what all of them are told.
struct Difference {
  std::function<void(Setting&)> change;
  std::vector<std::string> error;
};

TEST(Faults, DifferentProblems) {
  const std::array<int64_t, 4> thin{1, kRows, kHeads, kSize / 2};
  const std::vector<Difference> differences = {
      {[](Setting& s) { s.tensors.problem.causal = 1; },
       {"local.window: got (-1, -1) on ranks 0, 1 and (-1, 0), which is causal on rank 2"}},
      {[](Setting& s) { s.tensors.problem.window_left = 3; }, {"local.window: got", "(3, -1) on rank 2"}},
      {[](Setting& s) { s.tensors.problem.scale = 0.25; },
       {"local.scale: got 0.35355339059327373 on ranks 0, 1 and 0.25 on rank 2"}},
      {[](Setting& s) { s.tensors.problem.softcap = 30; },
       {"local.softcap: got 0 on ranks 0, 1 and 30 on rank 2"}},
      {[](Setting& s) { s.tensors.problem.dropout = 0.5; },
       {"local.dropout: got 0 on ranks 0, 1 and 0.5 on rank 2"}},
      {[&](Setting& s) {
         s.tensors.shape = thin;
         s.options.stages = 1;
       },
       {"local.q: got a batch of 1, 2 heads of 8 on ranks 0, 1 and a batch of 1, 2 heads of 4 on rank 2"}},
      {[](Setting& s) {
         s.pieces = {{0, 0, 3}, {1, 3, kRows + 4}, {2, kRows + 4, kAll}};
         s.pieces[1] = {1, 4, 8};
         s.pieces.push_back({0, 3, 4});
       },
       {"queries: got 12 rows, [0, 4) on rank 0,", "on ranks 0, 1 and 12 rows, [0, 3) on rank 0, [3, 4)"}},
      {[](Setting& s) { s.options.memory_limit = 1; }, {"memory_limit: got 0 on ranks 0, 1 and 1 on rank 2"}},
      {[](Setting& s) { s.options.stages = 3; },
       {"heads_ranks, stages, ranks_per_host: got 1, 0, 0 on ranks 0, 1 and 1, 3, 0 on rank 2"}},
  };
  for (const Difference& difference : differences) {
    const auto errors = run_ranks([&](int rank, Setting& s) {
      if (rank == 2) difference.change(s);
    });
    for (const std::string& error : errors) {
      expect_in(error, difference.error);
      expect_in(error, {"expected the same on all ranks; pass one value on every rank"});
    }
  }
}

/// Texts differ far behind their beginnings, and on every rank.
TEST(Faults, DifferentTextsOfManyCharacters) {
  std::string same = "s";
  for (int i = 0; i < 300; ++i) same += " + 0.5";
  std::array<std::string, kRanks> scores;
  for (int rank = 0; rank < kRanks; ++rank)
    scores[static_cast<size_t>(rank)] = same + " + " + std::to_string(rank + 1);
  const auto errors = run_ranks(
      [&](int rank, Setting& s) { s.tensors.problem.score = scores[static_cast<size_t>(rank)].c_str(); });
  for (const std::string& error : errors) {
    expect_in(error, {"terms: got ...", "on rank 0 and ...", "on rank 1 and ...", "on rank 2, expected"});
    EXPECT_LT(error.size(), 800u);
  }
}

/// Ranks that reach each other's memory wait for words in it, not for messages.
TEST(FaultsByCopies, NoneOnRightRanks) {
  for (const std::string& error : run_ranks([](int, Setting&) {}, true)) EXPECT_EQ(error, "");
}

TEST(FaultsByCopies, RankThatFailsInARunTellsTheOthers) {
  const auto errors = run_ranks([](int rank, Setting& s) { s.bad_run = rank == 1; }, true);
  expect_in(errors[1], {"workspace", "fovea_distributed_plan_workspace_size"});
  for (const size_t rank : {size_t{0}, size_t{2}}) expect_in(errors[rank], {"rank 1", "workspace"});
}

TEST(FaultsByCopies, RankThatDoesNotRun) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks([](int rank, Setting& s) { s.never_runs = rank == 1; }, true);
  for (const size_t rank : {size_t{0}, size_t{2}})
    expect_in(errors[rank], {"rank 1 did not come to a step within 300 ms"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(FaultsByCopies, OneRankThatWantsMessages) {
  const auto errors = run_ranks([](int rank, Setting& s) { s.wants_messages = rank == 2; }, true);
  for (const std::string& error : errors)
    expect_in(error, {"transport.peer_copies: got 1 on ranks 0, 1 and 0 on rank 2"});
}

/// Each rank is told, and the connections stay: the next run is right.
TEST(Faults, DifferentSeeds) {
  for (const bool offset : {false, true}) {
    const auto errors = run_ranks([&](int rank, Setting& s) {
      s.tensors.problem.dropout = 0.5;
      s.seed = offset ? 7 : static_cast<uint64_t>(rank / 2);
      s.offset = offset ? static_cast<uint64_t>(rank) : 0;
    });
    for (const std::string& error : errors) {
      if (offset) {
        expect_in(error, {"offset: got 0 on rank 0 and 1 on rank 1 and 2 on rank 2, expected the same"});
      } else {
        expect_in(error, {"seed: got 0 on ranks 0, 1 and 1 on rank 2, expected the same on all ranks;"});
      }
    }
  }
  const auto unused = run_ranks([](int rank, Setting& s) { s.seed = static_cast<uint64_t>(rank); });
  for (const std::string& error : unused) EXPECT_EQ(error, "") << "without dropout a seed is nothing";
}

TEST(Faults, RankThatIsMissing) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors = run_ranks([](int rank, Setting& s) { s.stays_away = rank == 0; });
  for (const size_t rank : {size_t{1}, size_t{2}}) expect_in(errors[rank], {"rank 0", "within 300 ms"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Faults, RankThatFailsInARunTellsTheOthers) {
  const auto errors = run_ranks([](int rank, Setting& s) { s.bad_run = rank == 1; });
  expect_in(errors[1], {"workspace", "fovea_distributed_plan_workspace_size"});
  for (const size_t rank : {size_t{0}, size_t{2}}) expect_in(errors[rank], {"rank 1", "workspace"});
}

TEST(Faults, RankThatFailsInAStepSaysWhich) {
  const auto errors = run_ranks([](int rank, Setting& s) { s.cut_link = rank == 1; });
  expect_in(errors[1], {"rank 1 could not begin a step: the link is cut", ", in rank 1, step 1 (send)"});
  for (const size_t rank : {size_t{0}, size_t{2}})
    expect_in(errors[rank], {"rank 1, step ", "(send): ", "the link is cut"});
}

/// Rank 0 waits for rank 1, and takes nothing of rank 2 meanwhile: both name rank 1.
TEST(Faults, RankThatIsSilentIsNamedByAll) {
  fovea_thread_options options{};
  options.struct_size = sizeof options;
  options.deadline_ms = 400;
  fovea_thread_group* group = nullptr;
  ASSERT_EQ(fovea_thread_group_create(kRanks, nullptr, &options, &group), FOVEA_OK);
  std::array<std::string, kRanks> errors;
  const auto work = [&](int rank) {
    fovea_transport t{};
    fovea_thread_transport(group, rank, &t);
    std::array<char, 16> memory{};
    const fovea_message from_second{1, memory.data(), 8}, to_first{0, memory.data() + 8, 8};
    const bool first = rank == 0;
    t.start(t.context, &to_first, first ? 0 : 1, &from_second, first ? 1 : 0, nullptr);
    if (t.finish(t.context, nullptr) == FOVEA_OK) return;
    errors[static_cast<size_t>(rank)] = t.error(t.context);
    t.stop(t.context, errors[static_cast<size_t>(rank)].c_str());
  };
  std::thread last(work, 2);
  work(0);
  last.join();
  fovea_thread_group_destroy(group);
  for (const size_t rank : {size_t{0}, size_t{2}}) expect_in(errors[rank], {"rank 1 sent nothing to rank 0"});
}

TEST(Faults, MessageOfAnotherSize) {
  fovea_thread_options options{};
  options.struct_size = sizeof options;
  options.deadline_ms = 300;
  fovea_thread_group* group = nullptr;
  ASSERT_EQ(fovea_thread_group_create(2, nullptr, &options, &group), FOVEA_OK);
  std::array<std::string, 2> errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      fovea_transport t{};
      fovea_thread_transport(group, rank, &t);
      std::array<char, 64> memory{};
      const fovea_message message{1 - rank, memory.data(), 32};
      const fovea_message received{1 - rank, memory.data() + 32, rank == 0 ? size_t{32} : size_t{16}};
      t.start(t.context, &message, 1, &received, 1, nullptr);
      if (t.finish(t.context, nullptr) != FOVEA_OK) {
        errors[static_cast<size_t>(rank)] = t.error(t.context);
        t.stop(t.context, errors[static_cast<size_t>(rank)].c_str());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  fovea_thread_group_destroy(group);
  expect_in(errors[1], {"rank 0 sent 32 bytes to rank 1, which expected 16"});
}

/// Terms of a setting, with memory for what they read.
struct Terms {
  std::array<int64_t, 4> shape{1, kHeads, kAll, kAll};
  std::vector<float> data = std::vector<float>(kHeads * kAll * kAll, 0.25f);
  fovea_tensor tensor{};
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named{};

  explicit Terms(std::array<int64_t, 4> sizes = {1, kHeads, kAll, kAll}) : shape(sizes) {
    tensor.data = data.data();
    tensor.device = {FOVEA_CPU, 0};
    tensor.ndim = 4;
    tensor.dtype = {FOVEA_CODE_FLOAT, 32, 1};
    tensor.shape = shape.data();
  }
  /// The tensor under several names.
  void name(fovea_problem& problem, std::initializer_list<const char*> names) {
    for (const char* name : names) named[static_cast<size_t>(problem.num_named++)] = {name, &tensor, nullptr};
    problem.named = named.data();
  }
};

TEST(Faults, OtherTermsOnARank) {
  std::array<Terms, kRanks> terms;
  const auto text = run_ranks([&](int rank, Setting& s) {
    s.tensors.problem.score = rank == 1 ? "s + t[b, h, q, k]" : "s - t[b, h, q, k]";
    terms[static_cast<size_t>(rank)].name(s.tensors.problem, {"t"});
  });
  const auto sees = run_ranks([](int rank, Setting& s) {
    if (rank == 0) s.tensors.problem.sees = "k <= q + 3";
  });
  std::array wide = {Terms(), Terms(), Terms({1, 1, kAll, kAll})};
  const auto shapes = run_ranks(
      [&](int rank, Setting& s) { s.tensors.problem.bias = &wide[static_cast<size_t>(rank)].tensor; });
  for (const auto* errors : {&text, &sees, &shapes}) {
    for (const std::string& error : *errors)
      expect_in(error, {"terms: got ", "on ranks ", "on rank ", "expected the same on all ranks"});
  }
}

TEST(Faults, TermTensorThatIsMissingInARun) {
  Terms terms;
  const auto errors = run_ranks([&](int, Setting& s) { s.tensors.problem.bias = &terms.tensor; });
  EXPECT_TRUE(std::any_of(errors.begin(), errors.end(), [](const std::string& error) {
    return error.find("bias: got NULL, expected memory") == 0;
  })) << errors[0];
}

/// Terms that do not fit the whole problem, on all ranks alike.
TEST(Faults, WrongTerms) {
  Terms rows({1, kHeads, kRows, kAll}), whole;
  struct Case {
    const char* name;
    std::function<void(fovea_problem&)> change;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"bias_of_a_ranks_rows",
       [&](fovea_problem& p) { p.bias = &rows.tensor; },
       {"local.bias: got shape (1, 2, 4, 12)", "12"}},
      {"mask_of_floats", [&](fovea_problem& p) { p.mask = &whole.tensor; }, {"local.mask", "bool or uint8"}},
      {"text", [](fovea_problem& p) { p.score = "s + foo"; }, {"local.score, character 5", "'foo'"}},
      {"named_of_a_ranks_rows",
       [&](fovea_problem& p) {
         p.sees = "t[b, h, q, k] < 1.0";
         rows.named = {};
         rows.name(p, {"t"});
       },
       {"local.named.t: got shape (1, 2, 4, 12)", "at least 12 in dimension 2"}},
      {"gradient_in_a_forward",
       [&](fovea_problem& p) {
         p.score = "s + t[b, h, q, k]";
         whole.name(p, {"t"});
         whole.named[0].gradient = &whole.tensor;
       },
       {"local.named.t.gradient", "none in a forward problem"}},
      {"more_names_than_parts_have_room_for",
       [&](fovea_problem& p) {
         p.score = "s";
         whole.named = {};
         whole.name(p, {"a", "c", "d", "e", "f", "g", "i", "j"});
       },
       {"local.num_named: got 8 tensors", "at most 7 over ranks", "put several into one"}},
      {"text_that_parts_make_too_long",
       [](fovea_problem& p) {
         static const std::string text = [] {
           std::string sum = "s";
           for (int i = 0; i < 600; ++i) sum += "+q";
           return sum;
         }();
         p.score = text.c_str();
       },
       {"local.score: got ", "characters with the numbers of a part", "at most 4096", "heads_ranks"}},
      {"rng_state",
       [&](fovea_problem& p) { p.rng_state = &whole.tensor; },
       {"local.rng_state: got shape (1, 2, 12, 12), expected (2)"}},
      {"seqused", [&](fovea_problem& p) { p.seqused_k = &whole.tensor; }, {"local.seqused_k: got one"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    std::mutex one_at_a_time;
    std::barrier changed(kRanks);  // before any rank reads what the cases share
    for (const std::string& error : run_ranks([&](int, Setting& s) {
           {
             const std::lock_guard lock(one_at_a_time);
             c.change(s.tensors.problem);
           }
           changed.arrive_and_wait();
         }))
      expect_in(error, c.parts);
  }
}

/// Wrong arguments, on all ranks alike.
TEST(Faults, WrongArguments) {
  struct Case {
    const char* name;
    std::function<void(Setting&)> change;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"row_twice", [](Setting& s) { s.pieces[1].begin = 3; }, {"queries", "row 3 in two pieces"}},
      {"row_missing", [](Setting& s) { s.pieces[1].begin = 5; }, {"queries", "no piece with row 4"}},
      {"no_such_rank", [](Setting& s) { s.pieces[2].rank = 3; }, {"queries[2]", "rank 3", "from 0 to 2"}},
      {"backwards",
       [](Setting& s) {
         s.pieces[2] = {2, 9, 8};
       },
       {"queries[2]", "[9, 8)", "begin <= end"}},
      {"rows_of_another_rank",
       [](Setting& s) {
         s.pieces = {{0, 0, kAll}};
       },
       {"local.q", "shape (1, 4, 2, 8)"}},
      {"no_o", [](Setting& s) { s.tensors.problem.o = nullptr; }, {"local.o", "NULL"}},
      {"divisor", [](Setting& s) { s.options.heads_ranks = 2; }, {"heads_ranks: got 2", "divisor of 3"}},
      {"stages", [](Setting& s) { s.options.stages = 4; }, {"stages: got 4", "at most 3"}},
      {"negative_limit", [](Setting& s) { s.options.memory_limit = -1; }, {"memory_limit"}},
      {"rate", [](Setting& s) { s.options.flops_per_second = -1; }, {"flops_per_second"}},
      {"backend",
       [](Setting& s) {
         static fovea_options attention = [] {
           fovea_options o = FOVEA_OPTIONS_INIT;
           o.backend = "none";
           return o;
         }();
         s.options.attention = &attention;
       },
       {"backend", "none"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    for (const std::string& error : run_ranks([&](int, Setting& s) { c.change(s); }))
      expect_in(error, c.parts);
  }
}

TEST(Faults, WrongStructs) {
  fovea_thread_group* group = nullptr;
  EXPECT_EQ(fovea_thread_group_create(0, nullptr, nullptr, &group), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_last_error(), {"size: got 0"});
  ASSERT_EQ(fovea_thread_group_create(1, nullptr, nullptr, &group), FOVEA_OK);
  fovea_transport transport{};
  EXPECT_EQ(fovea_thread_transport(group, 1, &transport), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_last_error(), {"rank: got 1"});
  ASSERT_EQ(fovea_thread_transport(group, 0, &transport), FOVEA_OK);
  fovea_distributed_problem problem{};
  fovea_distributed_plan* plan = nullptr;
  EXPECT_EQ(fovea_distributed_plan_create(&transport, &problem, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_last_error(), {"problem: got struct_size 0"});
  transport.finish = nullptr;
  problem.struct_size = sizeof problem;
  EXPECT_EQ(fovea_distributed_plan_create(&transport, &problem, nullptr, &plan), FOVEA_INVALID_ARGUMENT);
  expect_in(fovea_last_error(), {"transport", "NULL"});
  fovea_thread_group_destroy(group);
}

}  // namespace
}  // namespace fovea
