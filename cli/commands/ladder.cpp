// `fovea ladder`: every rung that this machine can run, checked against float64 and then timed.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "cli/commands/commands.hpp"
#include "cli/ladder/peer.hpp"
#include "cli/ladder/rows.hpp"
#include "cli/options/options.hpp"
#include "cli/terminal/failure.hpp"
#include "cli/terminal/progress.hpp"
#include "cli/terminal/text.hpp"
#include "ladder/harness/run.hpp"

namespace fovea::cli {
namespace {

struct LadderOptions {
  std::vector<std::string> groups, rungs, shapes;
  ladder::Protocol protocol;
  int64_t rows = 128;
  std::string device = "cuda:0";
  std::filesystem::path peers;
  bool list = false, json = false, profile = false, memory = false, no_peer = false;
};

/// At most this many turns of a rung and the library. Clocks that drift move both, so their ratio is steadier than their times.
constexpr int kTurns = 5;

/// "04" and "04_cpu_vector" both name that rung.
bool is_named(const ladder::Rung& rung, const std::string& name) {
  return name == rung.name || (name.size() == 2 && std::string(rung.name).compare(0, 2, name) == 0);
}

std::vector<const ladder::Rung*> chosen_rungs(const LadderOptions& options) {
  for (const std::string& name : options.groups) {
    const auto all = ladder::groups();
    if (std::none_of(all.begin(), all.end(), [&](const auto& group) { return name == group.name; })) {
      std::string known;
      for (const auto& group : all) known += (known.empty() ? "" : ", ") + std::string(group.name);
      throw Failure(Exit::usage, fmt::format("--group: got '{}', expected one of {}", name, known));
    }
  }
  for (const std::string& name : options.rungs) {
    const auto all = ladder::rungs();
    if (std::none_of(all.begin(), all.end(), [&](const auto& rung) { return is_named(rung, name); })) {
      throw Failure(
          Exit::usage,
          fmt::format("--rung: got '{}', expected a rung such as 01 or {}; `fovea ladder --list` names "
                      "them",
                      name, all.front().name));
    }
  }
  std::vector<const ladder::Rung*> chosen;
  for (const ladder::Rung& rung : ladder::rungs()) {
    const bool in_groups = options.groups.empty() ||
                           std::count(options.groups.begin(), options.groups.end(), rung.group->name) > 0;
    const bool in_rungs =
        options.rungs.empty() || std::any_of(options.rungs.begin(), options.rungs.end(),
                                             [&](const std::string& name) { return is_named(rung, name); });
    if (in_groups && in_rungs) chosen.push_back(&rung);
  }
  if (chosen.empty()) throw Failure(Exit::usage, "--rung: none of them is in the groups of --group");
  return chosen;
}

/// Lengths over which --memory looks at attention: one head on a CPU, where the textbook is slow, and eight
/// on a GPU.
std::vector<ladder::Shape> memory_shapes(const ladder::Group& group) {
  if (group.family == ladder::Family::matmul || group.family == ladder::Family::softmax) return group.shapes;
  std::vector<ladder::Shape> shapes;
  for (int length = 512; length <= 16384; length *= 2)
    shapes.push_back({group.where == ladder::Where::cpu ? 1 : 8, length, group.shapes.front().c});
  return shapes;
}

std::vector<ladder::Shape> shapes_of(const LadderOptions& options, const ladder::Group& group) {
  if (options.shapes.empty()) return options.memory ? memory_shapes(group) : group.shapes;
  std::vector<ladder::Shape> shapes;
  for (const std::string& text : options.shapes) {
    try {
      shapes.push_back(ladder::parse_shape(group.family, text));
    } catch (const std::invalid_argument& error) {
      throw Failure(Exit::usage,
                    fmt::format("{} for the rungs of group {}; choose others with --group or --rung",
                                error.what(), group.name));
    }
  }
  return shapes;
}

/// Why a rung does not run here; empty when it does.
std::string obstacle(const ladder::Rung& rung, ladder::Shape shape, const ladder::Device* device,
                     const std::string& no_device) {
  if (device == nullptr) return no_device + (rung.newer_too ? "" : "; needs " + rung.needs());
  if (rung.capability > 0 && !rung.runs_on(device->capability())) return "needs " + rung.needs();
  if (rung.in_python) return "timed by bench/gpu/ladder_peers.py; --peers shows it";
  if (rung.run == nullptr) return "this build has no code of it";
  if (!rung.accepts(shape)) return fmt::format("takes {}", rung.accepted);
  return "";
}

class Runner {
 public:
  explicit Runner(const LadderOptions& options)
      : options_(options), rungs_(chosen_rungs(options)), host_(ladder::host_device()) {
    const std::optional<int> id = gpu_of(options.device, "");
    if (id) {
      gpu_ = ladder::gpu_device(*id, no_gpu_);
    } else {
      no_gpu_ = "not asked for (--device cpu)";
    }
    for (const ladder::Rung* rung : rungs_) shapes_of(options_, *rung->group);  // mistakes before any work
    if (!options.peers.empty()) stored_peers_ = StoredPeers(options.peers, *host_, gpu_.get());
  }

