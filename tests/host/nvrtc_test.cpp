// Where NVRTC is looked for, and what is said where it is not.
#include "cuda/launch/nvrtc.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace fovea_test {
namespace {

namespace fs = std::filesystem;
using namespace fovea::cuda;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Nvrtc, SaysWhatIsMissing) {
  const std::string files[] = {"/nowhere/libnvrtc.so.13"};
  const Nvrtc none = open_nvrtc(files);
  EXPECT_EQ(none.functions, nullptr);
  EXPECT_TRUE(
      none.missing.starts_with("needs NVRTC to compile for the expression (/nowhere/libnvrtc.so.13: "))
      << none.missing;
  EXPECT_TRUE(has(none.missing, "install nvidia-cuda-nvrtc")) << none.missing;
  EXPECT_TRUE(has(none.missing, "FOVEA_NVRTC")) << none.missing;
}

TEST(Nvrtc, RefusesOtherLibraries) {
  const std::string files[] = {"libm.so.6", "/nowhere/libnvrtc.so"};
  const Nvrtc none = open_nvrtc(files);
  EXPECT_TRUE(has(none.missing, "libm.so.6 is not NVRTC")) << none.missing;
}

TEST(Nvrtc, TheVariableNamesTheOnlyFile) {
  ASSERT_EQ(::setenv("FOVEA_NVRTC", "/some/file.so", 1), 0);
  EXPECT_EQ(nvrtc_candidates(""), std::vector<std::string>{"/some/file.so"});
  ASSERT_EQ(::unsetenv("FOVEA_NVRTC"), 0);
  EXPECT_EQ(nvrtc_candidates("").front(), "libnvrtc.so.13");
}

TEST(Nvrtc, IsFoundAmongPythonsPackages) {
  std::string name = (fs::temp_directory_path() / "fovea-nvrtc-XXXXXX").string();
  ASSERT_NE(::mkdtemp(name.data()), nullptr);
  const fs::path packages = fs::path(name) / "lib/python3/site-packages";
  for (const char* file : {"nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"}) {
    fs::create_directories((packages / file).parent_path());
    std::ofstream(packages / file) << "";
    for (const char* library : {"fovea/_core.so", "fovea/lib/libfovea.so"}) {
      const auto files = nvrtc_candidates((packages / library).string());
      EXPECT_EQ(std::count(files.begin(), files.end(), (packages / file).string()), 1) << library;
    }
  }
  fs::remove_all(name);
}

TEST(Nvrtc, TakesTheNewestChipWhoseCodeRuns) {
  Nvrtc n;
  n.chips = {75, 80, 86, 90, 100};
  EXPECT_EQ(nvrtc_architecture(n, 90, true), "sm_90a");
  EXPECT_EQ(nvrtc_architecture(n, 90, false), "sm_90");
  EXPECT_EQ(nvrtc_architecture(n, 89, false), "sm_86");
  EXPECT_EQ(nvrtc_architecture(n, 120, false), "compute_100");
  EXPECT_EQ(nvrtc_architecture(n, 91, true), "");
  EXPECT_EQ(nvrtc_architecture(n, 70, false), "");
}

}  // namespace
}  // namespace fovea_test
