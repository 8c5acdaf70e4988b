// How runs behave on a GPU: streams, graphs, threads, load, several GPUs. Results are compared bit for bit with
// those of a run that has the device to itself.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "device_problem.hpp"

namespace fovea_test {
namespace {

/// Several tiles in each direction, two sequences, groups of heads; more than one row of CTAs.
ProblemSpec usual() {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.seqlen_q = 200;
  spec.seqlen_k = 333;
  spec.head_dim = spec.head_dim_v = 64;
  spec.causal = true;
  return spec;
}
/// Few queries: the keys are split over CTAs, and the splits merged.
ProblemSpec decode() {
  ProblemSpec spec;
  spec.batch = 2;
  spec.heads_q = 8;
  spec.heads_kv = 2;
  spec.seqlen_q = 1;
  spec.seqlen_k = 3000;
  spec.head_dim = spec.head_dim_v = 128;
  return spec;
}
/// Every term, and lengths that are read on the device.
ProblemSpec everything() {
  ProblemSpec spec = usual();
  spec.window_left = 150;
  spec.softcap = 10;
  spec.dropout = 0.2;
  spec.rng_state = true;
  spec.bias = spec.dbias = true;
  spec.bias_broadcast = 0b0001;
  spec.mask = spec.alibi = spec.sink = spec.dsink = spec.dlse = true;
  spec.lengths_q = {200, 0, 77};
  spec.lengths_k = {333, 5, 80};
  return spec;
}
/// A cache in pages that grows by rotated rows, of sequences of other lengths.
ProblemSpec growing() {
  ProblemSpec spec = decode();
  spec.seqlen_k = 512;
  spec.page_size = 16;
  spec.caches = 80;
  spec.used_k = {500, 31};
  spec.lengths_new = {1, 1};
  spec.rotary = 32;
  return spec;
}
std::vector<ProblemSpec> all_kinds() {
  return {usual(), decode(), everything(), growing()};
}

class Runs : public testing::Test {
 protected:
  void SetUp() override { FOVEA_SKIP_WITHOUT_CUDA_BACKEND(); }
};

TEST_F(Runs, AreRepeatable) {
  for (const ProblemSpec& spec : all_kinds()) {
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
      const Bytes first = x.outputs_alone();
      for (int repeat = 0; repeat < 10; ++repeat) EXPECT_EQ(x.outputs_alone(), first) << repeat;
    });
  }
}

/// The capture itself is a test: in its global mode the runtime refuses allocations and synchronisation.
TEST_F(Runs, CanBeCapturedAndReplayed) {
  for (const ProblemSpec& spec : all_kinds()) {
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
      const Bytes eager = x.outputs_alone();
      const Stream stream;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
      const fovea_status status = x.run(stream.get());
      EXPECT_EQ(status, FOVEA_OK) << fovea_last_error();
      cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
      ASSERT_NE(graph, nullptr);
      cuda_ok(cudaGraphInstantiate(&replay, graph, 0));
      x.upload();
      cuda_ok(cudaGraphLaunch(replay, stream.get()));
      EXPECT_EQ(x.outputs(), eager) << "first replay";

      // Other inputs in the same memory.
      OwnedTensor& v = x.host()[Role::kV];
      std::vector<double> values = v.values();
      for (double& value : values) value = -0.5 * value;
      v.assign(values);
      const Bytes other = x.outputs_alone();
      EXPECT_NE(other, eager);
      x.upload();
      for (int repeat = 0; repeat < 3; ++repeat) cuda_ok(cudaGraphLaunch(replay, stream.get()));
      EXPECT_EQ(x.outputs(), other) << "replay with other inputs";
      cuda_ok(cudaGraphExecDestroy(replay));
      cuda_ok(cudaGraphDestroy(graph));
    });
  }
}

