// fovea_bench: how fast this library is on this machine, by itself. For each row of rows.py: makes normal
// random inputs, checks sampled rows of the result against the backend "reference", warms up, times repeated
// runs; prints a table and writes JSON. Decoding is timed in turns with a plain read of K and V, and told as
// a share of that.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/fovea.hpp"
#include "read_memory.hpp"

namespace fovea::bench {
namespace {

constexpr const char* kRowLines[] = {
#include "rows.inc"
};

struct Settings {
  std::string filter, json, backend;
  double min_time = 0.5;  ///< seconds of timed runs a row
  int threads = 0;
  bool bshd = false;  ///< memory order (b, s, h, d) and not (b, h, s, d)
};

struct Row {
  std::string dtype, pass, mask;
  int64_t b = 0, s = 0, h = 0, d = 0;

  bool causal() const { return mask == "causal"; }
  bool decode() const { return mask == "decode"; }
  bool backward() const { return pass == "bwd"; }
  int64_t seqlen_q() const { return decode() ? 1 : s; }
  int64_t element_bytes() const { return dtype == "float32" ? 4 : 2; }
  std::string name() const {
    return dtype + "_" + pass + "_b" + std::to_string(b) + "_s" + std::to_string(s) + "_h" +
           std::to_string(h) + "_d" + std::to_string(d) + "_" + mask;
  }
  /// 4 b h sq sk d, half of it when causal, 2.5 times that for the backward.
  double flops() const {
    return 4.0 * static_cast<double>(b * h * seqlen_q()) * static_cast<double>(s * d) *
           (causal() ? 0.5 : 1.0) * (backward() ? 2.5 : 1.0);
  }
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

/// The rows of rows.py, those of one type and pass together.
std::vector<Row> all_rows() {
  std::vector<Row> rows;
  for (const char* line : kRowLines) {
    const std::vector<std::string> fields = split(line, ' ');
    for (const std::string& dtype : split(fields.at(5), ',')) {
      for (const std::string& pass : split(fields.at(6), ',')) {
        for (const std::string& mask : split(fields.at(4), ',')) {
          rows.push_back({dtype, pass, mask, std::stoll(fields[0]), std::stoll(fields[1]),
                          std::stoll(fields[2]), std::stoll(fields[3])});
        }
      }
    }
  }
  const auto rank = [](const Row& row) {
    return (row.decode() ? 4 : 0) + (row.dtype == "float32" ? 0 : 2) + (row.backward() ? 1 : 0);
  };
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) { return rank(a) < rank(b); });
  return rows;
}

// ---- memory
// ------------------------------------------------------------------------------------------------------------------

/// A tensor (batch, length, heads, size) of float32 or bfloat16 in one of the two memory orders, from a page
/// boundary.
class Array {
 public:
  Array() = default;
  Array(const std::string& dtype, int64_t b, int64_t s, int64_t h, int64_t d, bool bshd)
      : dtype_(dtype == "float32" ? dtype_of<float>() : dtype_of<bf16>()),
        shape_{b, s, h, d},
        strides_{h * s * d, bshd ? h * d : d, bshd ? d : s * d, 1} {
    constexpr size_t kPage = 4096;
    const size_t bytes = (static_cast<size_t>(count() * element_bytes()) + kPage - 1) / kPage * kPage;
    memory_.reset(std::aligned_alloc(kPage, bytes));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, bytes);
  }

