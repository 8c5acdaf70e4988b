#include "report.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace fovea_ggml {
namespace {

class Report {
 public:
  Report() {
    const char* const wanted = std::getenv("FOVEA_GGML_REPORT");
    is_wanted_ = wanted != nullptr && std::strcmp(wanted, "1") == 0;
  }

  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  ~Report() {
    if (!is_wanted_) return;
    std::fprintf(stderr, "fovea: computed %lld times\n", computed_);
    for (const auto& [what, times] : declined_) {
      std::fprintf(stderr, "fovea: declined %lld times: %s\n", times, what.c_str());
    }
  }

  void add_computed() {
    if (!is_wanted_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++computed_;
  }

  void add_declined(const ggml_tensor& node, const char* rule) {
    if (!is_wanted_) return;
    const std::string what = std::string("K ") + ggml_type_name(node.src[1]->type) + ", V " +
                             ggml_type_name(node.src[2]->type) + ": " + rule;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++declined_[what];
  }

 private:
  bool is_wanted_ = false;
  std::mutex mutex_;
  long long computed_ = 0;
  std::map<std::string, long long> declined_;
};

Report report;

}  // namespace

void report_computed() {
  report.add_computed();
}

void report_declined(const ggml_tensor& node, const char* rule) {
  report.add_declined(node, rule);
}

}  // namespace fovea_ggml
