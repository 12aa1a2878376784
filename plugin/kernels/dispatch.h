// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "flash_attention.h"
#include "variants.h"

namespace flash_export::kernels {

// The line of variants.inc that serves a problem which flashAttentionWhyUnsupported does not refuse: the
// first one with its dtype, room for its head dims, and what it needs.
Variant const& variantFor(FlashAttentionArgs const& args);

// How a problem is run: which line of variants.inc, heads packed into a tile's rows, splits of the keys.
struct Plan {
  int variant, pack, splits;
};

// The plan of flashAttentionLaunch on a device with so many multiprocessors; no split without a workspace.
Plan planFor(FlashAttentionArgs const& args, bool has_workspace, int multiprocessors);

// Launches by that plan; a workspace of splits * B * Hq * Sq * (Dv + 2) floats where it splits.
int32_t launchPlanned(FlashAttentionArgs const& args, Plan const& plan, void* workspace, void* stream);

}  // namespace flash_export::kernels