  int64_t count() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }
  int64_t element_bytes() const { return dtype_.bits / 8; }
  size_t bytes() const { return static_cast<size_t>(count() * element_bytes()); }
  void* data() const { return memory_.get(); }

  Tensor tensor() const { return Tensor(data(), dtype_, shape_, strides_); }
  /// Positions [first, first + length) of one head.
  Tensor slice(int64_t b, int64_t h, int64_t first, int64_t length) const {
    const std::array<int64_t, 4> shape = {1, length, 1, shape_[3]};
    auto* start = static_cast<char*>(data()) + index(b, first, h, 0) * element_bytes();
    return Tensor(start, dtype_, shape, strides_);
  }

  double at(int64_t b, int64_t s, int64_t h, int64_t d) const {
    const int64_t i = index(b, s, h, d);
    if (dtype_.bits == 32) return static_cast<double>(static_cast<const float*>(data())[i]);
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data())[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return static_cast<double>(value);
  }
  void fill_normal(uint64_t seed) {
    std::mt19937_64 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count(); ++i) {
      const float value = normal(generator);
      if (dtype_.bits == 32) {
        static_cast<float*>(data())[i] = value;
      } else {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        static_cast<uint16_t*>(data())[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      }
    }
  }
  /// Zeroes the positions [first, last) of every head.
  void zero(int64_t first, int64_t last) {
    for (int64_t b = 0; b < shape_[0]; ++b) {
      for (int64_t h = 0; h < shape_[2]; ++h) {
        for (int64_t s = first; s < last; ++s) {
          std::memset(static_cast<char*>(data()) + index(b, s, h, 0) * element_bytes(), 0,
                      static_cast<size_t>(shape_[3] * element_bytes()));
        }
      }
    }
  }

 private:
  int64_t index(int64_t b, int64_t s, int64_t h, int64_t d) const {
    return b * strides_[0] + s * strides_[1] + h * strides_[2] + d;
  }
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  fovea_dtype dtype_{};
  std::array<int64_t, 4> shape_{}, strides_{};
  std::unique_ptr<void, Free> memory_;
};

/// The tensors of one row, and the problem over them.
struct Case {
  Array q, k, v, o, d_o, dq, dk, dv;
  std::vector<float> lse;
  std::array<int64_t, 3> lse_shape;

  Case(const Row& row, bool bshd) : lse_shape{row.b, row.h, row.seqlen_q()} {
    const auto make = [&](int64_t length) { return Array(row.dtype, row.b, length, row.h, row.d, bshd); };
    q = make(row.seqlen_q());
    k = make(row.s);
    v = make(row.s);
    o = make(row.seqlen_q());
    lse.resize(static_cast<size_t>(row.b * row.h * row.seqlen_q()));
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    if (!row.backward()) return;
    d_o = make(row.s);
    d_o.fill_normal(4);
    dq = make(row.s);
    dk = make(row.s);
    dv = make(row.s);
  }
  Tensor lse_tensor() { return Tensor(lse.data(), lse_shape); }
  Problem forward(const Row& row) {
    return {.q = q.tensor(),
            .k = k.tensor(),
            .v = v.tensor(),
            .o = o.tensor(),
            .lse = lse_tensor(),
            .causal = row.causal()};
  }
  Problem backward(const Row& row) {
    Problem problem = forward(row);
    problem.pass = Pass::backward;
    problem.d_o = d_o.tensor();
    problem.dq = dq.tensor();
    problem.dk = dk.tensor();
    problem.dv = dv.tensor();
    return problem;
  }
  Buffers buffers(const Row& row) {
    Buffers b{.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()};
    if (row.backward()) {
      b.d_o = d_o.data();
      b.dq = dq.data();
      b.dk = dk.data();
      b.dv = dv.data();
    }
    return b;
  }
};

// ---- check
// -------------------------------------------------------------------------------------------------------------------

struct Block {
  int64_t first, length;
};

/// The first, middle and last rows of a long sequence, all of a short one.
std::vector<Block> sampled_blocks(int64_t rows) {
  constexpr int64_t kAll = 512, kSampled = 16;
  if (rows <= kAll) return {{0, rows}};
  return {{0, kSampled}, {rows / 2 - kSampled / 2, kSampled}, {rows - kSampled, kSampled}};
}

/// Largest difference relative to the largest value.
class Difference {
 public:
  void add(double got, double expected) {
    difference_ = std::isnan(got) ? HUGE_VAL : std::max(difference_, std::abs(got - expected));
    largest_ = std::max(largest_, std::abs(expected));
  }
  double relative() const { return difference_ / std::max(largest_, 1e-30); }

