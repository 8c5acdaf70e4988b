// The programs of a problem's expressions, made once for each plan, and which blocks of pairs need them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cpu/program.hpp"
#include "cpu/score_form.hpp"
#include "expr/blocks.hpp"

namespace fovea::cpu {

using expr::Seen;

/// Where the gradient of one named tensor is summed: its extents, and strides in that memory.
struct GradientLayout {
  size_t tensor = 0;
  TensorDesc layout;
};

struct PairPrograms {
  /// In the backward, slopes are computed, too, and `gradients` are added.
  PairPrograms(const AttentionProblem& problem, bool keys_on_columns,
               std::span<const GradientLayout> gradient_layouts = {});

  bool has_score = false, has_sees = false;
  bool sees_by_head = false;      ///< whether `sees` depends on the query head
  bool sees_by_key_head = false;  ///< or on the key head
  bool has_slope = false;         ///< the slope tile holds d score / d s; else that is 1
  bool gradients_read_score = false;
  bool has_form =
      false;  ///< the score is s, and what is added to it: `of_distance` and `factor` times `elements`
  Program all, some;    ///< of blocks that are seen in all of their pairs, and in some
  Program of_distance;  ///< f of a score's form
  Program factor;       ///< of its elements, where that is not 1
  std::optional<KeyElements> elements;
  std::optional<SeenElements> mask;    ///< what `sees` compares with 0, where it says no more
  std::optional<SeenClasses> classes;  ///< what `sees` compares of queries and keys, where it says no more
  Program strip;                       ///< `all` over kAttendLanes lanes, where scores have no form
  Program shown;                       ///< -inf where a pair is not seen, else 0
  Program gradients;                   ///< reads the scores before the expression, and their gradients

  /// Null where the scores stay as they are.
  const Program* program_of(Seen seen) const {
    const Program& program = seen == Seen::kAll ? all : some;
    return program.empty() ? nullptr : &program;
  }
  /// Whether the scores of such a block need no program.
  bool takes_form(Seen of_block) const {
    const bool masks = has_sees && of_block == Seen::kSome;
    return (has_score || masks) && (has_form || !has_score) && (mask || !masks);
  }
  int64_t scratch_bytes() const;
  /// "score of 4 operations a pair", for `fovea explain`; "" without expressions.
  std::string summary() const;

 private:
  void add_forms(const AttentionProblem& problem);
};

/// Finds out how much of blocks of pairs is seen. One thread at a time.
class SeenBlocks {
 public:
  /// An answer that other heads may need, too.
  struct Known {
    uint64_t block;
    Seen seen;
  };
  struct Memory {
    std::span<expr::Range> ranges;  ///< one for each node
    std::span<Known> known;         ///< kKnownBlocks, or none

    static int64_t ranges_of(const AttentionProblem& problem);
  };
  static constexpr int kKnownBits = 12;
  static constexpr int64_t kKnownBlocks = int64_t{1} << kKnownBits;

  SeenBlocks(const AttentionProblem& problem, const Buffers& buffers, const PairPrograms& programs,
             const Memory& memory);

  /// Of all heads of the group, where `sees` tells heads apart.
  Seen of(const expr::Block& block);
  /// Whether answers serve several heads, so that blocks of a strip are worth asking for.
  bool remembers() const { return !known_.empty(); }

 private:
  Seen computed(expr::Block block);

  class Tensors final : public expr::TensorRanges {
   public:
    Tensors(const AttentionProblem& problem, const Buffers& buffers) : problem_(problem), buffers_(buffers) {}
    std::optional<expr::Range> range(size_t tensor, std::span<const expr::IntRange> index) const override;

   private:
    const AttentionProblem& problem_;
    const Buffers& buffers_;
  };
  int64_t group_;
  bool by_head_;
  Tensors tensors_;
  std::optional<expr::BlockAnalysis> analysis_;
  std::span<Known> known_;  ///< of batch_
  int64_t batch_ = -1;
};

}  // namespace fovea::cpu
