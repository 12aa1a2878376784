// SPDX-License-Identifier: Apache-2.0
// The probes behind a C interface, for Python: a list, and a call. Compiled by nvcc, and by a C++ compiler
// with the emulation, whose memory is the host's.
#include <cstdlib>
#include <string>

#include "parts.h"
#include "start.h"

namespace flash_export::kernels {
namespace {

struct Probe {
  char const* name;
  int in_bytes, out_bytes;
  int (*run)(ProbeParams const& params, void* stream);
};

thread_local std::string last_error;

#ifdef __CUDACC__

template <class P>
int runProbe(ProbeParams const& params, void* stream) {
  return start<P, P::kThreads, P::kSharedBytes>(params, 1, stream);
}

#else

template <class P>
int runProbe(ProbeParams const& params, void*) {
  emulation::Machine& m = emulation::machine();
  m.global.clear();
  m.global.add("in", params.in, params.in + P::kInBytes, false);
  m.global.add("out", params.out, params.out + P::kOutBytes, true);
  last_error = m.launch(
      1, P::kThreads, P::kSharedBytes, 1, [](void const* p) { P::run(*static_cast<ProbeParams const*>(p)); },
      &params);
  return last_error.empty() ? 0 : 719;  // cudaErrorLaunchFailure
}

#endif

template <class P>
constexpr Probe probe() {
  return {P::kName, P::kInBytes, P::kOutBytes, &runProbe<P>};
}

template <class T, int kWhich>
using HalfProducts = ProductsOf<T, HalfTile, MmaProducts<T, HalfTile>, kWhich>;

constexpr Probe kProbes[] = {
    probe<Ldmatrix<false>>(),
    probe<Ldmatrix<true>>(),
    probe<Mma<ops::Half>>(),
    probe<Mma<ops::BFloat>>(),
    probe<PartialCopies>(),
    probe<Exchanges>(),
    probe<Each<Exp2>>(),
    probe<Each<Log2>>(),
    probe<Each<Tanh>>(),
    probe<Each<Exp>>(),
    probe<Each<Divide>>(),
    probe<Each<MultiplyAdd>>(),
    probe<Each<Maximum>>(),
    probe<Each<PackHalf>>(),
    probe<Each<PackBFloat>>(),
    probe<Widen<ops::Half>>(),
    probe<Widen<ops::BFloat>>(),
    probe<Tile<true>>(),
    probe<Tile<false>>(),
    probe<Pages>(),
    probe<HalfProducts<ops::Half, 0>>(),
    probe<HalfProducts<ops::BFloat, 1>>(),
    probe<ProductsOf<float, FloatTile, ScalarProducts<FloatTile>, 2>>(),
    probe<CombineParts>(),
    probe<AppendRows>(),
};

}  // namespace
}  // namespace flash_export::kernels

using flash_export::kernels::kProbes;

extern "C" {

int primitiveCount() { return int(sizeof kProbes / sizeof kProbes[0]); }
char const* primitiveName(int i) { return kProbes[i].name; }
int primitiveInBytes(int i) { return kProbes[i].in_bytes; }
int primitiveOutBytes(int i) { return kProbes[i].out_bytes; }

// Device memory under nvcc, else the host's. Returns a cudaError_t; 0: enqueued.
int primitiveRun(int i, void const* in, void* out, void* stream) {
  return kProbes[i].run({static_cast<unsigned char const*>(in), static_cast<unsigned char*>(out)}, stream);
}

char const* primitiveError() { return flash_export::kernels::last_error.c_str(); }
}