 private:
  double difference_ = 0, largest_ = 0;
};

/// Runs the row once on inputs whose d_o is zero outside sampled rows and compares the last head of the last
/// batch with the reference on those rows alone: a row without d_o adds nothing to dK and dV. Returns the
/// largest difference.
double check(const Row& row, Case& c, const Options& options) {
  const std::vector<Block> blocks = sampled_blocks(row.seqlen_q());
  const int64_t b = row.b - 1, h = row.h - 1, d = row.d;
  attend(c.forward(row), options);
  if (row.backward()) {
    int64_t last = 0;
    for (const Block& block : blocks) {
      c.d_o.zero(last, block.first);
      last = block.first + block.length;
    }
    c.d_o.zero(last, row.s);
    attend(c.backward(row), options);
  }

  Difference of_o, of_lse, of_dq, of_dk, of_dv;
  const auto key_values = static_cast<size_t>(row.s * d);
  std::vector<float> dk(key_values), dv(key_values);
  for (const auto& [first, length] : blocks) {
    // Causal is aligned bottom-right: these rows see the keys up to the last of them.
    const int64_t keys = row.causal() ? first + length : row.s;
    const Options reference{.backend = "reference", .num_threads = options.num_threads};
    Array o(row.dtype, 1, length, 1, d, false), part_dq(row.dtype, 1, length, 1, d, false);
    Array part_dk(row.dtype, 1, keys, 1, d, false), part_dv(row.dtype, 1, keys, 1, d, false);
    std::vector<float> lse(static_cast<size_t>(length));
    Problem problem{.q = c.q.slice(b, h, first, length),
                    .k = c.k.slice(b, h, 0, keys),
                    .v = c.v.slice(b, h, 0, keys),
                    .o = o.tensor(),
                    .lse = Tensor(lse.data(), {1, 1, length}),
                    .causal = row.causal()};
    attend(problem, reference);
    const float* got_lse = c.lse.data() + (b * row.h + h) * row.seqlen_q() + first;
    for (int64_t i = 0; i < length; ++i) {
      of_lse.add(static_cast<double>(got_lse[i]), static_cast<double>(lse[static_cast<size_t>(i)]));
      for (int64_t x = 0; x < d; ++x) of_o.add(c.o.at(b, first + i, h, x), o.at(0, i, 0, x));
    }
    if (!row.backward()) continue;
    problem.d_o = c.d_o.slice(b, h, first, length);
    problem.dq = part_dq.tensor();
    problem.dk = part_dk.tensor();
    problem.dv = part_dv.tensor();
    attend_backward(problem, reference);
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t x = 0; x < d; ++x) of_dq.add(c.dq.at(b, first + i, h, x), part_dq.at(0, i, 0, x));
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t x = 0; x < d; ++x) {
        dk[static_cast<size_t>(j * d + x)] += static_cast<float>(part_dk.at(0, j, 0, x));
        dv[static_cast<size_t>(j * d + x)] += static_cast<float>(part_dv.at(0, j, 0, x));
      }
    }
  }
  if (row.backward()) {
    for (int64_t j = 0; j < row.s; ++j) {
      for (int64_t x = 0; x < d; ++x) {
        of_dk.add(c.dk.at(b, j, h, x), static_cast<double>(dk[static_cast<size_t>(j * d + x)]));
        of_dv.add(c.dv.at(b, j, h, x), static_cast<double>(dv[static_cast<size_t>(j * d + x)]));
      }
    }
    c.d_o.fill_normal(4);
  }
  const double error =
      std::max({of_o.relative(), of_lse.relative(), of_dq.relative(), of_dk.relative(), of_dv.relative()});
  const double allowed = row.dtype == "float32" ? 2e-5 : 2e-2;
  if (!(error <= allowed)) {
    std::ostringstream text;
    text << row.name() << ": differs from the reference by " << error << " of the largest value, allowed "
         << allowed << " (o " << of_o.relative() << ", lse " << of_lse.relative() << ", dq "
         << of_dq.relative() << ", dk " << of_dk.relative() << ", dv " << of_dv.relative() << ")";
    throw std::runtime_error(text.str());
  }
  return error;
}

