// Times the library beside a rung, and reads the times of other libraries: the definitions of peer.hpp.
#include "cli/ladder/peer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "fovea/fovea.hpp"
#include "io/file_error.hpp"

namespace fovea::cli {
namespace {

/// Memory of a device, full of small numbers.
class Memory {
 public:
  Memory(ladder::Device& device, size_t bytes) : device_(device), data_(device.allocate(bytes)) {
    // 0x3c3c is 0.0115 in bfloat16 and 0x3c3c3c3c is 0.0115 in float32. Piece by piece, as on a host the
    // pattern itself would count in `weigh_library`.
    const std::vector<unsigned char> pattern(std::min(bytes, size_t{1} << 16), 0x3c);
    for (size_t at = 0; at < bytes; at += pattern.size())
      device.upload(static_cast<char*>(data_) + at, pattern.data(), std::min(pattern.size(), bytes - at));
  }
  ~Memory() { device_.release(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  ladder::Device& device_;
  void* data_;
};

bool is_of_library(const ladder::Group& group) {
  return group.family != ladder::Family::matmul && group.family != ladder::Family::softmax;
}

/// A problem of a group of attention as the library solves it.
class LibraryAttention final : public LibraryCall {
 public:
  LibraryAttention(ladder::Device& device, const ladder::Group& group, ladder::Shape shape,
                   const std::vector<ladder::HostTensor>& inputs)
      : device_(device) {
    const bool gpu = group.where == ladder::Where::gpu;
    const fovea_dtype type = group.type == ladder::Type::f32 ? fovea_dtype{FOVEA_CODE_FLOAT, 32, 1}
                                                             : fovea_dtype{FOVEA_CODE_BFLOAT, 16, 1};
    const int64_t sizes[] = {shape.a, shape.b, 1, shape.c};
    const int64_t lse_sizes[] = {shape.a, 1, shape.b};
    const auto count = static_cast<size_t>(shape.a) * static_cast<size_t>(shape.b);
    const fovea_device place = gpu ? cuda(device.id()) : fovea_device{FOVEA_CPU, 0};
    const auto tensor = [&] {
      return Tensor(allocate(count * static_cast<size_t>(shape.c) * type.bits / 8), type, sizes).on(place);
    };
    Problem problem;
    problem.causal = group.family == ladder::Family::causal;
    for (Tensor* t : {&problem.q, &problem.k, &problem.v, &problem.o}) *t = tensor();
    problem.lse = Tensor(static_cast<float*>(allocate(count * sizeof(float))), lse_sizes).on(place);
    if (group.family == ladder::Family::gradient) {
      problem.pass = Pass::backward;
      for (Tensor* t : {&problem.d_o, &problem.dq, &problem.dk, &problem.dv}) *t = tensor();
    }
    plan_ = std::make_unique<Plan>(problem, Options{});
    workspace_ = std::make_unique<Workspace>(*plan_);
    buffers_ = {.q = problem.q.data(),
                .k = problem.k.data(),
                .v = problem.v.data(),
                .o = problem.o.data(),
                .lse = problem.lse.data(),
                .d_o = problem.d_o.data(),
                .dq = problem.dq.data(),
                .dk = problem.dk.data(),
                .dv = problem.dv.data(),
                .stream = device.stream()};
    const std::pair<const char*, void*> places[] = {{"q", problem.q.data()},     {"k", problem.k.data()},
                                                    {"v", problem.v.data()},     {"o", problem.o.data()},
                                                    {"lse", problem.lse.data()}, {"d_o", problem.d_o.data()}};
    for (const ladder::HostTensor& input : inputs) {
      for (const auto& [name, to] : places) {
        if (!input.is_output && input.name == name) ladder::upload(device, to, input);
      }
    }
  }

  void run() override { plan_->run(buffers_, *workspace_); }
  std::string name() const override { return "fovea " + std::string(plan_->backend()); }

 private:
  void* allocate(size_t bytes) {
    memory_.push_back(std::make_unique<Memory>(device_, bytes));
    return memory_.back()->data();
  }

  ladder::Device& device_;
  std::vector<std::unique_ptr<Memory>> memory_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Workspace> workspace_;
  Buffers buffers_;
};

}  // namespace

std::unique_ptr<LibraryCall> library_call(ladder::Device& device, const ladder::Group& group,
                                          ladder::Shape shape,
                                          const std::vector<ladder::HostTensor>& inputs) {
  if (!is_of_library(group)) return nullptr;
  return std::make_unique<LibraryAttention>(device, group, shape, inputs);
}

std::optional<LibraryMemory> weigh_library(ladder::Device& device, const ladder::Group& group,
                                           ladder::Shape shape) {
  if (!is_of_library(group)) return std::nullopt;
  LibraryMemory memory;
  memory.peak_bytes = device.peak_bytes([&] {
    LibraryAttention call(device, group, shape, {});
    call.run();
    device.synchronize();
    memory.name = call.name();
  });
  return memory;
}

namespace {

/// The caller judges the error by the rung's tolerance.
StoredRung read_rung(const Json& row) {
  StoredRung stored;
  stored.timing = {row.at("runs").get<int>(), row.at("median_seconds").get<double>(),
                   row.at("fastest_seconds").get<double>(), row.at("spread").get<double>()};
  stored.timer = safe_text(row.at("timer").get<std::string>());
  stored.checked.rows = row.at("rows_checked").get<int64_t>();
  for (const auto& [tensor, error] : row.at("errors").items()) {
    stored.checked.errors.push_back(
        {tensor, error.at("largest").get<double>(), error.at("relative").get<double>()});
  }
  return stored;
}

}  // namespace

StoredPeers::StoredPeers(const std::filesystem::path& path, const ladder::Device& host,
                         const ladder::Device* gpu) {
  std::ifstream file(path);
  if (!file) throw io::FileError(path.string(), "cannot be read");
  const auto wrong = [&](const std::string& fault) {
    return io::FileError(path.string(), fault + "; bench/gpu/ladder_peers.py --json writes such files");
  };
  try {
    const Json json = Json::parse(file);
    const auto demand_same = [&](const char* where, const std::string& here) {
      const auto there = json.at(where).get<std::string>();
      if (there != here) {
        throw wrong(fmt::format("its times are of {}, this is {}; measure again here", io::printable(there),
                                here.empty() ? "a machine without a GPU" : here));
      }
    };
    if (json.contains("host")) demand_same("host", host.text());
    if (json.contains("gpu")) {  // the name alone: PyTorch does not tell the rest
      const std::string text = gpu != nullptr ? gpu->text() : "";
      demand_same("gpu", text.substr(0, text.find(", compute capability")));
    }
    about_ = {{"date", json.at("date")}, {"software", json.at("software")}};
    for (const Json& row : json.at("rows")) {
      const auto seconds = row.at("median_seconds").get<double>();
      if (!(seconds > 0)) throw wrong(fmt::format("median_seconds is {}, expected more than 0", seconds));
      if (row.contains("rung")) {
        rungs_.push_back(
            {row.at("rung").get<std::string>(), row.at("shape").get<std::string>(), read_rung(row)});
        continue;
      }
      const Peer peer{safe_text(row.at("peer").get<std::string>()), false, seconds};
      rows_.push_back({row.at("group").get<std::string>(), row.at("shape").get<std::string>(), peer});
    }
  } catch (const Json::exception& error) {
    throw wrong(std::string("not a table of times (") + error.what() + ")");
  }
}

std::vector<Peer> StoredPeers::of(const ladder::Group& group, ladder::Shape shape) const {
  std::vector<Peer> found;
  for (const Row& row : rows_) {
    if (row.group == group.name && row.shape == ladder::shape_text(group.family, shape))
      found.push_back(row.peer);
  }
  return found;
}

const StoredRung* StoredPeers::rung(const ladder::Rung& rung, ladder::Shape shape) const {
  const std::string text = ladder::shape_text(rung.group->family, shape);
  const auto found = std::find_if(rungs_.begin(), rungs_.end(), [&](const RungRow& row) {
    return row.name == rung.name && row.shape == text;
  });
  return found != rungs_.end() ? &found->stored : nullptr;
}

}  // namespace fovea::cli
