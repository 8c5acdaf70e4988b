// Options for the sizes and features of a problem: the definitions of shape_options.hpp.
#include "cli/options/shape_options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/terminal/failure.hpp"

namespace fovea::cli {

void ShapeOptions::add_options(CLI::App& command, bool lists, bool with_type) {
  constexpr const char* kGroup = "Sizes";
  const auto add = [&](const char* name, auto& field, const char* help, const char* type) {
    CLI::Option* option =
        command.add_option(name, field, help)->type_name(type)->group(kGroup)->delimiter(',');
    if (!lists) option->expected(1);
    options_.push_back(option);
  };
  const char* number = lists ? "N,..." : "N";
  add("--batch", batch, "Sequences (1)", number);
  add("--seqlen", seqlen, "Queries per sequence (1024)", number);
  add("--seqlen-k", seqlen_k, "Keys per sequence (default: as many as queries)", number);
  add("--heads", heads, "Heads of the queries (16)", number);
  add("--heads-kv", heads_kv, "Heads of keys and values (default: as many)", number);
  add("--head-dim", head_dim, "Head size (64)", number);
  add("--head-dim-v", head_dim_v, "Head size of the values (default: the same)", number);
  if (!with_type) return;
  add("--dtype", dtype,
      "float32, float16, bfloat16 (the default), float64, or float8_e4m3fn (forward; o is bfloat16)",
      lists ? "TYPE,..." : "TYPE");
}

bool ShapeOptions::given() const {
  return std::any_of(options_.begin(), options_.end(),
                     [](const CLI::Option* option) { return option->count() > 0; });
}

void ShapeOptions::take_defaults(const ShapeOptions& others) {
  using Sizes = std::vector<int64_t> ShapeOptions::*;
  // In the order of the options.
  constexpr std::array<Sizes, 7> kSizes = {
      &ShapeOptions::batch,    &ShapeOptions::seqlen,   &ShapeOptions::seqlen_k,  &ShapeOptions::heads,
      &ShapeOptions::heads_kv, &ShapeOptions::head_dim, &ShapeOptions::head_dim_v};
  const auto is_given = [&](size_t i) { return options_.at(i)->count() > 0; };
  constexpr size_t kHeads = 3, kHeadsKv = 4;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    if (!is_given(i) && !(i == kHeadsKv && is_given(kHeads))) this->*kSizes[i] = others.*kSizes[i];
  }
}

std::vector<Shape> ShapeOptions::shapes() const {
  std::vector<Shape> shapes;
  for (const std::string& type : dtype) {
    for (const int64_t dim : head_dim) {
      for (const int64_t dim_v : head_dim_v) {
        for (const int64_t hq : heads) {
          for (const int64_t hkv : heads_kv) {
            for (const int64_t b : batch) {
              for (const int64_t sq : seqlen) {
                for (const int64_t sk : seqlen_k) {
                  shapes.push_back({b, sq, sk == 0 ? sq : sk, hq, hkv == 0 ? hq : hkv, dim,
                                    dim_v == 0 ? dim : dim_v, parse_type("--dtype", type)});
                }
              }
            }
          }
        }
      }
    }
  }
  return shapes;
}

Tensor described(ElementType type, std::span<const int64_t> shape) {
  // Borrows the type of an array without elements.
  const Array none = io::make_array("", type, {0});
  return Tensor(nullptr, view(none).dtype(), shape);
}

Problem described(const Shape& shape, Pass pass) {
  Problem problem;
  problem.pass = pass;
  problem.q = described(shape.type, shape.q());
  problem.k = described(shape.type, shape.k());
  problem.v = described(shape.type, shape.v());
  problem.o = described(output_type(shape.type), shape.o());
  problem.lse = described(ElementType::f32, shape.lse());
  if (pass == Pass::backward) {
    problem.d_o = described(shape.type, shape.o());
    problem.dq = described(shape.type, shape.q());
    problem.dk = described(shape.type, shape.k());
    problem.dv = described(shape.type, shape.v());
  }
  return problem;
}

Pass parse_pass(const std::string& text) {
  if (text == "fwd" || text == "forward") return Pass::forward;
  if (text == "bwd" || text == "backward") return Pass::backward;
  throw Failure(Exit::usage, "--pass: got '" + text + "', expected fwd or bwd");
}

void move_to_gpu(Problem& p, int id) {
#define FOVEA_MOVE(field, Name, forward, backward, meaning) \
  if (p.field) p.field = Tensor(nullptr, p.field.dtype(), p.field.shape()).on(cuda(id));
  FOVEA_TENSORS(FOVEA_MOVE)
#undef FOVEA_MOVE
  for (NamedTensor& named : p.named)
    named.tensor = Tensor(nullptr, named.tensor.dtype(), named.tensor.shape()).on(cuda(id));
}

}  // namespace fovea::cli
