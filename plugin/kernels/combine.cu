// SPDX-License-Identifier: Apache-2.0
#include "combine.h"
#include "flash_attention.h"
#include "start.h"

namespace flash_export::kernels {
namespace {

template <class Element>
int combine(ForwardParams const& params, void* stream) {
  int64_t const rows = rowCount(params.batch, params.q_heads, params.seqlen_q);
  return start<Combine<Element>, Combine<Element>::kThreads, 0>(params, Combine<Element>::blocks(rows),
                                                                stream);
}

}  // namespace

int launchCombine(int32_t dtype, ForwardParams const& params, void* stream) {
  if (dtype == kFlashFloat16) return combine<ops::Half>(params, stream);
  if (dtype == kFlashBFloat16) return combine<ops::BFloat>(params, stream);
  return combine<float>(params, stream);
}

#ifdef __CUDACC__

int countMultiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 0;
  }
  return count;
}

#else

int countMultiprocessors() { return 108; }  // an A100's

#endif

}  // namespace flash_export::kernels
