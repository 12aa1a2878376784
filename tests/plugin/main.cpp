// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <vector>

#include "runner.h"

namespace runner {
namespace {

struct Test {
  char const* name;
  void (*body)();
};

std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

}  // namespace

bool add(char const* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

int runAll(std::string const& filter) {
  int passed = 0;
  int failed = 0;
  for (Test const& test : tests()) {
    if (std::string{test.name}.find(filter) == std::string::npos) continue;
    try {
      test.body();
      ++passed;
    } catch (std::exception const& error) {
      std::printf("FAILED %s\n  %s\n", test.name, error.what());
      ++failed;
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace runner

int main(int argc, char** argv) { return runner::runAll(argc > 1 ? argv[1] : ""); }
