// A small valid request of each kind, for tests that spoil it in one place.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "fovea/fovea.h"

namespace fovea_test {

inline constexpr fovea_dtype kFloat64{FOVEA_CODE_FLOAT, 64, 1};
inline constexpr fovea_dtype kFloat32{FOVEA_CODE_FLOAT, 32, 1};
inline constexpr fovea_dtype kFloat16{FOVEA_CODE_FLOAT, 16, 1};
inline constexpr fovea_dtype kBFloat16{FOVEA_CODE_BFLOAT, 16, 1};
inline constexpr fovea_dtype kE4M3{FOVEA_CODE_FLOAT8_E4M3FN, 8, 1};
inline constexpr fovea_dtype kInt32{FOVEA_CODE_INT, 32, 1};
inline constexpr fovea_dtype kInt64{FOVEA_CODE_INT, 64, 1};
inline constexpr fovea_dtype kUInt8{FOVEA_CODE_UINT, 8, 1};
inline constexpr fovea_dtype kBool{FOVEA_CODE_BOOL, 8, 1};

/// A tensor whose memory is larger than any valid shape of these tests needs.
class TestTensor {
 public:
  TestTensor() : memory_(kRoom, 0) {}

  void set(fovea_dtype dtype, std::initializer_list<int64_t> shape) {
    shape_.assign(shape);
    shape_.resize(6, 1);
    c = {};
    c.data = memory_.data();
    c.device = {FOVEA_CPU, 0};
    c.ndim = static_cast<int32_t>(shape.size());
    c.dtype = dtype;
    c.shape = shape_.data();
  }
  void set_shape(std::initializer_list<int64_t> shape) {
    const fovea_dtype dtype = c.dtype;
    set(dtype, shape);
  }
  void set_strides(std::initializer_list<int64_t> strides) {
    strides_.assign(strides);
    strides_.resize(6, 1);
    c.strides = strides_.data();
  }
  template <class T>
  void fill(std::initializer_list<T> values) {
    std::copy(values.begin(), values.end(), reinterpret_cast<T*>(memory_.data()));
  }
  std::vector<unsigned char>& memory() { return memory_; }

  fovea_tensor c{};

 private:
  static constexpr size_t kRoom = 4096;
  std::vector<unsigned char> memory_;
  std::vector<int64_t> shape_, strides_;
};

/// B = 2, Sq = 3, Sk = 5, Hq = 4, Hkv = 2, D = 8, Dv = 6.
class Request {
 public:
  static Request forward() {
    Request r;
    r.add("q", kFloat32, {2, 3, 4, 8});
    r.add("k", kFloat32, {2, 5, 2, 8});
    r.add("v", kFloat32, {2, 5, 2, 6});
    r.add("o", kFloat32, {2, 3, 4, 6});
    r.add("lse", kFloat32, {2, 4, 3});
    return r;
  }
  static Request backward() {
    Request r = forward();
    r.problem.pass = FOVEA_BACKWARD;
    r.add("d_o", kFloat32, {2, 3, 4, 6});
    r.add("dq", kFloat32, {2, 3, 4, 8});
    r.add("dk", kFloat32, {2, 5, 2, 8});
    r.add("dv", kFloat32, {2, 5, 2, 6});
    return r;
  }
  /// Three sequences of 2, 0, 4 queries and 3, 2, 1 keys.
  static Request packed() {
    Request r;
    r.add("q", kFloat32, {6, 4, 8});
    r.add("k", kFloat32, {6, 2, 8});
    r.add("v", kFloat32, {6, 2, 6});
    r.add("o", kFloat32, {6, 4, 6});
    r.add("lse", kFloat32, {4, 6});
    r.add("cu_seqlens_q", kInt32, {4}).fill<int32_t>({0, 2, 2, 6});
    r.add("cu_seqlens_k", kInt32, {4}).fill<int32_t>({0, 3, 5, 6});
    return r;
  }

  TestTensor& operator[](const std::string& name) { return tensors_.at(name); }
  TestTensor& add(const std::string& name, fovea_dtype dtype, std::initializer_list<int64_t> shape) {
    TestTensor& t = tensors_[name];
    t.set(dtype, shape);
    return t;
  }
  void remove(const std::string& name) { tensors_.erase(name); }
  /// A tensor for expressions, found as "named.<name>", and its gradient, found as "named.<name>.gradient".
  TestTensor& add_named(const std::string& name, fovea_dtype dtype, std::initializer_list<int64_t> shape) {
    names_.push_back(name);
    return add("named." + name, dtype, shape);
  }
  TestTensor& add_gradient(const std::string& name, fovea_dtype dtype, std::initializer_list<int64_t> shape) {
    return add("named." + name + ".gradient", dtype, shape);
  }
  /// Sets the element type of the named tensors.
  void set_dtype(std::initializer_list<const char*> names, fovea_dtype dtype) {
    for (const char* name : names) tensors_.at(name).c.dtype = dtype;
  }

  fovea_problem problem = FOVEA_PROBLEM_INIT;
  fovea_options options = FOVEA_OPTIONS_INIT;
  /// Called last, for what tensors cannot say: names and pointers.
  void (*spoil_named)(std::vector<fovea_named_tensor>&) = nullptr;
  void (*spoil_problem)(fovea_problem&) = nullptr;

