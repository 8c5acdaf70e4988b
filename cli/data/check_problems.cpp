// Draws the problems of `fovea check`: the definitions of check_problems.hpp.
#include "cli/data/check_problems.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>

#include "cli/options/shape_options.hpp"
#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"
#include "verify/random_problem.hpp"

namespace fovea::cli {
namespace {

verify::Type element_type(const Array& array) {
  constexpr std::array kTypes = {verify::Type::kF32, verify::Type::kF16, verify::Type::kBF16,
                                 verify::Type::kI32, verify::Type::kU8,  verify::Type::kBool};
  const fovea_dtype given = view(array).dtype();
  return *std::find_if(kTypes.begin(), kTypes.end(), [&](verify::Type type) {
    const fovea_dtype one = verify::dtype_of(type);
    return one.code == given.code && one.bits == given.bits;
  });
}

std::string quoted(const std::string& text) {
  std::string out = " '";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

void CheckedExpressions::add_options(CLI::App& command) {
  own.add_options(command);
  constexpr const char* kGroup = "Expressions";
  command
      .add_option("--expressions", which,
                  "Those of the random problems: drawn (the default), none, or the name of one that all have")
      ->type_name("WHICH")
      ->group(kGroup);
  const auto size = [&](const char* option, int64_t& value, const char* what) {
    command.add_option(option, value, what)->check(CLI::Range(int64_t{1}, int64_t{1} << 20))->group(kGroup);
  };
  size("--batch", batch, "With --score or --sees: sequences (2)");
  size("--seqlen", seqlen, "Queries per sequence (96)");
  size("--seqlen-k", seqlen_k, "Keys per sequence (default: as many as queries)");
  size("--heads", heads, "Heads of the queries (4)");
  size("--heads-kv", heads_kv, "Heads of keys and values (default: as many)");
  size("--head-dim", head_dim, "Head size (64)");
}

std::string CheckedExpressions::text() const {
  std::string text;
  if (which != "drawn") text += " --expressions " + which;
  if (!own.any()) return text;
  if (!own.score.empty()) text += " --score" + quoted(own.score);
  if (!own.sees.empty()) text += " --sees" + quoted(own.sees);
  for (const std::string& tensor : own.tensors) text += " --tensor" + quoted(tensor);
  text += fmt::format(" --batch {} --seqlen {} --heads {} --head-dim {}", batch, seqlen, heads, head_dim);
  if (seqlen_k > 0) text += fmt::format(" --seqlen-k {}", seqlen_k);
  if (heads_kv > 0) text += fmt::format(" --heads-kv {}", heads_kv);
  return text;
}

CheckProblems::CheckProblems(const CheckedExpressions& options)
    : options_(options), own_(read_expressions(options.own)) {
  if (options.own.any()) {
    if (options.which != "drawn") {
      throw Failure(Exit::usage, "--expressions: got " + safe_text(options.which) +
                                     " beside --score, --sees or --tensor, expected one or the other");
    }
    refuse_wrong_expressions();
    for (const Array& array : own_.tensors) values_.push_back(to_doubles(array));
    score_ = {.name = "score", .text = own_.score.c_str()};
    sees_ = {.name = "sees", .text = own_.sees.c_str()};
    auto& tensors = (own_.score.empty() ? sees_ : score_).tensors;
    for (size_t i = 0; i < own_.tensors.size(); ++i) {
      const Array& array = own_.tensors[i];
      tensors.push_back(
          {.name = array.name.c_str(),
           .elements = is_real(array.type) ? verify::Elements::kReal : verify::Elements::kInteger,
           .extents = {array.shape.begin(), array.shape.end()},
           .given = &values_[i],
           .given_type = element_type(array)});
    }
    chosen_score_ = own_.score.empty() ? nullptr : &score_;
    chosen_sees_ = own_.sees.empty() ? nullptr : &sees_;
    return;
  }
  if (options.which == "drawn" || options.which == "none") return;
  chosen_score_ = verify::known(verify::known_scores(), options.which);
  chosen_sees_ = verify::known(verify::known_masks(), options.which);
  if (chosen_score_ != nullptr || chosen_sees_ != nullptr) return;
  std::string names = "drawn, none";
  for (const auto* list : {&verify::known_scores(), &verify::known_masks()}) {
    for (const verify::KnownExpression& one : *list) names += std::string(", ") + one.name;
  }
  throw Failure(Exit::usage,
                fmt::format("--expressions: got '{}', expected one of {}", safe_text(options.which), names));
}

/// A plan of the oracle says what is wrong with texts and tensors, before a problem is drawn.
void CheckProblems::refuse_wrong_expressions() const {
  const CheckedExpressions& o = options_;
  const int64_t keys = o.seqlen_k > 0 ? o.seqlen_k : o.seqlen,
                heads_kv = o.heads_kv > 0 ? o.heads_kv : o.heads;
  Problem problem =
      described(Shape{o.batch, o.seqlen, keys, o.heads, heads_kv, o.head_dim, o.head_dim, ElementType::f32},
                Pass::forward);
  own_.apply(problem);
  const Plan plan(problem, {.backend = "reference"});
}

verify::ProblemSpec CheckProblems::draw(uint64_t seed, uint64_t index) const {
  const verify::ProblemSpec drawn = verify::random_problem(seed, index);
  verify::ProblemSpec spec = drawn;
  if (options_.own.any()) {
    // Of the drawn problem what does not change the meaning of the expressions, nor the sizes of their tensors.
    spec = {};
    spec.type = drawn.type, spec.o_is_f32 = drawn.o_is_f32, spec.gradients_are_f32 = drawn.gradients_are_f32;
    spec.batch = options_.batch, spec.heads_q = options_.heads;
    spec.heads_kv = options_.heads_kv > 0 ? options_.heads_kv : options_.heads;
    spec.seqlen_q = options_.seqlen;
    spec.seqlen_k = options_.seqlen_k > 0 ? options_.seqlen_k : options_.seqlen;
    spec.head_dim = spec.head_dim_v = options_.head_dim;
    spec.causal = drawn.causal;
    spec.dlse = true;  // through which the checker tells the oracle of roundings
    spec.plan_knows_data = drawn.plan_knows_data, spec.layout = drawn.layout, spec.aligned = drawn.aligned;
    spec.placement = drawn.placement, spec.data_seed = drawn.data_seed;
    spec.named_gradients = true;
  } else if (options_.which == "drawn") {
    return spec;
  }
  spec.score = chosen_score_;
  spec.sees = chosen_sees_;
  if (chosen_score_ != nullptr) spec.bias_values = verify::BiasValues::kNormal;  // as random_problem does
  return spec;
}

}  // namespace fovea::cli
