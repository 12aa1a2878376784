// SPDX-License-Identifier: Apache-2.0
// Strides beyond an int. Every query and key is 0, so a row's weights are those of its bias alone, and its
// result is plain from the values' marks.
#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "emulation/launch_emulated.h"
#include "emulation/numbers.h"
#include "named_cases.h"
#include "problem.h"

namespace kernel_tests {
namespace {

constexpr int64_t kFar = int64_t{1} << 31;  // elements: more than an int holds
constexpr int kBatches = 2, kHeads = 3, kRows = 3, kDim = 8, kPageSize = 16;

// Address space for offsets that no real tensor here could have; pages that are not touched take no memory.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : mBytes(bytes),
        mBegin(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                    0)) {}
  ~SparseMemory() {
    if (mBegin != MAP_FAILED) munmap(mBegin, mBytes);
  }
  SparseMemory(SparseMemory const&) = delete;
  SparseMemory& operator=(SparseMemory const&) = delete;
  void* begin() const { return mBegin == MAP_FAILED ? nullptr : mBegin; }

 private:
  size_t mBytes;
  void* mBegin;
};

struct FarCase {
  std::string name;
  FlashDtype dtype = kFlashFloat16;
  int keys = 3, kv_heads = kHeads, splits = 1;
  int tensor_axis = -1;     // batch, head or row of query, key, value and output is far; -1: none
  int bias_axis = -1;       // the same of the bias; -1: no bias
  bool float_bias = false;  // fp32
  bool paged = false;       // the page table's rows are far
  bool packed = false;      // sequences at the end of so many rows that their lse is far
};

class FarProblem {
 public:
  explicit FarProblem(FarCase const& c) : mCase(c) {
    mArgs.dtype = c.dtype;
    mArgs.batch = kBatches;
    mArgs.q_num_heads = kHeads;
    mArgs.kv_num_heads = c.kv_heads;
    mArgs.head_dim = mArgs.v_head_dim = kDim;
    mArgs.seqlen_q = kRows;
    mArgs.seqlen_kv = c.keys;
    mArgs.scale = 0.125f;
    mArgs.window_left = mArgs.window_right = -1;
    mArgs.kv_lengths = mLengths;
    mArgs.kv_lengths_stride = mArgs.sinks_stride = 1;
    mLengths[0] = c.keys;
    mLengths[1] = c.keys - 1;
    mArgs.sinks = mSinks;
    mArgs.lse = mLse;
    placeTensors();
    if (c.paged) placeTable();
    if (c.packed) placeSequences();
    if (c.bias_axis >= 0) placeBias();
  }

  std::string run() {
    if (mLacksMemory) {
      std::printf("skipped: no address space here for '%s'\n", mCase.name.c_str());
      return "";
    }
    if (std::string wrong = launch(mArgs, mCase.splits); !wrong.empty()) return wrong;
    for (int i = 0; i < kBatches * kHeads * kRows; ++i) {
      int const b = i / (kHeads * kRows), h = i / kRows % kHeads, row = i % kRows;
      if (std::string wrong = wrongRow(b, h, row); !wrong.empty()) return wrong;
    }
    return "";
  }

 private:
  // So many bytes of zeros; null where there are none, which run() tells.
  void* reserve(int64_t bytes) {
    mMemory.push_back(std::make_unique<SparseMemory>(size_t(bytes)));
    mLacksMemory = mLacksMemory || mMemory.back()->begin() == nullptr;
    return mMemory.back()->begin();
  }

  // Query and key share zeros; values and outputs lie beside them in the same rows.
  void placeTensors() {
    int64_t stride[3] = {int64_t{1} << 17, int64_t{1} << 14, 128};
    if (mCase.tensor_axis >= 0) stride[mCase.tensor_axis] = kFar;
    int const bytes = bytesOf(mCase.dtype);
    auto* const base = static_cast<char*>(reserve(4 * kFar * bytes));
    mArgs.query = mArgs.key = mArgs.value = mArgs.output = {base, stride[0], stride[1], stride[2]};
    mArgs.value.data = base + 32 * bytes;
    mArgs.output.data = base + 64 * bytes;
    if (mLacksMemory) return;
    for (int i = 0; i < kBatches * mCase.kv_heads * mCase.keys * kDim; ++i) {
      int const row = i / kDim % mCase.keys, head = i / kDim / mCase.keys % mCase.kv_heads;
      int const batch = i / kDim / mCase.keys / mCase.kv_heads;
      int64_t const place = placeOfKey(batch) * stride[0] + head * stride[1] + row * stride[2];
      put(mCase.dtype, mArgs.value.data, place + i % kDim, valueOf(batch, head, row));
    }
  }

  // Of a paged cache the batches' pages change places.
  int placeOfKey(int batch) const { return mCase.paged ? kBatches - 1 - batch : batch; }
  static float valueOf(int batch, int head, int key) {
    return float((1 << key % 3) * (1 + head + kHeads * batch));
  }

  // One page a batch: rows past the page's 16 are not there.
  void placeTable() {
    auto* const table = static_cast<int32_t*>(reserve(kBatches * kFar * int64_t(sizeof(int32_t))));
    mArgs.page_table = table;
    mArgs.page_table_stride = kFar;
    mArgs.page_size = kPageSize;
    mArgs.page_count = kBatches;
    for (int b = 0; b < kBatches && !mLacksMemory; ++b) table[b * kFar] = placeOfKey(b);
  }

