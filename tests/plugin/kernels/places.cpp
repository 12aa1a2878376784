// SPDX-License-Identifier: Apache-2.0
// Where a problem's tensors lie: layouts, packed sequences, pages.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>

#include "problem.h"

namespace kernel_tests {
namespace {

constexpr int kGuardElements = 32;
constexpr int kForeignRows = 2;  // before the first packed sequence and behind the last
constexpr int kSparePages = 3;

// cu_seqlens of sequences of these lengths, behind a few rows that belong to none.
std::vector<int32_t> startsOf(std::vector<int> const& lengths) {
  std::vector<int32_t> starts;
  if (lengths.empty()) return starts;
  starts.push_back(kForeignRows);
  for (int length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

}  // namespace

Tensors::Tensor Tensors::place(std::vector<unsigned char>& storage, int batches, int heads, int rows,
                               int dim) {
  Tensor t;
  t.dtype = mProblem.dtype;
  t.rows = rows;
  t.dim = dim;
  t.first = kGuardElements;
  t.storage = &storage;
  if (mProblem.layout == Layout::kRowsFirst) {
    t.head_stride = dim;
    t.row_stride = int64_t(heads) * dim;
    t.batch_stride = t.row_stride * rows;
  } else {
    t.row_stride = dim + (mProblem.layout == Layout::kGaps ? 1 : 0);
    t.head_stride = t.row_stride * rows;
    t.batch_stride = t.head_stride * heads;
  }
  storage.assign(size_t(batches * t.batch_stride + 2 * kGuardElements) * size_t(bytesOf(t.dtype)), 0xff);
  return t;
}

void Tensors::placeQueries() {
  Problem const& p = mProblem;
  mStartsQ = startsOf(p.rows_of);
  bool const packed = !mStartsQ.empty();
  int const batches = packed ? 1 : p.batch, rows = packed ? mStartsQ.back() + kForeignRows : p.seqlen_q;
  if (!p.isPacked()) mQuery = place(mQueryBytes, batches, p.heads_q, rows, p.head_dim);
  mOutput = place(mOutputBytes, batches, p.heads_q, rows, p.v_head_dim);
  if (packed) mQuery.starts = mOutput.starts = &mStartsQ;
  mLse.assign(size_t(batches) * size_t(p.heads_q) * size_t(rows), std::numeric_limits<float>::quiet_NaN());
}

void Tensors::placeKeys() {
  Problem const& p = mProblem;
  mStartsKv = startsOf(p.keys_of_sequence);
  int batches = p.batch, rows = p.seqlen_kv;
  if (!mStartsKv.empty()) {
    batches = 1;
    rows = mStartsKv.back() + kForeignRows;
  }
  if (p.page_size != 0) {
    makePages();
    batches = mPageCount;
    rows = p.page_size;
  }
  mKey = place(mKeyBytes, batches, p.heads_kv, rows, p.head_dim);
  mValue = place(mValueBytes, batches, p.heads_kv, rows, p.v_head_dim);
  for (Tensor* t : {&mKey, &mValue}) {
    if (!mStartsKv.empty()) t->starts = &mStartsKv;
    if (p.page_size == 0) continue;
    t->pages = &mPages;
    t->page_size = p.page_size;
    t->table_width = (p.seqlen_kv + p.page_size - 1) / p.page_size;
  }
}

void Tensors::makePages() {
  Problem const& p = mProblem;
  auto const pagesOf = [&](int keys) { return (keys + p.page_size - 1) / p.page_size; };
  for (int b = 0; b < p.batch; ++b) mPageCount += pagesOf(p.keysOf(b));
  mPageCount += kSparePages;
  std::vector<int> order(static_cast<size_t>(mPageCount));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{20261130});
  int const none[] = {INT32_MAX, INT32_MIN, -1};
  for (int b = 0; b < p.batch; ++b) {
    for (int i = 0; i < pagesOf(p.seqlen_kv); ++i) {
      bool const used = i < pagesOf(p.keysOf(b));
      mPages.push_back(used ? order.back() : none[i % 3]);
      if (used) order.pop_back();
    }
  }
}

size_t Tensors::lseIndex(int b, int h, int row) const {
  if (!mStartsQ.empty()) return size_t(h * mOutput.rows + mStartsQ[size_t(b)] + row);
  return size_t((b * mProblem.heads_q + h) * mProblem.seqlen_q + row);
}

void Tensors::placePacked() {
  int const dim = mProblem.head_dim;
  int64_t const heads = mProblem.heads_q + 2 * mProblem.heads_kv;
  Tensor t;
  t.dtype = mProblem.dtype;
  t.rows = mProblem.seqlen_q;
  t.dim = dim;
  t.storage = &mQueryBytes;
  bool const rows_first = mProblem.layout == Layout::kPacked;
  t.head_stride = rows_first ? dim : int64_t(dim) * t.rows;
  t.row_stride = rows_first ? heads * dim : dim;
  t.batch_stride = heads * dim * t.rows;
  mQuery = mKey = mValue = t;
  mQuery.first = kGuardElements;
  mKey.first = mQuery.first + mProblem.heads_q * t.head_stride;
  mValue.first = mKey.first + mProblem.heads_kv * t.head_stride;
  mQueryBytes.assign(size_t(mProblem.batch * t.batch_stride + 2 * kGuardElements) * size_t(bytesOf(t.dtype)),
                     0xff);
}

}  // namespace kernel_tests
