// Writes the headers that take the place of cuda/warp/expression.cuh in tests of kernels that only run compiled for an expression: for
// named_sums_test.cpp, or with "sees" for seen_blocks_test.cpp.
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "emulation/named_sums_problem.hpp"
#include "emulation/seen_blocks_problem.hpp"
#include "expr/cuda_text.hpp"
#include "expr/parse.hpp"

namespace {

using namespace fovea;

expr::Expression parsed(const char* text, expr::Use use,
                        const std::vector<expr::TensorDeclaration>& tensors) {
  return std::get<expr::Expression>(expr::parse(text, use, tensors));
}

std::string text_of_named_sums() {
  const std::vector<expr::TensorDeclaration> tensors = {{"scales", DType::kF32, 1},
                                                        {"table", DType::kF32, 2},
                                                        {"full", DType::kF32, 4},
                                                        {"one", DType::kF32, 0}};
  const auto score = parsed(emulation::kScoreOfNamedSums, expr::Use::kScore, tensors);
  expr::CudaTextInput input;
  input.score = &score;
  input.gradients.assign(tensors.size(), true);
  input.positions = int64_t{1} << 21;
  return expr::cuda_text(input);
}

std::string text_of_seen_blocks() {
  const std::vector<expr::TensorDeclaration> tensors = {
      {"group", DType::kI32, 2}, {"mark", DType::kI32, 2}, {"shift", DType::kI32, 1}};
  const auto sees = parsed(emulation::kSeesOfSeenBlocks, expr::Use::kSees, tensors);
  expr::CudaTextInput input;
  input.sees = &sees;
  input.gradients.assign(tensors.size(), false);
  input.positions = int64_t{1} << 21;
  return expr::cuda_text(input);
}

}  // namespace

int main(int count, char** arguments) {
  const std::filesystem::path file(arguments[1]);
  std::filesystem::create_directories(file.parent_path());
  const bool sees = count > 2 && std::string_view(arguments[2]) == "sees";
  std::ofstream(file) << (sees ? text_of_seen_blocks() : text_of_named_sums());
  return 0;
}
