// SPDX-License-Identifier: Apache-2.0
// Whether the tests of a process have run every kernel that is compiled.
#pragma once
#include <string>

namespace kernel_tests {

// The kernels that were not launched in this process, by the names of docs/kernels.md, each behind a space.
std::string kernelsNotLaunched();

}  // namespace kernel_tests
