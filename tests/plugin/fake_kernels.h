// SPDX-License-Identifier: Apache-2.0
// Kernels that compute nothing: they record what the plugin asks of them and answer what a test wants.
#pragma once
#include <string>

#include "kernels/flash_attention.h"

namespace fake {

struct Kernels {
  int32_t status = 0;    // what a launch returns
  size_t workspace = 0;  // bytes that a launch wants
  std::string reason;    // why nothing is supported; empty: everything is
  bool throws = false;   // every function throws instead
  int launches = 0;
  int appends = 0;
  FlashAttentionArgs args{};  // of the last call
  FlashAppendArgs append{};
  void* launch_workspace = nullptr;
  void* launch_stream = nullptr;
};

extern Kernels kernels;

}  // namespace fake
