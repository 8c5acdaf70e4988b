// Problems from files: which arrays are read, what they must be, and the library's problem over them.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/data/elements.hpp"
#include "cli/options/cli11.hpp"
#include "cli/options/options.hpp"
#include "fovea/fovea.hpp"
#include "io/safetensors.hpp"
#include "io/shards.hpp"

namespace fovea::cli {

/// Where arrays come from. An array is named as FILE.npy, FILE.safetensors (then the tensor that the option
/// is named after) or FILE.safetensors:NAME. FILE.safetensors may be a set of shards, or the index of one (io/shards.hpp).
struct InputFiles {
  std::string input, q, k, v, qv;
  std::string q_descale, k_descale, v_descale;
  std::string bias, mask, block_mask, alibi, sink;
  std::string cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  std::string keys;
  std::string block_size;
  std::string dtype;

  /// `with_values`: v takes part. `with_sequences`: packed and partly used sequences do. `with_dtype`:
  /// --dtype converts.
  void add_options(CLI::App& command, bool with_values, bool with_sequences, bool with_dtype = true);
  bool any() const { return !input.empty() || !q.empty() || !k.empty() || !v.empty(); }
};

/// One array by its name as above, for a tensor of the library's problem. Failures name the option and the file.
Array read_array(const std::string& tensor, const std::string& reference);
/// A tensor whose rows are read by those who need them, in the type that they are wanted in.
struct RowSource {
  io::RowFile file;
  ElementType type;

  /// Rows [begin, end) of one sequence, to `to`.
  void read(int64_t sequence, int64_t begin, int64_t end, std::byte* to) const;
  /// The type and the shape without elements.
  Array described(const std::string& name) const { return {name, type, file.shape(), {}}; }
};

/// The rows of a tensor that lies in .safetensors files, else nothing. Failures name the option and the file.
std::optional<RowSource> open_rows(const std::string& tensor, const std::string& reference);

/// The file part of such a name.
std::filesystem::path file_of(const std::string& reference);
/// The name in full: FILE.npy or FILE.safetensors:NAME, safe to print.
std::string full_reference(const std::string& tensor, const std::string& reference);

/// What was read. q, k, v keep the rank that they came with.
struct Inputs {
  Array q, k;
  std::optional<Array> v, qv, q_descale, k_descale, v_descale;
  std::optional<Array> bias, mask, block_mask, alibi, sink;
  std::optional<Array> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  std::optional<Array> keys;
  int64_t block_q = 0, block_k = 0;
  io::Metadata metadata;
  /// Every file that was read: none of them may become an output.
  std::vector<std::filesystem::path> files;
  /// Those of q, k, v and d_o that have no elements here, because each rank reads its rows.
  std::map<std::string, RowSource> rows{};
  /// Where each tensor of the problem came from: name of the tensor -> full_reference.
  std::map<std::string, std::string> sources;

  bool packed() const { return cu_seqlens_q.has_value() || cu_seqlens_k.has_value(); }
  /// The same error; if a tensor is at fault, its message names the file as well.
  Error naming_file(const Error& error) const;
  /// The problem over these arrays, with every tensor in the rank that the library wants.
  Problem problem() const;

  /// Shapes of the results: as the library wants them, and as the user gave q.
  std::vector<int64_t> o_shape() const;
  std::vector<int64_t> lse_shape() const;
  std::vector<int64_t> o_shape_for_user() const;
  std::vector<int64_t> lse_shape_for_user() const;
};

/// A tensor that does not fit the others; `Inputs::naming_file` adds its file.
Error misfit(const std::string& tensor, const std::string& what_came_and_was_expected);

/// Reads, converts to --dtype where it was given, and checks ranks and element types. The rest is the
/// library's to validate. `by_rows`: of q, k and v in .safetensors files only types and shapes are read.
Inputs read_inputs(const InputFiles& files, bool with_values = true, bool by_rows = false);

/// (seq, d), (seq, heads, d) or (batch, seq, heads, d) as the library wants it: 4 dimensions, packed 3.
std::vector<int64_t> full_shape(std::span<const int64_t> shape, bool packed);

}  // namespace fovea::cli
