// The definitions of shard_output.hpp.
#include "cli/ranks/shard_output.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cli/terminal/failure.hpp"
#include "io/atomic_file.hpp"
#include "io/shards.hpp"

namespace fovea::cli {
namespace {

/// A run of rows of one rank.
struct Run {
  int rank = 0;
  int64_t begin = 0, end = 0;  ///< of the whole
  int64_t first = 0;           ///< of them, among the rank's rows
  bool operator==(const Run&) const = default;
};

/// In the order of rows. Where every rank has all, the first one's.
std::vector<Run> runs_of(const std::vector<Piece>& pieces, int64_t rows, int ranks) {
  if (pieces.empty()) return {{0, 0, rows, 0}};
  std::vector<Run> runs;
  std::vector<int64_t> before(static_cast<size_t>(ranks));
  for (const Piece& piece : pieces) {
    int64_t& first = before[static_cast<size_t>(piece.rank)];
    runs.push_back({piece.rank, piece.begin, piece.end, first});
    first += piece.end - piece.begin;
  }
  std::ranges::sort(runs, {}, &Run::begin);
  return runs;
}

/// The rows that the shards hold. Queries and keys that are cut alike share shards.
struct ShardLayout {
  std::vector<Run> queries, keys;
  bool is_shared = false;

  size_t size() const { return is_shared ? queries.size() : queries.size() + keys.size(); }
  int rank(size_t shard) const {
    return (shard < queries.size() ? queries[shard] : keys[shard - queries.size()]).rank;
  }
  /// The run of an output in a shard, or nullptr. What every rank has lies in the first.
  const Run* run(Spread spread, size_t shard) const {
    const size_t first = spread == Spread::key_rows && !is_shared ? queries.size() : 0;
    const std::vector<Run>& runs = spread == Spread::key_rows ? keys : queries;
    const size_t count = spread == Spread::everywhere ? 1 : runs.size();
    return shard >= first && shard < first + count ? &runs[shard - first] : nullptr;
  }
};

size_t row_axis(const Array& array, Spread spread) {
  return spread == Spread::query_statistic ? array.shape.size() - 1 : io::row_axis(array.shape);
}

ShardLayout layout_of(std::span<const Array> outputs, const Division& division, int ranks) {
  ShardLayout layout;
  for (const Array& output : outputs) {
    const Spread spread = spread_of(output.name);
    if (spread == Spread::everywhere) continue;
    const bool of_keys = spread == Spread::key_rows;
    (of_keys ? layout.keys : layout.queries) =
        runs_of(of_keys ? division.keys : division.queries, output.shape[row_axis(output, spread)], ranks);
  }
  layout.is_shared = layout.queries == layout.keys;
  return layout;
}

/// What one rank has of a shard.
std::vector<Array> arrays_of(std::span<const Array> outputs, const ShardLayout& layout, size_t shard,
                             const RankPart& part) {
  std::vector<Array> arrays;
  for (const Array& output : outputs) {
    const Spread spread = spread_of(output.name);
    const Run* const run = layout.run(spread, shard);
    if (run == nullptr) continue;
    Array& array = arrays.emplace_back(output);
    if (spread != Spread::everywhere) array.shape[row_axis(output, spread)] = run->end - run->begin;
    const std::vector<std::byte> rows =
        part.rows_of(output.name, run->first, run->first + run->end - run->begin);
    array.bytes.assign(rows.begin(), rows.end());
  }
  return arrays;
}

/// Files of one rank, which disappear again unless all of all ranks are in place.
class PendingFiles {
 public:
  PendingFiles() = default;
  PendingFiles(const PendingFiles&) = delete;
  PendingFiles& operator=(const PendingFiles&) = delete;
  ~PendingFiles() { discard(); }
  io::AtomicFile& add(const std::filesystem::path& path, const Paths& inputs) {
    paths_.push_back(path);
    return *files_.emplace_back(std::make_unique<io::AtomicFile>(path, inputs));
  }
  void commit() {
    for (; in_place_.size() < files_.size(); in_place_.push_back(paths_[in_place_.size()]))
      files_[in_place_.size()]->commit();
  }
  void keep() { in_place_.clear(); }
  void discard() {
    std::error_code ignored;
    for (const std::filesystem::path& path : in_place_) std::filesystem::remove(path, ignored);
    in_place_.clear();
    files_.clear();
  }

