// SPDX-License-Identifier: Apache-2.0
// What one thread of this processor does at the most: fused products a second from registers, and bytes a
// second read from memory and from the cache. cpu_peaks.py compiles it for an instruction set and runs it.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
constexpr int kChains = 12;  // more than the latency of a product times the products a cycle

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Keeps the compiler from knowing a value, or from dropping it.
template <class Value>
inline void opaque(Value& value) {
  __asm__ volatile("" : "+x"(value));
}

// Floating-point operations a second; a product and its addition are two.
double products() {
  Floats sums[kChains], factor, term;
  for (Floats& sum : sums) sum = Floats{} + 1.0f;
  factor = Floats{} + 0.999f, term = Floats{} + 0.001f;
  opaque(factor), opaque(term);
  constexpr int64_t kRounds = 1 << 20;
  double const start = now();
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = sums[j] * factor + term;
  }
  double const seconds = now() - start;
  for (Floats& sum : sums) opaque(sum);
  return 2.0 * kLanes * kChains * kRounds / seconds;
}

// Bytes a second of reading `bytes` again and again.
double reads(float const* from, int64_t bytes) {
  constexpr int kAtOnce = 8;
  int64_t const count = bytes / int64_t{sizeof(Floats)} / kAtOnce * kAtOnce;
  int64_t const rounds = bytes < (int64_t{1} << 26) ? (int64_t{1} << 28) / bytes : 1;
  Floats sums[kAtOnce] = {};
  double const start = now();
  for (int64_t round = 0; round < rounds; ++round) {
    for (int64_t i = 0; i < count; i += kAtOnce) {
#pragma GCC unroll 8
      for (int j = 0; j < kAtOnce; ++j) {
        Floats x;
        std::memcpy(&x, from + (i + j) * kLanes, sizeof x);
        sums[j] += x;
      }
    }
    for (Floats& sum : sums) opaque(sum);
  }
  return double(rounds) * double(count) * double(sizeof(Floats)) / (now() - start);
}

template <class Measure>
double best(Measure const& measure) {
  double most = 0;
  for (int i = 0; i < 9; ++i) {
    double const seen = measure();
    most = seen > most ? seen : most;
  }
  return most;
}

}  // namespace

int main() {
  constexpr int64_t kMemory = int64_t{1} << 28,
                    kCache = int64_t{1} << 23;  // the second: 8 heads of 2,048 keys of 64
  float* const numbers = static_cast<float*>(std::aligned_alloc(4096, size_t{kMemory}));
  if (numbers == nullptr) return 1;
  for (int64_t i = 0; i < kMemory / 4; ++i) numbers[i] = 1.0f;
  double const memory = best([&] { return reads(numbers, kMemory); });
  double const cache = best([&] { return reads(numbers, kCache); });
  std::printf("{\"products\": %.4g, \"memory\": %.4g, \"cache\": %.4g}\n", best(products), memory, cache);
  std::free(numbers);
}
