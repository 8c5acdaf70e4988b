// `fovea look`: one head's attention map as a picture, at any length.
#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>

#include "cli/commands/commands.hpp"
#include "cli/data/expressions.hpp"
#include "cli/data/output.hpp"
#include "cli/measure/measure.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/picture/attention_map.hpp"
#include "cli/picture/figure.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

struct LookOptions {
  InputFiles files;
  ShapeOptions shape;
  Terms terms;
  ExpressionOptions expressions;
  Execution execution;
  std::string output, pool = "max", queries, keys, block_size;
  int64_t head = 0, batch_index = 0, size = 1024;
  bool blocks = false, json = false;
};

constexpr int64_t kSmallest = 16, kLargest = 16384;

Range parse_range(const char* option, const std::string& text, int64_t seqlen) {
  if (text.empty()) return {0, seqlen};
  const auto [first, last] = parse_pair(option, text, ':', "FIRST:LAST");
  if (first < 0 || last <= first || last > seqlen) {
    throw Failure(Exit::usage, fmt::format("{}: got {}, expected FIRST:LAST with 0 <= FIRST < LAST <= {}",
                                           option, text, seqlen));
  }
  return {first, last};
}

void check_options(const LookOptions& options) {
  if (options.expressions.any() || options.shape.given() || !options.block_size.empty()) {
    throw Failure(Exit::usage,
                  "--blocks: got sizes, an expression or a block size without it, expected --blocks beside "
                  "them: a map of "
                  "weights is drawn from q and k alone");
  }
  if (options.output.empty()) throw Failure(Exit::usage, "--output: got none, expected FILE.png or FILE.svg");
  if (options.pool != "max" && options.pool != "mean") {
    throw Failure(Exit::usage, "--pool: got '" + options.pool + "', expected max or mean");
  }
  if (options.size < kSmallest || options.size > kLargest) {
    throw Failure(Exit::usage,
                  fmt::format("--size: got {}, expected {} to {} pixels", options.size, kSmallest, kLargest));
  }
}

/// "512 queries, 512 keys", and what a cell of several weights shows.
std::string subtitle_of(const Overview& overview, Pooling pooling) {
  const int64_t queries = overview.queries.size(), keys = overview.keys.size();
  std::string text = fmt::format("{} queries, {} keys", queries, keys);
  if (overview.grid.rows < queries || overview.grid.columns < keys) {
    text += fmt::format(", a cell is the {} of {:.1f} x {:.1f} weights",
                        pooling == Pooling::max ? "largest" : "mean",
                        static_cast<double>(queries) / static_cast<double>(overview.grid.rows),
                        static_cast<double>(keys) / static_cast<double>(overview.grid.columns));
  }
  return text;
}

Overview make_overview(const LookOptions& options, const AttentionMap& map) {
  const Pooling pooling = options.pool == "max" ? Pooling::max : Pooling::mean;
  Overview overview;
  overview.queries = parse_range("--queries", options.queries, map.seqlen_q());
  overview.keys = parse_range("--keys", options.keys, map.seqlen_k());
  overview.grid = map.pooled(overview.queries, overview.keys, options.size, options.size, pooling,
                             options.execution.resolved_threads());
  overview.title = fmt::format("Attention of head {}", options.head);
  overview.subtitle = subtitle_of(overview, pooling);
  return overview;
}

AttentionMap map_of(const LookOptions& options, const Inputs& inputs) {
  try {
    return AttentionMap(inputs, options.terms, options.execution, options.batch_index, options.head);
  } catch (const Error& error) {
    throw inputs.naming_file(error);
  }
}

/// The problem whose blocks are drawn: over files, or of sizes alone.
Problem problem_of_blocks(const LookOptions& options, std::optional<Inputs>& inputs) {
  if (!options.files.any()) return described(options.shape.shapes().front(), Pass::forward);
  if (options.shape.given()) {
    throw Failure(Exit::usage, "inputs: got both files and sizes, expected one or the other");
  }
  inputs = read_inputs(options.files, false);
  Problem problem = inputs->problem();
  problem.v = problem.k;
  problem.o = described(inputs->q.type, problem.q.shape());
  return problem;
}

