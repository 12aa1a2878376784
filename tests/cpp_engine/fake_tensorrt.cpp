// SPDX-License-Identifier: Apache-2.0
// libnvinfer's runtime as the sample uses it, with TensorRT's own interfaces. An engine is a text: one plugin
// of ours, which the registry must have got before, and its tensors. It runs the plugin's enqueue when the
// stream is waited for, so with emulated kernels the attention is really computed.
//
//   plan OPERATOR
//   input|output NAME DTYPE DIM...      in the plugin's order; DTYPE as nvinfer1::DataType numbers it
//   int|float ATTRIBUTE VALUE
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "unexpected.h"

using namespace nvinfer1;

namespace {

struct Tensor {
  std::string name;
  bool isInput;
  PluginTensorDesc desc;
};

struct Plan {
  std::deque<Tensor> tensors;
  std::unique_ptr<IPluginV3> plugin;

  Tensor const& named(char const* name) const {
    for (Tensor const& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    unexpected::end(name);
  }
};

class Registry final : public unexpected::IPluginRegistry {
 public:
  PluginLibraryHandle loadLibrary(AsciiChar const* path) noexcept override {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    auto const get = library == nullptr ? nullptr : dlsym(library, "getCreators");
    if (get == nullptr) return nullptr;
    int32_t count = 0;
    auto* const* const creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(get)(count);
    mCreators.assign(creators, creators + count);
    return library;
  }

  IPluginCreatorV3One* creatorOf(std::string const& name) const {
    for (IPluginCreatorInterface* const one : mCreators) {
      auto* const creator = static_cast<IPluginCreatorV3One*>(one);
      if (name == creator->getPluginName()) return creator;
    }
    return nullptr;
  }

 private:
  std::vector<IPluginCreatorInterface*> mCreators;
};

// What enqueueV3 asks the stream for.
struct Work {
  IPluginV3OneRuntime* runtime;
  std::vector<PluginTensorDesc> in, out;
  std::vector<void const*> from;
  std::vector<void*> to;
  cudaStream_t stream;

  void run() const {
    if (runtime->enqueue(in.data(), out.data(), from.data(), to.data(), nullptr, stream) != 0) std::_Exit(97);
  }
};

class Context final : public IExecutionContext, private unexpected::VExecutionContext {
 public:
  explicit Context(Plan const& plan) : mPlan(plan) { mImpl = this; }

 private:
  bool setInputShape(char const* name, Dims const& dims) noexcept override {
    Dims const& built = mPlan.named(name).desc.dims;
    mShaped[name] = dims.nbDims == built.nbDims && std::equal(dims.d, dims.d + dims.nbDims, built.d);
    return mShaped[name];
  }
  Dims getTensorShape(char const* name) const noexcept override {
    for (Tensor const& tensor : mPlan.tensors) {
      auto const shaped = mShaped.find(tensor.name);
      if (tensor.isInput && (shaped == mShaped.end() || !shaped->second)) return Dims{-1, {}};
    }
    return mPlan.named(name).desc.dims;
  }
  bool setTensorAddress(char const* name, void* address) noexcept override {
    mAddresses[name] = address;
    return address != nullptr;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override {
    auto* const work = new Work{};
    work->runtime = static_cast<IPluginV3OneRuntime*>(
        mPlan.plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    work->stream = stream;
    for (Tensor const& tensor : mPlan.tensors) {
      void* const address = mAddresses[tensor.name];
      if (address == nullptr) return false;
      (tensor.isInput ? work->in : work->out).push_back(tensor.desc);
      if (tensor.isInput) {
        work->from.push_back(address);
      } else {
        work->to.push_back(address);
      }
    }
    if (work->runtime->onShapeChange(work->in.data(), static_cast<int32_t>(work->in.size()), work->out.data(),
                                     static_cast<int32_t>(work->out.size())) != 0) {
      return false;
    }
    auto const run = [](void* data) { std::unique_ptr<Work>(static_cast<Work*>(data))->run(); };
    return cudaLaunchHostFunc(stream, run, work) == cudaSuccess;
  }

  Plan const& mPlan;
  std::map<std::string, bool> mShaped;
  std::map<std::string, void*> mAddresses;
};

class Engine final : public ICudaEngine, private unexpected::VCudaEngine {
 public:
  explicit Engine(Plan plan) : mPlan(std::move(plan)) { mImpl = this; }

 private:
  int32_t getNbIOTensors() const noexcept override { return static_cast<int32_t>(mPlan.tensors.size()); }
  char const* getIOTensorName(int32_t i) const noexcept override { return mPlan.tensors[i].name.c_str(); }
  TensorIOMode getTensorIOMode(char const* name) const noexcept override {
    return mPlan.named(name).isInput ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  DataType getTensorDataType(char const* name) const noexcept override { return mPlan.named(name).desc.type; }
  Dims getProfileShape(char const* name, int32_t profile, OptProfileSelector which) const noexcept override {
    if (profile != 0 || which != OptProfileSelector::kOPT)
      unexpected::end("another shape than the usual one");
    return mPlan.named(name).desc.dims;
  }
  IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept override {
    return new Context(mPlan);
  }

  Plan mPlan;
};

class Runtime final : public IRuntime, private unexpected::VRuntime {
 public:
  explicit Runtime(ILogger& logger) : mLogger(logger) { mImpl = this; }

 private:
  IPluginRegistry& getPluginRegistry() noexcept override { return mRegistry; }

  ICudaEngine* deserializeCudaEngine(void const* data, std::size_t size) noexcept override {
    std::istringstream lines(std::string(static_cast<char const*>(data), size));
    std::string word, name;
    lines >> word >> name;
    IPluginCreatorV3One* const creator = mRegistry.creatorOf(name);
    if (word != "plan" || creator == nullptr) {
      mLogger.log(ILogger::Severity::kERROR, word == "plan" ? "no creator of its plugin" : "no plan");
      return nullptr;
    }
    Plan plan;
    std::deque<int32_t> ints;
    std::deque<float> floats;
    std::deque<std::string> names;
    std::vector<PluginField> fields;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      if (!(words >> word >> name)) continue;
      if (word == "int") {
        words >> ints.emplace_back();
        fields.emplace_back(names.emplace_back(name).c_str(), &ints.back(), PluginFieldType::kINT32, 1);
      } else if (word == "float") {
        words >> floats.emplace_back();
        fields.emplace_back(names.emplace_back(name).c_str(), &floats.back(), PluginFieldType::kFLOAT32, 1);
      } else {
        Tensor& tensor = plan.tensors.emplace_back(Tensor{name, word == "input", {}});
        int dtype = 0;
        words >> dtype;
        tensor.desc = {Dims{0, {}}, static_cast<DataType>(dtype), TensorFormat::kLINEAR, 1.0F};
        while (words >> tensor.desc.dims.d[tensor.desc.dims.nbDims]) ++tensor.desc.dims.nbDims;
      }
    }
    PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
    plan.plugin.reset(creator->createPlugin("attention", &collection, TensorRTPhase::kRUNTIME));
    return plan.plugin == nullptr ? nullptr : new Engine(std::move(plan));
  }

  ILogger& mLogger;
  Registry mRegistry;
};

}  // namespace

extern "C" void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
  return version == NV_TENSORRT_VERSION ? static_cast<IRuntime*>(new Runtime(*static_cast<ILogger*>(logger)))
                                        : nullptr;
}
