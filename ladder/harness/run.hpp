// A rung on a problem: memory, the check against float64, and the clock.
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
  double relative = 0;  ///< that over the largest expected value
};

struct Checked {
  std::vector<OutputError> errors;
  int64_t rows = 0;  ///< that were compared with float64; of all others it is checked that they are finite
  bool right = false;
};

/// The values of an input, as the device holds them.
void upload(Device& device, void* to, const HostTensor& tensor);

/// The tensors of a problem in the memory of a device.
class Problem {
 public:
  Problem(Device& device, const Rung& rung, Shape shape, uint64_t seed = 1);
  /// With tensors that another rung of the group was given already.
  Problem(Device& device, const Rung& rung, Shape shape, const std::vector<HostTensor>& tensors);
  ~Problem();
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  void run() const { rung_->run(task_); }
  /// Outputs full of NaN, one run, and the comparison of at most `rows` rows spread over all, with the first
  /// and the last among them.
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
