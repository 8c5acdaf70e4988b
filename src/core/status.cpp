// The message of an invalid argument: argument, got, expected, remedy.
#include "core/status.hpp"

namespace fovea {

void throw_invalid(std::string_view argument, std::string_view got, std::string_view expected,
                   std::string_view remedy) {
  std::string message;
  message.append(argument).append(": got ").append(got).append(", expected ").append(expected);
  message.append("; ").append(remedy);
  throw RequestError(Status::kInvalidArgument, std::string(argument), message);
}

}  // namespace fovea
