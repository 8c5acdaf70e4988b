// libFuzzer target: whatever the text, parse returns an expression or an error with a position; an expression survives
// being printed and read again, simplification keeps its values, and blocks are never wrong. The first byte chooses the use.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "../expr/check_text.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fovea::expr;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  bool parses = false;
  if (const char* broken = broken_promise(text, data[0] % 2 ? Use::kSees : Use::kScore, parses)) {
    std::fprintf(stderr, "broken promise: %s\n", broken);
    std::abort();
  }
  return 0;
}
