// SPDX-License-Identifier: Apache-2.0
// The device operations as inline PTX (PTX ISA 7.0, sm_80 and newer). device_ops.h says what each does.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define FLASH_DEVICE __device__ __forceinline__
#define FLASH_UNROLL _Pragma("unroll")
#define FLASH_UNROLL_4 _Pragma("unroll 4")
#define FLASH_NO_UNROLL _Pragma("unroll 1")

namespace flash_export::ops {

using Half = __half;
using BFloat = __nv_bfloat16;

FLASH_DEVICE int threadIndex() { return int(threadIdx.x); }
FLASH_DEVICE int lane() { return int(threadIdx.x & 31u); }
FLASH_DEVICE int warp() { return int(threadIdx.x >> 5); }
FLASH_DEVICE int64_t blockIndex() { return int64_t(blockIdx.x); }

extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
FLASH_DEVICE uint32_t sharedBase() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared_memory));
}

FLASH_DEVICE void syncThreads() { __syncthreads(); }
FLASH_DEVICE void syncWarp() { __syncwarp(); }
FLASH_DEVICE float shuffleXor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
FLASH_DEVICE float shuffle(float value, int source_lane) {
  return __shfl_sync(0xffffffffu, value, source_lane);
}

FLASH_DEVICE bool anyLane(bool b) { return __any_sync(0xffffffffu, b); }

FLASH_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FLASH_DEVICE void ldmatrixTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

template <class T>
FLASH_DEVICE void mma(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1);
template <>
FLASH_DEVICE void mma<Half>(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
FLASH_DEVICE void mma<BFloat>(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

FLASH_DEVICE void copyAsync(uint32_t destination, void const* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}
FLASH_DEVICE void copyAsyncCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kNewest>
FLASH_DEVICE void copyAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kNewest) : "memory");
}

FLASH_DEVICE Words4 loadShared128(uint32_t address) {
  Words4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "r"(address)
               : "memory");
  return r;
}
FLASH_DEVICE Words2 loadShared64(uint32_t address) {
  Words2 r;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];\n" : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(address) : "memory");
  return r;
}
FLASH_DEVICE void storeShared32(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(v) : "memory");
}
FLASH_DEVICE void storeShared64(uint32_t address, Words2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};\n" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]) : "memory");
}
FLASH_DEVICE void storeShared128(uint32_t address, Words4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

FLASH_DEVICE Words4 loadGlobal128(void const* p) {
  uint4 const v = __ldg(static_cast<uint4 const*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
// nvcc splits a store of a uint4 into four.
FLASH_DEVICE void storeGlobal128(void* p, Words4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
               : "memory");
}
template <class T>
FLASH_DEVICE T loadGlobal(T const* p) {
  return __ldg(p);
}
FLASH_DEVICE uint32_t loadBits(float const* p) { return __float_as_uint(__ldg(p)); }
FLASH_DEVICE uint32_t loadBits(Half const* p) { return __ldg(reinterpret_cast<unsigned short const*>(p)); }
FLASH_DEVICE uint32_t loadBits(BFloat const* p) { return __ldg(reinterpret_cast<unsigned short const*>(p)); }
FLASH_DEVICE float loadFloat(float const* p) { return __ldg(p); }
FLASH_DEVICE float loadFloat(Half const* p) { return __half2float(__ldg(p)); }
FLASH_DEVICE float loadFloat(BFloat const* p) { return __bfloat162float(__ldg(p)); }
FLASH_DEVICE void storeBits(float* p, uint32_t bits) { *p = __uint_as_float(bits); }
FLASH_DEVICE void storeBits(int32_t* p, uint32_t bits) { *p = int32_t(bits); }
FLASH_DEVICE void storeBits(Half* p, uint32_t bits) {
  *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(bits);
}
FLASH_DEVICE void storeBits(BFloat* p, uint32_t bits) {
  *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(bits);
}

template <class T>
FLASH_DEVICE uint32_t packPair(float lo, float hi);
template <>
FLASH_DEVICE uint32_t packPair<Half>(float lo, float hi) {
  __half2 const pair = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t const*>(&pair);
}
template <>
FLASH_DEVICE uint32_t packPair<BFloat>(float lo, float hi) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t const*>(&pair);
}

FLASH_DEVICE float exp2Approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FLASH_DEVICE float log2Approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FLASH_DEVICE float tanhPrecise(float x) { return tanhf(x); }
FLASH_DEVICE float multiplyAdd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FLASH_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
FLASH_DEVICE float roundedDivide(float a, float b) { return __fdiv_rn(a, b); }
FLASH_DEVICE uint32_t bitsOf(float x) { return __float_as_uint(x); }
FLASH_DEVICE float floatOf(uint32_t bits) { return __uint_as_float(bits); }

}  // namespace flash_export::ops