  /// The problem with its tensor fields set.
  const fovea_problem& c_problem() {
    for (const auto& [name, field] : fields()) {
      const auto found = tensors_.find(name);
      problem.*field = found == tensors_.end() ? nullptr : &found->second.c;
    }
    named_.clear();
    for (const std::string& name : names_)
      named_.push_back({name.c_str(), find("named." + name), find("named." + name + ".gradient")});
    if (spoil_named) spoil_named(named_);
    problem.named = named_.empty() ? nullptr : named_.data();
    if (!named_.empty()) problem.num_named = static_cast<int64_t>(named_.size());
    if (spoil_problem) spoil_problem(problem);
    return problem;
  }
  /// The data pointers of all tensors.
  fovea_buffers c_buffers() {
    fovea_buffers b = FOVEA_BUFFERS_INIT;
    const auto data = [&](const char* name) -> void* {
      const auto found = tensors_.find(name);
      return found == tensors_.end() ? nullptr : found->second.memory().data();
    };
#define FOVEA_TEST_POINTER(field, Name, forward, backward, meaning) b.field = data(#field);
    FOVEA_TENSORS(FOVEA_TEST_POINTER)
#undef FOVEA_TEST_POINTER
    for (size_t i = 0; i < names_.size() && i < FOVEA_MAX_NAMED_TENSORS; ++i) {
      b.named[i] = data(("named." + names_[i]).c_str());
      b.named_gradients[i] = data(("named." + names_[i] + ".gradient").c_str());
    }
    return b;
  }

  /// Every byte of every tensor.
  std::map<std::string, std::vector<unsigned char>> bytes() {
    std::map<std::string, std::vector<unsigned char>> all;
    for (auto& [name, tensor] : tensors_) all[name] = tensor.memory();
    return all;
  }

 private:
  static const std::map<std::string, const fovea_tensor * fovea_problem::*>& fields() {
    static const std::map<std::string, const fovea_tensor* fovea_problem::*> all = {
#define FOVEA_TEST_FIELD(field, Name, forward, backward, meaning) {#field, &fovea_problem::field},
        FOVEA_TENSORS(FOVEA_TEST_FIELD)
#undef FOVEA_TEST_FIELD
    };
    return all;
  }

  const fovea_tensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second.c;
  }

  std::map<std::string, TestTensor> tensors_;
  std::vector<std::string> names_;  ///< of expressions' tensors, in order
  std::vector<fovea_named_tensor> named_;
};

/// A workspace for `plan`, aligned.
class AlignedMemory {
 public:
  explicit AlignedMemory(size_t size) : memory_(size + FOVEA_WORKSPACE_ALIGNMENT) {}
  void* get() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() +
           (FOVEA_WORKSPACE_ALIGNMENT - address % FOVEA_WORKSPACE_ALIGNMENT) % FOVEA_WORKSPACE_ALIGNMENT;
  }

 private:
  std::vector<unsigned char> memory_;
};

/// Checks that the last error names `argument`, reads "<argument>: got ..., expected ...; <remedy>", and
/// contains the fragments.
inline void expect_message(const std::string& argument, const std::string& got, const std::string& expected) {
  EXPECT_EQ(fovea_last_error_argument(), argument);
  const std::string message = fovea_last_error();
  const size_t got_at = message.find(": got "), expected_at = message.find(", expected ");
  const size_t remedy_at = message.find("; ", expected_at == std::string::npos ? 0 : expected_at);
  ASSERT_NE(got_at, std::string::npos) << message;
  ASSERT_NE(expected_at, std::string::npos) << message;
  ASSERT_NE(remedy_at, std::string::npos) << message;
  EXPECT_EQ(message.substr(0, got_at), argument) << message;
  EXPECT_NE(message.substr(got_at, expected_at - got_at).find(got), std::string::npos)
      << message << "\n  should say that it got: " << got;
  EXPECT_NE(message.substr(expected_at, remedy_at - expected_at).find(expected), std::string::npos)
      << message << "\n  should say that it expected: " << expected;
  EXPECT_GT(message.size(), remedy_at + 8) << message << "\n  should end with a remedy";
}

/// A plan of a request, with a workspace and what a run of it takes. Making the plan must succeed: valid() says so.
class PlannedRun {
 public:
  explicit PlannedRun(Request& request) : PlannedRun(planned(request)) {}
  PlannedRun(const PlannedRun&) = delete;
  PlannedRun& operator=(const PlannedRun&) = delete;
  ~PlannedRun() { fovea_plan_destroy(plan_); }

  bool valid() const { return plan_ != nullptr; }
  /// The pointers of `request`, with the workspace.
  fovea_buffers buffers(Request& request) {
    fovea_buffers b = request.c_buffers();
    b.workspace = workspace_.get();
    b.workspace_size = fovea_plan_workspace_size(plan_);
    return b;
  }
  void expect_ok(const fovea_buffers& buffers) const {
    EXPECT_EQ(fovea_run(plan_, &buffers), FOVEA_OK) << fovea_last_error();
  }
  /// The run is refused with this message and writes nothing of `request`.
  void expect_refused(const fovea_buffers& buffers, Request& request, const char* argument, const char* got,
                      const char* expected) const {
    const auto before = request.bytes();
    EXPECT_EQ(fovea_run(plan_, &buffers), FOVEA_INVALID_ARGUMENT);
    expect_message(argument, got, expected);
    EXPECT_TRUE(request.bytes() == before) << "bytes were written";
  }

 private:
  static fovea_plan* planned(Request& request) {
    fovea_plan* plan = nullptr;
    EXPECT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK) << fovea_last_error();
    return plan;
  }
  explicit PlannedRun(fovea_plan* plan) : plan_(plan), workspace_(fovea_plan_workspace_size(plan)) {}

  fovea_plan* plan_;
  AlignedMemory workspace_;
};

}  // namespace fovea_test
