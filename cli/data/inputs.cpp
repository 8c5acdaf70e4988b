// Reads arrays from files and checks them against a problem: the definitions of inputs.hpp.
#include "cli/data/inputs.hpp"

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstring>
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

Reference split(const std::string& tensor, const std::string& text) {
  for (const std::string_view ending : {io::kIndexEnding, kSafetensors}) {
    const std::string separator = std::string(ending) + ":";
    const size_t at = text.rfind(separator);
    if (at == std::string::npos) continue;
    return {text.substr(0, at + ending.size()), text.substr(at + separator.size())};
  }
  return {text, tensor};
}

bool is_safetensors(const std::filesystem::path& file) {
  return file.extension() == kSafetensors || io::is_index(file);
}

/// The option that names the file of a tensor: "--block-mask" for block_mask.
std::string option_of(std::string tensor) {
  if (tensor == "d_o") return "--grad";
  std::ranges::replace(tensor, '_', '-');
  return "--" + tensor;
}

/// "--block-mask (m.npy)".
std::string option_text(const std::string& tensor, const Inputs& in) {
  return fmt::format("{} ({})", option_of(tensor), in.sources.at(tensor));
}

[[noreturn]] void refuse(const std::string& tensor, const Array& array, const Inputs& in,
                         const std::string& expected) {
  throw Failure(Exit::input, fmt::format("{}: got {} of shape {}, expected {}", option_text(tensor, in),
                                         type_name(array.type), shape_text(array.shape), expected));
}

/// Whole numbers as int32, which is what the library takes.
Array as_int32(const std::string& tensor, Array array, const Inputs& in) {
  if (array.type == ElementType::i32) return array;
  if (array.type != ElementType::i64) refuse(tensor, array, in, "int32 or int64");
  Array out = io::make_array(array.name, ElementType::i32, array.shape);
  const auto from = array.elements<int64_t>();
  const auto to = out.elements<int32_t>();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] < std::numeric_limits<int32_t>::min() || from[i] > std::numeric_limits<int32_t>::max()) {
      throw Failure(Exit::input, fmt::format("{}: element {} is {}, expected a number that fits int32",
                                             option_text(tensor, in), i, from[i]));
    }
    to[i] = static_cast<int32_t>(from[i]);
  }
  return out;
}

/// (rows, columns) and (heads, rows, columns) with dimensions of 1 put before them.
std::vector<int64_t> full_rank(std::span<const int64_t> shape, size_t rank = 4) {
  std::vector<int64_t> full(rank, 1);
  std::copy_backward(shape.begin(), shape.end(), full.end());
  return full;
}

enum class Kind {
  queries,  ///< rows like those of q, in its type
  lengths,  ///< int32 in the library, int64 in files as well
  bias,     ///< one value a pair of query and key, in the type of q or float32
  mask,     ///< one bool a pair, or a pair of blocks
  lists,    ///< int32, as lengths: one list a query
  logits,   ///< float32 in the library, any real type in files; so are factors
};

/// An array that a problem may do without. `tensor` is its name in the library, in a .safetensors file, and, with
/// dashes, as an option.
struct OptionalInput {
  const char* tensor;
  std::string InputFiles::*file;
  std::optional<Array> Inputs::*array;
  Kind kind;
};

