// Reads the tensors of expressions, and counts and draws blocks: the definitions of expressions.hpp.
#include "cli/data/expressions.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <utility>

#include "cli/data/inputs.hpp"
#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
namespace {

/// Types of files that the library has no name for in expressions, as those that it has.
Array as_element(const std::string& source, Array array) {
  if (array.type == ElementType::f64) return converted(std::move(array), ElementType::f32);
  if (array.type != ElementType::i64) return array;
  Array out = io::make_array(array.name, ElementType::i32, array.shape);
  const auto from = array.elements<int64_t>();
  const auto to = out.elements<int32_t>();
  for (size_t i = 0; i < from.size(); ++i) {
    if (!std::in_range<int32_t>(from[i])) {
      throw Failure(Exit::input,
                    fmt::format("--tensor ({}): element {} is {}, expected a number that fits int32", source,
                                i, from[i]));
    }
    to[i] = static_cast<int32_t>(from[i]);
  }
  return out;
}

/// Rows and columns of the grid of blocks over the longest sequence.
std::pair<int64_t, int64_t> grid_of(const Problem& p, int64_t block_q, int64_t block_k) {
  const bool packed = static_cast<bool>(p.cu_seqlens_q);
  const auto longest = [&](const Tensor& rows, const Tensor& starts, int64_t most) {
    if (!packed) return rows.shape()[1];
    const auto* at = static_cast<const int32_t*>(starts.data());
    if (most == 0 && at == nullptr) return rows.shape()[0];
    for (int64_t i = 1; most == 0 && i < starts.shape()[0]; ++i)
      most = std::max<int64_t>(most, at[i] - at[i - 1]);
    return most;
  };
  const int64_t q = longest(p.q, p.cu_seqlens_q, p.max_seqlen_q),
                k = longest(p.k, p.cu_seqlens_k, p.max_seqlen_k);
  return {(q + block_q - 1) / block_q, (k + block_k - 1) / block_k};
}

}  // namespace

void ExpressionOptions::add_options(CLI::App& command) {
  constexpr const char* kGroup = "Expressions";
  command
      .add_option("--score", score,
                  "What the score is made of s, b, h, hk, q, k, nq, nk and tensors: \"30 * tanh(s / 30)\"")
      ->type_name("TEXT")
      ->group(kGroup);
  command.add_option("--sees", sees, "Which keys a query sees: \"q - k < 128 || k < 4\"")
      ->type_name("TEXT")
      ->group(kGroup);
  command
      .add_option("--tensor", tensors,
                  "A tensor that the texts read by its name; repeat it for others: --tensor slope=slopes.npy")
      ->type_name("NAME=FILE")
      ->allow_extra_args(false)
      ->group(kGroup);
}

void Expressions::apply(Problem& problem) const {
  problem.score = score;
  problem.sees = sees;
  for (const Array& array : tensors) problem.named.push_back({array.name, view(array), {}});
}

bool is_float(const Tensor& tensor) {
  return tensor.dtype().code == FOVEA_CODE_FLOAT || tensor.dtype().code == FOVEA_CODE_BFLOAT;
}

Expressions read_expressions(const ExpressionOptions& options) {
  Expressions read{options.score, options.sees, {}, {}, {}};
  for (const std::string& tensor : options.tensors) {
    const size_t at = tensor.find('=');
    if (at == std::string::npos || at == 0 || at + 1 == tensor.size()) {
      throw Failure(Exit::usage, fmt::format("--tensor: got '{}', expected NAME=FILE", safe_text(tensor)));
    }
    const std::string name = tensor.substr(0, at), file = tensor.substr(at + 1);
    const std::string source = full_reference(name, file);
    Array array = [&] {
      try {
        return as_element(source, read_array(name, file));
      } catch (const Failure& failure) {
        // read_array names an option after the tensor.
        const std::string message = failure.what();
        const size_t colon = message.find(": ");
        throw Failure(failure.code, "--tensor" + (message.starts_with("--tensor") ? message.substr(8)
                                                                                  : message.substr(colon)));
      }
    }();
    array.name = name;
    read.tensors.push_back(std::move(array));
    read.files.push_back(file_of(file));
    read.sources["named." + name] = source;
  }
  return read;
}

std::vector<ExpressionLine> lines_of(const std::string& expressions) {
  std::vector<ExpressionLine> lines;
  for (size_t begin = 0; begin < expressions.size();) {
    const size_t end = std::min(expressions.find('\n', begin), expressions.size());
    const size_t tab = expressions.find('\t', begin);
    lines.push_back({expressions.substr(begin, tab - begin), expressions.substr(tab + 1, end - tab - 1)});
    begin = end + 1;
  }
  return lines;
}

SeenBlocks blocks_of(const Problem& problem, int64_t batch, int64_t head, int64_t block_q, int64_t block_k) {
  const auto [rows, columns] = grid_of(problem, block_q, block_k);
  return seen_blocks(problem, batch, head, block_q, block_k, rows, columns);
}

BlockCounts count_blocks(const Problem& problem, int64_t block) {
  constexpr int64_t kMost = 1 << 18;  // a second of a plain loop, where tensors are read
  const auto [rows, columns] = grid_of(problem, block, block);
  const int64_t batches = problem.cu_seqlens_q ? problem.cu_seqlens_q.shape()[0] - 1 : problem.q.shape()[0];
  const int64_t heads = problem.q.shape()[problem.q.shape().size() - 2];
  BlockCounts counts{.block = block};
  if (batches < 1 || heads < 1) return counts;
  counts.every_head = rows * columns * batches * heads <= kMost;
  for (int64_t b = 0; b < (counts.every_head ? batches : 1); ++b) {
    for (int64_t h = 0; h < (counts.every_head ? heads : 1); ++h) {
      for (const Seen seen : blocks_of(problem, b, h, block, block).seen)
        ++(seen == Seen::none ? counts.none : seen == Seen::all ? counts.all : counts.some);
    }
  }
  return counts;
}

std::string drawn(const SeenBlocks& blocks) {
  std::string text;
  for (int64_t row = 0; row < blocks.rows; ++row) {
    for (int64_t column = 0; column < blocks.columns; ++column) {
      const Seen seen = blocks.at(row, column);
      text += seen == Seen::none ? '.' : seen == Seen::all ? '#' : '+';
      text += column + 1 == blocks.columns ? '\n' : ' ';
    }
  }
  return text;
}

}  // namespace fovea::cli
