// SPDX-License-Identifier: Apache-2.0
#include "host.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace host {

using namespace nvinfer1;

void Messages::log(Severity, AsciiChar const* text) noexcept { mText += std::string{text} + "\n"; }

std::string Messages::take() { return std::exchange(mText, {}); }

Fields::Fields() {
#define ADD(name, smallest, largest) ints.push_back({#name, smallest});
  FLASH_ATTENTION_INT_ATTRIBUTES(ADD)
#undef ADD
#define ADD(name, smallest, largest) floats.push_back({#name, 0.0f});
  FLASH_ATTENTION_FLOAT_ATTRIBUTES(ADD)
#undef ADD
  set("q_num_heads", 2).set("scale", 0.5);
}

Fields& Fields::set(std::string const& name, double value) {
  for (Int& field : ints) {
    if (field.name == name) return field.value = static_cast<int32_t>(value), *this;
  }
  for (Float& field : floats) {
    if (field.name == name) return field.value = static_cast<float>(value), *this;
  }
  throw std::logic_error("the operator has no attribute " + name);
}

std::vector<PluginField> Fields::list() const {
  std::vector<PluginField> all;
  for (Int const& field : ints)
    all.emplace_back(field.name.c_str(), &field.value, PluginFieldType::kINT32, 1);
  for (Float const& field : floats)
    all.emplace_back(field.name.c_str(), &field.value, PluginFieldType::kFLOAT32, 1);
  return all;
}

IPluginCreatorV3One& creatorOf(char const* op) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto& creator = static_cast<IPluginCreatorV3One&>(*creators[i]);
    if (std::strcmp(creator.getPluginName(), op) == 0) return creator;
  }
  throw std::logic_error(std::string{"no creator for "} + op);
}

PluginPtr create(char const* op, std::vector<PluginField> const& fields) {
  PluginFieldCollection const collection{static_cast<int32_t>(fields.size()), fields.data()};
  return PluginPtr{creatorOf(op).createPlugin("attn_3", &collection, TensorRTPhase::kBUILD)};
}

IPluginV3OneCore& core(PluginPtr const& plugin) {
  return static_cast<IPluginV3OneCore&>(*plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}

IPluginV3OneBuild& build(PluginPtr const& plugin) {
  return static_cast<IPluginV3OneBuild&>(*plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

IPluginV3OneRuntime& runtime(PluginPtr const& plugin) {
  return static_cast<IPluginV3OneRuntime&>(*plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

Dims dims(std::vector<int64_t> const& sizes) {
  Dims result{static_cast<int32_t>(sizes.size()), {}};
  for (size_t i = 0; i < sizes.size(); ++i) result.d[i] = sizes[i];
  return result;
}

PluginTensorDesc desc(std::vector<int64_t> const& sizes, DataType dtype) {
  return {dims(sizes), dtype, TensorFormat::kLINEAR, 1.0f};
}

DynamicPluginTensorDesc dynamic(PluginTensorDesc const& desc) {
  return {desc, desc.dims, desc.dims, desc.dims};
}

std::vector<DynamicPluginTensorDesc> dynamic(std::vector<PluginTensorDesc> const& descs) {
  std::vector<DynamicPluginTensorDesc> all;
  for (PluginTensorDesc const& one : descs) all.push_back(dynamic(one));
  return all;
}

class Expressions::Expression final : public IDimensionExpr, private apiv::VDimensionExpr {
 public:
  Expression(std::string words, int64_t number) : text(std::move(words)), value(number) { mImpl = this; }
  ~Expression() noexcept override = default;

  std::string const text;
  int64_t const value;  // -1: not known

 private:
  bool isConstant() const override { return value >= 0; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }
};

Expressions::Expressions() { mImpl = this; }
Expressions::~Expressions() noexcept = default;

IDimensionExpr const* Expressions::make(std::string text, int64_t value) {
  mAll.push_back(std::make_unique<Expression>(std::move(text), value));
  return mAll.back().get();
}

IDimensionExpr const* Expressions::constant(int64_t value) { return make(std::to_string(value), value); }

IDimensionExpr const* Expressions::operation(DimensionOperation op, IDimensionExpr const& first,
                                             IDimensionExpr const& second) {
  auto const& a = static_cast<Expression const&>(first);
  auto const& b = static_cast<Expression const&>(second);
  bool const known = a.value >= 0 && b.value >= 0;
  switch (op) {
    case DimensionOperation::kFLOOR_DIV:
      return known ? constant(a.value / b.value) : make("(" + a.text + "/" + b.text + ")", -1);
    case DimensionOperation::kPROD:
      return known ? constant(a.value * b.value) : make(a.text + "*" + b.text, -1);
    default:
      throw std::logic_error("an operation that these expressions have not learned");
  }
}

IDimensionExpr const* Expressions::declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) {
  throw std::logic_error("the operator has no size tensors");
}

DimsExprs Expressions::shape(std::vector<std::string> const& axes) {
  DimsExprs result{static_cast<int32_t>(axes.size()), {}};
  for (size_t i = 0; i < axes.size(); ++i) {
    bool const number = axes[i].find_first_not_of("0123456789") == std::string::npos;
    result.d[i] = make(axes[i], number ? std::stoll(axes[i]) : -1);
  }
  return result;
}

std::string Expressions::text(DimsExprs const& shape) {
  std::string all = "[";
  for (int32_t i = 0; i < shape.nbDims; ++i) {
    all += (i > 0 ? ", " : "") + static_cast<Expression const*>(shape.d[i])->text;
  }
  return all + "]";
}

}  // namespace host
