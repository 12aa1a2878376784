// SPDX-License-Identifier: Apache-2.0
// A host for the plugin library with a C interface, for Python's ctypes: opens the library as TensorRT does
// and calls its interface with addresses of anybody's memory. driver.py beside it is its other half;
// scripts/gpu_check.py drives the real library on a GPU with it, test_contract.py the one with emulated
// kernels.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace nvinfer1;

std::string gMessages;

class Collector final : public ILogger, public ILoggerFinder {
 public:
  void log(Severity, AsciiChar const* text) noexcept override { gMessages += std::string{text} + "\n"; }
  ILogger* findLogger() override { return this; }
};

using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
using SetLoggerFinder = void (*)(ILoggerFinder*);

IPluginCreatorV3One* findCreator(char const* library, char const* op) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    gMessages += std::string{dlerror()} + "\n";
    return nullptr;
  }
  auto const getCreators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"));
  auto const setLoggerFinder = reinterpret_cast<SetLoggerFinder>(dlsym(handle, "setLoggerFinder"));
  static Collector collector;
  if (setLoggerFinder != nullptr) setLoggerFinder(&collector);
  int32_t count = 0;
  IPluginCreatorInterface* const* const creators = getCreators == nullptr ? nullptr : getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(creator->getPluginName(), op) == 0) return creator;
  }
  gMessages += std::string{library} + " has no plugin " + op + "\n";
  return nullptr;
}

IPluginV3OneRuntime* runtimeOf(void* plugin) {
  return static_cast<IPluginV3OneRuntime*>(
      static_cast<IPluginV3*>(plugin)->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

IPluginV3OneBuild* buildOf(void* plugin) {
  return static_cast<IPluginV3OneBuild*>(
      static_cast<IPluginV3*>(plugin)->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

}  // namespace

extern "C" {

struct DriverTensor {
  void* data;
  int32_t dtype;  // nvinfer1::DataType
  int32_t rank;
  int64_t dims[8];
};

struct DriverField {
  char const* name;
  int32_t is_float;
  int32_t int_value;
  float float_value;
};

// A plugin, or null; flashDriverMessages() says why.
void* flashDriverCreate(char const* library, char const* op, DriverField const* fields, int32_t count) {
  IPluginCreatorV3One* const creator = findCreator(library, op);
  if (creator == nullptr) return nullptr;
  std::vector<PluginField> list;
  for (DriverField const* field = fields; field != fields + count; ++field) {
    if (field->is_float != 0) {
      list.emplace_back(field->name, &field->float_value, PluginFieldType::kFLOAT32, 1);
    } else {
      list.emplace_back(field->name, &field->int_value, PluginFieldType::kINT32, 1);
    }
  }
  PluginFieldCollection const collection{count, list.data()};
  return creator->createPlugin("driver", &collection, TensorRTPhase::kRUNTIME);
}

void flashDriverDestroy(void* plugin) { delete static_cast<IPluginV3*>(plugin); }

// What the plugin and the driver have said since the last call; valid until the next.
char const* flashDriverMessages() {
  static std::string taken;
  taken = std::exchange(gMessages, {});
  return taken.c_str();
}

}  // extern "C"

namespace {

std::vector<PluginTensorDesc> descsOf(DriverTensor const* tensors, int32_t count) {
  std::vector<PluginTensorDesc> descs;
  for (DriverTensor const* tensor = tensors; tensor != tensors + count; ++tensor) {
    Dims dims{tensor->rank, {}};
    std::memcpy(dims.d, tensor->dims, sizeof tensor->dims);
    descs.push_back({dims, static_cast<DataType>(tensor->dtype), TensorFormat::kLINEAR, 1.0f});
  }
  return descs;
}

std::vector<DynamicPluginTensorDesc> boundsOf(std::vector<PluginTensorDesc> const& descs) {
  std::vector<DynamicPluginTensorDesc> bounds;
  for (PluginTensorDesc const& desc : descs) bounds.push_back({desc, desc.dims, desc.dims, desc.dims});
  return bounds;
}

std::vector<void*> addressesOf(DriverTensor const* tensors, int32_t count) {
  std::vector<void*> addresses;
  for (DriverTensor const* tensor = tensors; tensor != tensors + count; ++tensor)
    addresses.push_back(tensor->data);
  return addresses;
}

}  // namespace

extern "C" {

// onShapeChange and getWorkspaceSize: the bytes of workspace that flashDriverEnqueue wants, or -1.
int64_t flashDriverPrepare(void* plugin, DriverTensor const* inputs, int32_t nbInputs,
                           DriverTensor const* outputs, int32_t nbOutputs) {
  std::vector<PluginTensorDesc> const in = descsOf(inputs, nbInputs);
  std::vector<PluginTensorDesc> const out = descsOf(outputs, nbOutputs);
  if (runtimeOf(plugin)->onShapeChange(in.data(), nbInputs, out.data(), nbOutputs) != 0) return -1;
  return static_cast<int64_t>(
      buildOf(plugin)->getWorkspaceSize(boundsOf(in).data(), nbInputs, boundsOf(out).data(), nbOutputs));
}

// enqueue's result. `stream` is a cudaStream_t; the call does not wait for it.
int32_t flashDriverEnqueue(void* plugin, DriverTensor const* inputs, int32_t nbInputs,
                           DriverTensor const* outputs, int32_t nbOutputs, void* workspace, void* stream) {
  std::vector<PluginTensorDesc> const in = descsOf(inputs, nbInputs);
  std::vector<PluginTensorDesc> const out = descsOf(outputs, nbOutputs);
  return runtimeOf(plugin)->enqueue(in.data(), out.data(), addressesOf(inputs, nbInputs).data(),
                                    addressesOf(outputs, nbOutputs).data(), workspace,
                                    static_cast<cudaStream_t>(stream));
}

}  // extern "C"
