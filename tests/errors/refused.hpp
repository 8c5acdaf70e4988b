// A wrong request with what the message says of it, and the checks that plans and runs refuse it and write nothing.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <ostream>

#include "request.hpp"

namespace fovea_test {

struct Case {
  const char* name;
  Request (*make)();
  void (*spoil)(Request&);
  const char* argument;
  const char* got;
  const char* expected;
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

/// Plans and attends: both are refused with FOVEA_INVALID_ARGUMENT and write nothing. Calls check() after each.
template <class Check>
void expect_refused(Request& request, Check&& check) {
  const auto before = request.bytes();
  fovea_plan* plan = reinterpret_cast<fovea_plan*>(&request);
  EXPECT_EQ(fovea_plan_create(&request.c_problem(), &request.options, &plan), FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  check();
  EXPECT_EQ(fovea_attend(&request.c_problem(), &request.options, 1, 2), FOVEA_INVALID_ARGUMENT);
  check();
  EXPECT_TRUE(request.bytes() == before) << "bytes were written";
}
inline void expect_refused(const Case& c) {
  Request request = c.make();
  c.spoil(request);
  expect_refused(request, [&] { expect_message(c.argument, c.got, c.expected); });
}

/// A plan that knows nothing of what the tensors `unknown` hold, and then one wrong run after a good one.
inline void expect_refused_by_a_run(const Case& c, std::initializer_list<const char*> unknown) {
  Request request = c.make();
  for (const char* name : unknown) {
    if (request.bytes().count(name) != 0) request[name].c.data = nullptr;
  }
  fovea_plan* plan = nullptr;
  ASSERT_EQ(fovea_plan_create(&request.c_problem(), nullptr, &plan), FOVEA_OK) << fovea_last_error();
  AlignedMemory workspace(fovea_plan_workspace_size(plan));
  fovea_buffers buffers = request.c_buffers();
  buffers.workspace = workspace.get();
  buffers.workspace_size = fovea_plan_workspace_size(plan);
  EXPECT_EQ(fovea_run(plan, &buffers), FOVEA_OK) << fovea_last_error();
  c.spoil(request);
  const auto before = request.bytes();
  EXPECT_EQ(fovea_run(plan, &buffers), FOVEA_INVALID_ARGUMENT);
  expect_message(c.argument, c.got, c.expected);
  EXPECT_TRUE(request.bytes() == before) << "bytes were written";
  fovea_plan_destroy(plan);
}

}  // namespace fovea_test