/// A run returns before earlier work of its stream has started.
TEST_F(Runs, DoNotWaitForTheDevice) {
  for (const ProblemSpec& spec : all_kinds()) {
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
      const Bytes eager = x.outputs_alone();
      x.upload();
      const Stream stream;
      struct Gate {
        std::atomic<bool> open{false}, gave_up{false};
      } gate;
      cuda_ok(cudaLaunchHostFunc(
          stream.get(),
          [](void* data) {
            Gate& g = *static_cast<Gate*>(data);
            for (int waited = 0; !g.open && waited < 5000; ++waited) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            g.gave_up = !g.open;
          },
          &gate));
      EXPECT_EQ(x.run(stream.get()), FOVEA_OK) << fovea_last_error();
      EXPECT_EQ(cudaStreamQuery(stream.get()), cudaErrorNotReady);
      gate.open = true;
      stream.wait();
      EXPECT_FALSE(gate.gave_up) << "the run waited for its stream";
      EXPECT_EQ(x.outputs(), eager);
    });
  }
}

/// Runs take no memory from the device.
TEST_F(Runs, AllocateNothing) {
  for (const ProblemSpec& spec : {everything(), growing()}) {
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
      x.outputs_alone();
      size_t before = 0, after = 0, total = 0;
      cuda_ok(cudaMemGetInfo(&before, &total));
      for (int repeat = 0; repeat < 50; ++repeat) ASSERT_EQ(x.run(nullptr), FOVEA_OK) << fovea_last_error();
      cuda_ok(cudaMemGetInfo(&after, &total));
      EXPECT_EQ(before, after);
      cuda_ok(cudaDeviceSynchronize());
    });
  }
}

/// Runs keep the order of their stream: copies around them need no synchronisation.
TEST_F(Runs, KeepTheOrderOfTheirStream) {
  for_each_backend(usual(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass pass) {
    const Bytes eager = x.outputs_alone();
    const Stream stream;
    const Role read = Role::kV, written = pass == FOVEA_FORWARD ? Role::kO : Role::kDQ;
    const size_t size = x.host()[read].memory().size();
    fovea_buffers b = x.buffers(stream.get());
    void* const v = const_cast<void*>(b.v);
    const void* const result = pass == FOVEA_FORWARD ? b.o : b.dq;
    const size_t result_size = x.host()[written].memory().size();
    const std::vector<unsigned char> right(static_cast<unsigned char*>(x.host()[read].data()),
                                           static_cast<unsigned char*>(x.host()[read].data()) + size);
    const DeviceBytes copy(result_size);
    cuda_ok(cudaMemset(v, kPattern, size));
    cuda_ok(cudaDeviceSynchronize());
    // NaN for the first run, the right values for the second, NaN again after it.
    EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK);
    cuda_ok(cudaMemcpyAsync(v, right.data(), size, cudaMemcpyHostToDevice, stream.get()));
    EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK);
    cuda_ok(cudaMemcpyAsync(copy.get(), result, result_size, cudaMemcpyDeviceToDevice, stream.get()));
    cuda_ok(cudaMemsetAsync(v, kPattern, size, stream.get()));
    EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK);
    cuda_ok(cudaMemcpyAsync(const_cast<void*>(result), copy.get(), result_size, cudaMemcpyDeviceToDevice,
                            stream.get()));
    stream.wait();
    EXPECT_EQ(x.outputs().at(written), eager.at(written));
  });
}

/// Runs in a chain: what each reads here is what the one before has written there, so that none may read before that has ended (nor write,
/// as two results take turns).
struct Chain {
  Role read, written;  ///< of one shape
  const void* fovea_buffers::*from;
  void* fovea_buffers::*to;
};
constexpr Chain kForwards = {Role::kQ, Role::kO, &fovea_buffers::q, &fovea_buffers::o};
constexpr Chain kBackwards = {Role::kDO, Role::kDQ, &fovea_buffers::d_o, &fovea_buffers::dq};

