// SPDX-License-Identifier: Apache-2.0
#include "params.h"

#include <cstring>
#include <locale>
#include <sstream>
#include <utility>

#include "log.h"

namespace flash_export {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr char const* kExportAgain = "export the model again with flash-export, or correct the node";

constexpr PluginFieldType fieldTypeOf(int32_t) { return PluginFieldType::kINT32; }
constexpr PluginFieldType fieldTypeOf(float) { return PluginFieldType::kFLOAT32; }
constexpr char const* typeName(int32_t) { return "INT32"; }
constexpr char const* typeName(float) { return "FLOAT32"; }

// Reads fields by name, each at most once; at the end no field may be left.
class FieldReader {
 public:
  FieldReader(Operator op, PluginFieldCollection const* collection, std::string const& layer)
      : mWhat(std::string{"cannot create "} + infoOf(op).name), mLayer("node \"" + layer + "\"") {
    if (collection == nullptr || collection->nbFields < 0 ||
        (collection->nbFields > 0 && collection->fields == nullptr)) {
      fail("its fields", "no field collection", "the operator's attributes", kExportAgain);
    }
    mFields.assign(collection->fields, collection->fields + collection->nbFields);
    mUsed.assign(mFields.size(), false);
  }

  // The value of the field `name`, which must be there once, hold one number and lie in smallest..largest.
  template <class Value>
  Value read(char const* name, Value smallest, Value largest) {
    std::string const where = std::string{"attribute "} + name;
    std::ostringstream need;
    need << "one " << typeName(Value{}) << " in " << smallest << " to " << largest;

    PluginField const& field = find(name, need.str());
    if (field.type != fieldTypeOf(Value{}) || field.length != 1 || field.data == nullptr) {
      std::ostringstream got;
      got << "field type " << static_cast<int32_t>(field.type) << ", length " << field.length
          << (field.data == nullptr ? ", no data" : "");
      fail(where, got.str(), need.str(), kExportAgain);
    }
    Value value;
    std::memcpy(&value, field.data, sizeof value);   // TensorRT promises no alignment.
    if (!(smallest <= value && value <= largest)) {  // Written so that NaN fails too.
      std::ostringstream got;
      got << value;
      fail(where, got.str(), need.str(), kExportAgain);
    }
    return value;
  }

  // Throws if a field was never read.
  void finish() const {
    for (size_t i = 0; i < mFields.size(); ++i) {
      if (!mUsed[i]) {
        char const* const name = mFields[i].name;
        fail("its fields", std::string{"an unknown attribute "} + (name == nullptr ? "without a name" : name),
             "only the attributes of docs/op.md, each once",
             "use the plugin library of the flash-export that wrote the model");
      }
    }
  }

  [[noreturn]] void fail(std::string const& where, std::string const& got, std::string const& need,
                         char const* todo) const {
    throw PluginError(mWhat, mLayer + ", " + where, got, need, todo);
  }

 private:
  PluginField const& find(char const* name, std::string const& need) {
    PluginField const* found = nullptr;
    for (size_t i = 0; i < mFields.size(); ++i) {
      if (mFields[i].name == nullptr || std::strcmp(mFields[i].name, name) != 0) continue;
      if (found != nullptr) fail(std::string{"attribute "} + name, "it twice", need, kExportAgain);
      found = &mFields[i];
      mUsed[i] = true;
    }
    if (found == nullptr) fail(std::string{"attribute "} + name, "nothing", need, kExportAgain);
    return *found;
  }

  std::string mWhat;
  std::string mLayer;
  std::vector<PluginField> mFields;
  std::vector<bool> mUsed;
};

// What one range an attribute cannot say.
void checkTogether(Operator op, Params const& params, FieldReader const& reader) {
  if (params.q_num_heads % params.kv_num_heads != 0) {
    reader.fail("attributes q_num_heads and kv_num_heads",
                std::to_string(params.q_num_heads) + " query heads, " + std::to_string(params.kv_num_heads) +
                    " key and value heads",
                "a whole number of query heads for each key and value head", kExportAgain);
  }
  bool const sideInputs = params.has_bias != 0 || params.has_kv_lengths != 0 || params.has_sinks != 0;
  if (sideInputs && !hasSideInputs(op)) {
    reader.fail("attributes has_bias, has_kv_lengths, has_sinks", "1 on an operator without these inputs",
                "0, or the operator FlashAttentionEx", kExportAgain);
  }
  if (isCache(op) && params.has_kv_lengths == 0) {
    reader.fail("attribute has_kv_lengths", "0", "1: kv_lengths says what the cache holds", kExportAgain);
  }
  if (op == Operator::kFlashAttentionPacked && params.layout != 0) {
    reader.fail("attribute layout", std::to_string(params.layout), "0: qkv is [B, S, (Hq + 2*Hkv)*D]",
                kExportAgain);
  }
}

}  // namespace

Params readParams(Operator op, PluginFieldCollection const* collection, std::string const& layer) {
  FieldReader reader(op, collection, layer);
  Params params;
  visitAttributes(params, [&](char const* name, auto& member, auto smallest, auto largest) {
    member = reader.read(name, smallest, largest);
  });
  reader.finish();
  checkTogether(op, params, reader);
  return params;
}

std::vector<PluginField> fieldsOf(Params const& params) {
  std::vector<PluginField> fields;
  visitAttributes(params, [&](char const* name, auto const& member, auto, auto) {
    fields.emplace_back(name, &member, fieldTypeOf(member), 1);
  });
  return fields;
}

std::vector<PluginField> const& fieldNames() {
  static std::vector<PluginField> const names = [] {
    std::vector<PluginField> fields = fieldsOf(Params{});
    for (PluginField& field : fields) field.data = nullptr;
    return fields;
  }();
  return names;
}

namespace {

// "name=value ..." in the notation that `text` is set to.
std::string listOf(Params const& params, std::ostringstream text) {
  text.imbue(std::locale::classic());
  visitAttributes(params, [&](char const* name, auto const& member, auto, auto) {
    text << (text.tellp() > 0 ? " " : "") << name << '=' << member;
  });
  return text.str();
}

}  // namespace

std::string textOf(Params const& params) { return listOf(params, std::ostringstream{}); }

std::string timingCacheIdOf(Operator op, Params const& params) {
  std::ostringstream text;
  text << std::hexfloat;
  return std::string{infoOf(op).name} + " " + kVersion + " " + listOf(params, std::move(text));
}

}  // namespace flash_export
