// SPDX-License-Identifier: Apache-2.0
// Attention of few rows (decoding): a row's dimensions lie in the vectors' lanes, keys and values are read
// once, in place. A long sequence is cut into slices of keys, whose partial results are combined.
#pragma once
#include "functions.h"
#include "pages.h"
#include "rows.h"
#include "scaled_query.h"
#include "slice_values.h"

namespace flash_export::cpu {
namespace {

// Keys at a time; a multiple of kLanes. Keys and values take turns, and the processor's own prefetching needs
// a run of some length to get up to speed: asking for rows ahead in runs of 64 keys was a quarter to a third
// slower, from a cache and from memory.
constexpr int kSliceKeys = 512;

// Room for their scores: a vector of them may begin at the last, and one of -inf follows.
constexpr int kScores = kSliceKeys + 16;

// Up to so many rows slices are faster than a tile (measured with 1 to 8 rows of 2,048 keys: even at 4 with 4
// and 8 lanes, at 5 with 16).
constexpr int kSliceRows = 4;

// A row's partial result: row_max as baseOf has it, row_sum and its low part, then from kPartialOutput on the
// unnormalised output, then its low parts: runs are added up in sums of two parts, whose error does not grow
// with their number.
constexpr int kPartialOutput = 16;

int64_t partialSize(RowProblem const& problem) {
  return kPartialOutput + 2 * roundUp(problem.v_head_dim, 16);
}

int64_t sliceScratch(RowProblem const& problem, int32_t count) {
  return kScores + runSumsSize(problem) + count * querySize(problem);
}

// Of a row alone.
int64_t combineScratch(RowProblem const& problem) { return sliceScratch(problem, 1) + partialSize(problem); }

// Times this the weights, each at most e, of as many keys as there are at most have no infinite sum, whatever
// the values are.
constexpr float kLight = 0x1p-26f;

// sums[i] += query . key[i] over kVectors vectors; of the kLanes keys, the ones past `count` repeat the last.
template <int kVectors, bool kWhole, class Element>
FLASH_INLINE void addScores(float const* query, Element const* key, int64_t stride, int count,
                            Floats (&sums)[kLanes]) {
  Floats q[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) q[v] = load(query + v * kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[i] += q[v] * load(key + v * kLanes);
    if (kWhole || i + 1 < count) key += stride;
    __asm__("" : "+r"(key));  // one pointer, or the compiler keeps one for every key
  }
}

// The scores of kLanes keys from `key` on; of those, the ones past `count` repeat the last.
template <bool kWhole, class Element>
FLASH_INLINE Floats scoreLanes(RowProblem const& problem, float const* query, Element const* key, int count) {
  int64_t const stride = problem.key.row_stride;
  int const head_dim = problem.head_dim;
  Floats sums[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = splat(0.0f);
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    addScores<4, kWhole>(query + d, key + d, stride, count, sums);
  }
  for (; d + kLanes <= head_dim; d += kLanes) {
    addScores<1, kWhole>(query + d, key + d, stride, count, sums);
  }
  if (d < head_dim) {
    Floats const q = load(query + d);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      sums[i] += q * loadSome(key + smallerOf(i, count - 1) * stride + d, head_dim - d);
    }
  }
  return sumsOf(sums);
}

template <class Element>
FLASH_INLINE Floats biasLanes(Element const* bias, int64_t stride, int key0, int count) {
  if (stride == 0) return splat(loadOne(bias));
  return count >= kLanes ? load(bias + key0) : loadSome(bias + key0, count);
}

FLASH_INLINE Floats anyBiasLanes(RowProblem const& problem, void const* bias, int key0, int count) {
  switch (problem.bias_dtype) {
    case kFlashFloat32:
      return biasLanes(static_cast<float const*>(bias), problem.bias_stride, key0, count);
    case kFlashFloat16:
      return biasLanes(static_cast<Half const*>(bias), problem.bias_stride, key0, count);
    default:
      return biasLanes(static_cast<BFloat const*>(bias), problem.bias_stride, key0, count);
  }
}

// `visible` is set in the lanes whose score is -inf though no bias hides the key.
FLASH_INLINE Floats addBias(Floats s, Floats b, Ints& visible) {
  Floats const sum = b == -kInfinity ? b : s + b;  // hidden by the bias, whatever the score is
  visible |= (sum == -kInfinity) & (b != -kInfinity);
  return sum;
}

FLASH_INLINE bool anyOf(Ints lanes) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= lanes[i] != 0;
  return any;
}

// Takes kHidden away from the keys first <= j < last that no bias hides: their weight is 0, but 0 times an
// infinity or a NaN shows.
void showVisible(RowProblem const& problem, void const* bias, int first, int last, float* probs) {
  for (int j = first; j < last; ++j) {
    if (anyBiasLanes(problem, bias, j, 1)[0] != -kInfinity && isHidden(probs[j - first])) {
      probs[j - first] = 0.0f;
    }
  }
}

