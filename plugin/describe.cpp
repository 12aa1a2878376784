// SPDX-License-Identifier: Apache-2.0
#include "describe.h"

namespace flash_export {

std::string textOf(nvinfer1::Dims const& dims) {
  if (dims.nbDims < 0 || dims.nbDims > nvinfer1::Dims::MAX_DIMS) return "[unknown rank]";
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    text += i > 0 ? ", " : "";
    text += dims.d[i] < 0 ? "?" : std::to_string(dims.d[i]);
  }
  return text + "]";
}

std::string textOf(nvinfer1::DataType dtype) {
  using nvinfer1::DataType;
  switch (dtype) {
    case DataType::kFLOAT:
      return "fp32";
    case DataType::kHALF:
      return "fp16";
    case DataType::kBF16:
      return "bf16";
    case DataType::kINT32:
      return "int32";
    case DataType::kINT64:
      return "int64";
    case DataType::kINT8:
      return "int8";
    case DataType::kUINT8:
      return "uint8";
    case DataType::kBOOL:
      return "bool";
    default:
      return "dtype " + std::to_string(static_cast<int32_t>(dtype));
  }
}

}  // namespace flash_export
