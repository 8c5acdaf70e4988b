// Errors inside the library. They become status codes in src/capi, and nowhere else.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace fovea {

enum class Status {
  kOk = 0,
  kInvalidArgument = 1,
  kUnsupported = 2,
  kOutOfMemory = 3,
  kInternal = 4,
  kCudaError = 5
};

/// A failed request: the status, the argument at fault, and a message that also says what came, what was
/// expected and what to do.
class RequestError : public std::runtime_error {
 public:
  RequestError(Status status, std::string argument, const std::string& message)
      : std::runtime_error(message), status_(status), argument_(std::move(argument)) {}
  Status status() const noexcept { return status_; }
  const std::string& argument() const noexcept { return argument_; }

 private:
  Status status_;
  std::string argument_;
};

/// Throws RequestError(kInvalidArgument) reading "<argument>: got <got>, expected <expected>; <remedy>".
[[noreturn]] void throw_invalid(std::string_view argument, std::string_view got, std::string_view expected,
                                std::string_view remedy);

}  // namespace fovea
