// SPDX-License-Identifier: Apache-2.0
#include "append.h"
#include "start.h"

namespace flash_export::kernels {
namespace {

template <class Element>
int append(AppendParams const& params, void* stream) {
  using Kernel = Append<Element>;
  return start<Kernel, Kernel::kThreads, 0>(params, ceilDiv(appendRows(params), Kernel::kWarps), stream);
}

}  // namespace

int launchAppend(int32_t dtype, AppendParams const& params, void* stream) {
  // Numbers are only moved: one kernel serves both types of 16 bits.
  return dtype == kFlashFloat32 ? append<float>(params, stream) : append<ops::Half>(params, stream);
}

}  // namespace flash_export::kernels
