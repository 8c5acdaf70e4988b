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
  PlannedRun run(request);
  ASSERT_TRUE(run.valid());
  const fovea_buffers buffers = run.buffers(request);
  run.expect_ok(buffers);
  c.spoil(request);
  run.expect_refused(buffers, request, c.argument, c.got, c.expected);
}

}  // namespace fovea_test