/// Draws the classes of blocks into the terminal.
Exit run_look_at_blocks(const LookOptions& options) {
  if (!options.output.empty()) {
    throw Failure(Exit::usage,
                  "--output: got a file beside --blocks, which draws on the terminal; leave one of them out");
  }
  int64_t block_q = 128, block_k = 128;
  if (!options.block_size.empty())
    std::tie(block_q, block_k) = parse_pair("--block-size", options.block_size, ',', "Q,K");
  if (block_q < 1 || block_k < 1) {
    throw Failure(Exit::usage,
                  fmt::format("--block-size: got {},{}, expected positive numbers", block_q, block_k));
  }
  std::optional<Inputs> inputs;
  Problem problem = problem_of_blocks(options, inputs);
  options.terms.apply(problem);
  const Expressions expressions = read_expressions(options.expressions);
  expressions.apply(problem);
  const SeenBlocks blocks = blocks_of(problem, options.batch_index, options.head, block_q, block_k);
  constexpr int64_t kMostColumns = 120;
  if (!options.json && blocks.columns > kMostColumns) {
    throw Failure(
        Exit::usage,
        fmt::format("--block-size: got {} blocks beside each other, expected at most {}; make them larger",
                    blocks.columns, kMostColumns));
  }
  if (options.json) {
    Json rows = Json::array();
    for (int64_t row = 0; row < blocks.rows; ++row) {
      Json line = Json::array();
      for (int64_t column = 0; column < blocks.columns; ++column)
        line.push_back(static_cast<int>(blocks.at(row, column)));
      rows.push_back(std::move(line));
    }
    print_json({{"head", options.head},
                {"batch_index", options.batch_index},
                {"block_size", {block_q, block_k}},
                {"classes", {"none", "all", "some"}},
                {"blocks", std::move(rows)}});
    return Exit::ok;
  }
  fmt::print("{}", drawn(blocks));
  fmt::print("{}; blocks of {} queries (down) and {} keys, head {}\n", kBlockLegend, block_q, block_k,
             options.head);
  return Exit::ok;
}

Exit run_look(const LookOptions& options) {
  if (options.blocks) return run_look_at_blocks(options);
  check_options(options);
  const Inputs inputs = read_inputs(options.files, false);
  check_picture_output("--output", options.output, inputs.files);
  const AttentionMap map = map_of(options, inputs);
  if (map.seqlen_q() == 0 || map.seqlen_k() == 0) {
    throw Failure(Exit::input, "q, k: got an empty sequence, expected tokens to look at");
  }
  const Overview overview = make_overview(options, map);
  const WeightGrid& grid = overview.grid;
  const Picture picture = draw_overview(overview, options.size, picture_format(options.output));
  write_picture_output(options.output, picture, inputs.files);

  if (options.json) {
    print_json({{"file", options.output},
                {"width", picture.width},
                {"height", picture.height},
                {"head", options.head},
                {"batch_index", options.batch_index},
                {"seqlen_q", map.seqlen_q()},
                {"seqlen_k", map.seqlen_k()},
                {"rows", grid.rows},
                {"columns", grid.columns},
                {"pool", options.pool},
                {"backend", map.backend()},
                {"largest_weight", *std::max_element(grid.values.begin(), grid.values.end())},
                {"peak_process_bytes", peak_memory()}});
  } else {
    fmt::print("wrote {}: head {}, {} x {} weights in {} x {} cells; most memory held {}\n", options.output,
               options.head, overview.queries.size(), overview.keys.size(), grid.rows, grid.columns,
               bytes_text(peak_memory()));
  }
  return Exit::ok;
}

}  // namespace

void add_look(CLI::App& program, Action& action) {
  const auto options = std::make_shared<LookOptions>();
  CLI::App* command = program.add_subcommand("look", "One head's attention map as a picture, at any length");
  options->files.add_options(*command, false, false);
  options->terms.add_options(*command, false);
  options->expressions.add_options(*command);
  options->shape.add_options(*command, false, false);
  options->execution.add_options(*command, false);
  constexpr const char* kPicture = "Picture";
  command->add_option("--output", options->output, "Where the picture goes, as PNG or SVG")
      ->type_name("FILE")
      ->group(kPicture);
  command
      ->add_flag(
          "--blocks", options->blocks,
          "Draw on the terminal which blocks the window and --sees leave: all of their pairs, some, none")
      ->group(kPicture);
  command->add_option("--block-size", options->block_size, "Of --blocks: 128,128 (the default)")
      ->type_name("Q,K")
      ->group(kPicture);
  command->add_option("--head", options->head, "Head of the queries, from 0 (the default)")
      ->type_name("N")
      ->group(kPicture);
  command->add_option("--batch-index", options->batch_index, "Sequence of the batch, from 0 (the default)")
      ->type_name("N")
      ->group(kPicture);
  command->add_option("--size", options->size, "Pixels of the map's longer side in a PNG, at most (1024)")
      ->type_name("N")
      ->group(kPicture);
  command->add_option("--pool", options->pool, "What a cell of many weights shows: max (the default) or mean")
      ->type_name("KIND")
      ->group(kPicture);
  command->add_option("--queries", options->queries, "Only these queries, LAST not included")
      ->type_name("FIRST:LAST")
      ->group(kPicture);
  command->add_option("--keys", options->keys, "Only these keys; the weights stay those among all keys")
      ->type_name("FIRST:LAST")
      ->group(kPicture);
  add_json_option(*command, options->json);
  command->footer(
      "The library gives the lse of each query. From it, fovea look computes the weights again, a tile at a "
      "time, and\n"
      "pools them into the cells of the picture: memory grows with the sequence, not with its square.\n"
      "\n"
      "Examples:\n"
      "  fovea look --input qkv.safetensors --head 9 --output head9.svg\n"
      "  fovea look --q q.npy --k k.npy --causal --pool mean --size 2048 --output map.png\n"
      "  fovea look --blocks --seqlen 2048 --sees \"k < 256 || k <= q && q - k < 512\"");
  command->callback([options, &action] { action = [options] { return run_look(*options); }; });
}

}  // namespace fovea::cli
