// SPDX-License-Identifier: Apache-2.0
// Cases of the door that no Problem describes; forward_tests runs them beside the others.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace kernel_tests {

struct NamedCase {
  std::string name;
  std::function<std::string()> run;  // "" or what is wrong
};

// Sinks of NaN and of both infinities, over keys and over none, split and not.
std::vector<NamedCase> sinkCases();

// Strides beyond an int, of every tensor and side input that has one.
std::vector<NamedCase> farCases();

// A workspace of exactly the bytes that flashAttentionWorkspace says, for every compiled kernel; page tables
// whose every entry is past the pool.
std::vector<NamedCase> memoryCases();

}  // namespace kernel_tests
