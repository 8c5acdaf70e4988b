// libFuzzer target: whatever the bytes, parse_safetensors returns the tensors or throws FileError, and what it returns
// survives being written and read again. -malloc_limit_mb also shows that a size that the file claims allocates nothing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fovea::io;
  Safetensors file;
  try {
    file = parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz.safetensors");
  } catch (const FileError&) {
    return 0;
  }
  for (const Array& array : file.arrays) validate(array);
  Safetensors again =
      parse_safetensors(serialize_safetensors(file.arrays, file.metadata), "fuzz.safetensors");
  // Writing puts wider types first, so the order may differ.
  std::ranges::sort(file.arrays, {}, &Array::name);
  std::ranges::sort(again.arrays, {}, &Array::name);
  if (again.arrays != file.arrays || again.metadata != file.metadata) std::abort();
  return 0;
}
