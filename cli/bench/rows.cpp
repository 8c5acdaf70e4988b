// The rows of bench/cpu/rows.py, as CMake takes them from that file.
#include "cli/bench/rows.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <sstream>

namespace fovea::cli {
namespace {

constexpr const char* kRowLines[] = {
#include "rows.inc"
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

/// The name that bench/cpu/rows.py gives the row.
BenchCase make_row(const std::string& type, const std::string& pass, const std::string& mask,
                   const std::array<int64_t, 4>& sizes) {
  const auto [batch, seqlen, heads, head_dim] = sizes;
  BenchCase row;
  row.name = fmt::format("{}_{}_b{}_s{}_h{}_d{}_{}", type, pass, batch, seqlen, heads, head_dim, mask);
  row.reads_memory = mask == "decode";
  row.shape = {batch,    row.reads_memory ? 1 : seqlen, seqlen, heads, heads, head_dim,
               head_dim, parse_type("rows", type)};
  row.pass = parse_pass(pass);
  row.terms.causal = mask == "causal";
  return row;
}

}  // namespace

size_t BenchCase::key_bytes() const {
  const size_t element = cache && cache->of_8_bits ? 1 : io::element_size(shape.type);
  return static_cast<size_t>(shape.batch * shape.seqlen_k * shape.heads_kv *
                             (shape.head_dim + shape.head_dim_v)) *
         element;
}

std::vector<BenchCase> listed_rows(const std::string& filter) {
  std::vector<BenchCase> rows;
  for (const char* line : kRowLines) {
    const std::vector<std::string> fields = split(line, ' ');
    const std::array<int64_t, 4> sizes = {std::stoll(fields[0]), std::stoll(fields[1]), std::stoll(fields[2]),
                                          std::stoll(fields[3])};
    for (const std::string& type : split(fields.at(5), ',')) {
      for (const std::string& pass : split(fields.at(6), ',')) {
        for (const std::string& mask : split(fields.at(4), ',')) {
          rows.push_back(make_row(type, pass, mask, sizes));
        }
      }
    }
  }
  const auto group = [](const BenchCase& row) {
    return (row.reads_memory ? 4 : 0) + (row.shape.type == ElementType::f32 ? 0 : 2) +
           (row.pass == Pass::backward ? 1 : 0);
  };
  std::ranges::stable_sort(rows, {}, group);
  std::erase_if(rows, [&](const BenchCase& row) { return row.name.find(filter) == std::string::npos; });
  return rows;
}

}  // namespace fovea::cli