  std::vector<LadderRow> run() {
    int64_t steps = 0;
    for (const ladder::Rung* rung : rungs_)
      steps += static_cast<int64_t>(shapes_of(options_, *rung->group).size());
    Progress progress("ladder", steps);
    std::vector<LadderRow> rows;
    for (const ladder::Group& group : ladder::groups()) {
      std::vector<const ladder::Rung*> here;
      std::copy_if(rungs_.begin(), rungs_.end(), std::back_inserter(here),
                   [&](const ladder::Rung* rung) { return rung->group == &group; });
      if (here.empty()) continue;
      for (const ladder::Shape shape : shapes_of(options_, group))
        run_shape(group, shape, here, rows, progress);
    }
    return rows;
  }

  ladder::Device* device_of(const ladder::Group& group) const {
    return group.where == ladder::Where::cpu ? host_.get() : gpu_.get();
  }
  /// What bounds the rungs that were timed, and the memory of their devices: the lines of a roofline.
  Json peaks_of(const std::vector<LadderRow>& rows) {
    Json peaks = Json::array();
    std::vector<ladder::Bound> seen;
    const auto add = [&](const ladder::Group& group, ladder::Bound bound) {
      if (std::find(seen.begin(), seen.end(), bound) != seen.end()) return;
      seen.push_back(bound);
      const bool is_memory = bound == ladder::Bound::cpu_memory || bound == ladder::Bound::gpu_memory;
      const double rate = device_of(group)->peak(bound);
      if (rate > 0) {
        peaks.push_back({{"where", group.where == ladder::Where::cpu ? "cpu" : "gpu"},
                         {"bound", bound_name(bound)},
                         {"rate", rate * 1e-9},
                         {"unit", is_memory ? "GB/s" : "GFLOP/s"}});
      }
    };
    for (const LadderRow& row : rows) {
      if (!row.timed()) continue;
      const ladder::Group& group = *row.rung->group;
      add(group, row.rung->bound);
      add(group, group.where == ladder::Where::cpu ? ladder::Bound::cpu_memory : ladder::Bound::gpu_memory);
    }
    return peaks;
  }
  const StoredPeers& stored_peers() const { return stored_peers_; }
  const ladder::Device& host() const { return *host_; }
  const ladder::Device* gpu() const { return gpu_.get(); }
  const std::string& no_gpu() const { return no_gpu_; }

