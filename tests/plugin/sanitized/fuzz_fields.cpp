// SPDX-License-Identifier: Apache-2.0
// The plugin's fields as a stranger's plan may hold them: bytes become a field collection, and whatever
// createPlugin makes of it must hold what plugin/params.h promises. An entry point for libFuzzer (clang
// -fsanitize=fuzzer) and for random_inputs.cpp; a broken promise ends the process.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention_plugin.h"
#include "creator.h"
#include "log.h"

namespace {

using namespace nvinfer1;
using flash_export::Params;

// Ends the process, as a sanitizer does.
void require(bool promise, char const* words) {
  if (promise) return;
  std::fprintf(stderr, "broken promise: %s\n", words);
  std::abort();
}

// Reads the input's bytes in order; behind its end there are zeros.
class Bytes {
 public:
  Bytes(uint8_t const* data, size_t size) : mData(data), mLeft(size) {}

  bool empty() const { return mLeft == 0; }
  uint8_t byte() {
    uint8_t value = 0;
    copy(&value, 1);
    return value;
  }
  void copy(void* to, size_t size) {
    size_t const there = std::min(size, mLeft);
    std::fill_n(std::copy_n(mData, there, static_cast<uint8_t*>(to)), size - there, uint8_t{0});
    mData += there;
    mLeft -= there;
  }
  template <class Number>
  Number number() {
    Number value;
    copy(&value, sizeof value);
    return value;
  }

 private:
  uint8_t const* mData;
  size_t mLeft;
};

size_t bytesOf(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kFLOAT64:
    case PluginFieldType::kINT64:
      return 8;
    case PluginFieldType::kFLOAT32:
    case PluginFieldType::kINT32:
    case PluginFieldType::kDIMS:
      return 4;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kINT16:
    case PluginFieldType::kBF16:
      return 2;
    default:
      return 1;
  }
}

// A list of fields in which each field's data has exactly the bytes that its type and length say, at an odd
// address, so that a sanitizer sees every read beyond them.
class FieldList {
 public:
  // The operator's attributes with valid values.
  FieldList() {
    mParams.q_num_heads = 4;
    mParams.kv_num_heads = 2;
    mParams.scale = 0.125f;
    for (PluginField const& field : flash_export::fieldsOf(mParams)) {
      mFields.push_back(field);
      setData(mFields.back(), field.data, 4);
    }
  }

  // One change that the input chooses.
  void edit(Bytes& bytes) {
    uint8_t const kind = bytes.byte() % 9;
    if (kind == 0 || mFields.empty()) return add(bytes);
    size_t const at = bytes.byte() % mFields.size();
    PluginField& field = mFields[at];
    if (kind == 1) return setValue(field, bytes);
    if (kind == 2) return setType(field, bytes);
    if (kind == 3) return setLength(field, bytes);
    if (kind == 4) return void(field.name = name(bytes));
    if (kind == 5) return void(field.data = nullptr);
    if (kind == 6) return void(mFields.erase(mFields.begin() + std::ptrdiff_t(at)));
    if (kind == 7) return mFields.push_back(PluginField{field});
    std::swap(field, mFields[bytes.byte() % mFields.size()]);
  }

  std::vector<PluginField> const& fields() const { return mFields; }

 private:
  void add(Bytes& bytes) {
    mFields.emplace_back(name(bytes), nullptr, PluginFieldType::kINT32, 1);
    setType(mFields.back(), bytes);
    setLength(mFields.back(), bytes);
  }

  // A known name, none, or any text.
  char const* name(Bytes& bytes) {
    std::vector<PluginField> const& known = flash_export::fieldNames();
    size_t const choice = bytes.byte() % (known.size() + 2);
    if (choice < known.size()) return known[choice].name;
    if (choice == known.size()) return nullptr;
    mNames.emplace_back(bytes.byte() % 32, '\0');
    bytes.copy(mNames.back().data(), mNames.back().size());
    return mNames.back().c_str();
  }

  // Any four bytes, or a number at which ranges end.
  void setValue(PluginField& field, Bytes& bytes) {
    static float const kFloats[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e30f, 1.1e30f, 1e-45f};
    static int32_t const kInts[] = {INT32_MIN, INT32_MAX, -1, 0, 1, 65535, 65536};
    uint8_t const choice = bytes.byte();
    if (choice < 7) return setData(field, &kFloats[choice], 4);
    if (choice < 14) return setData(field, &kInts[choice - 7], 4);
    setData(field, bytes, 4);
  }

