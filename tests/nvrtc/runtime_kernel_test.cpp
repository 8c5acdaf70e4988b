// Kernels compiled by NVRTC are those that nvcc makes of the same sources. Needs no GPU; skipped where NVRTC is not.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <regex>
#include <thread>
#include <variant>
#include <vector>

#include "cuda/launch/cubin.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/runtime_kernel.hpp"
#include "cuda/launch/terms.hpp"
#include "expr/cuda_text.hpp"
#include "expr/parse.hpp"

namespace fovea_test {
namespace {

namespace fs = std::filesystem;
using namespace fovea::cuda;

#define FOVEA_SKIP_WITHOUT_NVRTC() \
  if (!nvrtc().missing.empty()) GTEST_SKIP() << nvrtc().missing

const Kernel* kernel_called(const std::string& name) {
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->name == name) return kernel;
  }
  return nullptr;
}

std::string contents_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The header that expressions replace.
std::string no_expression() {
  return contents_of(fs::path(FOVEA_SOURCE_DIR) / "src/cuda/warp/expression.cuh");
}

/// Registers of nvcc's code, from docs/kernels/resources.md; -1 where the page does not say.
int registers_of_page(const std::string& kernel, int capability) {
  static const std::string page = contents_of(fs::path(FOVEA_SOURCE_DIR) / "docs/kernels/resources.md");
  const int column = capability == 75   ? 0
                     : capability == 80 ? 1
                     : capability == 86 ? 2
                     : capability == 89 ? 3
                                        : 4;
  const std::regex row("\\| " + kernel + " \\|[^|]*\\|[^|]*" + "(?:\\|[^|]*){" + std::to_string(column) +
                       "}\\| (\\d+),");
  std::smatch match;
  return std::regex_search(page, match, row) ? std::stoi(match[1]) : -1;
}

struct Case {
  const char* kernel;
  int capability;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.kernel << " for sm_" << c.capability;
}
class RuntimeKernels : public testing::TestWithParam<Case> {};

TEST_P(RuntimeKernels, UseWhatNvccsUse) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const auto [name, capability] = GetParam();
  const Kernel* kernel = kernel_called(name);
  if (kernel == nullptr) GTEST_SKIP() << name << " is not in this build";
  const auto start = std::chrono::steady_clock::now();
  const CompiledKernel compiled =
      compile_kernel(*kernel, no_expression(), capability, nvrtc(), KernelCache(""));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  ASSERT_EQ(compiled.clause, "");
  EXPECT_EQ(compiled.note, "") << "without a folder there is nothing to keep";
  EXPECT_NE(compiled.symbol.find("_ZN5fovea4cuda"), std::string::npos) << compiled.symbol;
  const CubinUsage usage = usage_of(compiled.code);
  EXPECT_EQ(usage.local_bytes, 0) << "spills";
  if (nvrtc().version == 13000) {  // the page's compiler
    // Chips give out registers by eights; below that the two compilers need not agree.
    const auto given_out = [](int registers) { return (registers + 7) / 8 * 8; };
    EXPECT_EQ(given_out(usage.registers), given_out(registers_of_page(name, capability)));
  }
  RecordProperty("seconds", std::to_string(seconds.count()));
  std::printf("%s, sm_%d: %d registers, %zu bytes, %.2f s\n", name, capability, usage.registers,
              compiled.code.size(), seconds.count());
}
INSTANTIATE_TEST_SUITE_P(Set, RuntimeKernels,
                         testing::Values(Case{"fwd_sm90_bf16_d128", 90}, Case{"bwd_sm90_bf16_d128", 90},
                                         Case{"fwd_sm80_bf16_d128_82k", 80}, Case{"fwd_simt_f16_v64", 75},
                                         Case{"fwd_simt_bf16_v64", 80}, Case{"fwd_lists_bf16", 80},
                                         Case{"bwd_lists_f32", 90}));

/// A kernel that compiles quickly.
const Kernel& quick() {
  static const Kernel kernel = [] {
    Kernel k;
    k.name = "quick";
    k.source = {.text =
                    "#include \"cuda/warp/expression.cuh\"\n#include \"cuda/kernels/args.hpp\"\n"
                    "namespace fovea::cuda { template <int kSize> __global__ void quick(float* x) {\n"
                    "  tile::ExpressionTensors t; Expression::Head head(t, 0, 0, 0, 1, 1);\n"
                    "  *x = Expression::score(head, {head, 0}, {head, 0}, kSize); } }\n",
                .entry = "fovea::cuda::quick<3>"};
    return k;
  }();
  return kernel;
}