 private:
  std::vector<std::filesystem::path> paths_, in_place_;
  std::vector<std::unique_ptr<io::AtomicFile>> files_;
};

/// As Hugging Face writes it: metadata, and for each tensor the file that has it; here a list of files, in the order of rows, for one that is cut.
std::string index_text(const std::filesystem::path& index, std::span<const Array> outputs,
                       const ShardLayout& layout, const io::Metadata& metadata) {
  nlohmann::ordered_json json = {{"metadata", metadata}, {"weight_map", nlohmann::ordered_json::object()}};
  uint64_t total = 0;
  for (const Array& output : outputs) {
    total += io::byte_count(output.shape, io::element_size(output.type)).value_or(0);
    std::vector<std::string> names;
    for (size_t shard = 0; shard < layout.size(); ++shard) {
      if (layout.run(spread_of(output.name), shard) != nullptr)
        names.push_back(io::shard_path(index, shard + 1, layout.size()).filename().string());
    }
    nlohmann::ordered_json& entry = json["weight_map"][output.name];
    if (names.size() == 1) {
      entry = names[0];
    } else {
      entry = names;
    }
  }
  json["metadata"]["total_size"] = total;
  return json.dump(2) + "\n";
}

/// One rank's way: temporary files, all in place, the index. After each step ranks ask each other; where one failed, all clean up before
/// any ends, since mpirun kills the others of a process that ends with an error. Returns whether all went well.
bool write_on_rank(const Transport& transport, const std::filesystem::path& index,
                   std::span<const Array> outputs, const io::Metadata& metadata, const ShardLayout& layout,
                   const RankPart& part, const Paths& inputs) {
  PendingFiles shards;
  const std::function<void()> steps[] = {
      [&] {
        for (size_t shard = 0; shard < layout.size(); ++shard) {
          if (layout.rank(shard) != transport.rank()) continue;
          io::AtomicFile& file = shards.add(io::shard_path(index, shard + 1, layout.size()), inputs);
          io::write_safetensors(file, arrays_of(outputs, layout, shard, part), metadata);
        }
      },
      // An older index would name files of two runs, were this one to stop in between.
      [&] {
        if (transport.rank() == 0) std::filesystem::remove(index);
      },
      [&] { shards.commit(); },
      [&] {
        if (transport.rank() != 0) return;
        const std::string text = index_text(index, outputs, layout, metadata);
        io::write_file_atomically(index, std::as_bytes(std::span(text)), inputs);
      }};
  for (const std::function<void()>& step : steps) {
    std::exception_ptr failure;
    try {
      step();
    } catch (...) {
      failure = std::current_exception();
    }
    if (all_agree(transport, !failure)) continue;
    shards.discard();
    all_agree(transport, true);
    if (failure) std::rethrow_exception(failure);
    return false;
  }
  shards.keep();
  return true;
}

}  // namespace

size_t write_shards(const std::filesystem::path& index, std::span<const Array> outputs,
                    const io::Metadata& metadata, const RankGroup& group, const RankFiles& files,
                    const Paths& inputs) {
  const ShardLayout layout = layout_of(outputs, files.division, group.size());
  std::mutex mutex;
  std::exception_ptr failure;
  bool well = true;
  group.run([&](const Transport& transport) {
    const RankPart& part = *files.parts[static_cast<size_t>(transport.rank())];
    std::exception_ptr own;
    bool own_well = false;
    try {
      own_well = write_on_rank(transport, index, outputs, metadata, layout, part, inputs);
    } catch (const io::FileError&) {
      own = std::current_exception();
    } catch (const std::filesystem::filesystem_error&) {
      own = std::current_exception();
    }
    // Thrown here, it would stop the ranks once more, which know already.
    const std::lock_guard lock(mutex);
    well = well && own_well;
    if (own && !failure) failure = own;
  });
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    throw AgreedFailure(Exit::output, error.what());
  }
  return well ? layout.size() : 0;
}

}  // namespace fovea::cli