void expect_chain(DeviceProblem& x, const Chain& of) {
  const size_t size = x.host()[of.read].memory().size();
  ASSERT_EQ(x.host()[of.written].memory().size(), size);
  const std::array<DeviceBytes, 2> rows = {DeviceBytes(size), DeviceBytes(size)};
  const Stream stream;
  const auto chain = [&](bool apart) {
    fovea_buffers b = x.buffers(stream.get());
    cuda_ok(cudaMemcpyAsync(rows[0].get(), b.*of.from, size, cudaMemcpyDeviceToDevice, stream.get()));
    for (size_t i = 0; i < 8; ++i) {
      b.*of.from = rows[i % 2].get(), b.*of.to = rows[(i + 1) % 2].get();
      EXPECT_EQ(fovea_run(x.plan(), &b), FOVEA_OK) << fovea_last_error();
      if (apart) stream.wait();
    }
  };
  const auto result = [&] {
    std::vector<unsigned char> bytes(size);
    stream.wait();
    cuda_ok(cudaMemcpy(bytes.data(), rows[0].get(), size, cudaMemcpyDeviceToHost));
    return bytes;
  };
  x.upload();
  chain(true);
  const std::vector<unsigned char> right = result();
  for (int repeat = 0; repeat < 20; ++repeat) {
    chain(false);
    EXPECT_EQ(result(), right) << repeat;
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  chain(false);
  cuda_ok(cudaStreamEndCapture(stream.get(), &graph));
  cuda_ok(cudaGraphInstantiate(&replay, graph, 0));
  for (int repeat = 0; repeat < 20; ++repeat) {
    cuda_ok(cudaGraphLaunch(replay, stream.get()));
    EXPECT_EQ(result(), right) << "replay " << repeat;
  }
  cuda_ok(cudaGraphExecDestroy(replay));
  cuda_ok(cudaGraphDestroy(graph));
}
TEST_F(Runs, ReadWhatTheOneBeforeThemWrites) {
  for (const int keys : {300, 9000}) {  // on Hopper of one cluster; of several, merged by another launch
    ProblemSpec spec = decode();
    spec.seqlen_k = keys;
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass pass) {
      if (pass == FOVEA_FORWARD) expect_chain(x, kForwards);
    });
  }
}
/// Tiles of unequal work, more than two for each SM: from a counter that a launch before clears.
TEST_F(Runs, TakeTilesInAChain) {
  ProblemSpec spec = usual();
  spec.batch = 12;
  spec.heads_q = spec.heads_kv = 32;
  spec.seqlen_q = spec.seqlen_k = 256;
  for (const std::string& backend : cuda_backends()) {
    DeviceProblem x(spec, FOVEA_FORWARD, backend);
    if (x.plan() != nullptr) expect_chain(x, kForwards);
  }
}
/// The first launch of a small backward begins early, and the main kernel loads d_o without a wait of its own.
TEST_F(Runs, BackwardsReadWhatTheOneBeforeThemWrites) {
  for (const int head_dim : {64, 128, 256}) {
    ProblemSpec spec = usual();
    spec.head_dim = spec.head_dim_v = head_dim;
    for_each_backend(spec, [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass pass) {
      if (pass == FOVEA_BACKWARD) expect_chain(x, kBackwards);
    });
  }
}

/// Two problems at the same time, each with a stream of its own.
TEST_F(Runs, OnTwoStreamsDoNotInterfere) {
  for_each_backend(usual(),
                   [](DeviceProblem& a, const std::string& backend, ProblemSpec spec, fovea_pass pass) {
                     spec.data_seed = 77;
                     spec.seqlen_q = 131;
                     const DeviceProblem b(spec, pass, backend);
                     const Bytes alone_a = a.outputs_alone(), alone_b = b.outputs_alone();
                     const Stream stream_a, stream_b;
                     for (int repeat = 0; repeat < 10; ++repeat) {
                       a.upload();
                       b.upload();
                       for (int again = 0; again < 3; ++again) {
                         EXPECT_EQ(a.run(stream_a.get()), FOVEA_OK) << fovea_last_error();
                         EXPECT_EQ(b.run(stream_b.get()), FOVEA_OK) << fovea_last_error();
                       }
                       EXPECT_EQ(a.outputs(), alone_a) << repeat;
                       EXPECT_EQ(b.outputs(), alone_b) << repeat;
                     }
                   });
}

