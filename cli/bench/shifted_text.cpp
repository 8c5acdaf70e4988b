// Goes through names and brackets of a text that the library has accepted: the definitions of shifted_text.hpp.
#include "cli/bench/shifted_text.hpp"

#include <algorithm>
#include <cctype>

namespace fovea::cli {
namespace {

bool is_part(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
}

/// What a name of the part is in the whole.
std::string moved(const std::string& name, const PartOrigin& o) {
  if (name == "nq") return std::to_string(o.nq);
  const std::map<std::string, int64_t> steps = {{"b", o.b}, {"h", o.h}, {"hk", o.hk}, {"q", o.q}};
  const auto step = steps.find(name);
  if (step == steps.end() || step->second == 0) return name;
  return "(" + name + " + " + std::to_string(step->second) + ")";
}

/// A bracket that is open, and which dimension of which tensor stands there; none for parentheses.
struct Open {
  const Array* tensor = nullptr;
  size_t dimension = 0;
};

}  // namespace

std::string shifted(const std::string& given, const std::vector<Array>& tensors, const PartOrigin& origin) {
  std::string text;  // without blanks, so that what stands beside a name is next to it
  std::ranges::copy_if(given, std::back_inserter(text),
                       [](char c) { return std::isspace(static_cast<unsigned char>(c)) == 0; });
  std::string out, last;
  std::vector<Open> open;
  for (size_t at = 0; at < text.size();) {
    if (!is_part(text[at])) {
      const char c = text[at++];
      const auto named = std::ranges::find(tensors, last, &Array::name);
      if (c == '[') open.push_back({named == tensors.end() ? nullptr : &*named, 0});
      if (c == '(') open.push_back({});
      if ((c == ']' || c == ')') && !open.empty()) open.pop_back();
      if (c == ',' && !open.empty()) ++open.back().dimension;
      out += c;
      last.clear();
      continue;
    }
    const size_t begin = at;
    while (at < text.size() && is_part(text[at])) ++at;
    last = text.substr(begin, at - begin);
    // A name alone indexes a dimension of size 1 for all its values.
    const bool alone = !out.empty() && (out.back() == '[' || out.back() == ',') && at < text.size() &&
                       (text[at] == ']' || text[at] == ',');
    const bool broadcasts = alone && !open.empty() && open.back().tensor != nullptr &&
                            open.back().dimension < open.back().tensor->shape.size() &&
                            open.back().tensor->shape[open.back().dimension] == 1;
    out += broadcasts ? last : moved(last, origin);
  }
  return out;
}

Expressions shifted(const Expressions& whole, const PartOrigin& origin) {
  Expressions part = whole;
  part.score = shifted(whole.score, whole.tensors, origin);
  part.sees = shifted(whole.sees, whole.tensors, origin);
  return part;
}

}  // namespace fovea::cli