class RuntimeKernelCache : public testing::Test {
 protected:
  void SetUp() override {
    FOVEA_SKIP_WITHOUT_NVRTC();
    std::string name = (fs::temp_directory_path() / "fovea-nvrtc-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }
  CompiledKernel compiled(const std::string& expression = "", int capability = 80) const {
    return compile_kernel(quick(), expression, capability, nvrtc(), KernelCache(folder_ / "cache"));
  }
  fs::path folder_;
};

TEST_F(RuntimeKernelCache, KeepsTheCodeOfEachExpressionAndChip) {
  const CompiledKernel first = compiled();
  ASSERT_EQ(first.clause, "");
  EXPECT_EQ(first.note, "");
  EXPECT_FALSE(first.from_disk);
  const CompiledKernel second = compiled();
  EXPECT_TRUE(second.from_disk);
  EXPECT_EQ(second.code, first.code);
  EXPECT_EQ(second.symbol, first.symbol);
  EXPECT_FALSE(compiled("", 90).from_disk);
  EXPECT_FALSE(compiled(no_expression() + "\n").from_disk);
  EXPECT_TRUE(compiled(no_expression() + "\n").from_disk);
  EXPECT_TRUE(compiled("", 90).from_disk);
}

TEST_F(RuntimeKernelCache, WhatIsCompiledAheadNeedsNoNvrtc) {
  const KernelCache cache(folder_ / "cache");
  const Nvrtc none = open_nvrtc({});
  std::string file, again;
  EXPECT_NE(compile_ahead(quick(), "", 80, none, cache, file).clause, "");
  const CompiledKernel made = compile_ahead(quick(), "", 80, nvrtc(), cache, file);
  ASSERT_EQ(made.clause, "");
  EXPECT_TRUE(fs::is_regular_file(file));
  EXPECT_TRUE(compile_ahead(quick(), "", 80, none, cache, again).from_disk);
  EXPECT_EQ(again, file);
  for (const Nvrtc* any : {&none, &nvrtc()}) {
    const CompiledKernel found = compile_kernel(quick(), "", 80, *any, cache);
    EXPECT_TRUE(found.from_disk);
    EXPECT_EQ(found.code, made.code);
    EXPECT_EQ(found.clause, "");
  }
  EXPECT_NE(compile_kernel(quick(), "", 90, none, cache).clause, "") << "of another chip";
  EXPECT_NE(compile_kernel(quick(), no_expression() + "\n", 80, none, cache).clause, "");
}

TEST_F(RuntimeKernelCache, ManyProcessesAtOnce) {
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(compiled().clause.empty() && compiled().from_disk ? 0 : 1);
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(compiled().from_disk);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "cache"), {}), 1) << "temporary files stay behind";
}

TEST_F(RuntimeKernelCache, ThreadsShareOneCompilation) {
  ASSERT_EQ(::setenv("FOVEA_CACHE_DIR", "", 1), 0);
  std::vector<const CompiledKernel*> got(4);
  std::vector<std::thread> threads;
  for (const CompiledKernel*& mine : got) {
    threads.emplace_back([&mine] { mine = &compile_kernel(quick(), "", 80); });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(::unsetenv("FOVEA_CACHE_DIR"), 0);
  for (const CompiledKernel* one : got) EXPECT_EQ(one, got[0]);
  EXPECT_EQ(got[0]->clause, "");
}

TEST(RuntimeKernel, SaysWhatDoesNotCompile) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const CompiledKernel compiled =
      compile_kernel(quick(), "int nonsense = mistake;\n", 80, nvrtc(), KernelCache(""));
  EXPECT_TRUE(compiled.code.empty());
  EXPECT_NE(compiled.clause.find(
                "does not compile for the expression: cuda/warp/expression.cuh(1): error: identifier "
                "\"mistake\" is undefined"),
            std::string::npos)
      << compiled.clause;
}

TEST(RuntimeKernel, NeedsNvrtc) {
  const CompiledKernel compiled = compile_kernel(quick(), "", 80, open_nvrtc({}), KernelCache(""));
  EXPECT_EQ(compiled.clause.find("needs NVRTC to compile for the expression"), 0u) << compiled.clause;
}