// ---- time
// --------------------------------------------------------------------------------------------------------------------

struct Times {
  std::vector<double> seconds;

  double quantile(double q) const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    const double at = q * static_cast<double>(sorted.size() - 1);
    const auto below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
  }
  double median() const { return quantile(0.5); }
  /// Interquartile range over the median.
  double spread() const { return (quantile(0.75) - quantile(0.25)) / median(); }
};

template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Result {
  Row row;
  std::string backend;
  size_t workspace = 0;
  double error = 0;
  Times ours, read;
  size_t read_bytes = 0;
  std::string read_way;
};

/// The way whose best of three reads takes least.
template <class Read>
ReadWay fastest_way(const Read& read) {
  constexpr int kTries = 3;
  double least = HUGE_VAL;
  ReadWay fastest{};
  for (const ReadWay& way : read_ways()) {
    read(way);
    for (int i = 0; i < kTries; ++i) {
      const double seconds = seconds_of([&] { read(way); });
      if (seconds < least) {
        least = seconds;
        fastest = way;
      }
    }
  }
  return fastest;
}

/// A round runs once what is timed; rounds until `min_time` seconds are timed, at least five.
Result measure(const Row& row, const Settings& settings, int threads) {
  constexpr size_t kMinRounds = 5, kMaxRounds = 2000;
  const Options options{.backend = settings.backend, .num_threads = threads};
  Case c(row, settings.bshd);
  Result result;
  result.row = row;
  result.error = check(row, c, options);
  attend(c.forward(row), options);  // o and lse for the backward
  const Plan plan(row.backward() ? c.backward(row) : c.forward(row), options);
  Workspace workspace(plan);
  const Buffers buffers = c.buffers(row);
  const auto ours = [&] { plan.run(buffers, workspace); };
  MemoryReader reader(row.decode() ? threads : 1);
  // What is read and never used may be optimised away: its sum leaves through here.
  volatile uint32_t sink = 0;
  const auto read = [&](const ReadWay& way) {
    sink = reader.read(c.k.data(), c.k.bytes(), way) + reader.read(c.v.data(), c.v.bytes(), way);
  };
  result.backend = plan.backend();
  result.workspace = plan.workspace_size();
  result.read_bytes = c.k.bytes() + c.v.bytes();

  ours();
  ReadWay way{};
  if (row.decode()) {
    way = fastest_way(read);
    result.read_way = way.name();
  }
  for (double spent = 0; (spent < settings.min_time || result.ours.seconds.size() < kMinRounds) &&
                         result.ours.seconds.size() < kMaxRounds;) {
    result.ours.seconds.push_back(seconds_of(ours));
    spent += result.ours.seconds.back();
    if (row.decode()) result.read.seconds.push_back(seconds_of([&] { read(way); }));
  }
  return result;
}

// ---- report
// ------------------------------------------------------------------------------------------------------------------

double bandwidth_share(const Result& r) {
  return r.read.median() / r.ours.median();
}

void print(const Result& r) {
  std::printf("%-44s %-16s %10.3f ms %5.1f %% %9.1f GFLOP/s %9.2f MB  %.1e", r.row.name().c_str(),
              r.backend.c_str(), 1e3 * r.ours.median(), 100 * r.ours.spread(),
              r.row.flops() / r.ours.median() * 1e-9, static_cast<double>(r.workspace) * 1e-6, r.error);
  if (r.row.decode()) {
    const double rate = static_cast<double>(r.read_bytes) * 1e-9;
    std::printf("  %.1f GB/s, %.1f %% of a plain read (%.1f GB/s; %s)", rate / r.ours.median(),
                100 * bandwidth_share(r), rate / r.read.median(), r.read_way.c_str());
  }
  std::printf("\n");
  std::fflush(stdout);
}

