// SPDX-License-Identifier: Apache-2.0
#include "fake_runtime.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

extern "C" flash_export::onnxruntime::Status* RegisterCustomOps(
    flash_export::onnxruntime::Options* options, flash_export::onnxruntime::ApiBase const* base);

namespace fake {
namespace {

constexpr size_t kSlots = 275;
constexpr int kThreads = 3;  // of a session, its caller among them

struct Status {
  std::string text;
};

struct Domain {
  std::vector<ort::CustomOp const*> operators;
};

struct Options {
  Domain const* domain = nullptr;
};

ort::Status* failed(std::string const& text) { return reinterpret_cast<ort::Status*>(new Status{text}); }

void check(ort::Status* status) {
  if (status == nullptr) return;
  Status* const mine = reinterpret_cast<Status*>(status);
  std::runtime_error const error(mine->text);
  delete mine;
  throw error;
}

template <class Map, class Value>
ort::Status* find(Map const& map, char const* name, Value* value) {
  auto const found = map.find(name);
  if (found == map.end()) return failed(std::string{"no attribute "} + name);
  *value = found->second;
  return nullptr;
}

ort::Status* copyText(std::string const& text, char* to, size_t* size) {
  size_t const room = *size;
  *size = text.size() + 1;
  if (room < *size) return failed("too little room");
  std::memcpy(to, text.c_str(), *size);
  return nullptr;
}

NodeInfo const& node(ort::KernelInfo const* info) { return *reinterpret_cast<NodeInfo const*>(info); }
Tensor& tensor(ort::Value const* value) {
  return const_cast<Tensor&>(*reinterpret_cast<Tensor const*>(value));
}
Run& runOf(ort::Context const* context) { return const_cast<Run&>(*reinterpret_cast<Run const*>(context)); }

void parallelFor(void (*body)(void*, size_t), size_t count, void* user) {
  std::atomic<size_t> next{0};
  auto const drain = [&] {
    for (size_t i = next++; i < count; i = next++) body(user, i);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < kThreads; ++i) threads.emplace_back(drain);
  drain();
  for (std::thread& thread : threads) thread.join();
}

// The table's functions, by slot.
struct Table {
  Table() {
    set(0, +[](int, char const* text) { return failed(text); });
    set(
        26, +[](char const*, ort::Domain** domain) -> ort::Status* {
          *domain = reinterpret_cast<ort::Domain*>(
              new Domain);  // lives as long as the library, as the runtime's do
          return nullptr;
        });
    set(
        27, +[](ort::Domain* domain, ort::CustomOp const* op) -> ort::Status* {
          reinterpret_cast<Domain*>(domain)->operators.push_back(op);
          return nullptr;
        });
    set(
        28, +[](ort::Options* options, ort::Domain* domain) -> ort::Status* {
          reinterpret_cast<Options*>(options)->domain = reinterpret_cast<Domain*>(domain);
          return nullptr;
        });
    set(
        51, +[](ort::Value* value, void** data) -> ort::Status* {
          *data = tensor(value).values.data();
          return nullptr;
        });
    // A tensor describes itself.
    set(
        65, +[](ort::Value const* value, ort::ShapeInfo** info) -> ort::Status* {
          *info = reinterpret_cast<ort::ShapeInfo*>(&tensor(value));
          return nullptr;
        });
    set(
        61, +[](ort::ShapeInfo const* info, size_t* rank) -> ort::Status* {
          *rank = reinterpret_cast<Tensor const*>(info)->shape.size();
          return nullptr;
        });
    set(
        62, +[](ort::ShapeInfo const* info, int64_t* dims, size_t rank) -> ort::Status* {
          std::memcpy(dims, reinterpret_cast<Tensor const*>(info)->shape.data(), rank * sizeof *dims);
          return nullptr;
        });
    set(99, +[](ort::ShapeInfo*) {});
    set(
        85, +[](ort::KernelInfo const* info, char const* name, float* value) {
          return find(node(info).floats, name, value);
        });
    set(
        86, +[](ort::KernelInfo const* info, char const* name, int64_t* value) {
          return find(node(info).ints, name, value);
        });
    set(
        87, +[](ort::KernelInfo const* info, char const* name, char* text, size_t* size) {
          std::string value;
          ort::Status* const status = find(node(info).texts, name, &value);
          return status == nullptr ? copyText(value, text, size) : status;
        });
    set(
        244, +[](ort::KernelInfo const* info, char* text, size_t* size) {
          return copyText(node(info).name, text, size);
        });
    set(93, +[](ort::Status* status) { delete reinterpret_cast<Status*>(status); });
    set(
        90, +[](ort::Context const* context, size_t index, ort::Value const** value) -> ort::Status* {
          *value = reinterpret_cast<ort::Value const*>(&runOf(context).inputs.at(index));
          return nullptr;
        });
    set(
        91,
        +[](ort::Context* context, size_t index, int64_t const* dims, size_t rank,
            ort::Value** value) -> ort::Status* {
          Run& run = runOf(context);
          if (auto const found = run.in_place.find(index); found != run.in_place.end()) {
            *value = reinterpret_cast<ort::Value*>(&run.inputs.at(found->second));
            return nullptr;
          }
          Tensor& made = run.outputs.at(index);
          made.shape.assign(dims, dims + rank);
          size_t count = 1;
          for (int64_t dim : made.shape) count *= size_t(dim);
          made.values.assign(count, 7.0f);
          *value = reinterpret_cast<ort::Value*>(&made);
          return nullptr;
        });
    set(
        274,
        +[](ort::Context const* context, void (*body)(void*, size_t), size_t count, size_t,
            void* user) -> ort::Status* {
          Run& run = runOf(context);
          run.handed += count;
          if (!run.idle) parallelFor(body, count, user);
          return nullptr;
        });
  }

  template <class Function>
  void set(size_t slot, Function* function) {
    slots[slot] = reinterpret_cast<void (*)()>(function);
  }

  void (*slots[kSlots])() = {};
};

ort::ApiBase const kBase{+[](uint32_t) -> ort::Table* {
                           static Table const table;
                           return table.slots;
                         },
                         +[] { return "1.17.0"; }};

}  // namespace

Tensor tensorOf(std::vector<int64_t> shape, std::vector<int32_t> const& values) {
  Tensor tensor{std::move(shape), std::vector<float>(values.size())};
  if (!values.empty()) std::memcpy(tensor.values.data(), values.data(), values.size() * sizeof values[0]);
  return tensor;
}

int32_t intAt(Tensor const& tensor, size_t index) {
  int32_t value = 0;
  std::memcpy(&value, &tensor.values.at(index), sizeof value);
  return value;
}

Session::Session(char const* op, NodeInfo const& node) {
  Options options;
  check(RegisterCustomOps(reinterpret_cast<ort::Options*>(&options), &kBase));
  for (ort::CustomOp const* one : options.domain->operators) {
    if (std::strcmp(one->getName(one), op) == 0 && one->getInputType(one, 0) == ort::kFloat) mOp = one;
  }
  if (mOp == nullptr) throw std::runtime_error(std::string{"no operator "} + op);
  auto* const info = reinterpret_cast<ort::KernelInfo const*>(&node);
  check(mOp->createKernelV2(mOp, kBase.getApi(ort::kApiVersion), info, &mKernel));
}

Session::~Session() { mOp->kernelDestroy(mKernel); }

void Session::run(Run& run) const {
  check(mOp->kernelComputeV2(mKernel, reinterpret_cast<ort::Context*>(&run)));
}

}  // namespace fake