TEST(RuntimeKernel, NeedsAProgram) {
  EXPECT_EQ(compile_kernel(Kernel{}, "", 80, nvrtc(), KernelCache("")).clause, "does not take expressions");
}

TEST(RuntimeKernel, OfAChipThatNvrtcDoesNotKnowIsPtx) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const CompiledKernel compiled = compile_kernel(quick(), "", 999, nvrtc(), KernelCache(""));
  ASSERT_EQ(compiled.clause, "");
  EXPECT_NE(compiled.code.find(".entry " + compiled.symbol), std::string::npos);
}

TEST(RuntimeKernel, EveryProgramNamesItsKernel) {
  for (const Kernel* kernel : kernel_table()) {
    const bool takes = kernel->kind == KernelKind::kForward || kernel->kind == KernelKind::kBackward ||
                       kernel->kind == KernelKind::kBackwardDv || kernel->kind == KernelKind::kBackwardDq ||
                       kernel->kind == KernelKind::kListKeys || kernel->kind == KernelKind::kDBias ||
                       kernel->kind == KernelKind::kNamedGradients ||
                       kernel->kind == KernelKind::kNamedPeaks || kernel->kind == KernelKind::kNamedSums ||
                       kernel->kind == KernelKind::kSeenBlocks ||
                       kernel->kind == KernelKind::kBackwardSeenBlocks;
    EXPECT_EQ(kernel->source.text != nullptr, takes) << kernel->name;
    EXPECT_TRUE(kernel->entry != nullptr || takes) << kernel->name;
  }
}

// --- kernels for expressions

struct Text {
  const char *name, *score, *sees;
};
constexpr Text kTexts[] = {
    {"alibi", "s - f[h] * abs(q + nk - nq - k)", ""},
    {"table", "s + g[h, clamp(k - q, -128, 127) + 128]", ""},
    {"softcap", "30 * tanh(s / 30)", ""},
    {"documents", "", "d[b, q] == d[b, k]"},
    {"mask", "", "m[b, h, q, k] != 0"},
    {"both", "s * f[h] - 0.5 * float(q - k)", "k <= q && d[b, q] == d[b, k]"},
};
std::string text_of(const Text& text) {
  using namespace fovea;
  const std::vector<expr::TensorDeclaration> tensors = {
      {"f", DType::kF32, 1}, {"g", DType::kF32, 2}, {"d", DType::kI32, 2}, {"m", DType::kU8, 4}};
  std::optional<expr::Expression> score, sees;
  if (*text.score) score = std::get<expr::Expression>(expr::parse(text.score, expr::Use::kScore, tensors));
  if (*text.sees) sees = std::get<expr::Expression>(expr::parse(text.sees, expr::Use::kSees, tensors));
  expr::CudaTextInput input;
  input.score = score ? &*score : nullptr;
  input.sees = sees ? &*sees : nullptr;
  input.positions = int64_t{1} << 21;
  input.gradients = {true, true, false, false};
  return expr::cuda_text(input);
}
void PrintTo(const Text& text, std::ostream* out) {
  *out << text.name;
}

class ExpressionKernels : public testing::TestWithParam<Text> {};

