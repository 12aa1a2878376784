// SPDX-License-Identifier: Apache-2.0
// Loads the plugin library that lies beside this one into every TensorRT of the process, the moment this one
// is opened: for hosts that can only open a library (dlopen, LD_PRELOAD) and never ask a registry to load
// one.
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <unwind.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "op.h"

namespace {

constexpr char const* kPlugin = "libflash_attention_plugin.so";
constexpr char const* kPluginVariable = "FLASH_TRT_PLUGIN";
// TensorRT for RTX, and the name that its ONNX parser opens it by and ends the process without.
constexpr char const* kRtx = "libtensorrt_rtx.so.1";
constexpr char const* kRtxName = "libtensorrt_rtx.so";

// By SONAME, so that the one that is loaded is found, wherever it came from.
constexpr char const* kHosts[] = {"libnvinfer.so.11", "libnvinfer.so.10", kRtx, "libnvinfer_lean.so.11",
                                  "libnvinfer_lean.so.10"};
constexpr int kHostCount = sizeof(kHosts) / sizeof(kHosts[0]);

void say(std::string const& what, std::string const& where, std::string const& got, std::string const& need,
         std::string const& todo) {
  std::fprintf(stderr, "flash_export autoload: %s\n  where %s\n  got   %s\n  need  %s\n  do    %s\n",
               what.c_str(), where.c_str(), got.c_str(), need.c_str(), todo.c_str());
}

// --- a TensorRT in this process
// ------------------------------------------------------------------------------------

// Where IPluginRegistry::loadLibrary stands in the registry's virtual table, or -1 for a version that is not
// known. TensorRT 11 dropped the methods that 10 had before it, and TensorRT for RTX 1.7 has the same table
// as 11.
int loadLibrarySlot(int32_t version) {
  bool const is10 = version >= 100700 && version < 110000;
  bool const is11 = version >= 110000 && version < 120000;
  bool const isRtx = version >= 10700 && version < 20000;
  return is10 ? 10 : is11 || isRtx ? 6 : -1;
}

struct Host {
  std::string name;
  int32_t version;
  void* registry;
  void const* code;  // where its library lies in memory
};

// Where the library of an address lies in memory.
void const* libraryOf(void const* address) {
  Dl_info info{};
  return dladdr(address, &info) == 0 ? nullptr : info.dli_fbase;
}

// Whether this code runs because the host called dlopen: its registry was told to load this library.
bool openedBy(Host const& host) {
  struct Search {
    void const* code;
    bool found;
  } search{host.code, false};
  _Unwind_Backtrace(
      [](_Unwind_Context* frame, void* data) {
        Search& s = *static_cast<Search*>(data);
        s.found |= libraryOf(reinterpret_cast<void const*>(_Unwind_GetIP(frame))) == s.code;
        return s.found ? _URC_END_OF_STACK : _URC_NO_REASON;
      },
      &search);
  return search.found;
}

// The TensorRT behind a dlopen handle; its registry is null when it is none.
Host hostIn(void* library, std::string const& name) {
  using Version = int32_t (*)() noexcept;
  using Registry = void* (*)() noexcept;
  auto const version = reinterpret_cast<Version>(dlsym(library, "getInferLibVersion"));
  auto const registry = reinterpret_cast<Registry>(dlsym(library, "getPluginRegistry"));
  if (version == nullptr || registry == nullptr) {
    return {name, 0, nullptr, nullptr};
  }
  return {name, version(), registry(), libraryOf(reinterpret_cast<void const*>(version))};
}

template <class Result, class... Arguments>
Result callSlot(void* object, int slot, Arguments... arguments) {
  using Method = Result (*)(void*, Arguments...) noexcept;
  return reinterpret_cast<Method>((*static_cast<void***>(object))[slot])(object, arguments...);
}

// getAllCreators() stands three after loadLibrary() in every known table.
bool hasOurs(void* registry, int load_slot) {
  int32_t count = 0;
  auto* const creators = callSlot<nvinfer1::IPluginCreatorInterface* const*>(registry, load_slot + 3,
                                                                             static_cast<int32_t*>(&count));
  for (int32_t i = 0; creators != nullptr && i < count; ++i) {
    if (std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0) {
      auto const* const creator = static_cast<nvinfer1::IPluginCreatorV3One const*>(creators[i]);
      if (std::strcmp(creator->getPluginNamespace(), flash_export::kNamespace) == 0) {
        return true;
      }
    }
  }
  return false;
}

void loadInto(Host const& host, std::string const& plugin) {
  int const slot = loadLibrarySlot(host.version);
  std::string const where = host.name + ", version " + std::to_string(host.version);
  if (slot < 0) {
    say("this TensorRT is not supported", where, "a version whose plugin registry is not known",
        "TensorRT 10.7 to 11, or TensorRT for RTX 1.7 or a later 1.x", "install one of these");
    return;
  }
  if (openedBy(host)) {
    say("the library that loads itself was given to a registry, which answers null for it", where,
        "load_library of this library", "load_library of " + plugin,
        "nothing now: the operators are there; give it that library next time");
  }
  if (hasOurs(host.registry, slot)) {
    return;
  }
  callSlot<void*>(host.registry, slot, plugin.c_str());
  if (!hasOurs(host.registry, slot)) {
    say("the plugin library does not load into TensorRT", where, "no " + plugin + " in its registry",
        std::string{kPlugin} + " of this flash-export beside this library",
        "see TensorRT's own message above, or set " + std::string{kPluginVariable} +
            " to the library's path");
  }
}

// --- finding both
// --------------------------------------------------------------------------------------------------

// The path of a library beside this one.
std::string beside(char const* name) {
  Dl_info info{};
  dladdr(reinterpret_cast<void const*>(&beside), &info);
  std::string const self = info.dli_fname == nullptr ? "" : info.dli_fname;
  return self.substr(0, self.rfind('/') + 1) + name;
}

std::string pluginPath() {
  char const* const chosen = std::getenv(kPluginVariable);
  return chosen != nullptr && *chosen != '\0' ? chosen : beside(kPlugin);
}

// Gives TensorRT for RTX the name that its parser asks for, where the process has none of that name yet.
void nameRtx() {
  if (dlopen(kRtxName, RTLD_LAZY | RTLD_NOLOAD) == nullptr) {
    dlopen(beside(kRtxName).c_str(), RTLD_LAZY);
  }
}

// Loads the plugin into each TensorRT that dlopen finds with `flags`; returns how many it found.
int loadIntoAll(int flags, std::string const& plugin) {
  int found = 0;
  for (char const* name : kHosts) {
    if (void* const library = dlopen(name, flags)) {
      Host const host = hostIn(library, name);
      if (host.registry != nullptr) {
        if (std::strcmp(name, kRtx) == 0) {
          nameRtx();
        }
        loadInto(host, plugin);
        ++found;
      }
    }
  }
  return found;
}

__attribute__((constructor)) void autoload() {
  std::string const plugin = pluginPath();
  if (loadIntoAll(RTLD_LAZY | RTLD_NOLOAD, plugin) > 0) {
    return;
  }
  // A TensorRT of another file name, or linked into the program.
  Host const host = hostIn(RTLD_DEFAULT, "the program");
  if (host.registry != nullptr) {
    loadInto(host, plugin);
    return;
  }
  // LD_PRELOAD comes before the program has opened TensorRT: open it here, as a library linked with it would.
  if (loadIntoAll(RTLD_LAZY | RTLD_GLOBAL, plugin) == 0) {
    say("there is no TensorRT in this process", plugin,
        "none of " + std::to_string(kHostCount) + " libraries, " + kHosts[0] + " to " +
            kHosts[kHostCount - 1],
        "TensorRT 10.7 to 11, or TensorRT for RTX 1.7", "open TensorRT first, or put it on the library path");
  }
}

}  // namespace
