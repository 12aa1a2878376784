// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "attention.h"
#include "variants.h"

namespace flash_export::kernels {

// The line of variants.inc that serves a problem which flashAttentionWhyUnsupported does not refuse: the
// first one with its dtype, room for its head dims, and what it needs.
Variant const& variantFor(FlashAttentionArgs const& args);

}  // namespace flash_export::kernels
