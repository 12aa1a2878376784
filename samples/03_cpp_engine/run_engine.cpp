// SPDX-License-Identifier: Apache-2.0
// Runs an engine from C++ with TensorRT's own API: loads the plugin, loads the engine, feeds it, prints its
// outputs.
//
//   run_engine ENGINE libflash_attention_plugin.so
//
// Every input gets the most usual shape of the engine's profile, and small numbers that are the same in every
// run. Ends with 0 when it ran, 2 for wrong arguments, 5 when something is missing here (a GPU, the plugin,
// this TensorRT's engine).
#include <NvInferRuntime.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Missing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, char const* text) noexcept override {
    if (severity <= Severity::kWARNING) {
      std::fprintf(stderr, "tensorrt: %s\n", text);
    }
  }
};

void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    throw Missing(std::string{what} + ": " + cudaGetErrorString(status));
  }
}

void require(bool holds, std::string const& what) {
  if (!holds) {
    throw Missing(what);
  }
}

struct FreeDevice {
  void operator()(void* pointer) const noexcept { cudaFree(pointer); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const noexcept { cudaStreamDestroy(stream); }
};
using DeviceMemory = std::unique_ptr<void, FreeDevice>;

// One input or output: its shape, its bytes on the GPU, and the same on the host.
struct Tensor {
  std::string name;
  nvinfer1::DataType type;
  size_t count;
  std::vector<char> host;
  DeviceMemory device;
};

size_t bytesOf(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kINT64:
      return 8;
    case nvinfer1::DataType::kFLOAT:
    case nvinfer1::DataType::kINT32:
      return 4;
    case nvinfer1::DataType::kHALF:
    case nvinfer1::DataType::kBF16:
      return 2;
    default:
      return 1;
  }
}

Tensor makeTensor(std::string const& name, nvinfer1::DataType type, nvinfer1::Dims const& dims) {
  size_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) {
    count *= static_cast<size_t>(dims.d[i]);
  }
  void* memory = nullptr;
  size_t const bytes = count * bytesOf(type);
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
  return {name, type, count, std::vector<char>(bytes), DeviceMemory{memory}};
}

// Floats in [-1, 1); integers 1, which is a token, a kept mask and a length everywhere.
void fill(Tensor& tensor) {
  for (size_t i = 0; i < tensor.count; ++i) {
    float const value = static_cast<float>((i * 7919) % 2048) / 1024.0F - 1.0F;
    char* const at = tensor.host.data() + i * bytesOf(tensor.type);
    if (tensor.type == nvinfer1::DataType::kFLOAT) {
      std::memcpy(at, &value, sizeof value);
    } else if (tensor.type == nvinfer1::DataType::kHALF) {
      __half const half = __float2half(value);
      std::memcpy(at, &half, sizeof half);
    } else if (tensor.type != nvinfer1::DataType::kBF16) {
      at[0] = 1;  // little-endian; the bytes above it are 0
    }
  }
}

void print(Tensor const& tensor) {
  std::printf("%s: %zu numbers", tensor.name.c_str(), tensor.count);
  for (size_t i = 0; i < tensor.count && i < 4; ++i) {
    char const* const at = tensor.host.data() + i * bytesOf(tensor.type);
    float value = 0.0F;
    if (tensor.type == nvinfer1::DataType::kFLOAT) {
      std::memcpy(&value, at, sizeof value);
    } else if (tensor.type == nvinfer1::DataType::kHALF) {
      __half half;
      std::memcpy(&half, at, sizeof half);
      value = __half2float(half);
    } else {
      continue;
    }
    std::printf(" %g", static_cast<double>(value));
  }
  std::printf("\n");
}

std::vector<char> read(char const* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Missing(std::string{"cannot read "} + path);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

void run(char const* engine_path, char const* plugin_path) {
  int device_count = 0;
  check(cudaGetDeviceCount(&device_count), "this machine's GPU");
  Logger logger;
  std::unique_ptr<nvinfer1::IRuntime> const runtime{nvinfer1::createInferRuntime(logger)};
  require(runtime != nullptr, "TensorRT makes no runtime here");
  // Before the engine: it names the plugin's operators.
  require(runtime->getPluginRegistry().loadLibrary(plugin_path) != nullptr,
          std::string{"the plugin does not load: "} + plugin_path);
  std::vector<char> const plan = read(engine_path);
  std::unique_ptr<nvinfer1::ICudaEngine> const engine{
      runtime->deserializeCudaEngine(plan.data(), plan.size())};
  require(engine != nullptr, std::string{"the engine does not load: "} + engine_path);
  std::unique_ptr<nvinfer1::IExecutionContext> const context{engine->createExecutionContext()};
  require(context != nullptr, "too little memory for the engine's work");

  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  for (int32_t i = 0; i < engine->getNbIOTensors(); ++i) {
    char const* const name = engine->getIOTensorName(i);
    if (engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT) {
      auto const dims = engine->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
      require(context->setInputShape(name, dims),
              std::string{"the engine does not take its own shape of "} + name);
      inputs.push_back(makeTensor(name, engine->getTensorDataType(name), dims));
    }
  }
  for (int32_t i = 0; i < engine->getNbIOTensors(); ++i) {
    char const* const name = engine->getIOTensorName(i);
    if (engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kOUTPUT) {
      outputs.push_back(makeTensor(name, engine->getTensorDataType(name), context->getTensorShape(name)));
    }
  }

  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::unique_ptr<CUstream_st, DestroyStream> const owned{stream};
  for (Tensor& input : inputs) {
    fill(input);
    require(context->setTensorAddress(input.name.c_str(), input.device.get()),
            "no address for " + input.name);
    check(cudaMemcpyAsync(input.device.get(), input.host.data(), input.host.size(), cudaMemcpyHostToDevice,
                          stream),
          "copy to the GPU");
  }
  for (Tensor& output : outputs) {
    require(context->setTensorAddress(output.name.c_str(), output.device.get()),
            "no address for " + output.name);
  }
  require(context->enqueueV3(stream), "the engine does not run; TensorRT's message is above");
  for (Tensor& output : outputs) {
    check(cudaMemcpyAsync(output.host.data(), output.device.get(), output.host.size(), cudaMemcpyDeviceToHost,
                          stream),
          "copy from the GPU");
  }
  check(cudaStreamSynchronize(stream), "the engine's work");
  for (Tensor const& output : outputs) {
    print(output);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s ENGINE libflash_attention_plugin.so\n", argv[0]);
    return 2;
  }
  try {
    run(argv[1], argv[2]);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 5;
  }
  return 0;
}