/// A hundred runs beside a changing load: none, a little, more than the GPU holds at a time. The load changes the
/// order of tiles and which CTA takes them.
TEST_F(Runs, RepeatAHundredTimesUnderAChangingLoad) {
  for (const ProblemSpec& kind : all_kinds()) {
    for_each_backend(
        kind, [](DeviceProblem& x, const std::string& backend, ProblemSpec spec, fovea_pass pass) {
          const Bytes alone = x.outputs_alone();
          spec.data_seed = 78;
          const DeviceProblem load(spec, pass, backend);
          constexpr int kStreams = 4;
          const Stream stream, load_streams[kStreams];
          for (int repeat = 0; repeat < 100; ++repeat) {
            x.upload();
            // The runs of the load all write the same outputs, which are not read.
            const int others = load.workspace_size() > 0 ? repeat % 2 : repeat % 17;
            for (int i = 0; i < others; ++i)
              ASSERT_EQ(load.run(load_streams[i % kStreams].get()), FOVEA_OK) << fovea_last_error();
            ASSERT_EQ(x.run(stream.get()), FOVEA_OK) << fovea_last_error();
            ASSERT_EQ(x.outputs(), alone) << "run " << repeat << " beside " << others;
          }
        });
  }
}

/// Every SM full, and its shared memory as busy as it gets: a load that comes too late for the copy behind it shows nowhere else. Of the
/// first backend, as it takes a minute.
TEST_F(Runs, GiveTheSameBitsOnAFullGpu) {
  const std::string backend = cuda_backends().front();
  for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
    for (const int64_t length : {128, 512}) {
      for (const bool causal : {false, true}) {
        ProblemSpec spec;
        spec.type = Type::kBF16;
        spec.heads_q = spec.heads_kv = 128;
        spec.seqlen_q = spec.seqlen_k = length;
        spec.head_dim = spec.head_dim_v = head_dim;
        spec.causal = causal;
        for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
          const DeviceProblem x(spec, pass, backend, {.forward_backend = cpu_backend()});
          if (!x.plan()) continue;
          const Stream stream;
          Bytes first;
          for (int repeat = 0; repeat < 25; ++repeat) {
            ASSERT_EQ(x.run(stream.get()), FOVEA_OK) << fovea_last_error();
            const Bytes outputs = x.outputs();
            if (repeat == 0) first = outputs;
            ASSERT_TRUE(outputs == first) << describe(spec) << ", run " << repeat;
          }
        }
      }
    }
  }
}

/// One plan, many host threads, each with buffers, workspace and stream of its own.
TEST_F(Runs, OfOnePlanFromManyThreads) {
  for (const ProblemSpec& kind : {usual(), decode()}) {
    for_each_backend(
        kind, [](DeviceProblem& x, const std::string& backend, const ProblemSpec& spec, fovea_pass pass) {
          constexpr size_t kThreads = 8;
          const Bytes alone = x.outputs_alone();
          std::vector<std::unique_ptr<DeviceProblem>> own;
          for (size_t t = 0; t < kThreads; ++t)
            own.push_back(std::make_unique<DeviceProblem>(spec, pass, backend));
          std::vector<std::string> failures(kThreads);
          std::vector<std::thread> threads;
          for (size_t t = 0; t < kThreads; ++t) {
            threads.emplace_back([&, t] {
              const Stream stream;
              for (int repeat = 0; repeat < 20 && failures[t].empty(); ++repeat) {
                const fovea_buffers b = own[t]->buffers(stream.get());
                if (fovea_run(x.plan(), &b) != FOVEA_OK) failures[t] = fovea_last_error();
              }
              stream.wait();
            });
          }
          for (std::thread& thread : threads) thread.join();
          for (size_t t = 0; t < kThreads; ++t) {
            EXPECT_EQ(failures[t], "") << "thread " << t;
            EXPECT_EQ(own[t]->outputs(), alone) << "thread " << t;
          }
        });
  }
}

