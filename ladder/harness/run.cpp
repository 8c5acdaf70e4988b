// Memory of a problem on a device, the check against float64, and the timing of a rung: the definitions of run.hpp.

#include "ladder/harness/run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "ladder/harness/parallel.hpp"

namespace ladder {
namespace {

size_t bytes_of(const HostTensor& t) {
  return static_cast<size_t>(t.count()) * (t.type == Type::f32 ? 4 : 2);
}

/// The values in the element type of the device.
std::vector<uint16_t> encoded(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), bf16_bits);
  return bits;
}

/// At most `count` rows of `rows`, evenly spread, the first and the last included.
std::vector<int64_t> chosen_rows(int64_t rows, int64_t count) {
  std::vector<int64_t> chosen;
  if (count >= rows) {
    for (int64_t row = 0; row < rows; ++row) chosen.push_back(row);
  } else {
    for (int64_t i = 0; i < count; ++i) chosen.push_back(i * (rows - 1) / std::max<int64_t>(count - 1, 1));
  }
  return chosen;
}

}  // namespace

void upload(Device& device, void* to, const HostTensor& tensor) {
  if (tensor.type == Type::f32) {
    device.upload(to, tensor.values.data(), bytes_of(tensor));
  } else {
    device.upload(to, encoded(tensor.values).data(), bytes_of(tensor));
  }
}

Problem::Problem(Device& device, const Rung& rung, Shape shape, uint64_t seed)
    : device_(device),
      rung_(&rung),
      shape_(shape),
      own_(make_tensors(rung.group->family, rung.group->type, shape, seed)),
      tensors_(&own_) {
  place(own_);
}
Problem::Problem(Device& device, const Rung& rung, Shape shape, const std::vector<HostTensor>& tensors)
    : device_(device), rung_(&rung), shape_(shape), tensors_(&tensors) {
  place(tensors);
}

void Problem::place(const std::vector<HostTensor>& tensors) {
  task_.shape = shape_;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const HostTensor& t = tensors[i];
    task_.tensors[i] = device_.allocate(bytes_of(t));
    if (!t.is_output) upload(device_, task_.tensors[i], t);
  }
  workspace_bytes_ = rung_->workspace(shape_) * sizeof(float);
  if (workspace_bytes_ > 0) task_.workspace = static_cast<float*>(device_.allocate(workspace_bytes_));
}

Problem::~Problem() {
  for (void* memory : task_.tensors) device_.release(memory);
  device_.release(task_.workspace);
}

void Problem::spoil_outputs() const {
  const auto spoil = [&](void* memory, size_t bytes) {
    const std::vector<unsigned char> nan(bytes, 0xff);  // NaN in every type
    device_.upload(memory, nan.data(), bytes);
  };
  for (size_t i = 0; i < tensors_->size(); ++i) {
    if ((*tensors_)[i].is_output) spoil(task_.tensors[i], bytes_of((*tensors_)[i]));
  }
  if (workspace_bytes_ > 0) spoil(task_.workspace, workspace_bytes_);
}

Checked Problem::check(int64_t rows) const {
  spoil_outputs();
  run();
  device_.synchronize();

  struct Got {
    const HostTensor* tensor;
    std::vector<float> values;
    double error = 0, largest = 0;
    bool finite = true;
  };
  std::vector<Got> outputs;
  for (size_t i = 0; i < tensors_->size(); ++i) {
    const HostTensor& t = (*tensors_)[i];
    if (!t.is_output) continue;
    Got got{&t, std::vector<float>(static_cast<size_t>(t.count()))};
    if (t.type == Type::f32) {
      device_.download(got.values.data(), task_.tensors[i], bytes_of(t));
    } else {
      std::vector<uint16_t> bits(got.values.size());
      device_.download(bits.data(), task_.tensors[i], bytes_of(t));
      std::transform(bits.begin(), bits.end(), got.values.begin(), bf16_value);
    }
    got.finite = std::all_of(got.values.begin(), got.values.end(), [](float x) { return std::isfinite(x); });
    outputs.push_back(std::move(got));
  }

  const std::vector<int64_t> chosen = chosen_rows(outputs.front().tensor->rows, rows);
  std::mutex mutex;
  parallel_for(static_cast<int64_t>(chosen.size()), [&](int64_t i) {
    const int64_t row = chosen[static_cast<size_t>(i)];
    const auto expected = reference_row(rung_->group->family, shape_, *tensors_, row);
    for (size_t o = 0; o < outputs.size(); ++o) {
      Got& got = outputs[o];
      double error = 0, largest = 0;
      for (size_t c = 0; c < expected[o].size(); ++c) {
        const auto at = static_cast<size_t>(row * got.tensor->width) + c;
        error = std::max(error, std::abs(static_cast<double>(got.values[at]) - expected[o][c]));
        largest = std::max(largest, std::abs(expected[o][c]));
      }
      const std::lock_guard lock(mutex);
      got.error = std::max(got.error, error);
      got.largest = std::max(got.largest, largest);
    }
  });

  Checked checked;
  checked.rows = static_cast<int64_t>(chosen.size());
  checked.right = true;
  for (const Got& got : outputs) {
    const double relative = got.error / std::max(got.largest, 1e-30);
    checked.errors.push_back({got.tensor->name, got.error, relative});
    checked.right = checked.right && got.finite && relative <= rung_->tolerance;
  }
  return checked;
}

Summary summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double share) {
    const double at = share * static_cast<double>(times.size() - 1);
    const auto below = static_cast<size_t>(at);
    const double above = times[std::min(below + 1, times.size() - 1)];
    return times[below] + (above - times[below]) * (at - static_cast<double>(below));
  };
  if (times.empty()) return {};
  const double median = quantile(0.5);
  return {static_cast<int>(times.size()), median, times.front(), (quantile(0.75) - quantile(0.25)) / median};
}

}  // namespace ladder
