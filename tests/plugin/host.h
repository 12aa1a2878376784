// SPDX-License-Identifier: Apache-2.0
// What TensorRT is to a plugin, played by the test: the registry's logger, field collections, shape
// expressions.
#pragma once
#include <NvInferRuntime.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "op.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& nbCreators);
extern "C" void setLoggerFinder(nvinfer1::ILoggerFinder* finder);

namespace host {

// Takes the plugin's messages while it lives.
class Messages final : public nvinfer1::ILogger, public nvinfer1::ILoggerFinder {
 public:
  Messages() { setLoggerFinder(this); }
  ~Messages() override { setLoggerFinder(nullptr); }

  void log(Severity severity, nvinfer1::AsciiChar const* text) noexcept override;
  nvinfer1::ILogger* findLogger() override { return this; }

  // All messages since the last take(), and forgets them.
  std::string take();
  bool has(std::string const& part) const { return mText.find(part) != std::string::npos; }

 private:
  std::string mText;
};

// The operator's attributes as a node carries them. Change a member of `ints` or `floats`, or a field itself.
struct Fields {
  struct Int {
    std::string name;
    int32_t value;
  };
  struct Float {
    std::string name;
    float value;
  };
  std::deque<Int> ints;
  std::deque<Float> floats;

  // Valid for two query heads, one key and value head, layout 0, nothing masked.
  Fields();
  Fields& set(std::string const& name, double value);
  std::vector<nvinfer1::PluginField> list() const;
};

using PluginPtr = std::unique_ptr<nvinfer1::IPluginV3>;

nvinfer1::IPluginCreatorV3One& creatorOf(char const* op);
PluginPtr create(char const* op, std::vector<nvinfer1::PluginField> const& fields);
inline PluginPtr create(char const* op, Fields const& fields) { return create(op, fields.list()); }

nvinfer1::IPluginV3OneCore& core(PluginPtr const& plugin);
nvinfer1::IPluginV3OneBuild& build(PluginPtr const& plugin);
nvinfer1::IPluginV3OneRuntime& runtime(PluginPtr const& plugin);

nvinfer1::Dims dims(std::vector<int64_t> const& sizes);
nvinfer1::PluginTensorDesc desc(std::vector<int64_t> const& sizes,
                                nvinfer1::DataType dtype = nvinfer1::DataType::kFLOAT);
// A description whose smallest, optimal and largest shapes are the same.
nvinfer1::DynamicPluginTensorDesc dynamic(nvinfer1::PluginTensorDesc const& desc);
std::vector<nvinfer1::DynamicPluginTensorDesc> dynamic(std::vector<nvinfer1::PluginTensorDesc> const& descs);

// Shape expressions: a dimension is a number, or a name for one that is not known yet.
class Expressions final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
  Expressions();
  ~Expressions() noexcept override;

  nvinfer1::DimsExprs shape(std::vector<std::string> const& axes);
  // "[B, (W/2)*4]"
  static std::string text(nvinfer1::DimsExprs const& shape);

 private:
  class Expression;
  nvinfer1::IDimensionExpr const* constant(int64_t value) override;
  nvinfer1::IDimensionExpr const* operation(nvinfer1::DimensionOperation op,
                                            nvinfer1::IDimensionExpr const& first,
                                            nvinfer1::IDimensionExpr const& second) override;
  nvinfer1::IDimensionExpr const* declareSizeTensor(int32_t, nvinfer1::IDimensionExpr const&,
                                                    nvinfer1::IDimensionExpr const&) override;
  nvinfer1::IDimensionExpr const* make(std::string text, int64_t value);

  std::vector<std::unique_ptr<Expression>> mAll;
};

}  // namespace host
