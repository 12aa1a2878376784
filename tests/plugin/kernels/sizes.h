// SPDX-License-Identifier: Apache-2.0
// Problems of many keys and of huge scores, for forward_tests.
#pragma once
#include <vector>

#include "problem.h"
#include "variants.h"

namespace kernel_tests {

// Scores of 2^28 and more, where a product of maximum and scale is off by more than an exponential's range.
std::vector<Problem> hugeProblems(flash_export::kernels::Variant const& v);

// fp32 over 1,000 and more keys whose values do not cancel out: where sums taken key by key are off most.
std::vector<Problem> longProblems();

}  // namespace kernel_tests
