// SPDX-License-Identifier: Apache-2.0
// What ONNX Runtime is to the operator's library on a CPU, played by the test: the slots of its C ABI that
// the library calls (plugin/cpu/onnxruntime_abi.h), with sessions, tensors and threads of the test's own.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu/onnxruntime_abi.h"

namespace fake {

namespace ort = flash_export::onnxruntime;

// Elements of 32 bits; int32 ones by their bits.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

Tensor tensorOf(std::vector<int64_t> shape, std::vector<int32_t> const& values);
int32_t intAt(Tensor const& tensor, size_t index);

// A node of a model: its name and attributes.
struct NodeInfo {
  std::string name;
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> texts;
};

// One run of a node: the tensors that it reads, those that it makes, filled with 7 at first.
struct Run {
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::map<size_t, size_t> in_place = {};  // output -> the input whose tensor it is
  bool idle = false;                       // the session's threads leave undone what they are handed
  size_t handed = 0;                       // bodies that they were
};

// A session: registers the library, makes a kernel for one node and runs it.
class Session {
 public:
  // Throws std::runtime_error with the library's message where it refuses.
  Session(char const* op, NodeInfo const& node);
  ~Session();
  Session(Session const&) = delete;
  Session& operator=(Session const&) = delete;

  // May be called from many threads at once.
  void run(Run& run) const;

 private:
  ort::CustomOp const* mOp = nullptr;
  void* mKernel = nullptr;
};

}  // namespace fake