constexpr OptionalInput kOptionalInputs[] = {
    {"qv", &InputFiles::qv, &Inputs::qv, Kind::queries},
    {"q_descale", &InputFiles::q_descale, &Inputs::q_descale, Kind::logits},
    {"k_descale", &InputFiles::k_descale, &Inputs::k_descale, Kind::logits},
    {"v_descale", &InputFiles::v_descale, &Inputs::v_descale, Kind::logits},
    {"bias", &InputFiles::bias, &Inputs::bias, Kind::bias},
    {"mask", &InputFiles::mask, &Inputs::mask, Kind::mask},
    {"block_mask", &InputFiles::block_mask, &Inputs::block_mask, Kind::mask},
    {"alibi", &InputFiles::alibi, &Inputs::alibi, Kind::logits},
    {"sink", &InputFiles::sink, &Inputs::sink, Kind::logits},
    {"cu_seqlens_q", &InputFiles::cu_seqlens_q, &Inputs::cu_seqlens_q, Kind::lengths},
    {"cu_seqlens_k", &InputFiles::cu_seqlens_k, &Inputs::cu_seqlens_k, Kind::lengths},
    {"seqused_q", &InputFiles::seqused_q, &Inputs::seqused_q, Kind::lengths},
    {"seqused_k", &InputFiles::seqused_k, &Inputs::seqused_k, Kind::lengths},
    {"keys", &InputFiles::keys, &Inputs::keys, Kind::lists},
};

constexpr const char* kRealTypes = "float32, float16, bfloat16, float64 or float8_e4m3fn";

/// A FileError of read() as a failure that names the tensor's option as well.
template <class Read>
auto naming_option(const std::string& tensor, const Read& read) {
  try {
    return read();
  } catch (const io::FileError& error) {
    throw Failure(Exit::input, fmt::format("{}: {}", option_of(tensor), error.what()));
  }
}

/// q, k or v: its elements, or where its rows lie.
Array take_rows(const std::string& tensor, RowSource rows, bool by_rows, Inputs& in) {
  for (const std::filesystem::path& file : rows.file.files()) {
    if (std::ranges::find(in.files, file) == in.files.end()) in.files.push_back(file);
  }
  if (!by_rows) return rows.file.read_all();
  return in.rows.emplace(tensor, std::move(rows)).first->second.described(tensor);
}

/// q, k and v from one file for each.
void read_separate(const InputFiles& files, bool with_values, bool by_rows, Inputs& in) {
  if (files.q.empty() || files.k.empty() || (with_values && files.v.empty())) {
    throw Failure(Exit::usage, fmt::format("inputs: got only some of {}, expected all of them",
                                           with_values ? "--q, --k and --v" : "--q and --k"));
  }
  const auto read = [&](const char* tensor, const std::string& reference) {
    in.sources[tensor] = full_reference(tensor, reference);
    if (std::optional<RowSource> rows = open_rows(tensor, reference))
      return naming_option(tensor, [&] { return take_rows(tensor, std::move(*rows), by_rows, in); });
    in.files.push_back(file_of(reference));
    return read_array(tensor, reference);
  };
  in.q = read("q", files.q);
  in.k = read("k", files.k);
  if (with_values) in.v = read("v", files.v);
}

/// q, k and v from one file, or one set of shards, for all.
void read_together(const InputFiles& files, bool with_values, bool by_rows, Inputs& in) {
  const std::filesystem::path path = files.input;
  if (!is_safetensors(path)) {
    throw Failure(Exit::usage,
                  fmt::format("--input: got '{}', expected FILE.safetensors; give .npy files by {}",
                              safe_text(files.input), with_values ? "--q, --k and --v" : "--q and --k"));
  }
  const auto read = [&](const char* tensor) {
    in.sources[tensor] = full_reference(tensor, files.input);
    io::RowFile file(path, tensor);
    if (in.files.empty()) in.metadata = file.metadata();
    const ElementType type = file.type();
    return take_rows(tensor, {std::move(file), type}, by_rows, in);
  };
  in.q = read("q");
  in.k = read("k");
  if (with_values) in.v = read("v");
}

/// The same elements in another type; what has none gets it when its rows are read.
void convert(const char* tensor, Array& array, ElementType type, Inputs& in) {
  const auto rows = in.rows.find(tensor);
  if (rows == in.rows.end()) {
    array = converted(std::move(array), type);
  } else {
    array.type = rows->second.type = type;
  }
}

