// Reads arrays from files and checks them against a problem: the definitions of inputs.hpp.
#include "cli/data/inputs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"
#include "io/npy.hpp"

namespace fovea::cli {
namespace {

constexpr std::string_view kSafetensors = ".safetensors";
constexpr std::string_view kNpy = ".npy";

struct Reference {
  std::filesystem::path file;
  std::string name;
};

Reference split(const std::string& option, const std::string& text) {
  const std::string separator = std::string(kSafetensors) + ":";
  const size_t at = text.rfind(separator);
  if (at == std::string::npos) return {text, option};
  return {text.substr(0, at + kSafetensors.size()), text.substr(at + separator.size())};
}

std::string got(const Array& array) {
  return fmt::format("got {} of shape {}", type_name(array.type), shape_text(array.shape));
}

[[noreturn]] void refuse(const std::string& option, const Array& array, const std::string& expected) {
  throw Failure(Exit::input, fmt::format("--{}: {}, expected {}", option, got(array), expected));
}

/// Whole numbers as int32, which is what the library takes.
Array as_int32(const std::string& option, Array array) {
  if (array.type == ElementType::i32) return array;
  if (array.type != ElementType::i64) refuse(option, array, "int32 or int64");
  Array out = io::make_array(array.name, ElementType::i32, array.shape);
  const auto from = array.elements<int64_t>();
  const auto to = out.elements<int32_t>();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] < std::numeric_limits<int32_t>::min() || from[i] > std::numeric_limits<int32_t>::max()) {
      throw Failure(Exit::input, fmt::format("--{}: element {} is {}, expected a number that fits int32",
                                             option, i, from[i]));
    }
    to[i] = static_cast<int32_t>(from[i]);
  }
  return out;
}

/// (rows, columns) and (heads, rows, columns) with dimensions of 1 put before them.
std::vector<int64_t> four_dimensions(std::span<const int64_t> shape) {
  std::vector<int64_t> full(4, 1);
  std::copy_backward(shape.begin(), shape.end(), full.end());
  return full;
}

}  // namespace

void InputFiles::add_options(CLI::App& command, bool with_values, bool with_sequences, bool with_dtype) {
  constexpr const char* kInputs = "Inputs";
  const auto add = [&](const char* name, std::string& field, const char* help, const char* group) {
    command.add_option(name, field, help)->type_name("FILE")->group(group);
  };
  add("--input", input,
      with_values ? "A .safetensors file with the tensors q, k and v"
                  : "A .safetensors file with the tensors q and k",
      kInputs);
  add("--q", q, "Queries: (seqlen, d), (seqlen, heads, d) or (batch, seqlen, heads, d)", kInputs);
  add("--k", k, "Keys, of the same number of dimensions", kInputs);
  if (with_values) add("--v", v, "Values, of the same number of dimensions", kInputs);
  if (with_dtype) {
    command
        .add_option("--dtype", dtype,
                    "Convert q, k, v to this type first: float32, float16, bfloat16, float64")
        ->type_name("TYPE")
        ->group(kInputs);
  }
  constexpr const char* kArrays = "Arrays of terms";
  add("--bias", bias, "Added to the scores: (q, k), (heads, q, k) or (batch, heads, q, k); 1 broadcasts",
      kArrays);
  add("--mask", mask, "bool or uint8, shapes as the bias: only keys with a nonzero mask are seen", kArrays);
  if (with_values) {
    add("--block-mask", block_mask, "The same for blocks of queries and keys", kArrays);
    command.add_option("--block-size", block_size, "Size of those blocks")->type_name("Q,K")->group(kArrays);
  }
  add("--alibi", alibi, "ALiBi slopes: (heads) or (batch, heads)", kArrays);
  add("--sink", sink, "One logit a head, which takes its share of the weight: (heads)", kArrays);
  if (!with_sequences) return;
  constexpr const char* kSequences = "Sequences of different lengths";
  add("--cu-seqlens-q", cu_seqlens_q,
      "Packed sequences: where each starts in q, and the end: whole numbers, one more than sequences. "
      "q, k, v are then (total, d) or (total, heads, d)",
      kSequences);
  add("--cu-seqlens-k", cu_seqlens_k, "The same for k and v", kSequences);
  add("--seqused-q", seqused_q, "How much of each sequence of queries is used: (batch)", kSequences);
  add("--seqused-k", seqused_k, "How much of each sequence of keys is used: (batch)", kSequences);
}

