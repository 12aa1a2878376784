// SPDX-License-Identifier: Apache-2.0
// Problems of many keys, for forward_tests.
#pragma once
#include <vector>

#include "problem.h"

namespace kernel_tests {

// fp32 over 1,000 and more keys whose values do not cancel out: where sums taken key by key are off most.
std::vector<Problem> longProblems();

}  // namespace kernel_tests
