// Compares this backend with ggml's own on the masks of real models, which test-backend-ops does not make, and times both in
// turn. It prints a line of JSON for each case; exit status 1 when a result differs by more than ggml's own tests allow.
//
//   ggml_compare check                  small cases: masks, types, chunks of a long cache
//   ggml_compare time [ROUNDS [NAME [TYPE]]]   the sizes that the guide quotes, or those of one name and type
//   ggml_compare least [ROUNDS]         small problems, which show where the backend begins to pay
//   ggml_compare rows [ROUNDS]          quantised caches with few and with many rows
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

/// max_nmse_err() of test-backend-ops for this operation.
constexpr double kMostError = 5e-4;

struct Case {
  const char* name;
  int64_t d, d_v, heads, key_heads, queries, keys;
  ggml_type type;
  const char* mask;  ///< none, causal, window, sequences, prefix, random, alibi
  float softcap = 0;
  bool sinks = false;
  int64_t batch = 1;
};

std::vector<Case> small_cases() {
  std::vector<Case> cases;
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
    for (const char* mask : {"none", "causal", "window", "sequences", "prefix", "random", "alibi"}) {
      for (const int64_t queries : {1, 3, 70}) {
        cases.push_back({"small", 64, 64, 8, 2, queries, 333, type, mask, 0, false, 1});
        cases.push_back({"batch", 64, 96, 4, 4, queries, 512, type, mask, 30.0f, true, 2});
      }
    }
  }
  // A head of 40,000 keys of 128 as float32 is more than a panel, so these go chunk by chunk.
  for (const char* mask : {"none", "causal", "window", "sequences", "alibi"}) {
    cases.push_back({"chunks", 128, 128, 4, 2, 1, 40000, GGML_TYPE_Q8_0, mask, 0, true, 1});
    cases.push_back({"chunks", 128, 128, 2, 1, 9, 40000, GGML_TYPE_Q4_0, mask, 0, false, 1});
    cases.push_back({"panels", 128, 128, 4, 2, 60, 40000, GGML_TYPE_Q8_0, mask, 0, true, 1});
  }
  return cases;
}

std::vector<Case> timed_cases() {
  std::vector<Case> cases;
  for (const int64_t d : {64, 128}) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
      cases.push_back({"prefill", d, d, 8, 8, 4096, 4096, type, "causal"});
      cases.push_back({"decode", d, d, 32, 8, 1, 16384, type, "causal"});
    }
    for (const ggml_type type : {GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL})
      cases.push_back({"decode", d, d, 32, 8, 1, 16384, type, "causal"});
    for (const ggml_type type : {GGML_TYPE_BF16, GGML_TYPE_F32}) {
      cases.push_back({"prefill", d, d, 8, 8, 1024, 4096, type, "causal"});
      cases.push_back({"decode", d, d, 32, 8, 1, 16384, type, "causal"});
    }
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "causal"});
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "window"});
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "sequences"});
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "alibi"});
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "causal", 30.0f});
    cases.push_back({"ubatch", d, d, 32, 8, 512, 4096, GGML_TYPE_F16, "none"});
    cases.push_back({"decode", d, d, 32, 8, 1, 16384, GGML_TYPE_F16, "alibi"});
    cases.push_back({"decode", d, d, 32, 8, 4, 16384, GGML_TYPE_F16, "sequences"});
    cases.push_back({"decode", d, d, 32, 4, 1, 16384, GGML_TYPE_F16, "causal"});
    cases.push_back({"decode", d, d, 32, 8, 8, 16384, GGML_TYPE_F16, "causal"});
  }
  return cases;
}

/// Problems around those where this backend begins to pay.
std::vector<Case> least_cases() {
  std::vector<Case> cases;
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1}) {
    for (const int64_t d : {64, 128}) {
      for (const int64_t queries : {1, 3}) {
        for (const int64_t keys : {64, 128, 256, 512, 2048, 8192}) {
          for (const int64_t group : {1, 4}) {
            for (const int64_t key_heads : {4, 8}) {
              cases.push_back({"least", d, d, group * key_heads, key_heads, queries, keys, type, "causal"});
            }
          }
        }
      }
    }
  }
  return cases;
}

/// Rows of a key head around those up to which blocks are read as they are: four heads, one to sixteen queries.
std::vector<Case> rows_cases() {
  std::vector<Case> cases;
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL}) {
    for (const int64_t d : {64, 128}) {
      for (const int64_t queries : {1, 2, 4, 8, 12, 16})
        cases.push_back({"rows", d, d, 16, 4, queries, 8192, type, "causal"});
    }
  }
  return cases;
}