/// Of each head size one spills little: four registers, above 128 columns as much as a plan takes.
TEST_P(ExpressionKernels, FitTheRegisters) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const std::string text = text_of(GetParam());
  std::map<std::string, int> spilled;  // the least of those tried
  for (const Kernel* kernel : kernel_table()) {
    // Of backwards above 256, which have three kernels each, those with the fewest registers left.
    const bool wide_backward = kernel->head_dim == 512 && (kernel->kind == KernelKind::kBackward ||
                                                           kernel->kind == KernelKind::kBackwardDv ||
                                                           kernel->kind == KernelKind::kBackwardDq);
    const bool rows = kernel->entry == nullptr && (kernel->terms & kTermSees) != 0 &&
                      kernel->dtype == fovea::DType::kBF16 &&
                      (kernel->seen_blocks || kernel->kind == KernelKind::kForward || wide_backward) &&
                      kernel->head_dim != 96;
    const bool other =
        kernel->kind == KernelKind::kSeenBlocks || kernel->kind == KernelKind::kBackwardSeenBlocks ||
        ((kernel->kind == KernelKind::kNamedGradients || kernel->kind == KernelKind::kNamedSums) &&
         kernel->dtype == fovea::DType::kBF16);
    if (!rows && !other) continue;
    const std::string group = std::to_string(static_cast<int>(kernel->kind)) + "/" +
                              std::to_string(kernel->head_dim) + "/" + std::to_string(kernel->head_dim_v);
    if (spilled.contains(group) && spilled[group] == 0) continue;
    const CompiledKernel compiled = compile_kernel(*kernel, text, 90, nvrtc(), KernelCache(""));
    ASSERT_EQ(compiled.clause, "") << kernel->name;
    const int bytes = usage_of(compiled.code).local_bytes;
    std::printf("%s: %d bytes spilled\n", kernel->name, bytes);
    const auto [best, is_new] = spilled.emplace(group, bytes);
    if (!is_new) best->second = std::min(best->second, bytes);
  }
  for (const auto& [group, bytes] : spilled) {
    const bool wide = std::ranges::any_of(std::array{"/192", "/256", "/384", "/512"}, [&](const char* size) {
      return group.find(size) != std::string::npos;
    });
    EXPECT_LE(bytes, wide ? kMostSpilledBytes : 16) << group;
  }
}
INSTANTIATE_TEST_SUITE_P(Texts, ExpressionKernels, testing::ValuesIn(kTexts),
                         [](const auto& test) { return std::string(test.param.name); });

/// Those whose terms are too rare for the library to hold them: they are compiled as they are.
TEST(RareKernels, FitTheRegisters) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  int count = 0;
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->entry != nullptr || (kernel->terms & kTermExpressions) != 0 ||
        kernel->dtype != fovea::DType::kBF16)
      continue;
    const CompiledKernel compiled = compile_kernel(*kernel, "", 90, nvrtc(), KernelCache(""));
    ASSERT_EQ(compiled.clause, "") << kernel->name;
    EXPECT_EQ(usage_of(compiled.code).local_bytes, 0) << kernel->name;
    ++count;
  }
  if (count == 0) GTEST_SKIP() << "this build has none: they are Hopper's";
}

// --- on a GPU

#define FOVEA_SKIP_WITHOUT_GPU() \
  if (!driver().missing.empty()) GTEST_SKIP() << driver().missing

TEST(LoadedKernels, OfRunTimeAreThoseOfTheLibrary) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  FOVEA_SKIP_WITHOUT_GPU();
  const int capability = properties_of(0).capability;
  int count = 0;
  for (const char* name : {"fwd_sm90_bf16_d128", "fwd_sm80_bf16_d128", "fwd_simt_f16_v64"}) {
    const Kernel* kernel = kernel_called(name);
    if (kernel == nullptr || kernel->min_capability > capability || kernel->entry == nullptr ||
        (kernel->max_capability != 0 && kernel->max_capability < capability)) {
      continue;
    }
    const LoadedKernel& ahead = loaded(*kernel, 0);
    const LoadedKernel& now = loaded(*kernel, 0, no_expression());
    EXPECT_EQ(now.clause, ahead.clause);
    EXPECT_EQ(now.ctas_per_sm, ahead.ctas_per_sm) << name;
    EXPECT_NE(now.function, nullptr) << name;
    EXPECT_EQ(&loaded(*kernel, 0, no_expression()), &now);
    ++count;
  }
  if (count == 0) GTEST_SKIP() << "no kernel for this GPU in this build";
}

TEST(LoadedKernels, MustNotSpill) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  FOVEA_SKIP_WITHOUT_GPU();
  Kernel kernel;
  kernel.name = "spills";
  kernel.threads = 32;
  kernel.source = {.text =
                       "#include \"cuda/kernels/args.hpp\"\n"
                       "template <int kSize> __global__ void spills(int* x) {\n"
                       "  int local[kSize]; for (int i = 0; i < kSize; ++i) local[i] = x[i * i];\n"
                       "  for (int i = 0; i < kSize; ++i) x[i] = local[x[i] % kSize]; }\n",
                   .entry = "spills<300>"};
  const LoadedKernel& refused = loaded(kernel, 0, "");
  EXPECT_EQ(refused.function, nullptr);
  EXPECT_NE(refused.clause.find("spills spills registers with this expression (12"), std::string::npos)
      << refused.clause;
}

}  // namespace
}  // namespace fovea_test