FLASH_INLINE float sumOf(Floats x) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// scores[...] of the keys first <= j < last, which lie in one piece, for one row.
template <class Element>
FLASH_INLINE Floats scorePiece(RowProblem const& problem, Row const& row, float const* query, int first,
                               int last, Floats largest, float* scores, Ints& visible) {
  Element const* key = rowAt<Element>(problem.pages, problem.key, first);
  float const* const factors = query + roundUp(problem.head_dim, 16);
  for (int j = first; j < last; j += kLanes, key += kLanes * problem.key.row_stride) {
    Floats s = last - j < kLanes ? scoreLanes<false>(problem, query, key, last - j)
                                 : scoreLanes<true>(problem, query, key, kLanes);
    s = s * factors[0] * factors[1];
    if (problem.softcap > 0.0f) s = problem.softcap * tanhOf(s / problem.softcap);
    if (row.bias != nullptr) s = addBias(s, anyBiasLanes(problem, row.bias, j, last - j), visible);
    if (last - j < kLanes) s = laneNumbers() < last - j ? s : splat(-kInfinity);
    largest = larger(s, largest);
    store(scores + (j - first), s);
  }
  return largest;
}

// scores[...] of the keys first <= j < last for one row, -inf behind them; returns the largest, or `most`.
// `visible` as in addBias.
template <class Element>
FLASH_INLINE float scoreSlice(RowProblem const& problem, Row const& row, float const* query, int first,
                              int last, float most, float* scores, Ints& visible) {
  Floats largest = splat(most);
  for (int j = first; j < last;) {
    int const end = endOfPiece(problem.pages, j, last);
    largest = scorePiece<Element>(problem, row, query, j, end, largest, scores + (j - first), visible);
    j = end;
  }
  store(scores + (last - first), splat(-kInfinity));
  return largestOf(largest);
}

template <class Element>
FLASH_INLINE void addRow(RowProblem const& problem, Row const& row, float const* query, int first, int last,
                         float weight, float* scores, float* sums, float* partial) {
  float const before = partial[0];
  Ints visible{};
  float const now =
      baseOf(before, scoreSlice<Element>(problem, row, query, first, last, before, scores, visible));
  float const most = now == -kInfinity ? 0.0f : now;  // (-inf) - (-inf) would be NaN
  float const shrink = expOf(before - most);
  Floats sum{};
  for (int j = 0; j < last - first;) {
    Floats part{};  // of some: equal weights, added one by one, would all be rounded the same way
    for (int const end = smallerOf(last - first, j + kSummed * kLanes); j < end; j += kLanes) {
      Floats const s = load(scores + j);
      Floats const p = s == -kInfinity ? splat(kHidden) : expOf(s - most);
      store(scores + j, p * weight);
      part += p;
    }
    sum += part;
  }
  partial[0] = now;
  addTo(partial[1], partial[2], shrink, sumOf(sum));
  float* const output = partial + kPartialOutput;
  if (row.bias == nullptr) {
    addRun<false, Element>(problem, first, last, scores, shrink, output, sums);
  } else {
    if (anyOf(visible)) showVisible(problem, row.bias, first, last, scores);
    addRun<true, Element>(problem, first, last, scores, shrink, output, sums);
  }
}

// `weight`: a power of two that is in the partial outputs.
template <class Element>
void runSlice(RowProblem const& problem, Row const* rows, int32_t count, int32_t first, int32_t last,
              float weight, float* partials, float* scratch) {
  float* const scores = scratch;
  float* const sums = scratch + kScores;
  float* const queries = sums + runSumsSize(problem);
  int64_t const query_size = querySize(problem), size = partialSize(problem);
  for (int r = 0; r < count; ++r) {
    widenQuery<Element>(problem, rows[r], queries + r * query_size);
    float* const partial = partials + r * size;
    partial[0] = -kInfinity, partial[1] = partial[2] = 0.0f;
    for (int64_t i = kPartialOutput; i < size; ++i) partial[i] = 0.0f;
  }
  for (int key0 = first; key0 < last; key0 += kSliceKeys) {
    for (int r = 0; r < count; ++r) {
      int const from = largerOf(key0, rows[r].first);
      int const to = smallerOf(smallerOf(key0 + kSliceKeys, last), rows[r].last);
      if (from >= to) continue;
      float const* const query = queries + r * query_size;
      addRow<Element>(problem, rows[r], query, from, to, weight, scores, sums, partials + r * size);
    }
  }
}

FLASH_INLINE bool isFinite(float x) { return x - x == 0.0f; }

// What a row's partial results come to: row_max of its keys, and the factor of what their weights beside that
// come to.
struct Total {
  float keys_max, factor;
};

