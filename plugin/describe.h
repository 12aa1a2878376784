// SPDX-License-Identifier: Apache-2.0
// Shapes and dtypes in words.
#pragma once
#include <NvInferRuntime.h>

#include <string>

namespace flash_export {

// "[2, 128, 512]"; an unknown dimension is "?".
std::string textOf(nvinfer1::Dims const& dims);

// "fp16"; "dtype 9" for those that have no name here.
std::string textOf(nvinfer1::DataType dtype);

}  // namespace flash_export
