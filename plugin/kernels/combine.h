// SPDX-License-Identifier: Apache-2.0
// Puts together what the splits of a row found, one warp a row: outputs weighted by their sum of weights
// times e^(maximum - largest maximum), the sink added to the sum once. FlashAttention-2's split-KV reduction
// (Dao 2023, arXiv:2307.08691, 3.1.2), but with maximum and sum apart: a log-sum-exp of both would lose the
// sum beside a maximum of 10^8, as of a row whose bias is the lowest number throughout.
#pragma once
#include "sequences.h"
#include "softmax.h"

namespace flash_export::kernels {

template <class Element_>
struct Combine {
  using Element = Element_;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;

  static FLASH_HOST_DEVICE int64_t blocks(int64_t rows) { return ceilDiv(rows, kWarps); }

  static FLASH_DEVICE void run(ForwardParams const& p) {
    int64_t const rows = rowCount(p.batch, p.q_heads, p.seqlen_q);
    int64_t const number = ops::blockIndex() * kWarps + ops::warp();
    if (number >= rows) return;
    int64_t const batch_head = number / p.seqlen_q;
    int const query = int(number - batch_head * p.seqlen_q);
    int const batch = int(batch_head / p.q_heads);
    int const head = int(batch_head - int64_t(batch) * p.q_heads);
    Span const queries = queriesOf(p, batch);
    if (query >= queries.count) return;

    float const sink =
        p.sinks == nullptr ? kNegativeInfinity : ops::loadGlobal(p.sinks + int64_t(head) * p.sinks_stride);
    float largest = sink;
    for (int i = 0; i < p.splits; ++i) {
      largest = ops::maximum(largest, ops::loadFloat(p.partial_max + i * rows + number));
    }
    float const against = finiteMaximum(largest);
    // 0 where no key was seen, and where the sink, finite or not, dwarfs them all: such rows end alike.
    float keys = 0.0f;
    for (int i = 0; i < p.splits; ++i) keys += weightOf(p, i * rows + number, against);
    float const sum = keys + expPrecise(sink - against);

    Element* const output = static_cast<Element*>(p.output.data) + int64_t(batch) * p.output.batch_stride +
                            int64_t(head) * p.output.head_stride +
                            (int64_t(queries.first) + query) * p.output.row_stride;
    float const multiplier = keys == 0.0f ? 0.0f : ops::roundedDivide(1.0f, sum);
    for (int d = ops::lane(); d < p.v_head_dim; d += kWarpSize) {
      float total = 0.0f;
      for (int i = 0; i < p.splits; ++i) {
        float const part = ops::loadFloat(p.partial_output + (i * rows + number) * p.v_head_dim + d);
        total = ops::multiplyAdd(part, weightOf(p, i * rows + number, against), total);
      }
      ops::storeBits(output + d, bitsOfElement(total * multiplier));
    }
    if (p.lse != nullptr && ops::lane() == 0) {
      float const lse = keys == 0.0f ? sink : against + ops::log2Approx(sum) * kLn2;
      ops::storeBits(p.lse + lseNumber(p, batch, queries.first, head, query), ops::bitsOf(lse));
    }
  }

 private:
  static FLASH_DEVICE float weightOf(ForwardParams const& p, int64_t number, float against) {
    return ops::loadFloat(p.partial_sum + number) *
           expPrecise(ops::loadFloat(p.partial_max + number) - against);
  }

  static FLASH_DEVICE uint32_t bitsOfElement(float x) {
    if constexpr (sizeof(Element) == 4) {
      return ops::bitsOf(x);
    } else {
      return ops::packPair<Element>(x, 0.0f);
    }
  }
};

}  // namespace flash_export::kernels