constexpr float kUnseen = -std::numeric_limits<float>::infinity();

/// The mask's number of a query and a key. Queries end at 3/4 of the cache, as while a text is read, or are all of it.
float mask_number(const Case& c, int64_t batch, int64_t i, int64_t j, std::mt19937& random) {
  const int64_t position = std::max<int64_t>(0, c.keys * 3 / 4 - c.queries) + i + batch * 7;
  const std::string kind = c.mask;
  if (kind == "random") return random() % 8 == 0 ? kUnseen : static_cast<float>(random() % 256) / 64 - 2;
  if (kind == "sequences") return (i + j) % 2 == 0 && j <= position ? 0.0f : kUnseen;  // two, cell by cell
  if (kind == "prefix") return j <= std::max(position, c.keys / 5) ? 0.0f : kUnseen;
  if (j > position) return kUnseen;
  if (kind == "window") return position - j < 100 ? 0.0f : kUnseen;
  return kind == "alibi" ? -static_cast<float>(position - j) : 0.0f;
}

struct Free {
  void operator()(ggml_context* x) const { ggml_free(x); }
  void operator()(ggml_backend_t x) const { ggml_backend_free(x); }
  void operator()(ggml_backend_buffer_t x) const { ggml_backend_buffer_free(x); }
};

/// The node of a case, with numbers in its tensors.
class Node {
 public:
  explicit Node(const Case& c) {
    ggml_init_params params = {};
    params.mem_size = 32 * ggml_tensor_overhead() + ggml_graph_overhead();
    params.no_alloc = true;
    context_.reset(ggml_init(params));
    const bool alibi = std::string(c.mask) == "alibi";
    ggml_tensor* q = new_tensor(GGML_TYPE_F32, c.d, c.queries, c.heads, c.batch);
    ggml_tensor* k = new_tensor(c.type, c.d, c.keys, c.key_heads, c.batch);
    ggml_tensor* v = new_tensor(c.type, c.d_v, c.keys, c.key_heads, c.batch);
    ggml_tensor* m = std::string(c.mask) == "none"
                         ? nullptr
                         : ggml_new_tensor_4d(context_.get(), GGML_TYPE_F16, c.keys, c.queries, 1, c.batch);
    ggml_tensor* s = c.sinks ? ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, c.heads) : nullptr;
    output = ggml_flash_attn_ext(context_.get(), q, k, v, m, 1 / std::sqrt(static_cast<float>(c.d)),
                                 alibi ? 8.0f : 0.0f, c.softcap);
    ggml_flash_attn_ext_add_sinks(output, s);
    graph = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph, output);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_cpu_buffer_type()));
    std::mt19937 random(static_cast<unsigned>(c.d + c.keys + c.queries));
    for (ggml_tensor* t : {q, k, v, s}) {
      if (t != nullptr) fill(t->view_src != nullptr ? t->view_src : t, random);
    }
    if (m != nullptr) fill_mask(c, m, random);
  }

  std::vector<float> result() const {
    const auto* data = static_cast<const float*>(output->data);
    return {data, data + ggml_nelements(output)};
  }

  ggml_tensor* output;
  ggml_cgraph* graph;

 private:
  /// (size, rows, heads, batch), laid out as a cache is: the heads of a row lie side by side.
  ggml_tensor* new_tensor(ggml_type type, int64_t size, int64_t rows, int64_t heads, int64_t batch) {
    ggml_tensor* t = ggml_new_tensor_4d(context_.get(), type, size, heads, rows, batch);
    return ggml_permute(context_.get(), t, 0, 2, 1, 3);
  }

  static void fill(ggml_tensor* t, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(t->ne[0]));
    const size_t bytes = ggml_row_size(t->type, t->ne[0]);
    for (int64_t i = 0; i < ggml_nrows(t); ++i) {
      for (float& x : row) x = normal(random);
      char* to = static_cast<char*>(t->data) + static_cast<size_t>(i) * bytes;
      if (t->type == GGML_TYPE_F32) {
        std::memcpy(to, row.data(), bytes);
      } else {
        ggml_quantize_chunk(t->type, row.data(), to, 0, 1, t->ne[0], nullptr);
      }
    }
  }

  static void fill_mask(const Case& c, ggml_tensor* m, std::mt19937& random) {
    auto* to = static_cast<ggml_fp16_t*>(m->data);
    for (int64_t batch = 0; batch < c.batch; ++batch) {
      for (int64_t i = 0; i < c.queries; ++i) {
        for (int64_t j = 0; j < c.keys; ++j) *to++ = ggml_fp32_to_fp16(mask_number(c, batch, i, j, random));
      }
    }
  }

  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_backend_buffer, Free> buffer_;
};

