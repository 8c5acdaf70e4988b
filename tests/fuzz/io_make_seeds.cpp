// Writes the small valid files from which the fuzz targets start:
// fuzz_io_seeds DIRECTORY makes DIRECTORY/npy and DIRECTORY/safetensors.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace {

void make_seeds(const std::filesystem::path& directory) {
  using namespace fovea::io;
  std::filesystem::create_directories(directory / "npy");
  std::filesystem::create_directories(directory / "safetensors");

  std::vector<Array> all;
  for (const ElementType type : {ElementType::boolean, ElementType::u8, ElementType::f16, ElementType::bf16,
                                 ElementType::i32, ElementType::f32, ElementType::f64, ElementType::i64}) {
    const std::string name(element_type_name(type));
    all.push_back(make_array(name, type, {2, 3}));
    for (const int version : {1, 2, 3}) {
      write_npy(directory / "npy" / (name + "_v" + std::to_string(version) + ".npy"), all.back(), {},
                version);
    }
    write_safetensors(directory / "safetensors" / (name + ".safetensors"), {&all.back(), 1});
  }
  write_npy(directory / "npy" / "scalar.npy", make_array("scalar", ElementType::f32, {}));
  write_npy(directory / "npy" / "empty.npy", make_array("empty", ElementType::f64, {4, 0, 2}));
  write_safetensors(directory / "safetensors" / "all.safetensors", all,
                    {{"format", "pt"}, {"escape", "\"\\\n"}});
  write_safetensors(directory / "safetensors" / "none.safetensors", {}, {{"only", "metadata"}});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  try {
    make_seeds(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
