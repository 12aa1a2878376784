// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's C ABI, as much of it as an operator needs, in our own words. OrtApi is a table of function
// pointers to which versions only append, so a slot means the same in every runtime from version 1.17 on;
// tests/plugin/cpu/test_operator.py runs all of them against real runtimes. Facts: onnxruntime_c_api.h of
// github.com/microsoft/onnxruntime (MIT).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flash_export::onnxruntime {

constexpr uint32_t kApiVersion = 17;  // ONNX Runtime 1.17, the first with KernelContext_ParallelFor

struct Options;     // OrtSessionOptions
struct Domain;      // OrtCustomOpDomain
struct Status;      // OrtStatus; null: success
struct Value;       // OrtValue
struct ShapeInfo;   // OrtTensorTypeAndShapeInfo
struct KernelInfo;  // OrtKernelInfo
struct Context;     // OrtKernelContext

using Table = void (*const)();

struct ApiBase {
  Table* (*getApi)(uint32_t version);
  char const* (*getVersionString)();
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int { kFloat = 1, kInt32 = 6, kFloat16 = 10, kBFloat16 = 16 };

// A status that was not success; whoever catches it returns it to the runtime.
struct Failed {
  Status* status;
};

// The table, typed. Functions throw Failed.
class Api {
 public:
  explicit Api(Table* table) : mTable(table) {}

  Status* createStatus(ErrorCode code, char const* text) const {
    return at<Status*(int, char const*)>(0)(code, text);
  }
  Domain* createDomain(char const* name) const {
    Domain* domain = nullptr;
    check(at<Status*(char const*, Domain**)>(26)(name, &domain));
    return domain;
  }
  void addOperator(Domain* domain, struct CustomOp const* op) const {
    check(at<Status*(Domain*, CustomOp const*)>(27)(domain, op));
  }
  void addDomain(Options* options, Domain* domain) const {
    check(at<Status*(Options*, Domain*)>(28)(options, domain));
  }

  void* data(Value const* value) const {
    void* start = nullptr;
    check(at<Status*(Value*, void**)>(51)(const_cast<Value*>(value), &start));
    return start;
  }
  // The shape of a tensor; `dims` has room for `most`. Returns the rank, which may be larger than `most`.
  size_t shape(Value const* value, int64_t* dims, size_t most) const {
    ShapeInfo* info = nullptr;
    check(at<Status*(Value const*, ShapeInfo**)>(65)(value, &info));
    size_t rank = 0;
    Status* status = at<Status*(ShapeInfo const*, size_t*)>(61)(info, &rank);
    if (status == nullptr && rank <= most) {
      status = at<Status*(ShapeInfo const*, int64_t*, size_t)>(62)(info, dims, rank);
    }
    at<void(ShapeInfo*)>(99)(info);
    check(status);
    return rank;
  }

  // Attributes and the name of a node. False: there is no attribute of that name and type.
  bool attribute(KernelInfo const* info, char const* name, float& value) const {
    return found(at<Status*(KernelInfo const*, char const*, float*)>(85)(info, name, &value));
  }
  bool attribute(KernelInfo const* info, char const* name, int64_t& value) const {
    return found(at<Status*(KernelInfo const*, char const*, int64_t*)>(86)(info, name, &value));
  }
  bool attribute(KernelInfo const* info, char const* name, std::string& text) const {
    auto const get = at<Status*(KernelInfo const*, char const*, char*, size_t*)>(87);
    for (size_t room = 64;;) {  // with the NUL at its end
      text.resize(room);
      size_t size = room;
      if (found(get(info, name, text.data(), &size))) return text.resize(size - 1), true;
      if (size <= room) return false;
      room = size;
    }
  }
  bool nodeName(KernelInfo const* info, char* text, size_t size) const {
    return found(at<Status*(KernelInfo const*, char*, size_t*)>(244)(info, text, &size));
  }

  Value const* input(Context const* context, size_t index) const {
    Value const* value = nullptr;
    check(at<Status*(Context const*, size_t, Value const**)>(90)(context, index, &value));
    return value;
  }
  Value* output(Context* context, size_t index, int64_t const* dims, size_t rank) const {
    Value* value = nullptr;
    check(at<Status*(Context*, size_t, int64_t const*, size_t, Value**)>(91)(context, index, dims, rank,
                                                                             &value));
    return value;
  }
  // Calls body(user, i) for 0 <= i < count on the session's threads, in as many batches, and waits.
  void parallelFor(Context const* context, void (*body)(void*, size_t), size_t count, size_t batches,
                   void* user) const {
    using Body = void (*)(void*, size_t);
    check(at<Status*(Context const*, Body, size_t, size_t, void*)>(274)(context, body, count, batches, user));
  }

 private:
  template <class Function>
  Function* at(size_t slot) const {
    return reinterpret_cast<Function*>(mTable[slot]);
  }
  static void check(Status* status) {
    if (status != nullptr) throw Failed{status};
  }
  bool found(Status* status) const {
    if (status != nullptr) at<void(Status*)>(93)(status);
    return status == nullptr;
  }

  Table* mTable;
};

// OrtCustomOp of version 17. Functions get the struct itself first, as `self`. Null where we have nothing to
// say.
struct CustomOp {
  using Self = CustomOp const*;
  uint32_t version;
  void* (*createKernel)(Self, Table*, KernelInfo const*);  // not called where V2 is there
  char const* (*getName)(Self);
  char const* (*getExecutionProvider)(Self);  // null: the CPU
  int (*getInputType)(Self, size_t);
  size_t (*getInputTypeCount)(Self);
  int (*getOutputType)(Self, size_t);
  size_t (*getOutputTypeCount)(Self);
  void (*kernelCompute)(void*, Context*);  // not called where V2 is there
  void (*kernelDestroy)(void*);
  int (*getInputCharacteristic)(Self, size_t);   // 0: required
  int (*getOutputCharacteristic)(Self, size_t);  // 0: required
  int (*getInputMemoryType)(Self, size_t);       // 0: default
  int (*getVariadicInputMinArity)(Self);
  int (*getVariadicInputHomogeneity)(Self);
  int (*getVariadicOutputMinArity)(Self);
  int (*getVariadicOutputHomogeneity)(Self);
  Status* (*createKernelV2)(Self, Table*, KernelInfo const*, void**);
  Status* (*kernelComputeV2)(void*, Context*);
  Status* (*inferOutputShape)(Self, void*);
  int (*getStartVersion)(Self);
  int (*getEndVersion)(Self);
  void* inPlaceAndAlias[4];
};
static_assert(sizeof(CustomOp) == 208 || sizeof(void*) != 8, "OrtCustomOp of version 17 has 208 bytes");

}  // namespace flash_export::onnxruntime
