// Prints the rows of `fovea ladder`, as a table and as JSON.
#include "cli/ladder/rows.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>

namespace fovea::cli {
namespace {

const char* unit_of(const ladder::Rung& rung) {
  return rung.bound == ladder::Bound::gpu_memory ? "GB/s" : "GFLOP/s";
}

/// The column of a peer: backends of the library may differ from shape to shape.
std::string column_of(const Peer& peer) {
  return "of " + (peer.is_library ? "fovea" : peer.name);
}

std::string share_text(double share) {
  return fmt::format("{:.2f}x", share);
}

/// The cells behind the shape of a rung that was timed.
std::vector<std::string> time_cells(const LadderRow& row, const std::vector<std::string>& peer_columns) {
  double error = 0;
  for (const ladder::OutputError& e : row.checked.errors) error = std::max(error, e.relative);
  std::vector<std::string> cells(5 + peer_columns.size(), "-");
  if (!row.timed()) {
    cells[0] = row.profiled ? "profiled" : "WRONG";
  } else {
    cells[0] = seconds_text(row.timing.median);
    cells[1] = fmt::format("{:.0f} %", row.timing.spread * 100);
    cells[2] = fmt::format("{:.4g} {}", row.rate() * 1e-9, unit_of(*row.rung));
    if (row.peak > 0) cells[3] = fmt::format("{:.1f} %", row.rate() / row.peak * 100);
    if (row.before) cells[4] = share_text(*row.before / row.timing.median);
    for (const Peer& peer : row.peers) {
      const auto at = std::find(peer_columns.begin(), peer_columns.end(), column_of(peer));
      cells[static_cast<size_t>(5 + (at - peer_columns.begin()))] = share_text(row.share(peer));
    }
  }
  cells.push_back(fmt::format("{:.1e}", error));
  return cells;
}

std::vector<std::string> memory_cells(const LadderRow& row) {
  if (!row.library_memory) return {bytes_text(static_cast<double>(row.peak_bytes)), "-"};
  return {bytes_text(static_cast<double>(row.peak_bytes)),
          fmt::format("{} ({})", bytes_text(static_cast<double>(row.library_memory->peak_bytes)),
                      row.library_memory->name)};
}

}  // namespace

const char* bound_name(ladder::Bound bound) {
  switch (bound) {
    case ladder::Bound::cpu_f32:
      return "multiply-adds of all processors";
    case ladder::Bound::gpu_f32:
      return "multiply-adds of all CUDA cores";
    case ladder::Bound::gpu_tf32:
      return "tensor cores, tf32";
    case ladder::Bound::gpu_bf16:
      return "tensor cores, bf16";
    case ladder::Bound::cpu_memory:
    case ladder::Bound::gpu_memory:
      break;
  }
  return "memory, copied";
}

Json json_of(const LadderRow& row) {
  const ladder::Group& group = *row.rung->group;
  Json json = {{"rung", row.rung->name},
               {"group", group.name},
               {"shape", ladder::shape_text(group.family, row.shape)},
               {"dtype", group.type == ladder::Type::f32 ? "float32" : "bfloat16"}};
  if (!row.skipped.empty()) {
    json["skipped"] = row.skipped;
    return json;
  }
  if (row.peak_bytes > 0) {
    json["peak_bytes"] = row.peak_bytes;
    if (row.library_memory)
      json["library"] = {{"name", row.library_memory->name}, {"peak_bytes", row.library_memory->peak_bytes}};
    return json;
  }
  json["right"] = row.checked.right;
  json["rows_checked"] = row.checked.rows;
  json["tolerance"] = row.rung->tolerance;
  for (const ladder::OutputError& error : row.checked.errors) {
    json["errors"][error.tensor] = {{"largest", error.largest}, {"relative", error.relative}};
  }
  if (row.profiled) json["profiled"] = true;
  if (!row.timed()) return json;
  json["runs"] = row.timing.runs;
  if (!row.timer.empty()) json["timer"] = "bench/gpu/ladder_peers.py, " + row.timer;
  json["median_seconds"] = row.timing.median;
  json["fastest_seconds"] = row.timing.fastest;
  json["spread"] = row.timing.spread;
  json["rate"] = row.rate() * 1e-9;
  json["unit"] = unit_of(*row.rung);
  json["flops"] = ladder::flops_of(group.family, row.shape);
  json["bytes"] = ladder::bytes_of(group.family, group.type, row.shape);
  json["bound"] = bound_name(row.rung->bound);
  if (row.peak > 0) json["share_of_peak"] = row.rate() / row.peak;
  if (row.before) json["times_the_rung_before"] = *row.before / row.timing.median;
  for (const Peer& peer : row.peers) {
    json["peers"].push_back({{"name", peer.name},
                             {"seconds", peer.seconds},
                             {"rung_seconds", row.seconds_beside(peer)},
                             {"share", row.share(peer)}});
  }
  return json;
}

void print_table(const std::vector<LadderRow>& rows, bool memory) {
  std::map<const ladder::Group*, std::vector<const LadderRow*>> by_group;
  for (const LadderRow& row : rows) by_group[row.rung->group].push_back(&row);
  for (const ladder::Group& group : ladder::groups()) {
    if (!by_group.contains(&group)) continue;
    std::vector<std::string> head = {"rung", "shape"}, peer_columns;
    std::string library, bound;
    for (const LadderRow* row : by_group[&group]) {
      if (row->timed()) bound = bound_name(row->rung->bound);
      for (const Peer& peer : row->peers) {
        if (peer.is_library) library = peer.name;
        if (std::find(peer_columns.begin(), peer_columns.end(), column_of(peer)) == peer_columns.end())
          peer_columns.push_back(column_of(peer));
      }
    }
    if (memory) {
      head.insert(head.end(), {"peak", "of the library"});
    } else {
      head.insert(head.end(), {"median", "spread", "rate", "of peak", "of before"});
      head.insert(head.end(), peer_columns.begin(), peer_columns.end());
      head.push_back("error");
    }
    fmt::print("\n{} ({})\n", group.title, ladder::shape_words(group.family));
    Table table("  ");
    table.add(head);
    for (const LadderRow* row : by_group[&group]) {
      std::vector<std::string> line = {row->rung->name, ladder::shape_text(group.family, row->shape)};
      std::vector<std::string> cells(head.size() - line.size(), "-");
      if (!row->skipped.empty()) {
        cells.back() = row->skipped;
      } else {
        cells = memory ? memory_cells(*row) : time_cells(*row, peer_columns);
      }
      line.insert(line.end(), cells.begin(), cells.end());
      table.add(line);
    }
    fmt::print("{}", table.text());
    if (!bound.empty())
      fmt::print("  peak: {}{}\n", bound, library.empty() ? "" : "; fovea: " + library.substr(6));
  }
}

}  // namespace fovea::cli