 private:
  void run_shape(const ladder::Group& group, ladder::Shape shape,
                 const std::vector<const ladder::Rung*>& rungs, std::vector<LadderRow>& rows,
                 Progress& progress) {
    ladder::Device* device = device_of(group);
    std::vector<ladder::HostTensor> tensors;
    std::unique_ptr<LibraryCall> library;
    std::optional<double> library_alone;
    const auto time_library_alone = [&] {
      if (!library_alone) {
        const auto times = device->time({[&] { library->run(); }}, options_.protocol);
        library_alone = ladder::summary(times.front()).median;
      }
      return *library_alone;
    };
    std::optional<LibraryMemory> library_memory;
    std::optional<double> before;
    for (const ladder::Rung* rung : rungs) {
      LadderRow row;
      row.rung = rung;
      row.shape = shape;
      const StoredRung* stored = stored_rung(*rung, shape, device);
      if (stored == nullptr) row.skipped = obstacle(*rung, shape, device, no_gpu_);
      if (row.skipped.empty()) {
        if (tensors.empty()) tensors = ladder::make_tensors(group.family, group.type, shape, 1);
        if (options_.memory) {
          if (!library_memory && !options_.no_peer) library_memory = weigh_library(*device, group, shape);
          row.library_memory = library_memory;
          weigh(row, *device, tensors);
        } else {
          if (!options_.profile) {
            row.peers = stored_peers_.of(group, shape);
            if (library == nullptr && !options_.no_peer)
              library = library_call(*device, group, shape, tensors);
          }
          row.before = before;
          if (stored != nullptr) {
            take(row, *stored, *device);
          } else {
            // Clocks of a GPU move with its load. On a CPU turns would only let threads of the one, which
            // spin for a while when they have nothing to do, get in the way of the other's.
            const bool in_turns = library != nullptr && device->capability() > 0;
            if (library != nullptr && !in_turns) time_library_alone();  // before the first rung
            check_and_time(row, *device, tensors, in_turns ? library.get() : nullptr);
            if (row.timed()) before = row.timing.median;
          }
          const bool has_library = !row.peers.empty() && row.peers.front().is_library;
          if (row.timed() && library != nullptr && !has_library)
            add_library(row, *library, time_library_alone(), 0);
        }
      }
      rows.push_back(std::move(row));
      progress.advance();
    }
  }

  /// Of a rung in Python; null where it is not in the file of --peers, or not asked for.
  const StoredRung* stored_rung(const ladder::Rung& rung, ladder::Shape shape,
                                const ladder::Device* device) const {
    if (!rung.in_python || device == nullptr || options_.memory || options_.profile) return nullptr;
    return stored_peers_.rung(rung, shape);
  }
  static void take(LadderRow& row, const StoredRung& stored, ladder::Device& device) {
    row.checked = stored.checked;
    row.checked.right =
        std::all_of(row.checked.errors.begin(), row.checked.errors.end(),
                    [&](const ladder::OutputError& error) { return error.relative <= row.rung->tolerance; });
    if (!row.checked.right) return;
    row.timing = stored.timing;
    row.timer = stored.timer;
    row.peak = device.peak(row.rung->bound);
  }

  static void add_library(LadderRow& row, const LibraryCall& library, double seconds, double beside) {
    row.peers.insert(row.peers.begin(), {library.name(), true, seconds, beside});
  }
  /// `library` then takes turns with the rung; null: it does not.
  void check_and_time(LadderRow& row, ladder::Device& device, const std::vector<ladder::HostTensor>& tensors,
                      LibraryCall* library) const {
    const ladder::Problem problem(device, *row.rung, row.shape, tensors);
    row.checked = problem.check(options_.rows);
    if (!row.checked.right) return;  // how fast it is wrong is of no interest
    if (options_.profile) {
      device.profile([&] { problem.run(); });
      row.profiled = true;
      return;  // under a profiler nothing is as fast as it is
    }
    const auto run = [&] { problem.run(); };
    row.timing = ladder::summary(device.time({run}, options_.protocol).front());
    if (library != nullptr) {
      // Apart from the rung's own time, which is to be held against those of others that ran alone, too.
      ladder::Protocol turns = options_.protocol;
      turns.runs = std::min(turns.runs, kTurns);
      const auto times = device.time({run, [&] { library->run(); }}, turns);
      add_library(row, *library, ladder::summary(times.back()).median, ladder::summary(times.front()).median);
    }
    row.peak = device.peak(row.rung->bound);
  }