  // Every query is the same row of zeros.
  void placeSequences() {
    mArgs.total_q = INT32_MAX;
    for (int b = 0; b <= kBatches; ++b) mStarts[b] = INT32_MAX - (kBatches - b) * kRows;
    mArgs.cu_seqlens_q = mStarts;
    mArgs.query.row_stride = mArgs.query.head_stride = 0;
    mArgs.output = {reserve(mArgs.total_q * kHeads * kDim * bytesOf(mCase.dtype)), 0, kDim, kHeads * kDim};
    mArgs.lse = static_cast<float*>(reserve(mArgs.total_q * kHeads * int64_t(sizeof(float))));
  }

  void placeBias() {
    FlashDtype const dtype = mCase.float_bias ? kFlashFloat32 : mCase.dtype;
    int64_t stride[4] = {27, 9, 3, 1};
    stride[mCase.bias_axis] = kFar;
    std::copy_n(stride, 4, mArgs.bias_stride);
    void* const bias = reserve(4 * kFar * bytesOf(dtype));
    mArgs.bias = bias;
    mArgs.bias_dtype = dtype;
    for (int i = 0; i < kBatches * kHeads * kRows * mCase.keys && !mLacksMemory; ++i) {
      int const key = i % mCase.keys, row = i / mCase.keys % kRows, h = i / mCase.keys / kRows % kHeads;
      int const b = i / mCase.keys / kRows / kHeads;
      int64_t const place = b * stride[0] + h * stride[1] + row * stride[2] + key * stride[3];
      put(dtype, bias, place, biasOf(b, h, row, key));
    }
  }

  static float biasOf(int b, int h, int row, int key) { return (b + h + row) % 3 == key % 3 ? 1.0f : -20.0f; }

  std::string wrongRow(int b, int h, int row) const {
    double sum = std::exp(double(mSinks[h])), output = 0.0;
    for (int key = 0; key < mLengths[b]; ++key) {
      double const weight = mArgs.bias == nullptr ? 1.0 : std::exp(double(biasOf(b, h, row, key)));
      sum += weight;
      output += weight * double(valueOf(b, h / (kHeads / mCase.kv_heads), key));
    }
    FlashTensor const& t = mArgs.output;
    int64_t place = h * t.head_stride + row * t.row_stride + b * t.batch_stride;
    int64_t lse_place = (b * kHeads + h) * kRows + row;
    if (mCase.packed) {
      place += mStarts[b] * t.row_stride;
      lse_place = h * mArgs.total_q + mStarts[b] + row;
    }
    double const got = double(get(mCase.dtype, t.data, place + kDim - 1));
    double const lse = double(mArgs.lse[lse_place]);
    if (std::fabs(got - output / sum) < 0.02 && std::fabs(lse - std::log(sum)) < 1e-3) return "";
    return "batch " + std::to_string(b) + ", head " + std::to_string(h) + ", row " + std::to_string(row) +
           ": output " + std::to_string(got) + ", not " + std::to_string(output / sum) + "; lse " +
           std::to_string(lse) + ", not " + std::to_string(std::log(sum));
  }

  static void put(FlashDtype dtype, void* data, int64_t place, float x) {
    uint16_t const half = flash_export::emulation::floatToHalf(x);
    auto* const at = static_cast<char*>(data) + place * bytesOf(dtype);
    std::memcpy(at, dtype == kFlashFloat32 ? static_cast<void const*>(&x) : &half, size_t(bytesOf(dtype)));
  }
  static float get(FlashDtype dtype, void const* data, int64_t place) {
    auto const* const at = static_cast<char const*>(data) + place * bytesOf(dtype);
    float x;
    uint16_t half;
    std::memcpy(dtype == kFlashFloat32 ? static_cast<void*>(&x) : &half, at, size_t(bytesOf(dtype)));
    return dtype == kFlashFloat32 ? x : flash_export::emulation::halfToFloat(half);
  }

  FarCase mCase;
  FlashAttentionArgs mArgs{};
  std::vector<std::unique_ptr<SparseMemory>> mMemory;
  bool mLacksMemory = false;
  int32_t mLengths[kBatches];
  int32_t mStarts[kBatches + 1];
  float mSinks[kHeads] = {0.5f, -1.0f, 0.0f};
  float mLse[kBatches * kHeads * kRows];
};

std::vector<FarCase> allFarCases(FlashDtype dtype, std::string const& of_dtype) {
  std::vector<FarCase> all;
  auto const add = [&](std::string const& name) -> FarCase& {
    all.push_back(FarCase{});
    all.back().name = "far " + name + " " + of_dtype;
    all.back().dtype = dtype;
    return all.back();
  };
  char const* const axes[] = {"batches", "heads", "rows", "keys"};
  for (int axis = 0; axis < 3; ++axis) add(std::string("tensors' ") + axes[axis]).tensor_axis = axis;
  for (int axis = 0; axis < 4; ++axis) {
    add(std::string("bias of ") + axes[axis]).bias_axis = axis;
    FarCase& grouped = add(std::string("bias of packed ") + axes[axis]);
    grouped.bias_axis = axis;
    grouped.kv_heads = 1;
    grouped.float_bias = true;
  }
  add("page table").paged = true;
  FarCase& general = add("page table and bias");
  general.paged = true;
  general.bias_axis = 1;
  add("lse").packed = true;
  FarCase& split = add("lse of splits");
  split.packed = true;
  split.splits = 2;
  split.keys = 70;
  return all;
}

}  // namespace

std::vector<NamedCase> farCases() {
  std::vector<NamedCase> all;
  for (FlashDtype dtype : {kFlashFloat16, kFlashFloat32}) {
    for (FarCase const& c : allFarCases(dtype, dtype == kFlashFloat16 ? "fp16" : "fp32")) {
      all.push_back({c.name, [c] { return FarProblem(c).run(); }});
    }
  }
  return all;
}

}  // namespace kernel_tests
