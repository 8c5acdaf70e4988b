// Runs a rung on a problem: memory, the check against float64, and the timing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ladder/harness/device.hpp"
#include "ladder/harness/family.hpp"

namespace ladder {

struct OutputError {
  std::string tensor;
  double largest = 0;   ///< max |got - expected|
  double relative = 0;  ///< `largest` over the largest expected value
};

struct Checked {
  std::vector<OutputError> errors;
  int64_t rows = 0;  ///< rows compared with float64; all others are checked to be finite
  bool right = false;
};

/// The values of an input in the element type of the device.
void upload(Device& device, void* to, const HostTensor& tensor);

/// The tensors of a problem in the memory of a device.
class Problem {
 public:
  Problem(Device& device, const Rung& rung, Shape shape, uint64_t seed = 1);
  /// Takes tensors that were made for another rung of the group.
  Problem(Device& device, const Rung& rung, Shape shape, const std::vector<HostTensor>& tensors);
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  void run() const { rung_->run(task_); }
  /// Fills the outputs with NaN, runs once, and compares at most `rows` rows, evenly spread, the first and the
  /// last included.
  Checked check(int64_t rows) const;

 private:
  void place(const std::vector<HostTensor>& tensors);
  void spoil_outputs() const;

  Device& device_;
  const Rung* rung_;
  Shape shape_;
  std::vector<HostTensor> own_;
  const std::vector<HostTensor>* tensors_;
  Task task_;
  size_t workspace_bytes_ = 0;
};

struct Summary {
  int runs = 0;
  double median = 0, fastest = 0;  ///< seconds
  double spread = 0;               ///< distance of the quartiles over the median
};
Summary summary(std::vector<double> times);

}  // namespace ladder