/// Checks q, k, v or qv, and converts it to --dtype, or what qv has beside that.
void prepare(const char* tensor, Array& array, const std::string& dtype, Inputs& in, bool is_qv = false) {
  if (!is_real(array.type)) refuse(tensor, array, in, kRealTypes);
  const size_t most = in.packed() ? 3 : 4;
  if (array.shape.size() < 2 || array.shape.size() > most || array.shape.size() != in.q.shape.size()) {
    refuse(tensor, array, in,
           in.packed() ? "(total, d) or (total, heads, d), q, k and v alike"
                       : "(seqlen, d), (seqlen, heads, d) or (batch, seqlen, heads, d), q, k and v alike");
  }
  if (dtype.empty()) return;
  const ElementType type = parse_type("--dtype", dtype);
  convert(tensor, array, is_qv ? output_type(type) : type, in);
}

/// Checks an optional array, and converts it to a type that the library takes.
void prepare(const OptionalInput& what, Array& array, const Inputs& in) {
  if (what.kind == Kind::lengths) {
    array = as_int32(what.tensor, std::move(array), in);
    return;
  }
  if (what.kind == Kind::lists) {
    const size_t most = in.packed() ? 3 : 4;
    if (array.shape.size() < 2 || array.shape.size() > most) {
      refuse(what.tensor, array, in,
             in.packed() ? "(q, count) or (heads of k, q, count)"
                         : "(q, count), (heads of k, q, count) or (batch, heads of k, q, count)");
    }
    array = as_int32(what.tensor, std::move(array), in);
    return;
  }
  const bool of_pairs = what.kind == Kind::bias || what.kind == Kind::mask;
  if (of_pairs && (array.shape.size() < 2 || array.shape.size() > 4)) {
    refuse(what.tensor, array, in, "2 to 4 dimensions: (q, k), (heads, q, k) or (batch, heads, q, k)");
  }
  if (what.kind == Kind::mask) return;
  if (!is_real(array.type)) refuse(what.tensor, array, in, kRealTypes);
  // Beside a q of 8 bits the type of o decides, which is not known here.
  if (what.kind == Kind::bias && array.type == in.q.type && array.type != ElementType::e4m3) return;
  array = converted(std::move(array), ElementType::f32);
}

}  // namespace

void InputFiles::add_options(CLI::App& command, bool with_values, bool with_sequences, bool with_dtype) {
  constexpr const char* kInputs = "Inputs";
  const auto add = [&](const char* name, std::string& field, const char* help, const char* group) {
    command.add_option(name, field, help)->type_name("FILE")->group(group);
  };
  add("--input", input,
      with_values ? "A .safetensors file, or the index of several, with the tensors q, k and v"
                  : "A .safetensors file, or the index of several, with the tensors q and k",
      kInputs);
  add("--q", q, "Queries: (seqlen, d), (seqlen, heads, d) or (batch, seqlen, heads, d)", kInputs);
  add("--k", k, "Keys, of the same number of dimensions", kInputs);
  if (with_values) add("--v", v, "Values, of the same number of dimensions", kInputs);
  if (with_values) {
    add("--qv", qv, "Queries of the values, as q with the head size of v: scores get scale qv v^T, too",
        kInputs);
    constexpr const char* kFactors =
        "(batch or 1, heads of k or 1): its elements, of float8_e4m3fn, are multiplied by these";
    add("--q-descale", q_descale, kFactors, kInputs);
    add("--k-descale", k_descale, kFactors, kInputs);
    add("--v-descale", v_descale, kFactors, kInputs);
  }
  if (with_dtype) {
    command
        .add_option("--dtype", dtype,
                    "Convert q, k, v and qv to this type first: float32, float16, bfloat16, float64, "
                    "float8_e4m3fn (but qv)")
        ->type_name("TYPE")
        ->group(kInputs);
  }
  constexpr const char* kArrays = "Arrays of terms";
  add("--bias", bias, "Added to the scores: (q, k), (heads, q, k) or (batch, heads, q, k); 1 broadcasts",
      kArrays);
  add("--mask", mask, "bool or uint8, shapes as the bias: only keys with a nonzero mask are seen", kArrays);
  if (with_values) {
    add("--block-mask", block_mask, "A mask with one entry per block of queries and keys", kArrays);
    command.add_option("--block-size", block_size, "Block size of --block-mask")
        ->type_name("Q,K")
        ->group(kArrays);
  }
  if (with_values) {
    add("--keys", keys,
        "Lists of keys, whole numbers: (q, count), (heads of k, q, count) or (batch, heads of k, q, count); "
        "1 "
        "broadcasts, -1 is no key. A query sees the keys of its list only",
        kArrays);
  }
  add("--alibi", alibi, "ALiBi slopes: (heads) or (batch, heads)", kArrays);
  add("--sink", sink, "One extra logit per head, which takes part of the weight: (heads)", kArrays);
  if (!with_sequences) return;
  constexpr const char* kSequences = "Sequences of different lengths";
  add("--cu-seqlens-q", cu_seqlens_q,
      "Packed sequences: where each starts in q, and the end: whole numbers, one more than sequences. "
      "q, k, v are then (total, d) or (total, heads, d)",
      kSequences);
  add("--cu-seqlens-k", cu_seqlens_k, "The same for k and v", kSequences);
  add("--seqused-q", seqused_q, "Number of queries used in each sequence: (batch)", kSequences);
  add("--seqused-k", seqused_k, "Number of keys used in each sequence: (batch)", kSequences);
}

