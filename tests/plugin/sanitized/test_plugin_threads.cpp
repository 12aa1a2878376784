// SPDX-License-Identifier: Apache-2.0
// 16 threads use the plugin library at once, as a server with many execution contexts does; for
// ThreadSanitizer. The kernels are three functions here that launch nothing.
#include <atomic>
#include <cstring>
#include <mutex>

#include "host.h"
#include "kernels/flash_attention.h"
#include "threads.h"

namespace {

using namespace nvinfer1;

constexpr int kThreads = 16;
constexpr int kRounds = 40;

std::atomic<int> gLaunches{0};
std::atomic<int> gAppends{0};

constexpr char const* kOperators[] = {"FlashAttention", "FlashAttentionEx", "FlashAttentionCache",
                                      "FlashAttentionPagedCache"};

// A host's logger is called from any thread; this one keeps what it is told.
class SharedMessages final : public ILogger, public ILoggerFinder {
 public:
  void log(Severity, AsciiChar const* text) noexcept override {
    std::lock_guard<std::mutex> const lock(mMutex);
    mTexts.emplace_back(text);
  }
  ILogger* findLogger() override { return this; }
  std::vector<std::string> const& texts() const { return mTexts; }

 private:
  std::mutex mMutex;
  std::vector<std::string> mTexts;
};

host::Fields fieldsFor(int thread, int round) {
  host::Fields fields;
  fields.set("q_num_heads", 4).set("kv_num_heads", thread % 2 == 0 ? 2 : 4);
  fields.set("causal", round % 2).set("window_left", thread * 100 + round).set("scale", 0.25 * thread);
  return fields;
}

host::Fields cacheFields() {
  return host::Fields()
      .set("layout", 1)
      .set("q_num_heads", 4)
      .set("kv_num_heads", 2)
      .set("has_kv_lengths", 1);
}

void expectFields(host::PluginPtr const& plugin, host::Fields const& given) {
  PluginFieldCollection const* const written = host::runtime(plugin).getFieldsToSerialize();
  std::vector<PluginField> const list = given.list();
  EXPECT(written->nbFields == static_cast<int32_t>(list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    EXPECT(std::memcmp(written->fields[i].data, list[i].data, 4) == 0, list[i].name);
  }
}

// Everything that a host asks of a node of two heads of 8 at build and run time.
void useThroughout(host::PluginPtr const& plugin) {
  std::vector<PluginTensorDesc> const in(3, host::desc({1, 5, 32}));
  PluginTensorDesc const out = host::desc({1, 5, 32});
  std::vector<DynamicPluginTensorDesc> const all = host::dynamic(std::vector<PluginTensorDesc>(4, out));
  IPluginV3OneBuild& build = host::build(plugin);
  DataType const types[] = {DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT};
  DataType written = DataType::kHALF;
  EXPECT(build.getOutputDataTypes(&written, 1, types, 3) == 0 && written == DataType::kFLOAT);
  EXPECT(build.supportsFormatCombination(3, all.data(), 3, 1));
  EXPECT(build.configurePlugin(all.data(), 3, &all[3], 1) == 0);
  EXPECT(build.getWorkspaceSize(all.data(), 3, &all[3], 1) == 0);
  host::Expressions expressions;
  std::vector<DimsExprs> const shapes(3, expressions.shape({"B", "S", "32"}));
  DimsExprs shape{};
  EXPECT(build.getOutputShapes(shapes.data(), 3, nullptr, 0, &shape, 1, expressions) == 0);

  std::vector<float> memory(160);
  void const* inputs[] = {memory.data(), memory.data(), memory.data()};
  void* outputs[] = {memory.data()};
  IPluginV3OneRuntime& runtime = host::runtime(plugin);
  EXPECT(runtime.onShapeChange(in.data(), 3, &out, 1) == 0);
  EXPECT(runtime.enqueue(in.data(), &out, inputs, outputs, nullptr, nullptr) == 0);
}

// A cache form at build and run time: three new keys into a cache of 48, or of three pages of 16.
void appendThroughout(host::PluginPtr const& plugin, bool paged) {
  PluginTensorDesc const cache = host::desc({paged ? 3 : 1, 2, paged ? 16 : 48, 8});
  PluginTensorDesc const length = host::desc({1}, DataType::kINT32);
  std::vector<PluginTensorDesc> in{host::desc({1, 4, 7, 8}),
                                   host::desc({1, 2, 3, 8}),
                                   host::desc({1, 2, 3, 8}),
                                   host::desc({1, 1, 1, 1}),
                                   length,
                                   host::desc({1}),
                                   cache,
                                   cache};
  if (paged) in.push_back(host::desc({1, 3}, DataType::kINT32));
  std::vector<PluginTensorDesc> const out{in[0], host::desc({1, 4, 7}), length, cache, cache};
  int32_t const count = static_cast<int32_t>(in.size());

  auto& build = static_cast<IPluginV3OneBuildV2&>(host::build(plugin));
  EXPECT(build.getAliasedInput(3) == 6 && build.getAliasedInput(4) == 7);
  EXPECT(build.configurePlugin(host::dynamic(in).data(), count, host::dynamic(out).data(), 5) == 0);

  std::vector<float> memory(1024);
  std::vector<void const*> const inputs(in.size(), memory.data());
  std::vector<void*> const outputs(out.size(), memory.data());
  IPluginV3OneRuntime& runtime = host::runtime(plugin);
  EXPECT(runtime.onShapeChange(in.data(), count, out.data(), 5) == 0);
  EXPECT(runtime.enqueue(in.data(), out.data(), inputs.data(), outputs.data(), memory.data(), nullptr) == 0);
}

// First in the file: it is about the library's statics.
TEST(the_first_calls_of_a_process_may_come_from_many_threads) {
  runner::inThreads(kThreads, [](int) {
    int32_t count = 0;
    IPluginCreatorInterface* const* const creators = getCreators(count);
    for (int32_t i = 0; i < count; ++i) {
      auto& creator = static_cast<IPluginCreatorV3One&>(*creators[i]);
      EXPECT(creator.getFieldNames()->nbFields == 12, creator.getFieldNames()->nbFields);
    }
  });
}

TEST(threads_that_create_serialise_and_clone_their_own_plugins_do_not_meet) {
  runner::inThreads(kThreads, [](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      char const* const op = kOperators[thread % 4];
      bool const isCache = thread % 4 >= 2;
      host::Fields const fields =
          isCache ? fieldsFor(thread, round).set("has_kv_lengths", 1) : fieldsFor(thread, round);
      host::PluginPtr const built = host::create(op, fields);
      EXPECT(built != nullptr);
      PluginFieldCollection const* const plan = host::runtime(built).getFieldsToSerialize();
      host::PluginPtr const loaded =
          host::create(op, std::vector<PluginField>(plan->fields, plan->fields + plan->nbFields));
      host::PluginPtr const clone{loaded->clone()};
      host::PluginPtr const attached{host::runtime(clone).attachToContext(nullptr)};
      for (host::PluginPtr const* plugin : {&built, &loaded, &clone, &attached})
        expectFields(*plugin, fields);
      EXPECT(std::string{host::build(attached).getMetadataString()}.find("q_num_heads=4") == 9,
             host::build(attached).getMetadataString());
    }
  });
}

TEST(threads_may_clone_and_serialise_one_plugin) {
  host::Fields const fields = fieldsFor(0, 0).set("kv_num_heads", 4);
  host::PluginPtr const shared = host::create("FlashAttention", fields);
  gLaunches = 0;
  runner::inThreads(kThreads, [&](int) {
    for (int round = 0; round < kRounds; ++round) {
      expectFields(shared, fields);
      host::PluginPtr const clone{shared->clone()};
      expectFields(clone, fields);
      useThroughout(clone);
    }
  });
  EXPECT(gLaunches == kThreads * kRounds, gLaunches);
}

TEST(threads_may_clone_one_plugin_of_a_cache_and_append_each_to_its_own) {
  host::PluginPtr const whole = host::create("FlashAttentionCache", cacheFields());
  host::PluginPtr const paged = host::create("FlashAttentionPagedCache", cacheFields());
  gAppends = 0;
  runner::inThreads(kThreads, [&](int thread) {
    bool const isPaged = thread % 2 == 1;
    for (int round = 0; round < kRounds; ++round) {
      host::PluginPtr const clone{(isPaged ? paged : whole)->clone()};
      expectFields(clone, cacheFields());
      appendThroughout(clone, isPaged);
    }
  });
  EXPECT(gAppends == kThreads * kRounds, gAppends);
}

TEST(threads_that_are_refused_each_get_their_message) {
  SharedMessages messages;
  setLoggerFinder(&messages);
  runner::inThreads(kThreads, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      if (thread == 0) setLoggerFinder(&messages);
      EXPECT(host::create("FlashAttention", host::Fields().set("layout", thread + 2)) == nullptr);
    }
  });
  setLoggerFinder(nullptr);
  EXPECT(messages.texts().size() == size_t(kThreads * kRounds), messages.texts().size());
  for (std::string const& text : messages.texts()) {
    EXPECT(text.find("attribute layout\n  got   ") != std::string::npos, text);
  }
}

}  // namespace

int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const*, char* text, size_t) {
  *text = '\0';
  return 0;
}

int32_t flashAttentionAppendWhyUnsupported(FlashAppendArgs const*, char* text, size_t) {
  *text = '\0';
  return 0;
}

int32_t flashAttentionAppend(FlashAppendArgs const*, void*) {
  ++gAppends;
  return 0;
}

size_t flashAttentionWorkspace(FlashAttentionArgs const*) { return 0; }

int32_t flashAttentionLaunch(FlashAttentionArgs const*, void*, void*) {
  ++gLaunches;
  return 0;
}
