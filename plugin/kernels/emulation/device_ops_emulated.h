// SPDX-License-Identifier: Apache-2.0
// The device operations on the host, checked at every step. device_ops.h says what each does.
#pragma once
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"
#include "numbers.h"

#define FLASH_DEVICE inline
#define FLASH_UNROLL
#define FLASH_UNROLL_4
#define FLASH_NO_UNROLL
// The caller's place as two hidden arguments; FLASH_HERE hands it on.
#define FLASH_SITE char const *file = __builtin_FILE(), int line = __builtin_LINE()
#define FLASH_HERE (emulation::Site{file, line})

namespace flash_export::ops {

inline int threadIndex() { return emulation::machine().thread(); }
inline int lane() { return threadIndex() & 31; }
inline int warp() { return threadIndex() >> 5; }
inline int64_t blockIndex() { return emulation::machine().block(); }
inline uint32_t sharedBase() { return emulation::kSharedBase; }

inline void syncThreads(FLASH_SITE) { emulation::machine().syncThreads(FLASH_HERE); }
inline void syncWarp(FLASH_SITE) { emulation::machine().syncWarp(FLASH_HERE); }

// From which lane each lane takes its value.
float exchange(float value, int source_lane, char const* operation, emulation::Site site);
inline float shuffleXor(float value, int mask, FLASH_SITE) {
  return exchange(value, lane() ^ mask, "shfl.xor", FLASH_HERE);
}
inline float shuffle(float value, int source_lane, FLASH_SITE) {
  return exchange(value, source_lane & 31, "shfl", FLASH_HERE);
}

bool anyLane(bool b, FLASH_SITE);

void loadMatrices(uint32_t (&r)[4], uint32_t address, bool transposed, emulation::Site site);
inline void ldmatrix(uint32_t (&r)[4], uint32_t address, FLASH_SITE) {
  loadMatrices(r, address, false, FLASH_HERE);
}
inline void ldmatrixTransposed(uint32_t (&r)[4], uint32_t address, FLASH_SITE) {
  loadMatrices(r, address, true, FLASH_HERE);
}

void multiply(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, bool bfloat,
              emulation::Site site);
template <class T>
void mma(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, FLASH_SITE) {
  multiply(d, a, b0, b1, std::is_same<T, BFloat>::value, FLASH_HERE);
}

inline void copyAsync(uint32_t destination, void const* source, int bytes, FLASH_SITE) {
  emulation::machine().startCopy({destination, source, bytes, FLASH_HERE});
}
inline void copyAsyncCommit() { emulation::machine().commitCopies(); }
template <int kNewest>
void copyAsyncWait() {
  emulation::machine().waitCopies(kNewest);
}

void readShared(uint32_t address, uint32_t bytes, void* target, emulation::Site site);
void writeShared(uint32_t address, uint32_t bytes, void const* source, emulation::Site site);
inline Words4 loadShared128(uint32_t address, FLASH_SITE) {
  Words4 words;
  readShared(address, 16, &words, FLASH_HERE);
  return words;
}
inline Words2 loadShared64(uint32_t address, FLASH_SITE) {
  Words2 words;
  readShared(address, 8, &words, FLASH_HERE);
  return words;
}
inline void storeShared32(uint32_t address, uint32_t v, FLASH_SITE) {
  writeShared(address, 4, &v, FLASH_HERE);
}
inline void storeShared64(uint32_t address, Words2 v, FLASH_SITE) { writeShared(address, 8, &v, FLASH_HERE); }
inline void storeShared128(uint32_t address, Words4 v, FLASH_SITE) {
  writeShared(address, 16, &v, FLASH_HERE);
}

void readGlobal(void const* p, size_t bytes, void* target, emulation::Site site);
void writeGlobal(void* p, size_t bytes, void const* source, emulation::Site site);
inline Words4 loadGlobal128(void const* p, FLASH_SITE) {
  Words4 words;
  readGlobal(p, 16, &words, FLASH_HERE);
  return words;
}
inline void storeGlobal128(void* p, Words4 v, FLASH_SITE) { writeGlobal(p, 16, &v, FLASH_HERE); }
template <class T>
T loadGlobal(T const* p, FLASH_SITE) {
  T value;
  readGlobal(p, sizeof value, &value, FLASH_HERE);
  return value;
}
template <class T>
uint32_t loadBits(T const* p, FLASH_SITE) {
  uint32_t bits = 0;
  readGlobal(p, sizeof(T), &bits, FLASH_HERE);
  return bits;
}
template <class T>
void storeBits(T* p, uint32_t bits, FLASH_SITE) {
  writeGlobal(p, sizeof(T), &bits, FLASH_HERE);
}
inline float loadFloat(float const* p, FLASH_SITE) { return floatOf(loadBits(p, file, line)); }
inline float loadFloat(Half const* p, FLASH_SITE) {
  return emulation::halfToFloat(uint16_t(loadBits(p, file, line)));
}
inline float loadFloat(BFloat const* p, FLASH_SITE) {
  return emulation::bfloatToFloat(uint16_t(loadBits(p, file, line)));
}

template <class T>
uint32_t packPair(float lo, float hi);
template <>
inline uint32_t packPair<Half>(float lo, float hi) {
  return emulation::floatToHalf(lo) | uint32_t(emulation::floatToHalf(hi)) << 16;
}
template <>
inline uint32_t packPair<BFloat>(float lo, float hi) {
  return emulation::floatToBFloat(lo) | uint32_t(emulation::floatToBFloat(hi)) << 16;
}

inline float exp2Approx(float x) {
  // ex2(0) is 1 on the device too.
  return emulation::flushed(x) == 0.0f ? 1.0f : emulation::approximate(std::exp2(double(x)), x);
}
inline float log2Approx(float x) {
  float const normal = emulation::flushed(x);
  return normal == 1.0f ? 0.0f : emulation::approximate(std::log2(double(normal)), normal);
}
inline float tanhPrecise(float x) { return std::tanh(x); }
inline float multiplyAdd(float a, float b, float c) { return std::fma(a, b, c); }
inline float maximum(float a, float b) { return std::fmax(a, b); }
inline float roundedDivide(float a, float b) { return a / b; }

}  // namespace flash_export::ops
