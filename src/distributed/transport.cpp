// The definitions of transport.hpp.
#include "distributed/transport.hpp"

#include <algorithm>

#include "core/status.hpp"

namespace fovea::distributed {

Transport::Transport(const fovea_transport* given) : c_{} {
  if (given == nullptr) throw_invalid("transport", "NULL", "a transport", "open one for this rank");
  if (given->struct_size < sizeof(fovea_transport))
    throw_invalid("transport", "a struct of " + std::to_string(given->struct_size) + " bytes",
                  std::to_string(sizeof(fovea_transport)), "set struct_size");
  c_ = *given;
  if (!c_.start || !c_.finish || !c_.stop || !c_.error)
    throw_invalid("transport", "a function that is NULL", "start, finish, stop and error", "fill the struct");
  if (c_.size < 1 || c_.rank < 0 || c_.rank >= c_.size)
    throw_invalid("transport", "rank " + std::to_string(c_.rank) + " of " + std::to_string(c_.size),
                  "a rank below the number of ranks", "fill the struct");
}

void Transport::check(fovea_status status, const char* what) const {
  if (status == FOVEA_OK) return;
  const char* why = c_.error(c_.context);
  throw RequestError(static_cast<Status>(status), "transport",
                     "transport: rank " + std::to_string(c_.rank) + " " + what + ": " + (why ? why : ""));
}

void Transport::start(const std::vector<fovea_message>& sends, const std::vector<fovea_message>& receives,
                      void* stream) const {
  check(c_.start(c_.context, sends.data(), static_cast<int32_t>(sends.size()), receives.data(),
                 static_cast<int32_t>(receives.size()), stream),
        "could not begin a step");
}

void Transport::ask() const {
  start({}, {}, nullptr);
  finish(nullptr);
}

void Transport::finish(void* stream) const {
  check(c_.finish(c_.context, stream), "could not end a step");
}

}  // namespace fovea::distributed
