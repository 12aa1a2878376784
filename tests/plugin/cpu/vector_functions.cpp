// SPDX-License-Identifier: Apache-2.0
// The kernels' vector functions on arrays, for ctypes; compiled once for each instruction set. Counts are
// multiples of 16.
#include "functions.h"

namespace {

using namespace flash_export::cpu;

template <class From, class To, class Function>
void forEach(From const* from, To* to, int64_t count, Function function) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, function(load(from + i)));
}

Floats same(Floats x) { return x; }

// While it lives, the processor takes subnormal floats for 0 and makes none: what ONNX Runtime's
// session.set_denormal_as_zero asks for.
class SubnormalsAreZero {
 public:
#if defined(__x86_64__)
  SubnormalsAreZero() : mBefore(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(mBefore | 0x8040u); }
  ~SubnormalsAreZero() { __builtin_ia32_ldmxcsr(mBefore); }

 private:
  unsigned mBefore;
#elif defined(__aarch64__)
  SubnormalsAreZero() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(mBefore));
    __asm__ volatile("msr fpcr, %0" : : "r"(mBefore | (1u << 24)));
  }
  ~SubnormalsAreZero() { __asm__ volatile("msr fpcr, %0" : : "r"(mBefore)); }

 private:
  uint64_t mBefore;
#endif
};

}  // namespace

#define DOOR extern "C" __attribute__((visibility("default")))

DOOR void exponentials(float const* x, float* y, int64_t count) {
  forEach(x, y, count, [](Floats v) { return expOf(v); });
}
DOOR void hyperbolicTangents(float const* x, float* y, int64_t count) { forEach(x, y, count, tanhOf); }
DOOR void widenHalves(Half const* x, float* y, int64_t count) { forEach(x, y, count, same); }
DOOR void widenHalvesWithoutSubnormals(Half const* x, float* y, int64_t count) {
  SubnormalsAreZero const now;
  forEach(x, y, count, same);
}
DOOR void narrowToHalvesWithoutSubnormals(float const* x, Half* y, int64_t count) {
  SubnormalsAreZero const now;
  forEach(x, y, count, same);
}
DOOR void narrowToHalves(float const* x, Half* y, int64_t count) { forEach(x, y, count, same); }
DOOR void widenBFloats(BFloat const* x, float* y, int64_t count) { forEach(x, y, count, same); }
DOOR void narrowToBFloats(float const* x, BFloat* y, int64_t count) { forEach(x, y, count, same); }

// Transposes kLanes x kLanes numbers; returns kLanes.
DOOR int transposed(float const* x, float* y) {
  Floats square[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = load(x + i * kLanes);
  transpose(square);
  for (int i = 0; i < kLanes; ++i) store(y + i * kLanes, square[i]);
  return kLanes;
}

// The sums of kLanes rows of kLanes numbers; returns kLanes.
DOOR int rowSums(float const* x, float* y) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(x + i * kLanes);
  store(y, sumsOf(rows));
  return kLanes;
}