// Writes the row's lse too.
FLASH_INLINE Total totalOf(Row const& row, float const* partials, int64_t step, int32_t slices) {
  float keys_max = -kInfinity, sum = 0.0f;
  for (int s = 0; s < slices; ++s) keys_max = partials[s * step] > keys_max ? partials[s * step] : keys_max;
  auto const sumOfSlice = [&](int s) { return wholeOf(partials[s * step + 1], partials[s * step + 2]); };
  for (int s = 0; s < slices; ++s) sum += sumOfSlice(s);
  if (keys_max == -kInfinity && sum == 0.0f) {  // no key: the sink as it is, be it none or no number
    if (row.lse != nullptr) *row.lse = row.sink;
    return {0.0f, 0.0f};
  }
  if (row.sink == kInfinity && sum == sum) {  // it has all the weight
    if (row.lse != nullptr) *row.lse = kInfinity;
    return {keys_max, 0.0f};
  }
  float const most = keys_max == -kInfinity ? 0.0f : keys_max;
  float keys_sum = 0.0f;
  for (int s = 0; s < slices; ++s) keys_sum += sumOfSlice(s) * expOf(partials[s * step] - most);
  Joined const all = joinSink(keys_max, keys_sum, row.sink);
  if (row.lse != nullptr) *row.lse = all.row_max + __builtin_logf(all.row_sum);
  return {most, all.share};
}

// The row's output at `d` from partials that runSlice made with `weight`.
FLASH_INLINE Floats outputOf(RowProblem const& problem, Total total, float const* partials, int64_t step,
                             int32_t slices, int d, float weight) {
  int64_t const low = roundUp(problem.v_head_dim, 16);
  Floats sum{};
  for (int s = 0; s < slices; ++s) {
    float const* const partial = partials + s * step;
    float const* const output = partial + kPartialOutput + d;
    sum += wholeOf(load(output), load(output + low)) * expOf(partial[0] - total.keys_max);
  }
  Floats const output = sum * total.factor;
  if (weight == 1.0f) return output;
  Floats const most = splat(0x1.fffffep127f), whole = output * (1.0f / weight);
  Floats const rounded = whole > most    ? most
                         : whole < -most ? -most
                                         : whole;  // a mean is no more than its values
  return magnitudeOf(output) < kInfinity ? rounded : output;
}

// Writes the row's output; with another weight than 1 only where what is written is no finite number. Returns
// whether some is none though the weights are.
template <class Element>
FLASH_INLINE bool combineSlices(RowProblem const& problem, Row const& row, float const* partials,
                                int64_t step, int32_t slices, float weight) {
  Total const total = totalOf(row, partials, step, slices);
  Floats finite{};
  for (int d = 0; d < problem.v_head_dim; d += kLanes) {
    Floats output = outputOf(problem, total, partials, step, slices, d, weight);
    finite += output * 0.0f;
    Element* const to = static_cast<Element*>(row.output) + d;
    int const left = problem.v_head_dim - d;
    if (weight != 1.0f) {
      Floats const written = left >= kLanes ? load(to) : loadSome(to, left);
      output = magnitudeOf(written) < kInfinity ? written : output;
    }
    if (left >= kLanes) {
      store(to, output);
    } else {
      storeSome(to, output, left);
    }
  }
  return isFinite(total.factor) && !isFinite(sumOf(finite));
}

// Replaces what is no finite number in a row's output, whose weights are finite: values have passed on the
// way what fp32 holds, or are infinite. `scratch` has combineScratch() floats.
template <class Element>
void attendLightly(RowProblem const& problem, Row const& row, float* scratch) {
  float* const partial = scratch + sliceScratch(problem, 1);
  runSlice<Element>(problem, &row, 1, row.first, row.last, kLight, partial, scratch);
  combineSlices<Element>(problem, row, partial, 0, 1, kLight);
}

template <class Element>
void finishRow(RowProblem const& problem, Row const& row, float const* partials, int64_t step, int32_t slices,
               float* scratch) {
  if (combineSlices<Element>(problem, row, partials, step, slices, 1.0f)) {
    attendLightly<Element>(problem, row, scratch);
  }
}

// A row by itself, from its own keys alone.
template <class Element>
void attendAlone(RowProblem const& problem, Row const& row, float* scratch) {
  float* const partial = scratch + sliceScratch(problem, 1);
  runSlice<Element>(problem, &row, 1, row.first, row.last, 1.0f, partial, scratch);
  finishRow<Element>(problem, row, partial, 0, 1, scratch);
}

void slice(RowProblem const& problem, Row const* rows, int32_t count, int32_t first, int32_t last,
           float* partials, float* scratch) {
  switch (problem.dtype) {
    case kFlashFloat32:
      return runSlice<float>(problem, rows, count, first, last, 1.0f, partials, scratch);
    case kFlashFloat16:
      return runSlice<Half>(problem, rows, count, first, last, 1.0f, partials, scratch);
    default:
      return runSlice<BFloat>(problem, rows, count, first, last, 1.0f, partials, scratch);
  }
}

void combine(RowProblem const& problem, Row const& row, float const* partials, int64_t step, int32_t slices,
             float* scratch) {
  switch (problem.dtype) {
    case kFlashFloat32:
      return finishRow<float>(problem, row, partials, step, slices, scratch);
    case kFlashFloat16:
      return finishRow<Half>(problem, row, partials, step, slices, scratch);
    default:
      return finishRow<BFloat>(problem, row, partials, step, slices, scratch);
  }
}

}  // namespace
}  // namespace flash_export::cpu
