// SPDX-License-Identifier: Apache-2.0
// The smallest test runner that names what failed: TEST(a_claim) { EXPECT(condition); }
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace runner {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Adds a test to the list that runAll() goes through; the value is not used.
bool add(char const* name, void (*body)());

// Runs the tests whose names contain `filter`; prints the failed ones and "N passed, N failed". Returns
// main's result.
int runAll(std::string const& filter);

}  // namespace runner

#define TEST(name)                                                             \
  static void name();                                                          \
  [[maybe_unused]] static bool const kAdded_##name = runner::add(#name, name); \
  static void name()

// Ends the test with the place and, streamed after the condition, what was seen: EXPECT(a == b, a << " and "
// << b);
#define EXPECT(condition, ...)                                    \
  do {                                                            \
    if (!(condition)) {                                           \
      std::ostringstream failure_;                                \
      failure_ << __FILE__ << ':' << __LINE__ << ": " #condition; \
      __VA_OPT__(failure_ << "; " << __VA_ARGS__;)                \
      throw runner::Failure(failure_.str());                      \
    }                                                             \
  } while (false)
