// Writes the header that takes the place of cuda/warp/expression.cuh in named_sums_test.cpp.
#include <filesystem>
#include <fstream>
#include <variant>

#include "emulation/named_sums_problem.hpp"
#include "expr/cuda_text.hpp"
#include "expr/parse.hpp"

int main(int, char** arguments) {
  using namespace fovea;
  const std::vector<expr::TensorDeclaration> tensors = {{"scales", DType::kF32, 1},
                                                        {"table", DType::kF32, 2},
                                                        {"full", DType::kF32, 4},
                                                        {"one", DType::kF32, 0}};
  const auto score =
      std::get<expr::Expression>(expr::parse(emulation::kScoreOfNamedSums, expr::Use::kScore, tensors));
  expr::CudaTextInput input;
  input.score = &score;
  input.gradients.assign(tensors.size(), true);
  input.positions = int64_t{1} << 21;
  const std::filesystem::path file(arguments[1]);
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << expr::cuda_text(input);
  return 0;
}
