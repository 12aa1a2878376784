// SPDX-License-Identifier: Apache-2.0
// The outputs' shapes as expressions of the inputs', for networks with dynamic dimensions.
#pragma once
#include <NvInferRuntime.h>

#include "problem.h"

namespace flash_export {

// Writes one DimsExprs an output. Throws PluginError for a wrong rank, and for a constant dimension that the
// number of heads does not fit.
void writeOutputShapes(Node const& node, nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                       nvinfer1::IExprBuilder& builder);

}  // namespace flash_export
