// write_texts FILE: the CUDA texts of text_cases() as C++ for the host, each in a namespace of its own.
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "text_cases.hpp"

namespace fovea::expr {
namespace {

/// Without the includes, which the host has no headers for.
std::string in_namespace(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  std::string result, line;
  while (std::getline(lines, line)) {
    if (line.starts_with("#include") || line == "#pragma once") continue;
    result += (line == "namespace fovea::cuda {" ? "namespace fovea::" + name + " {" : line) + "\n";
  }
  return result;
}

void write(std::ofstream& file) {
  file << "#include \"cuda_on_host.hpp\"\n\n";
  const std::vector<TextCase> cases = text_cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    std::optional<Expression> score, sees;
    if (!cases[i].score.empty()) score = text_expression(cases[i].score, Use::kScore);
    if (!cases[i].sees.empty()) sees = text_expression(cases[i].sees, Use::kSees);
    const CudaTextInput input = text_input(cases[i], score ? &*score : nullptr, sees ? &*sees : nullptr);
    file << in_namespace(cuda_text(input), "text_" + std::to_string(i)) << "\n";
  }
  file << "std::vector<fovea::expr::CompiledText> fovea::expr::compiled_texts() {\n  return {";
  for (size_t i = 0; i < cases.size(); ++i) {
    file << (i > 0 ? ",\n          " : "") << "OnHost<text_" << i << "::Expression>::kText";
  }
  file << "};\n}\n";
}

}  // namespace
}  // namespace fovea::expr

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("write_texts FILE\n", stderr);
    return 2;
  }
  std::ofstream file(argv[1]);
  fovea::expr::write(file);
  file.close();
  return file ? 0 : 1;
}