std::filesystem::path file_of(const std::string& reference) {
  return split("", reference).file;
}

Array read_array(const std::string& option, const std::string& reference) {
  const Reference r = split(option, reference);
  if (r.file.extension() == kSafetensors) {
    const std::vector<std::string> names = {r.name};
    return std::move(io::read_safetensors(r.file, names).arrays.at(0));
  }
  if (r.file.extension() == kNpy) return io::read_npy(r.file);
  throw Failure(Exit::usage,
                fmt::format("--{}: got '{}', expected FILE.npy, FILE.safetensors or FILE.safetensors:NAME",
                            option, safe_text(reference)));
}

std::vector<int64_t> full_shape(std::span<const int64_t> shape, bool packed) {
  const size_t rank = shape.size();
  const int64_t size = shape[rank - 1], heads = rank > 2 ? shape[rank - 2] : 1;
  if (packed) return {shape[0], heads, size};
  return {rank > 3 ? shape[0] : 1, shape[rank > 3 ? 1 : 0], heads, size};
}

Inputs read_inputs(const InputFiles& files, bool with_values) {
  const std::string all = with_values ? "--q, --k and --v" : "--q and --k";
  Inputs in;
  const bool separate = !files.q.empty() || !files.k.empty() || !files.v.empty();
  if (files.input.empty() == !separate) {
    throw Failure(Exit::usage,
                  separate ? "--input: got it together with --q, --k or --v, expected one or the other"
                           : "inputs: got none, expected --input FILE.safetensors, or " + all);
  }
  if (separate) {
    if (files.q.empty() || files.k.empty() || (with_values && files.v.empty())) {
      throw Failure(Exit::usage, "inputs: got only some of " + all + ", expected all of them");
    }
    in.q = read_array("q", files.q);
    in.k = read_array("k", files.k);
    if (with_values) in.v = read_array("v", files.v);
    for (const std::string* one : {&files.q, &files.k, &files.v}) {
      if (!one->empty()) in.files.push_back(file_of(*one));
    }
  } else {
    const std::filesystem::path path = files.input;
    if (path.extension() != kSafetensors) {
      throw Failure(Exit::usage,
                    fmt::format("--input: got '{}', expected FILE.safetensors; give .npy files by {}",
                                safe_text(files.input), all));
    }
    std::vector<std::string> names = {"q", "k"};
    if (with_values) names.emplace_back("v");
    io::Safetensors read = io::read_safetensors(path, names);
    for (Array& array : read.arrays) {
      if (array.name == "q") {
        in.q = std::move(array);
      } else if (array.name == "k") {
        in.k = std::move(array);
      } else {
        in.v = std::move(array);
      }
    }
    in.metadata = std::move(read.metadata);
    in.files.push_back(path);
  }

  const auto read = [&](const char* option, const std::string& reference, std::optional<Array>& into) {
    if (reference.empty()) return;
    into = read_array(option, reference);
    in.files.push_back(file_of(reference));
  };
  read("bias", files.bias, in.bias);
  read("mask", files.mask, in.mask);
  read("block_mask", files.block_mask, in.block_mask);
  read("alibi", files.alibi, in.alibi);
  read("sink", files.sink, in.sink);
  read("cu_seqlens_q", files.cu_seqlens_q, in.cu_seqlens_q);
  read("cu_seqlens_k", files.cu_seqlens_k, in.cu_seqlens_k);
  read("seqused_q", files.seqused_q, in.seqused_q);
  read("seqused_k", files.seqused_k, in.seqused_k);
  for (auto [option, array] : {std::pair{"cu_seqlens_q", &in.cu_seqlens_q},
                               {"cu_seqlens_k", &in.cu_seqlens_k},
                               {"seqused_q", &in.seqused_q},
                               {"seqused_k", &in.seqused_k}}) {
    if (*array) *array = as_int32(option, std::move(**array));
  }
  if (in.block_mask.has_value() == files.block_size.empty()) {
    throw Failure(Exit::usage, "--block-mask and --block-size: got one of them, expected both or neither");
  }
  if (in.block_mask) {
    std::tie(in.block_q, in.block_k) = parse_pair("--block-size", files.block_size, ',', "Q,K");
  }

  const auto prepare = [&](const char* option, Array& array) {
    if (!is_real(array.type)) refuse(option, array, "float32, float16, bfloat16 or float64");
    const size_t most = in.packed() ? 3 : 4;
    if (array.shape.size() < 2 || array.shape.size() > most || array.shape.size() != in.q.shape.size()) {
      refuse(option, array,
             in.packed() ? "(total, d) or (total, heads, d), q, k and v alike"
                         : "(seqlen, d), (seqlen, heads, d) or (batch, seqlen, heads, d), q, k and v alike");
    }
    if (!files.dtype.empty()) array = converted(std::move(array), parse_type("--dtype", files.dtype));
  };
  prepare("q", in.q);
  prepare("k", in.k);
  if (in.v) prepare("v", *in.v);

  for (auto [option, array] :
       {std::pair{"bias", &in.bias}, {"mask", &in.mask}, {"block-mask", &in.block_mask}}) {
    if (*array && ((*array)->shape.size() < 2 || (*array)->shape.size() > 4)) {
      refuse(option, **array, "2 to 4 dimensions: (q, k), (heads, q, k) or (batch, heads, q, k)");
    }
  }
  // The library takes these as float32, the bias also in the type of q.
  for (auto [option, array] : {std::pair{"bias", &in.bias}, {"alibi", &in.alibi}, {"sink", &in.sink}}) {
    if (!*array) continue;
    if (!is_real((*array)->type)) refuse(option, **array, "float32, float16, bfloat16 or float64");
    if (array == &in.bias && in.bias->type == in.q.type) continue;
    *array = converted(std::move(**array), ElementType::f32);
  }
  return in;
}

