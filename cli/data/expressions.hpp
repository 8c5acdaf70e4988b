// --score, --sees and --tensor: expressions, and the tensors that they read from files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/data/elements.hpp"
#include "cli/options/cli11.hpp"
#include "fovea/fovea.hpp"

namespace fovea::cli {

/// What the command line says of expressions.
struct ExpressionOptions {
  std::string score, sees;
  std::vector<std::string> tensors;  ///< NAME=FILE

  void add_options(CLI::App& command);
  bool any() const { return !score.empty() || !sees.empty() || !tensors.empty(); }
};

/// Expressions with their tensors read. Problems refer to the arrays.
struct Expressions {
  std::string score, sees;
  std::vector<Array> tensors;                  ///< by name
  std::vector<std::filesystem::path> files;    ///< that were read
  std::map<std::string, std::string> sources;  ///< "named.slope" -> its file

  void apply(Problem& problem) const;
};

/// Whether a named tensor can have a gradient.
bool is_float(const Tensor& tensor);

/// Failures name the option and the file.
Expressions read_expressions(const ExpressionOptions& options);

/// A line of Plan::expressions: "score", "d score / d s" or the like, and the text.
struct ExpressionLine {
  std::string name, text;
};
std::vector<ExpressionLine> lines_of(const std::string& expressions);

/// How many blocks of a problem are seen.
struct BlockCounts {
  int64_t block = 0, none = 0, all = 0, some = 0;
  bool every_head = true;  ///< else of the first head of the first sequence alone
};
BlockCounts count_blocks(const Problem& problem, int64_t block);

/// Seen blocks as lines of text: a character for each block.
std::string drawn(const SeenBlocks& blocks);
/// What its characters mean.
inline constexpr const char* kBlockLegend = "# all pairs, + some, . none";

/// Of a problem; rows and columns are those of its longest sequence.
SeenBlocks blocks_of(const Problem& problem, int64_t batch, int64_t head, int64_t block_q, int64_t block_k);

}  // namespace fovea::cli
