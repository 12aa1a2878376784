// SPDX-License-Identifier: Apache-2.0
// The 16-bit element types on the host, and the errors of the device's fast units.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace flash_export::ops {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline uint32_t bitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float floatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace flash_export::ops

namespace flash_export::emulation {

inline float halfToFloat(uint16_t half) {
  uint32_t const sign = uint32_t(half & 0x8000u) << 16;
  uint32_t const exponent = (half >> 10) & 31u, mantissa = half & 1023u;
  if (exponent == 31) return ops::floatOf(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return ops::floatOf(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  float const magnitude = std::ldexp(float(mantissa), -24);
  return sign != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even, as every conversion on the device does.
inline uint16_t floatToHalf(float x) {
  uint32_t const bits = ops::bitsOf(x);
  uint32_t const sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(ops::floatOf(magnitude), 24))));
  }
  uint32_t const rebased = magnitude - 0x38000000u;
  return uint16_t(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
}

inline float bfloatToFloat(uint16_t bfloat) { return ops::floatOf(uint32_t(bfloat) << 16); }

inline uint16_t floatToBFloat(float x) {
  uint32_t const bits = ops::bitsOf(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// 65,536 entries: the products convert each element many times.
inline std::array<float, 65536> const& halfTable() {
  static std::array<float, 65536> const table = [] {
    std::array<float, 65536> t{};
    for (uint32_t i = 0; i < t.size(); ++i) t[i] = halfToFloat(uint16_t(i));
    return t;
  }();
  return table;
}

// A subnormal number is zero to the fast units, as argument and as result (.ftz).
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

// `exact` as a unit with an error of up to 2 ulp may return it: -2 ... +2 ulp, fixed by the argument's bits.
// An exact stand-in would hide what the approximation costs.
inline float approximate(double exact, float argument) {
  float const rounded = float(exact);
  if (!std::isfinite(rounded) || rounded == 0.0f) return rounded;
  if (flushed(rounded) == 0.0f) return flushed(rounded);
  int const error = int((ops::bitsOf(argument) * 2654435761u) >> 16) % 5 - 2;
  return ops::floatOf(ops::bitsOf(rounded) + uint32_t(error));
}

}  // namespace flash_export::emulation