using Backend = std::unique_ptr<ggml_backend, Free>;

Backend backend_named(const char* name, int threads) {
  ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
  if (device == nullptr) return nullptr;
  Backend backend(ggml_backend_dev_init(device, nullptr));
  const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
  if (set_threads != nullptr) set_threads(backend.get(), threads);
  return backend;
}

/// Squared error over squared length, as test-backend-ops has it.
double error_of(const std::vector<float>& x, const std::vector<float>& expected) {
  double error = 0, length = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i])) return std::numeric_limits<double>::infinity();
    error += (x[i] - expected[i]) * static_cast<double>(x[i] - expected[i]);
    length += expected[i] * static_cast<double>(expected[i]);
  }
  return error / std::max(length, 1e-30);
}

double seconds_of(ggml_backend_t backend, ggml_cgraph* graph) {
  // Short runs are repeated until they can be timed.
  constexpr double kLeastSeconds = 0.02;
  for (int runs = 1;; runs *= 4) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < runs; ++i) ggml_backend_graph_compute(backend, graph);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (seconds >= kLeastSeconds) return seconds / runs;
  }
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/// Prints the case; true when the results agree.
bool compare(const Case& c, ggml_backend_t ggml, ggml_backend_t fovea, int rounds) {
  const Node node(c);
  if (!ggml_backend_supports_op(fovea, node.output)) {
    std::printf("{\"case\": \"%s\", \"mask\": \"%s\", \"declined\": true}\n", c.name, c.mask);
    return true;
  }
  ggml_backend_graph_compute(ggml, node.graph);
  const std::vector<float> expected = node.result();
  std::fill_n(static_cast<float*>(node.output->data), expected.size(), NAN);
  const bool computed = ggml_backend_graph_compute(fovea, node.graph) == GGML_STATUS_SUCCESS;
  const double error = error_of(node.result(), expected);
  const bool same = computed && error <= kMostError;
  std::printf(
      "{\"case\": \"%s\", \"d\": %d, \"dv\": %d, \"heads\": %d, \"key_heads\": %d, \"queries\": %d, "
      "\"keys\": %d, \"batch\": %d, \"type\": \"%s\", \"mask\": \"%s\", \"softcap\": %g, "
      "\"sinks\": %s, \"error\": %.2e, \"same\": %s",
      c.name, static_cast<int>(c.d), static_cast<int>(c.d_v), static_cast<int>(c.heads),
      static_cast<int>(c.key_heads), static_cast<int>(c.queries), static_cast<int>(c.keys),
      static_cast<int>(c.batch), ggml_type_name(c.type), c.mask, static_cast<double>(c.softcap),
      c.sinks ? "true" : "false", error, same ? "true" : "false");
  if (rounds > 0) {
    std::vector<double> ggml_seconds, fovea_seconds;
    for (int round = 0; round < rounds; ++round) {
      ggml_seconds.push_back(seconds_of(ggml, node.graph));
      fovea_seconds.push_back(seconds_of(fovea, node.graph));
    }
    std::printf(", \"ggml_ms\": %.4f, \"fovea_ms\": %.4f, \"ratio\": %.2f", 1e3 * median(ggml_seconds),
                1e3 * median(fovea_seconds), median(ggml_seconds) / median(fovea_seconds));
  }
  std::printf("}\n");
  std::fflush(stdout);
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 3;
  ggml_backend_load_all();
  const int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const Backend ggml = backend_named("CPU", threads), fovea = backend_named("Fovea", threads);
  if (ggml == nullptr || fovea == nullptr) {
    std::fprintf(stderr, "no backend %s: set GGML_BACKEND_PATH to libggml-fovea.so\n",
                 ggml == nullptr ? "CPU" : "Fovea");
    return 2;
  }
  bool same = true;
  const bool timed = mode != "check";
  const std::vector<Case> cases = mode == "time"    ? timed_cases()
                                  : mode == "least" ? least_cases()
                                  : mode == "rows"  ? rows_cases()
                                                    : small_cases();
  for (const Case& c : cases) {
    if (argc > 3 && c.name != std::string(argv[3])) continue;
    if (argc > 4 && ggml_type_name(c.type) != std::string(argv[4])) continue;
    same = compare(c, ggml.get(), fovea.get(), timed ? rounds : 0) && same;
  }
  return same ? 0 : 1;
}