void write_json(const std::string& path, const std::vector<Result>& results, int threads) {
  std::ofstream out(path);
  out << "{\n\"version\": \"" << version() << "\",\n\"machine\": \"" << machine()
      << "\",\n\"threads\": " << threads << ",\n\"rows\": [";
  const char* comma = "\n";
  for (const Result& r : results) {
    out << comma << "{\"name\": \"" << r.row.name() << "\", \"backend\": \"" << r.backend
        << "\", \"ms\": " << 1e3 * r.ours.median() << ", \"spread\": " << r.ours.spread()
        << ", \"runs\": " << r.ours.seconds.size()
        << ", \"gflops\": " << r.row.flops() / r.ours.median() * 1e-9
        << ", \"workspace_bytes\": " << r.workspace << ", \"error\": " << r.error;
    if (r.row.decode()) {
      out << ", \"read_ms\": " << 1e3 * r.read.median() << ", \"read_spread\": " << r.read.spread()
          << ", \"read_gb_s\": " << static_cast<double>(r.read_bytes) / r.read.median() * 1e-9
          << ", \"read_way\": \"" << r.read_way << "\", \"share_of_read\": " << bandwidth_share(r);
    }
    out << "}";
    comma = ",\n";
  }
  out << "\n]\n}\n";
  if (!out.flush()) throw std::runtime_error(path + ": could not be written");
}

constexpr const char* kUsage =
    "fovea_bench [options]: speed of Fovea on this machine\n"
    "  --rows TEXT       only rows whose name contains TEXT; --list names them\n"
    "  --min-time S      seconds of timed runs a row (0.5)\n"
    "  --threads N       worker threads (all that the process may use)\n"
    "  --backend NAME    this backend and not the first that can\n"
    "  --layout NAME     memory order: bhsd (default) or bshd\n"
    "  --json PATH       writes the results there, too\n";

int run(int argc, char** argv) {
  Settings settings;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--help") {
      std::cout << kUsage;
      return 0;
    }
    if (option == "--list") {
      list = true;
      continue;
    }
    if (i + 1 == argc)
      throw std::invalid_argument(std::string(option) + ": unknown option, or its value is missing");
    const std::string value = argv[++i];
    if (option == "--rows") {
      settings.filter = value;
    } else if (option == "--min-time") {
      settings.min_time = std::stod(value);
    } else if (option == "--threads") {
      settings.threads = std::stoi(value);
    } else if (option == "--backend") {
      settings.backend = value;
    } else if (option == "--layout" && (value == "bhsd" || value == "bshd")) {
      settings.bshd = value == "bshd";
    } else if (option == "--json") {
      settings.json = value;
    } else {
      throw std::invalid_argument(std::string(option) + " " + value + ": unknown; --help tells the options");
    }
  }
  std::vector<Row> rows = all_rows();
  std::erase_if(rows, [&](const Row& row) { return row.name().find(settings.filter) == std::string::npos; });
  if (list) {
    for (const Row& row : rows) std::cout << row.name() << "\n";
    return 0;
  }
  const int threads = settings.threads > 0 ? settings.threads : default_threads();
  std::cout << "fovea " << version() << "; " << machine() << "; " << threads << " threads used\n"
            << "row, backend, median, spread (interquartile range over median), rate, workspace, largest "
               "difference from "
               "the reference over the largest value\n";
  std::vector<Result> results;
  for (const Row& row : rows) {
    results.push_back(measure(row, settings, threads));
    print(results.back());
  }
  if (!settings.json.empty()) write_json(settings.json, results, threads);
  return 0;
}

}  // namespace
}  // namespace fovea::bench

int main(int argc, char** argv) {
  try {
    return fovea::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "fovea_bench: " << error.what() << "\n";
    return 1;
  }
}
