// SPDX-License-Identifier: Apache-2.0
// Tests in many threads: inThreads(16, [](int thread) { EXPECT(...); });
#pragma once
#include <atomic>
#include <thread>
#include <vector>

#include "runner.h"

namespace runner {

// Runs body(thread) on `count` threads that start together; an EXPECT that fails in one of them fails the
// test.
template <class Body>
void inThreads(int count, Body const& body) {
  std::atomic<int> ready{0};
  std::vector<std::string> failures;
  failures.resize(size_t(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      for (++ready; ready < count;) std::this_thread::yield();
      try {
        body(i);
      } catch (std::exception const& error) {
        failures[size_t(i)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::string const& failure : failures) EXPECT(failure.empty(), failure);
}

}  // namespace runner