/// Provokes races: launches problems of very different sizes in shuffled orders on many streams, so that their
/// CTAs share SMs, start late and in other orders than alone, and find other data in the caches.
TEST_F(Runs, GiveTheSameBitsInAnyLaunchOrder) {
  for (const std::string& backend : cuda_backends()) {
    std::vector<std::unique_ptr<DeviceProblem>> problems;
    std::vector<Bytes> alone;
    for (const Type type : {Type::kF32, Type::kF16, Type::kBF16}) {
      for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
        for (ProblemSpec spec : all_kinds()) {
          if (pass == FOVEA_BACKWARD && spec.forward_only()) continue;
          for (const int64_t length : {17, 130, 700}) {
            spec.type = type;
            if (spec.lengths_q.empty() && spec.seqlen_q > 1) spec.seqlen_q = length;
            spec.data_seed = static_cast<uint64_t>(length);
            auto x = std::make_unique<DeviceProblem>(spec, pass, backend);
            if (!x->plan()) continue;
            alone.push_back(x->outputs_alone());
            problems.push_back(std::move(x));
          }
        }
      }
    }
    EXPECT_FALSE(problems.empty()) << backend;
    std::vector<std::unique_ptr<Stream>> streams;
    for (int s = 0; s < 8; ++s) streams.push_back(std::make_unique<Stream>());
    std::mt19937 random(5);
    std::vector<size_t> order(problems.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (int round = 0; round < 12; ++round) {
      for (const auto& x : problems) x->upload();
      std::shuffle(order.begin(), order.end(), random);
      // Each problem on one stream of the round, two to four times in a row, so that its own runs stay in order.
      for (const size_t i : order) {
        const auto stream = streams[random() % streams.size()]->get();
        for (unsigned again = 0; again < 2 + random() % 3; ++again) {
          ASSERT_EQ(problems[i]->run(stream), FOVEA_OK) << fovea_last_error();
        }
      }
      for (size_t i = 0; i < problems.size(); ++i) {
        ASSERT_EQ(problems[i]->outputs(), alone[i])
            << backend << " round " << round << ": " << describe(problems[i]->host().spec);
      }
    }
  }
}

/// The default stream, and one call that does everything.
TEST_F(Runs, FromOneCallOfAttend) {
  for (const ProblemSpec& kind : all_kinds()) {
    for_each_backend(kind, [](DeviceProblem& x, const std::string& backend, const ProblemSpec&, fovea_pass) {
      const Bytes alone = x.outputs_alone();
      const Stream stream;
      for (void* const on : {static_cast<void*>(nullptr), static_cast<void*>(stream.get())}) {
        x.upload();
        const auto description = x.description();
        fovea_options options = FOVEA_OPTIONS_INIT;
        options.backend = backend.c_str();
        options.deterministic = 1;
        options.stream = on;
        const fovea_buffers b = x.buffers(nullptr);
        ASSERT_EQ(fovea_attend(&description->problem, &options, b.seed, b.offset), FOVEA_OK)
            << fovea_last_error();
        EXPECT_EQ(x.outputs(), alone);
      }
    });
  }
}

TEST_F(Runs, KeepTheCurrentDevice) {
  for_each_backend(usual(), [](DeviceProblem& x, const std::string&, const ProblemSpec&, fovea_pass) {
    for (int device = 0; device < gpus(); ++device) {
      cuda_ok(cudaSetDevice(device));
      EXPECT_EQ(x.run(nullptr), FOVEA_OK) << fovea_last_error();
      int now = -1;
      cuda_ok(cudaGetDevice(&now));
      EXPECT_EQ(now, device);
    }
    cuda_ok(cudaSetDevice(0));
    cuda_ok(cudaDeviceSynchronize());
  });
}

class TwoGpus : public Runs {
 protected:
  void SetUp() override {
    FOVEA_SKIP_WITHOUT_CUDA_BACKEND();
    FOVEA_SKIP_WITHOUT_TWO_GPUS();
  }
};

/// The same problem on both, at the same time, from a thread whose current device is the first.
TEST_F(TwoGpus, GiveTheSameBits) {
  for (const ProblemSpec& kind : all_kinds()) {
    for_each_backend(
        kind, [](DeviceProblem& x, const std::string& backend, const ProblemSpec& spec, fovea_pass pass) {
          const Bytes alone = x.outputs_alone();
          const DeviceProblem y(spec, pass, backend, {.device = 1});
          const Stream first(0), second(1);
          x.upload();
          y.upload();
          for (int repeat = 0; repeat < 5; ++repeat) {
            EXPECT_EQ(x.run(first.get()), FOVEA_OK) << fovea_last_error();
            EXPECT_EQ(y.run(second.get()), FOVEA_OK) << fovea_last_error();
          }
          first.wait();
          second.wait();
          EXPECT_EQ(x.outputs(), alone);
          EXPECT_EQ(y.outputs(), alone);
        });
  }
}

}  // namespace
}  // namespace fovea_test
