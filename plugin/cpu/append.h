// SPDX-License-Identifier: Apache-2.0
// A cache on a CPU: new keys and values go behind those that it holds.
#pragma once
#include "attention.h"

namespace flash_export::cpu {

// Copies `bytes` on the host's threads; nothing where `from` is `to`. They do not overlap otherwise.
void copyCache(void* to, void const* from, int64_t bytes, Parallel const& parallel);

// Writes the new rows, and lengths_after, which may be the memory of kv_lengths. A row that has no room, or
// in a page that is none, is dropped. `args` has passed flashAttentionAppendWhyUnsupported (this library's).
// Throws std::bad_alloc.
void append(FlashAppendArgs const& args);

}  // namespace flash_export::cpu