  static void weigh(LadderRow& row, ladder::Device& device, const std::vector<ladder::HostTensor>& tensors) {
    try {
      row.peak_bytes = device.peak_bytes([&] {
        const ladder::Problem problem(device, *row.rung, row.shape, tensors);
        problem.run();
        device.synchronize();
      });
      if (row.peak_bytes == 0) row.skipped = "less memory than this system tells apart, or it does not tell";
    } catch (const std::bad_alloc&) {
      row.skipped = "out of memory";
    }
  }

  const LadderOptions& options_;
  std::vector<const ladder::Rung*> rungs_;
  std::unique_ptr<ladder::Device> host_, gpu_;
  std::string no_gpu_;
  StoredPeers stored_peers_;
};

/// Those that are timed when none are asked for.
std::vector<std::string> shape_texts(const ladder::Group& group) {
  std::vector<std::string> texts;
  for (const ladder::Shape shape : group.shapes) texts.push_back(ladder::shape_text(group.family, shape));
  return texts;
}

void print_list(bool json) {
  if (json) {
    Json list = Json::array();
    for (const ladder::Rung& rung : ladder::rungs()) {
      list.push_back({{"rung", rung.name},
                      {"group", rung.group->name},
                      {"idea", rung.idea},
                      {"where", rung.group->where == ladder::Where::cpu ? "cpu" : "gpu"},
                      {"capability", rung.capability},
                      {"newer_too", rung.newer_too},
                      {"accepts", rung.accepted},
                      {"shapes", shape_texts(*rung.group)},
                      {"in_python", rung.in_python},
                      {"in_this_build", rung.run != nullptr}});
    }
    print_json(list);
    return;
  }
  for (const ladder::Group& group : ladder::groups()) {
    fmt::print("{}: {}\n", group.name, group.title);
    Table table("  ");
    for (const ladder::Rung& rung : ladder::rungs()) {
      if (rung.group == &group)
        table.add(
            {rung.name, rung.newer_too ? rung.idea : fmt::format("{}; needs {}", rung.idea, rung.needs())});
    }
    fmt::print("{}", table.text());
  }
}

std::string protocol_text(const LadderOptions& options) {
  if (options.memory) {
    return "the most bytes that the tensors, the workspace and one run held at a time, beyond those in use "
           "before: VmHWM of /proc/self/status on CPUs, cudaMemGetInfo on GPUs";
  }
  if (options.profile) return "one run between cudaProfilerStart and -Stop, behind a kernel `profile_marker`";
  return fmt::format(
      "{} warm-ups, {} runs (fewer, but 3 at least, after {:g} s); median, spread of the quartiles over "
      "it; on GPUs the library in turns with each rung, {} runs at most; inputs stay where they are, in "
      "caches "
      "too",
      options.protocol.warmups, options.protocol.runs, options.protocol.seconds, kTurns);
}

/// The day, as 2026-01-31.
std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16] = "";
  std::strftime(text, sizeof text, "%F", std::localtime(&now));
  return text;
}