std::filesystem::path file_of(const std::string& reference) {
  return split("", reference).file;
}

std::string full_reference(const std::string& tensor, const std::string& reference) {
  const Reference r = split(tensor, reference);
  const bool names_tensor = is_safetensors(r.file);
  return safe_text(names_tensor ? fmt::format("{}:{}", r.file.string(), r.name) : reference);
}

Array read_array(const std::string& tensor, const std::string& reference) {
  const Reference r = split(tensor, reference);
  const bool is_npy = r.file.extension() == kNpy;
  if (!is_npy && !is_safetensors(r.file)) {
    throw Failure(Exit::usage,
                  fmt::format("{}: got '{}', expected FILE.npy, FILE.safetensors or FILE.safetensors:NAME",
                              option_of(tensor), safe_text(reference)));
  }
  return naming_option(tensor, [&] {
    if (is_npy) return io::read_npy(r.file);
    const std::vector<std::filesystem::path> shards = io::find_shards(r.file, r.name).shards;
    if (shards.size() > 1) {
      throw io::FileError(r.file.string(),
                          fmt::format("has tensor {} in {} shards, expected it whole in one file",
                                      io::printable(r.name), shards.size()));
    }
    const std::vector<std::string> names = {r.name};
    return std::move(io::read_safetensors(shards[0], names).arrays.at(0));
  });
}

std::optional<RowSource> open_rows(const std::string& tensor, const std::string& reference) {
  const Reference r = split(tensor, reference);
  if (!is_safetensors(r.file)) return std::nullopt;
  return naming_option(tensor, [&]() -> RowSource {
    io::RowFile file(r.file, r.name);
    const ElementType type = file.type();
    return {std::move(file), type};
  });
}

void RowSource::read(int64_t sequence, int64_t begin, int64_t end, std::byte* to) const {
  const std::vector<int64_t>& whole = file.shape();
  std::vector<int64_t> shape(whole.begin() + static_cast<ptrdiff_t>(io::row_axis(whole)), whole.end());
  shape[0] = end - begin;
  if (type == file.type())
    return file.read(sequence, begin, end, {to, *io::byte_count(shape, io::element_size(type))});
  Array rows = io::make_array("", file.type(), shape);
  file.read(sequence, begin, end, rows.bytes);
  rows = converted(std::move(rows), type);
  if (!rows.bytes.empty()) std::memcpy(to, rows.bytes.data(), rows.bytes.size());
}

