// SPDX-License-Identifier: Apache-2.0
// variants.inc as data, for dispatch and for the tests.
#pragma once
#include "flash_attention.h"
#include "geometry.h"

namespace flash_export::kernels {

constexpr int32_t kDtypeOfHalf = kFlashFloat16;
constexpr int32_t kDtypeOfBFloat = kFlashBFloat16;
constexpr int32_t kDtypeOfFloat = kFlashFloat32;

// What a compiled kernel can do (variants.inc).
enum class Features { kPlain, kGeneral, kPaged };

struct Variant {
  char const* name;
  int32_t dtype;
  int head_dim, tile_q, tile_kv, warps;
  Features features;
  constexpr bool general() const { return features == Features::kGeneral; }
};

constexpr Variant kVariants[] = {
#define FLASH_VARIANT(Element, head_dim, tile_q, tile_kv, warps, features) \
  {#Element #head_dim #features, kDtypeOf##Element, head_dim, tile_q, tile_kv, warps, Features::k##features},
#include "variants.inc"
#undef FLASH_VARIANT
};

constexpr int largestHeadDim() {
  int largest = 0;
  for (Variant const& v : kVariants) largest = larger(largest, v.head_dim);
  return largest;
}

constexpr int smallestTileQ() {
  int smallest = kVariants[0].tile_q;
  for (Variant const& v : kVariants) smallest = smaller(smallest, v.tile_q);
  return smallest;
}

constexpr int smallestTileKv() {
  int smallest = kVariants[0].tile_kv;
  for (Variant const& v : kVariants) smallest = smaller(smallest, v.tile_kv);
  return smallest;
}

constexpr int kMaxHeadDim = largestHeadDim();
constexpr int kSmallestTileQ = smallestTileQ();
constexpr int kSmallestTileKv = smallestTileKv();

}  // namespace flash_export::kernels
