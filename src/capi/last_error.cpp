// The message of the last error of each thread, in memory that is never allocated.
#include "capi/last_error.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace fovea::capi {
namespace {

/// Fixed room, so that a failure to allocate can be reported too.
template <size_t kSize>
class FixedText {
 public:
  void set(std::string_view text) noexcept {
    const size_t length = std::min(text.size(), kSize - 1);
    std::memcpy(characters_.data(), text.data(), length);
    characters_[length] = '\0';
    if (length < text.size()) std::memcpy(characters_.data() + length - 3, "...", 3);
  }
  const char* c_str() const noexcept { return characters_.data(); }

 private:
  std::array<char, kSize> characters_{};
};

thread_local FixedText<4096> message;
thread_local FixedText<64> argument;

}  // namespace

void set_last_error(std::string_view argument_name, std::string_view text) noexcept {
  argument.set(argument_name);
  message.set(text);
}
const char* last_error_message() noexcept {
  return message.c_str();
}
const char* last_error_argument() noexcept {
  return argument.c_str();
}

}  // namespace fovea::capi
