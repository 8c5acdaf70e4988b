// Numbers and names as people read them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::cli {

/// Keys stay in the order in which they were put in.
using Json = nlohmann::ordered_json;

std::string bytes_text(double bytes);      ///< "1.50 MiB"
std::string seconds_text(double seconds);  ///< "1.50 ms"
/// "(1, 512, 12, 32)".
std::string shape_text(std::span<const int64_t> shape);
/// Only printable ASCII: what comes from a file must not be able to control a terminal.
std::string safe_text(std::string_view text);
/// A text that is one whole number and nothing else.
std::optional<int64_t> whole_number(std::string_view text);
/// Prints the value on stdout, in one line a member.
void print_json(const Json& json);

/// Rows of cells, with columns aligned: the first to the left, the others to the right.
class Table {
 public:
  explicit Table(std::string indent = "") : indent_(std::move(indent)) {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::string indent_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace fovea::cli
