#include "cli/ladder_peer.hpp"

#include "fovea/fovea.hpp"

namespace fovea::cli {
namespace {

/// Memory of a device, full of small numbers.
class Memory {
 public:
  Memory(ladder::Device& device, size_t bytes) : device_(device), data_(device.allocate(bytes)) {
    // 0x3c3c is 0.0115 in bfloat16 and 0x3c3c3c3c is 0.0115 in float32: the time does not depend on the
    // values.
    const std::vector<unsigned char> pattern(bytes, 0x3c);
    device.upload(data_, pattern.data(), bytes);
  }
  ~Memory() { device_.release(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  ladder::Device& device_;
  void* data_;
};

}  // namespace

std::optional<Peer> time_library(ladder::Device& device, const ladder::Group& group, ladder::Shape shape,
                                 const ladder::Protocol& protocol) {
  const bool backward = group.family == ladder::Family::gradient;
  if (!backward && group.family != ladder::Family::attention) return std::nullopt;
  const bool gpu = group.where == ladder::Where::gpu;
  const fovea_dtype type = group.type == ladder::Type::f32 ? fovea_dtype{FOVEA_CODE_FLOAT, 32, 1}
                                                           : fovea_dtype{FOVEA_CODE_BFLOAT, 16, 1};
  const int64_t sizes[] = {shape.a, shape.b, 1, shape.c};
  const int64_t lse_sizes[] = {shape.a, 1, shape.b};
  const auto count = static_cast<size_t>(shape.a) * static_cast<size_t>(shape.b);
  const size_t bytes = count * static_cast<size_t>(shape.c) * type.bits / 8;
  const Memory q(device, bytes), k(device, bytes), v(device, bytes), o(device, bytes), d_o(device, bytes),
      dq(device, bytes), dk(device, bytes), dv(device, bytes), lse(device, count * sizeof(float));
  const fovea_device place = gpu ? cuda(device.id()) : fovea_device{FOVEA_CPU, 0};
  const auto tensor = [&](const Memory& m) { return Tensor(m.data(), type, sizes).on(place); };

  Problem problem;
  problem.q = tensor(q);
  problem.k = tensor(k);
  problem.v = tensor(v);
  problem.o = tensor(o);
  problem.lse = Tensor(static_cast<float*>(lse.data()), lse_sizes).on(place);
  if (backward) {
    problem.pass = Pass::backward;
    problem.d_o = tensor(d_o);
    problem.dq = tensor(dq);
    problem.dk = tensor(dk);
    problem.dv = tensor(dv);
  }
  const Plan plan(problem, Options{});
  Workspace workspace(plan);
  const Buffers buffers = {.q = problem.q.data(),
                           .k = problem.k.data(),
                           .v = problem.v.data(),
                           .o = problem.o.data(),
                           .lse = problem.lse.data(),
                           .d_o = problem.d_o.data(),
                           .dq = problem.dq.data(),
                           .dk = problem.dk.data(),
                           .dv = problem.dv.data(),
                           .stream = device.stream()};
  const auto times = device.time([&] { plan.run(buffers, workspace); }, protocol);
  return Peer{"fovea " + std::string(plan.backend()), ladder::summary(times).median};
}

}  // namespace fovea::cli