Exit run_ladder(const LadderOptions& options) {
  if (options.list) {
    print_list(options.json);
    return Exit::ok;
  }
  if (options.protocol.runs < 3) {
    throw Failure(Exit::usage, fmt::format("--runs: got {}, expected 3 or more: a median and a spread",
                                           options.protocol.runs));
  }
  if (options.protocol.warmups < 0)
    throw Failure(Exit::usage,
                  fmt::format("--warmups: got {}, expected 0 or more", options.protocol.warmups));
  if (options.rows < 1)
    throw Failure(Exit::usage, fmt::format("--rows: got {}, expected 1 or more", options.rows));

  Runner runner(options);
  const std::vector<LadderRow> rows = runner.run();
  const bool all_right = std::all_of(rows.begin(), rows.end(), [&](const LadderRow& row) {
    return !row.skipped.empty() || options.memory || row.checked.right;
  });
  const std::string protocol = protocol_text(options);
  if (options.json) {
    Json json = {{"version", version()},
                 {"date", today()},
                 {"host", runner.host().text()},
                 {"protocol", protocol},
                 {"rows", Json::array()}};
    if (runner.gpu() != nullptr) json["gpu"] = runner.gpu()->text();
    if (!runner.stored_peers().about().is_null()) json["peers"] = runner.stored_peers().about();
    if (const Json peaks = runner.peaks_of(rows); !peaks.empty()) json["peaks"] = peaks;
    for (const LadderRow& row : rows) json["rows"].push_back(json_of(row));
    print_json(json);
  } else {
    fmt::print("fovea {} on {}\n", version(), runner.host().text());
    fmt::print("GPU: {}\n", runner.gpu() != nullptr ? runner.gpu()->text() : runner.no_gpu());
    fmt::print("{}\n", protocol);
    print_table(rows, options.memory);
  }
  return all_right ? Exit::ok : Exit::check_failed;
}

}  // namespace

void add_ladder(CLI::App& program, Action& action) {
  const auto options = std::make_shared<LadderOptions>();
  CLI::App* command =
      program.add_subcommand("ladder", "Run the rungs of the ladder: check each, then time it");
  command->add_flag("--list", options->list, "List all rungs and run none");
  command->add_option("--group", options->groups, "Only these groups")->delimiter(',')->type_name("NAME,...");
  command->add_option("--rung", options->rungs, "Only these rungs: 04 or 04_cpu_vector")
      ->delimiter(',')
      ->type_name("NAME,...");
  command
      ->add_option("--shape", options->shapes,
                   "Sizes in place of each group's: MxNxK, ROWSxCOLUMNS or BATCHxLENGTHxSIZE")
      ->delimiter(',')
      ->type_name("SIZES,...");
  command->add_option("--warmups", options->protocol.warmups, "Untimed runs before the timed ones (2)")
      ->type_name("N");
  command->add_option("--runs", options->protocol.runs, "Timed runs, at most (11)")->type_name("N");
  command
      ->add_option("--seconds", options->protocol.seconds,
                   "Stop a rung after so many seconds and at least three runs (10)")
      ->type_name("S");
  command->add_option("--rows", options->rows, "Rows of the outputs that are compared with float64 (128)")
      ->type_name("N");
  command->add_option("--device", options->device,
                      "cuda:N: the GPU that runs GPU rungs (cuda:0); cpu: leave GPU rungs out");
  command->add_flag("--no-peer", options->no_peer, "Do not time the library beside the rungs");
  command
      ->add_option("--peers", options->peers,
                   "Times of other libraries and of rungs in Python, from bench/gpu/ladder_peers.py")
      ->type_name("FILE");
  CLI::Option* memory =
      command->add_flag("--memory", options->memory,
                        "Measure peak memory instead of time; attention at lengths of 512 to 16384");
  command
      ->add_flag(
          "--profile", options->profile,
          "Instead of timing, run once between cudaProfilerStart and cudaProfilerStop, for Nsight Compute")
      ->excludes(memory);
  add_json_option(*command, options->json);
  command->footer(
      "Each rung computes the whole problem and is compared with float64 before it is timed. A wrong rung "
      "has no\n"
      "time, and the exit code is 1. Rungs that this machine cannot run are listed with the reason.\n"
      "\n"
      "Examples:\n"
      "  fovea ladder --list\n"
      "  fovea ladder --group cpu\n"
      "  fovea ladder --rung 03,04 --shape 8x512x64,8x2048x64 --runs 21\n"
      "  fovea ladder --group tensor --json\n"
      "  fovea ladder --group cpu --memory");
  command->callback([options, &action] { action = [options] { return run_ladder(*options); }; });
}

}  // namespace fovea::cli