std::vector<int64_t> full_shape(std::span<const int64_t> shape, bool packed) {
  const size_t rank = shape.size();
  const int64_t size = shape[rank - 1], heads = rank > 2 ? shape[rank - 2] : 1;
  if (packed) return {shape[0], heads, size};
  return {rank > 3 ? shape[0] : 1, shape[rank > 3 ? 1 : 0], heads, size};
}

Inputs read_inputs(const InputFiles& files, bool with_values, bool by_rows) {
  const bool separate = !files.q.empty() || !files.k.empty() || !files.v.empty();
  if (files.input.empty() == !separate) {
    throw Failure(Exit::usage,
                  separate ? "--input: got it together with --q, --k or --v, expected one or the other"
                           : fmt::format("inputs: got none, expected --input FILE.safetensors, or {}",
                                         with_values ? "--q, --k and --v" : "--q and --k"));
  }
  if (files.block_mask.empty() != files.block_size.empty()) {
    throw Failure(Exit::usage, "--block-mask and --block-size: got one of them, expected both or neither");
  }
  Inputs in;
  (separate ? read_separate : read_together)(files, with_values, by_rows, in);
  for (const OptionalInput& what : kOptionalInputs) {
    const std::string& reference = files.*what.file;
    if (reference.empty()) continue;
    in.files.push_back(file_of(reference));
    in.sources[what.tensor] = full_reference(what.tensor, reference);
    in.*what.array = read_array(what.tensor, reference);
  }
  if (in.block_mask) {
    std::tie(in.block_q, in.block_k) = parse_pair("--block-size", files.block_size, ',', "Q,K");
  }
  prepare("q", in.q, files.dtype, in);
  prepare("k", in.k, files.dtype, in);
  if (in.v) prepare("v", *in.v, files.dtype, in);
  for (const OptionalInput& what : kOptionalInputs) {
    std::optional<Array>& array = in.*what.array;
    if (!array) continue;
    if (what.kind == Kind::queries) {
      prepare(what.tensor, *array, files.dtype, in, true);
    } else {
      prepare(what, *array, in);
    }
  }
  return in;
}

Error misfit(const std::string& tensor, const std::string& what_came_and_was_expected) {
  return {FOVEA_INVALID_ARGUMENT, tensor, tensor + ": " + what_came_and_was_expected};
}

Error Inputs::naming_file(const Error& error) const {
  const auto source = sources.find(error.argument());
  if (source == sources.end()) return error;
  return {error.status(), error.argument(),
          fmt::format("{} ({} is from {})", error.what(), source->first, source->second)};
}

Problem Inputs::problem() const {
  Problem problem;
  problem.q = view(q, full_shape(q.shape, packed()));
  problem.k = view(k, full_shape(k.shape, packed()));
  if (v) problem.v = view(*v, full_shape(v->shape, packed()));
  if (qv) problem.qv = view(*qv, full_shape(qv->shape, packed()));
  if (q_descale) problem.q_descale = view(*q_descale);
  if (k_descale) problem.k_descale = view(*k_descale);
  if (v_descale) problem.v_descale = view(*v_descale);
  if (bias) problem.bias = view(*bias, full_rank(bias->shape));
  if (mask) problem.mask = view(*mask, full_rank(mask->shape));
  if (block_mask) problem.block_mask = view(*block_mask, full_rank(block_mask->shape));
  problem.block_q = block_q;
  problem.block_k = block_k;
  if (alibi) problem.alibi = view(*alibi);
  if (sink) problem.sink = view(*sink);
  if (cu_seqlens_q) problem.cu_seqlens_q = view(*cu_seqlens_q);
  if (cu_seqlens_k) problem.cu_seqlens_k = view(*cu_seqlens_k);
  if (seqused_q) problem.seqused_q = view(*seqused_q);
  if (seqused_k) problem.seqused_k = view(*seqused_k);
  if (keys) problem.keys = view(*keys, full_rank(keys->shape, packed() ? 3 : 4));
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
