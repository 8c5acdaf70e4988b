// libFuzzer target: whatever the bytes, parse_npy returns an array or throws FileError, and an array it returns survives
// being written and read again. -malloc_limit_mb also shows that a size that the file claims allocates nothing.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/npy.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fovea::io;
  Array array;
  try {
    array = parse_npy(std::as_bytes(std::span(data, size)), "fuzz.npy");
  } catch (const FileError&) {
    return 0;
  }
  validate(array);
  for (const int version : {1, 2, 3}) {
    if (parse_npy(serialize_npy(array, version), "fuzz.npy") != array) std::abort();
  }
  return 0;
}