  void setType(PluginField& field, Bytes& bytes) {
    uint8_t const choice = bytes.byte();
    field.type = static_cast<PluginFieldType>(choice == 255 ? bytes.number<int32_t>() : choice % 16);
    setData(field, bytes, dataSize(field));
  }

  void setLength(PluginField& field, Bytes& bytes) {
    uint8_t const choice = bytes.byte();
    field.length = choice == 255 ? bytes.number<int32_t>() : choice % 5 - 1;
    setData(field, bytes, dataSize(field));
  }

  // A length that no memory holds gets a few elements: the reader must not come so far.
  static size_t dataSize(PluginField const& field) {
    return bytesOf(field.type) * size_t(std::clamp(field.length, 0, 4));
  }

  void setData(PluginField& field, Bytes& bytes, size_t size) {
    std::vector<char> data(size);
    bytes.copy(data.data(), size);
    setData(field, data.data(), size);
  }
  void setData(PluginField& field, void const* data, size_t size) {
    mData.emplace_back(new char[size + 1]);  // an array of its own: what is beyond belongs to nobody
    char* const start = mData.back().get() + 1;
    std::copy_n(static_cast<char const*>(data), size, start);
    field.data = start;
  }

  Params mParams;
  std::deque<std::string> mNames;
  std::vector<std::unique_ptr<char[]>> mData;
  std::vector<PluginField> mFields;
};

// Keeps the last message.
class LastMessage final : public ILogger, public ILoggerFinder {
 public:
  void log(Severity, AsciiChar const* text) noexcept override { mText = text; }
  ILogger* findLogger() override { return this; }
  std::string take() { return std::exchange(mText, {}); }

 private:
  std::string mText;
};

void requireInRange(PluginFieldCollection const& written) {
  int32_t i = 0;
  Params const any{};
  flash_export::visitAttributes(any, [&](char const* name, auto value, auto smallest, auto largest) {
    PluginField const& field = written.fields[i++];
    require(std::strcmp(field.name, name) == 0 && field.length == 1, "a plugin writes its attributes");
    std::memcpy(&value, field.data, sizeof value);
    require(smallest <= value && value <= largest, "an accepted attribute is in range");
  });
  require(written.nbFields == i, "a plugin writes its attributes and no more");
}

PluginFieldCollection const& written(IPluginV3& plugin) {
  auto* const runtime = plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME);
  return *static_cast<IPluginV3OneRuntime*>(runtime)->getFieldsToSerialize();
}

// What was accepted is in range, and the plugin that its plan makes, and its clone, are the same.
void requireSound(flash_export::AttentionCreator& creator, IPluginV3& plugin) {
  PluginFieldCollection const& fields = written(plugin);
  requireInRange(fields);
  std::unique_ptr<IPluginV3> const clone{plugin.clone()};
  std::unique_ptr<IPluginV3> const again{creator.createPlugin("plan", &fields, TensorRTPhase::kRUNTIME)};
  require(clone != nullptr && again != nullptr, "what a plugin writes is accepted");
  for (IPluginV3* const other : {clone.get(), again.get()}) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
      require(std::memcmp(written(*other).fields[i].data, fields.fields[i].data, 4) == 0,
              "a plan and a clone keep every value");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
  static LastMessage messages;
  flash_export::setLoggerFinder(&messages);
  Bytes bytes(data, size);
  flash_export::AttentionCreator creator{
      static_cast<flash_export::Operator>(bytes.byte() % flash_export::kOperatorCount)};
  uint8_t const shape = bytes.byte();
  FieldList list;
  for (int edits = 0; edits < 40 && !bytes.empty(); ++edits) list.edit(bytes);

  PluginFieldCollection collection{static_cast<int32_t>(list.fields().size()), list.fields().data()};
  if (shape == 253) collection.fields = nullptr;
  if (shape == 254) collection.nbFields = bytes.number<int32_t>() | INT32_MIN;
  std::unique_ptr<IPluginV3> const plugin{
      creator.createPlugin("node", shape == 255 ? nullptr : &collection, TensorRTPhase::kBUILD)};
  std::string const text = messages.take();
  if (plugin != nullptr) {
    require(text.empty(), "an accepted field list needs no message");
    require(list.fields().size() == flash_export::fieldNames().size(), "each attribute is there once");
    requireSound(creator, *plugin);
    return 0;
  }
  for (char const* part :
       {"cannot create FlashAttention", "\n  where ", "\n  got ", "\n  need ", "\n  do "}) {
    require(text.find(part) != std::string::npos, "a refusal has five parts");
  }
  return 0;
}
