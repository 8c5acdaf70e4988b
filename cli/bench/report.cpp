// Rows of `fovea bench` as a table and as JSON.
#include "cli/bench/report.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

const char* pass_name(Pass pass) {
  return pass == Pass::forward ? "fwd" : "bwd";
}

Json json_of(const BenchRow& row, bool on_gpu) {
  const Shape& s = row.what.shape;
  Json entry = Json::object();
  if (!row.what.name.empty()) entry["name"] = row.what.name;
  if (row.what.cache) {
    entry["page"] = row.what.cache->page;
    entry["layout"] = row.what.cache->heads_outside ? "bhsd" : "bshd";
    entry["cache_dtype"] = row.what.cache->of_8_bits ? "float8_e4m3fn" : type_name(s.type);
    entry["caches"] = row.what.cache->copies;
  }
  entry.update({{"pass", pass_name(row.what.pass)},
                {"dtype", type_name(s.type)},
                {"batch", s.batch},
                {"seqlen", s.seqlen_q},
                {"seqlen_k", s.seqlen_k},
                {"heads", s.heads_q},
                {"heads_kv", s.heads_kv},
                {"head_dim", s.head_dim},
                {"head_dim_v", s.head_dim_v},
                {"causal", row.what.terms.causal},
                {"backend", row.backend},
                {"workspace_bytes", row.workspace},
                {"flops", row.flops},
                {"right", row.right()},
                {"relative_error", row.error},
                {"allowed_error", row.allowed},
                {"rows_checked", row.rows_checked}});
  if (!row.right()) return entry;
  entry["runs"] = row.timing.runs;
  entry["median_seconds"] = row.timing.median;
  entry["fastest_seconds"] = row.timing.fastest;
  entry["spread"] = row.timing.spread;
  entry["gflops"] = row.rate() * 1e-9;
  if (on_gpu) entry["host_nanoseconds"] = row.host_seconds * 1e9;
  if (row.what.reads_memory) {
    entry["key_bytes"] = row.what.key_bytes();
    entry["key_gb_s"] = row.key_rate() * 1e-9;
  }
  if (row.read) {
    entry["read"] = {{"median_seconds", row.read->timing.median},
                     {"spread", row.read->timing.spread},
                     {"gb_s", row.read->rate() * 1e-9},
                     {"way", row.read->way},
                     {"share", row.share_of_read()}};
  }
  if (row.single) {
    entry["ranks"] = {{"count", row.single->ranks},
                      {"single_median_seconds", row.single->timing.median},
                      {"single_spread", row.single->timing.spread},
                      {"share", row.share_of_single()},
                      {"reason", row.single->reason}};
  }
  return entry;
}

std::string pair_text(int64_t a, int64_t b) {
  return a == b ? std::to_string(a) : fmt::format("{}/{}", a, b);
}

std::vector<std::string> cells(const BenchRow& row, bool on_gpu) {
  const Shape& s = row.what.shape;
  const bool right = row.right();
  std::vector<std::string> line = {pass_name(row.what.pass),
                                   type_name(s.type),
                                   std::to_string(s.batch),
                                   std::to_string(s.seqlen_q),
                                   std::to_string(s.seqlen_k),
                                   pair_text(s.heads_q, s.heads_kv),
                                   pair_text(s.head_dim, s.head_dim_v),
                                   row.backend,
                                   right ? seconds_text(row.timing.median) : "WRONG",
                                   right ? seconds_text(row.timing.fastest) : "-",
                                   right ? fmt::format("{:.0f} %", row.timing.spread * 100) : "-",
                                   right ? fmt::format("{:.1f}", row.rate() * 1e-9) : "-",
                                   bytes_text(static_cast<double>(row.workspace)),
                                   fmt::format("{:.1e}", row.error)};
  if (on_gpu) line.insert(line.end() - 1, right ? seconds_text(row.host_seconds) : "-");
  // A listed row's name says its type, pass and sizes.
  if (!row.what.name.empty()) line.erase(line.begin() + 1, line.begin() + 7);
  if (!row.what.name.empty()) line.front() = row.what.name;
  return line;
}

}  // namespace

void print_bench_json(const BenchSetting& setting, const std::vector<BenchRow>& rows) {
  Json json = {{"version", version()},
               {"machine", machine()},
               {"threads", setting.threads},
               {"causal", setting.causal},
               {"rows", Json::array()}};
  if (!setting.gpu.empty()) json["gpu"] = setting.gpu;
  for (const BenchRow& row : rows) json["rows"].push_back(json_of(row, !setting.gpu.empty()));
  print_json(json);
}

void print_bench_table(const BenchSetting& setting, const std::vector<BenchRow>& rows) {
  const bool on_gpu = !setting.gpu.empty();
  fmt::print("fovea {} on {}{}\n", version(),
             on_gpu ? setting.gpu : fmt::format("{}; {} threads", machine(), setting.threads),
             setting.causal ? "; causal" : "");
  std::vector<std::string> head = {"pass",   "dtype",   "batch",     "queries", "keys",
                                   "heads",  "size",    "backend",   "median",  "fastest",
                                   "spread", "GFLOP/s", "workspace", "error"};
  if (on_gpu) head.insert(head.end() - 1, "host");
  if (!rows.empty() && !rows.front().what.name.empty()) {
    head.erase(head.begin() + 1, head.begin() + 7);
    head.front() = "row";
  }
  Table table;
  table.add(head);
  for (const BenchRow& row : rows) table.add(cells(row, on_gpu));
  fmt::print("{}", table.text());
  for (const BenchRow& row : rows) {
    if (!row.read || !row.right()) continue;
    fmt::print("{}: K and V at {:.1f} GB/s, {:.1f} % of a plain read of them at {:.1f} GB/s ({})\n",
               row.what.name, row.key_rate() * 1e-9, 100 * row.share_of_read(), row.read->rate() * 1e-9,
               row.read->way);
  }
  for (const BenchRow& row : rows) {
    if (!row.single || !row.right()) continue;
    fmt::print("{} {} {}: {} ranks at {:.3f} of the rate of one with all threads, {}\n",
               pass_name(row.what.pass), type_name(row.what.shape.type), row.what.shape.seqlen_q,
               row.single->ranks, row.share_of_single(), seconds_text(row.single->timing.median));
  }
  if (on_gpu) {
    fmt::print(
        "median, fastest: one launch inside a CUDA graph, on inputs that stay in place; host: one call "
        "outside of a graph\n");
  }
  fmt::print(
      "spread: interquartile range over the median; error: relative, against the oracle in float64, on a "
      "slice\n");
}

}  // namespace fovea::cli
