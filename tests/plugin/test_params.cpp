// SPDX-License-Identifier: Apache-2.0
// plugin/params.h through createPlugin and getFieldsToSerialize, as TensorRT calls them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "host.h"
#include "runner.h"

namespace {

using namespace nvinfer1;

constexpr char const* kEx = "FlashAttentionEx";
constexpr char const* kPlain = "FlashAttention";

// createPlugin must return null and say so, naming `part`; the next good call must work.
void expectRefused(char const* op, std::vector<PluginField> const& fields, std::string const& part) {
  host::Messages messages;
  EXPECT(host::create(op, fields) == nullptr, "for " << part);
  std::string const text = messages.take();
  EXPECT(text.find(part) != std::string::npos, "no \"" << part << "\" in: " << text);
  for (char const* label : {"where node \"attn_3\"", "\n  got   ", "\n  need  ", "\n  do    "}) {
    EXPECT(text.find(label) != std::string::npos, "no \"" << label << "\" in: " << text);
  }
  EXPECT(host::create(op, host::Fields()) != nullptr, messages.take());
}

// Three values within the range of an attribute, other attributes allowing them.
std::vector<double> valuesOf(std::string const& name, double smallest, double largest) {
  if (name == "layout" || largest == 1) return {0, 1, 0};
  if (name == "kv_num_heads") return {1, 4, 8};
  if (name == "q_num_heads") return {1, 12, 65535};
  if (name == "scale") return {0.125, -3.5, 0.0};
  return {smallest, 7, largest};
}

void expectRoundTrip(std::string const& name, double value) {
  host::Fields fields;
  if (name == "kv_num_heads") fields.set("q_num_heads", 8);
  fields.set(name, value);
  host::PluginPtr const first = host::create(kEx, fields);
  EXPECT(first != nullptr, name << " = " << value);
  // A plan holds copies of the serialised fields, and a clone writes the same.
  PluginFieldCollection const* const written = host::runtime(first).getFieldsToSerialize();
  host::PluginPtr const clone{first->clone()};
  std::vector<PluginField> const kept(written->fields, written->fields + written->nbFields);
  host::PluginPtr const second = host::create(kEx, kept);
  EXPECT(second != nullptr && clone != nullptr, name << " = " << value);

  std::vector<PluginField> const given = fields.list();
  for (host::PluginPtr const* plugin : {&first, &second, &clone}) {
    PluginFieldCollection const* const out = host::runtime(*plugin).getFieldsToSerialize();
    EXPECT(out->nbFields == static_cast<int32_t>(given.size()));
    for (int32_t i = 0; i < out->nbFields; ++i) {
      EXPECT(std::strcmp(out->fields[i].name, given[i].name) == 0,
             out->fields[i].name << " for " << given[i].name);
      EXPECT(out->fields[i].type == given[i].type && out->fields[i].length == 1, given[i].name);
      EXPECT(std::memcmp(out->fields[i].data, given[i].data, 4) == 0, given[i].name);
    }
  }
}

TEST(every_attribute_survives_a_plan_and_a_clone_at_three_values) {
#define ROUND_TRIP(name, smallest, largest) \
  for (double value : valuesOf(#name, smallest, largest)) expectRoundTrip(#name, value);
  FLASH_ATTENTION_INT_ATTRIBUTES(ROUND_TRIP)
  FLASH_ATTENTION_FLOAT_ATTRIBUTES(ROUND_TRIP)
#undef ROUND_TRIP
}

TEST(the_creators_are_the_five_operators) {
  int32_t count = 0;
  getCreators(count);
  EXPECT(count == 5, count);
  for (char const* op : {"FlashAttention", "FlashAttentionEx", "FlashAttentionPacked", "FlashAttentionCache",
                         "FlashAttentionPagedCache"}) {
    IPluginCreatorV3One& creator = host::creatorOf(op);
    EXPECT(std::string{creator.getPluginNamespace()} == "flash_export");
    EXPECT(std::string{creator.getPluginVersion()} == "1");
    EXPECT(std::string{creator.getInterfaceInfo().kind} == "PLUGIN CREATOR_V3ONE");

    bool const cache = std::string{op}.find("Cache") != std::string::npos;
    host::PluginPtr const plugin = host::create(op, host::Fields().set("has_kv_lengths", cache));
    EXPECT(plugin != nullptr);
    EXPECT(std::string{host::core(plugin).getPluginName()} == op);
    EXPECT(std::string{host::core(plugin).getPluginNamespace()} == "flash_export");
    EXPECT(std::string{host::core(plugin).getPluginVersion()} == "1");
  }
}

TEST(the_parser_is_told_every_attribute) {
  PluginFieldCollection const* const names = host::creatorOf(kPlain).getFieldNames();
  host::Fields const expected;
  EXPECT(names->nbFields == static_cast<int32_t>(expected.list().size()), names->nbFields);
  for (int32_t i = 0; i < names->nbFields; ++i) {
    EXPECT(std::strcmp(names->fields[i].name, expected.list()[i].name) == 0, names->fields[i].name);
    EXPECT(names->fields[i].type == expected.list()[i].type, names->fields[i].name);
    EXPECT(names->fields[i].data == nullptr, names->fields[i].name);
  }
}

TEST(attributes_need_not_be_in_order_nor_aligned) {
  host::Fields const fields;
  std::vector<PluginField> list = fields.list();
  std::reverse(list.begin(), list.end());
  std::vector<char> bytes(4 * list.size() + 1);
  for (size_t i = 0; i < list.size(); ++i) {
    std::memcpy(&bytes[4 * i + 1], list[i].data, 4);
    list[i].data = &bytes[4 * i + 1];
  }
  EXPECT(host::create(kPlain, list) != nullptr);
}

TEST(a_missing_attribute_is_refused) {
  host::Fields const fields;
  for (size_t i = 0; i < fields.list().size(); ++i) {
    std::vector<PluginField> list = fields.list();
    std::string const name = list[i].name;
    list.erase(list.begin() + i);
    expectRefused(kPlain, list, "attribute " + name + "\n  got   nothing");
  }
}

TEST(an_attribute_that_is_there_twice_is_refused) {
  host::Fields const fields;
  for (PluginField const& field : fields.list()) {
    std::vector<PluginField> list = fields.list();
    list.push_back(field);
    expectRefused(kPlain, list, std::string{"attribute "} + field.name + "\n  got   it twice");
  }
}

TEST(an_unknown_attribute_is_refused) {
  host::Fields const fields;
  int32_t const value = 1;
  std::vector<PluginField> list = fields.list();
  list.emplace_back("is_causal", &value, PluginFieldType::kINT32, 1);
  expectRefused(kPlain, list, "unknown attribute is_causal");
  list.back().name = nullptr;
  expectRefused(kPlain, list, "unknown attribute without a name");
}

TEST(a_wrong_type_length_or_no_data_is_refused) {
  host::Fields const fields;
  for (size_t i = 0; i < fields.list().size(); ++i) {
    std::string const name = std::string{"attribute "} + fields.list()[i].name;
    for (PluginFieldType type : {PluginFieldType::kFLOAT64, PluginFieldType::kINT64, PluginFieldType::kCHAR,
                                 PluginFieldType::kUNKNOWN}) {
      std::vector<PluginField> list = fields.list();
      list[i].type = type;
      expectRefused(kPlain, list, name);
    }
    for (int32_t length : {0, 2, -1}) {
      std::vector<PluginField> list = fields.list();
      list[i].length = length;
      expectRefused(kPlain, list, name);
    }
    std::vector<PluginField> list = fields.list();
    list[i].data = nullptr;
    expectRefused(kPlain, list, name);
  }
}

TEST(a_value_out_of_range_is_refused) {
  host::Fields fields;
#define BEYOND(name, smallest, largest)                                                                \
  if (int64_t{smallest} > std::numeric_limits<int32_t>::min()) {                                       \
    expectRefused(kPlain, host::Fields().set(#name, double{smallest} - 1).list(), "attribute " #name); \
  }                                                                                                    \
  if (int64_t{largest} < std::numeric_limits<int32_t>::max()) {                                        \
    expectRefused(kPlain, host::Fields().set(#name, double{largest} + 1).list(), "attribute " #name);  \
  }
  FLASH_ATTENTION_INT_ATTRIBUTES(BEYOND)
#undef BEYOND
  for (double value : {std::nan(""), double{INFINITY}, -double{INFINITY}}) {
    expectRefused(kPlain, host::Fields().set("scale", value).list(), "attribute scale");
    expectRefused(kPlain, host::Fields().set("softcap", value).list(), "attribute softcap");
  }
  expectRefused(kPlain, host::Fields().set("softcap", -1).list(), "attribute softcap");
}

TEST(values_that_contradict_each_other_are_refused) {
  expectRefused(kPlain, host::Fields().set("q_num_heads", 3).set("kv_num_heads", 2).list(), "3 query heads");
  for (char const* name : {"has_bias", "has_kv_lengths", "has_sinks"}) {
    expectRefused(kPlain, host::Fields().set(name, 1).list(), "FlashAttentionEx");
    expectRefused("FlashAttentionPacked", host::Fields().set(name, 1).list(), "FlashAttentionEx");
  }
  expectRefused("FlashAttentionPacked", host::Fields().set("layout", 1).list(), "attribute layout");
}

TEST(no_field_collection_is_refused) {
  host::Messages messages;
  IPluginCreatorV3One& creator = host::creatorOf(kPlain);
  EXPECT(creator.createPlugin("attn_3", nullptr, TensorRTPhase::kRUNTIME) == nullptr);
  EXPECT(messages.has("no field collection"), messages.take());
  PluginFieldCollection const broken{3, nullptr};
  EXPECT(creator.createPlugin(nullptr, &broken, TensorRTPhase::kBUILD) == nullptr);
  PluginFieldCollection const negative{-1, nullptr};
  EXPECT(creator.createPlugin("attn_3", &negative, TensorRTPhase::kBUILD) == nullptr);
  PluginFieldCollection const none{0, nullptr};
  EXPECT(creator.createPlugin("attn_3", &none, TensorRTPhase::kBUILD) == nullptr);
}

// --- the timing cache -----------------------------------------------------------------------------------

std::string timingCacheId(char const* op, host::Fields const& fields) {
  host::PluginPtr const plugin = host::create(op, fields);
  EXPECT(plugin != nullptr, op);
  char const* const id = host::build(plugin).getTimingCacheID();
  EXPECT(id != nullptr, op);
  EXPECT(host::build(plugin).getTimingCacheID() == id, "the id moves");
  host::PluginPtr const clone{plugin->clone()};
  EXPECT(std::string{host::build(clone).getTimingCacheID()} == id, id);
  return id;
}

TEST(the_timing_cache_id_is_the_same_for_the_same_node_and_another_for_each_operator) {
  std::string const plain = timingCacheId(kPlain, {}), extended = timingCacheId(kEx, {}),
                    packed = timingCacheId("FlashAttentionPacked", {});
  EXPECT(timingCacheId(kPlain, {}) == plain, plain);
  EXPECT(plain != extended && plain != packed && extended != packed, plain);
  EXPECT(plain.rfind("FlashAttention 1 ", 0) == 0, plain);  // the plugin's version
}

TEST(every_attribute_alters_the_timing_cache_id) {
  auto const ids = [](std::string const& name, std::vector<double> const& values) {
    std::set<std::string> found;
    for (double value : values) {
      host::Fields fields;
      if (name == "kv_num_heads") fields.set("q_num_heads", 8);
      found.insert(timingCacheId(kEx, fields.set(name, value)));
    }
    return found.size();
  };
#define ALTERS(name, smallest, largest)                                          \
  {                                                                              \
    std::vector<double> const values = valuesOf(#name, smallest, largest);       \
    std::set<double> const distinct(values.begin(), values.end());               \
    EXPECT(distinct.size() > 1 && ids(#name, values) == distinct.size(), #name); \
  }
  FLASH_ATTENTION_INT_ATTRIBUTES(ALTERS)
  FLASH_ATTENTION_FLOAT_ATTRIBUTES(ALTERS)
#undef ALTERS
  float const scale = 0.125F;  // in the last bit too, which six digits do not show
  EXPECT(ids("scale", {scale, std::nextafter(scale, 1.0F)}) == 2);
  EXPECT(ids("softcap", {scale, std::nextafter(scale, 1.0F)}) == 2);
}

TEST(the_metadata_lists_the_attributes) {
  host::PluginPtr const plugin = host::create(kEx, host::Fields().set("causal", 1).set("scale", 0.125));
  std::string const text = host::build(plugin).getMetadataString();
  for (char const* part : {"causal=1", "scale=0.125", "q_num_heads=2", "has_sinks=0"}) {
    EXPECT(text.find(part) != std::string::npos, text);
  }
}

}  // namespace