Problem Inputs::problem() const {
  Problem problem;
  problem.q = view(q, full_shape(q.shape, packed()));
  problem.k = view(k, full_shape(k.shape, packed()));
  if (v) problem.v = view(*v, full_shape(v->shape, packed()));
  if (bias) problem.bias = view(*bias, four_dimensions(bias->shape));
  if (mask) problem.mask = view(*mask, four_dimensions(mask->shape));
  if (block_mask) problem.block_mask = view(*block_mask, four_dimensions(block_mask->shape));
  problem.block_q = block_q;
  problem.block_k = block_k;
  if (alibi) problem.alibi = view(*alibi);
  if (sink) problem.sink = view(*sink);
  if (cu_seqlens_q) problem.cu_seqlens_q = view(*cu_seqlens_q);
  if (cu_seqlens_k) problem.cu_seqlens_k = view(*cu_seqlens_k);
  if (seqused_q) problem.seqused_q = view(*seqused_q);
  if (seqused_k) problem.seqused_k = view(*seqused_k);
  return problem;
}

std::vector<int64_t> Inputs::o_shape() const {
  std::vector<int64_t> shape = full_shape(q.shape, packed());
  shape.back() = v ? v->shape.back() : 1;
  return shape;
}

std::vector<int64_t> Inputs::lse_shape() const {
  const std::vector<int64_t> shape = full_shape(q.shape, packed());
  if (packed()) return {shape[1], shape[0]};
  return {shape[0], shape[2], shape[1]};
}

std::vector<int64_t> Inputs::o_shape_for_user() const {
  std::vector<int64_t> shape = q.shape;
  shape.back() = v ? v->shape.back() : 1;
  return shape;
}

std::vector<int64_t> Inputs::lse_shape_for_user() const {
  if (q.shape.size() == 2) return {q.shape[0]};
  if (q.shape.size() == 3) return {q.shape[1], q.shape[0]};
  return lse_shape();
}

}  // namespace fovea::cli
