// SPDX-License-Identifier: Apache-2.0
#include "fake_kernels.h"

#include <cstdio>
#include <stdexcept>

namespace fake {

Kernels kernels;

namespace {

void record(FlashAttentionArgs const* args) {
  if (kernels.throws) throw std::runtime_error("the kernels' own bug");
  kernels.args = *args;
}

}  // namespace
}  // namespace fake

int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const* args, char* text, size_t text_size) {
  fake::record(args);
  std::snprintf(text, text_size, "%s", fake::kernels.reason.c_str());
  return fake::kernels.reason.empty() ? 0 : 1;
}

int32_t flashAttentionAppendWhyUnsupported(FlashAppendArgs const* args, char* text, size_t text_size) {
  fake::kernels.append = *args;
  std::snprintf(text, text_size, "%s", fake::kernels.reason.c_str());
  return fake::kernels.reason.empty() ? 0 : 1;
}

int32_t flashAttentionAppend(FlashAppendArgs const* args, void* stream) {
  fake::kernels.append = *args;
  ++fake::kernels.appends;
  fake::kernels.launch_stream = stream;
  return fake::kernels.status;
}

size_t flashAttentionWorkspace(FlashAttentionArgs const* args) {
  fake::record(args);
  return fake::kernels.workspace;
}

int32_t flashAttentionLaunch(FlashAttentionArgs const* args, void* workspace, void* stream) {
  fake::record(args);
  ++fake::kernels.launches;
  fake::kernels.launch_workspace = workspace;
  fake::kernels.launch_stream = stream;
  return fake::kernels.status;
}
