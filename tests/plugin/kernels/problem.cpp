// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "dispatch.h"
#include "emulation/launch_emulated.h"
#include "emulation/numbers.h"

namespace kernel_tests {
namespace {

using namespace flash_export;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double load(FlashDtype dtype, unsigned char const* p) {
  if (dtype == kFlashFloat32) {
    float x;
    std::memcpy(&x, p, 4);
    return double(x);
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return double(dtype == kFlashFloat16 ? emulation::halfToFloat(bits) : emulation::bfloatToFloat(bits));
}

void store(FlashDtype dtype, unsigned char* p, double x) {
  float const narrow = float(x);
  if (dtype == kFlashFloat32) {
    std::memcpy(p, &narrow, 4);
    return;
  }
  uint16_t const bits =
      dtype == kFlashFloat16 ? emulation::floatToHalf(narrow) : emulation::floatToBFloat(narrow);
  std::memcpy(p, &bits, 2);
}

// So many bytes full of NaN, null of 0, between two guard bands.
class Workspace {
 public:
  explicit Workspace(size_t bytes)
      : mBytes(bytes),
        mMemory(2 * kBand + bytes, 0xff),
        mBefore(mMemory.data(), kBand),
        mBehind(mMemory.data() + kBand + bytes, kBand) {}
  void* data() { return mBytes == 0 ? nullptr : mMemory.data() + kBand; }

 private:
  static constexpr size_t kBand = 4096;
  size_t mBytes;
  std::vector<unsigned char> mMemory;
  emulation::GuardBand mBefore, mBehind;
};

std::string answerOf(int status) {
  return status == 0 ? "" : "status " + std::to_string(status) + ": " + flashEmulationError();
}

double lowest(FlashDtype dtype) {
  if (dtype == kFlashFloat16) return -65504.0;
  return dtype == kFlashBFloat16 ? double(emulation::bfloatToFloat(0xff7f))
                                 : double(std::numeric_limits<float>::lowest());
}

}  // namespace

int bytesOf(FlashDtype dtype) { return dtype == kFlashFloat32 ? 4 : 2; }

double rounded(FlashDtype dtype, double x) {
  unsigned char bytes[4];
  store(dtype, bytes, x);
  return load(dtype, bytes);
}

std::string Problem::describe() const {
  static char const* const dtypes[] = {"fp32", "fp16", "bf16"};
  static char const* const layouts[] = {"rows-first", "heads-first", "packed", "packed-heads", "gaps"};
  static char const* const biases[] = {"",      "full",        "of-keys",     "of-queries",
                                       "holes", "hidden-rows", "lowest-rows", "alibi"};
  std::string s = dtypes[dtype];
  auto const add = [&](char const* name, double value) {
    char text[48];
    std::snprintf(text, sizeof text, " %s %g", name, value);
    s += text;
  };
  add("B", batch);
  add("Hq", heads_q);
  add("Hkv", heads_kv);
  add("Sq", seqlen_q);
  add("Skv", seqlen_kv);
  add("D", head_dim);
  add("Dv", v_head_dim);
  s += std::string(" ") + layouts[int(layout)];
  if (scale != 0.0f) add("scale", double(scale));
  if (softcap != 0.0f) add("softcap", double(softcap));
  if (causal != 0) s += diagonal != 0 ? " bottom-right" : " top-left";
  if (causal == 0 && diagonal != 0) s += " diagonal";
  if (window_left >= 0) add("left", window_left);
  if (window_right >= 0) add("right", window_right);
  if (bias != Bias::kNone) s += std::string(" bias ") + biases[int(bias)] + (float_bias ? " fp32" : "");
  for (int length : kv_lengths) add("length", length);
  for (int rows : rows_of) add("rows", rows);
  for (int keys : keys_of_sequence) add("keys", keys);
  if (page_size != 0) add("page", page_size);
  if (sinks != 0) add("sinks", sinks);
  if (!wants_lse) s += " no-lse";
  if (score_std != 2.5f) add("std", double(score_std));
  if (key_std != 1.0f) add("key-std", double(key_std));
  if (value_mean != 0.0f) add("value-mean", double(value_mean));
  if (growth != 0.0f) add("growth", double(growth));
  if (splits != 0) add("splits", splits);
  if (draw != 0) add("draw", draw);
  return s;
}

float Problem::softmaxScale() const { return scale != 0.0f ? scale : 1.0f / std::sqrt(float(head_dim)); }

int Problem::rowsOf(int batch_index) const {
  return rows_of.empty() ? seqlen_q : rows_of[size_t(batch_index)];
}

int Problem::keysOf(int batch_index) const {
  int const most = keys_of_sequence.empty() ? seqlen_kv : keys_of_sequence[size_t(batch_index)];
  if (kv_lengths.empty()) return most;
  int const given = kv_lengths[kv_lengths.size() == 1 ? 0 : size_t(batch_index)];
  return std::min(std::max(given, 0), most);
}

bool Problem::sees(int batch_index, int row, int key) const {
  int64_t const stands_at = row + (diagonal != 0 ? keysOf(batch_index) - rowsOf(batch_index) : 0);
  if (key >= keysOf(batch_index) || (causal != 0 && key > stands_at)) return false;
  if (window_left >= 0 && key < stands_at - window_left) return false;
  return window_right < 0 || key <= stands_at + window_right;
}

int64_t Tensors::Tensor::index(int b, int h, int row, int d) const {
  int64_t start = b * batch_stride;
  if (starts != nullptr) start = (*starts)[size_t(b)] * row_stride;
  if (pages != nullptr) {
    start = (*pages)[size_t(b * table_width + row / page_size)] * batch_stride;
    row %= page_size;
  }
  return first + start + h * head_stride + row * row_stride + d;
}

double Tensors::Tensor::at(int b, int h, int row, int d) const {
  return load(dtype, storage->data() + index(b, h, row, d) * bytesOf(dtype));
}

void Tensors::Tensor::set(int b, int h, int row, int d, double x) {
  store(dtype, storage->data() + index(b, h, row, d) * bytesOf(dtype), x);
}

FlashTensor Tensors::Tensor::view() const {
  return {storage->data() + first * bytesOf(dtype), batch_stride, head_stride, row_stride};
}

Tensors::Tensors(Problem const& problem) : mProblem(problem) {
  Problem const& p = mProblem;
  std::mt19937 random{uint32_t(std::hash<std::string>{}(p.describe()))};
  std::normal_distribution<double> normal;
  if (p.isPacked()) {
    placePacked();
  } else {
    placeKeys();
  }
  placeQueries();
  double const strength =
      double(p.score_std) / (std::fabs(double(p.softmaxScale())) * std::sqrt(p.head_dim) * double(p.key_std));
  auto const fill = [&](Tensor& t, int heads, double factor, bool to_length, double mean = 0.0) {
    for (int b = 0; b < p.batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int row = 0; row < (to_length ? p.keysOf(b) : p.rowsOf(b)); ++row) {
          for (int d = 0; d < t.dim; ++d) t.set(b, h, row, d, mean + normal(random) * factor);
        }
      }
    }
  };
  fill(mQuery, p.heads_q, strength, false);
  fill(mKey, p.heads_kv, double(p.key_std), true);
  fill(mValue, p.heads_kv, 1.0, true, double(p.value_mean));
  if (p.growth != 0.0f) makeGrow();
  for (int length : p.kv_lengths) mLengths.push_back(length);
  for (int i = 0; i < (p.sinks == 2 ? p.heads_q : p.sinks); ++i) mSinks.push_back(float(normal(random) * 3));
  fillBias();
}

// The first number of queries and keys carries it.
void Tensors::makeGrow() {
  Problem const& p = mProblem;
  double const step = double(p.growth) * std::log(2.0) / (double(p.softmaxScale()) * double(p.key_std));
  for (int b = 0; b < p.batch; ++b) {
    for (int i = 0; i < p.heads_q * p.rowsOf(b); ++i) {
      int const row = i % p.rowsOf(b);
      mQuery.set(b, i / p.rowsOf(b), row, 0, (row % 2 == 0 ? 1.0 : 0.5) * double(p.key_std));
    }
    for (int i = 0; i < p.heads_kv * p.keysOf(b); ++i) {
      int const key = i % p.keysOf(b);
      mKey.set(b, i / p.keysOf(b), key, 0, step * ((p.keysOf(b) - 1) / 32 - key / 32));
    }
  }
}

void Tensors::fillBias() {
  Problem const& p = mProblem;
  if (p.bias == Bias::kNone) return;
  bool const keys = p.bias != Bias::kOfQueries, queries = p.bias != Bias::kOfKeys;
  bool const batches = p.bias == Bias::kFull || p.bias == Bias::kOfKeys;
  bool const heads = p.bias == Bias::kFull || p.bias == Bias::kHoles || p.bias == Bias::kAlibi;
  int const size[4] = {batches ? p.batch : 1, heads ? p.heads_q : 1, queries ? p.seqlen_q : 1,
                       keys ? p.seqlen_kv : 1};
  int64_t count = 1;
  for (int axis = 3; axis >= 0; --axis) {
    mBiasStride[axis] = size[axis] > 1 ? count : 0;
    count *= size[axis];
  }
  FlashDtype const dtype = p.float_bias ? kFlashFloat32 : p.dtype;
  mBiasBytes.assign(size_t(count) * size_t(bytesOf(dtype)), 0xff);
  std::mt19937 random{20261129};
  std::normal_distribution<double> normal{0.0, 2.0};
  for (int64_t i = 0; i < count; ++i) {
    int64_t const row = i / size[3] % size[2];
    double x = normal(random);
    if (p.bias == Bias::kAlibi) {  // Press, Smith & Lewis 2021, arXiv:2108.12409
      int64_t const head = i / (size[2] * size[3]) % size[1], key = i % size[3];
      double const slope = std::exp2(-8.0 * double(head + 1) / p.heads_q);
      x = -slope * std::fabs(double(row + p.seqlen_kv - p.seqlen_q - key));
    }
    if (p.bias == Bias::kHoles && random() % 4 == 0) x = -kInfinity;
    if (p.bias == Bias::kHiddenRows && row % 3 == 1) x = -kInfinity;
    if (p.bias == Bias::kLowestRows && row % 3 == 1) x = lowest(dtype);
    store(dtype, mBiasBytes.data() + i * bytesOf(dtype), x);
  }
}

float Tensors::biasAt(int b, int h, int row, int key) const {
  if (mBiasBytes.empty()) return 0.0f;
  FlashDtype const dtype = mProblem.float_bias ? kFlashFloat32 : mProblem.dtype;
  int64_t const index = b * mBiasStride[0] + h * mBiasStride[1] + row * mBiasStride[2] + key * mBiasStride[3];
  return float(load(dtype, mBiasBytes.data() + index * bytesOf(dtype)));
}

bool Tensors::sees(int b, int h, int row, int key) const {
  return mProblem.sees(b, row, key) && biasAt(b, h, row, key) > -std::numeric_limits<float>::infinity();
}

float Tensors::sinkAt(int h) const {
  if (mSinks.empty()) return -std::numeric_limits<float>::infinity();
  return mSinks[mSinks.size() == 1 ? 0 : size_t(h)];
}

FlashAttentionArgs Tensors::args() {
  Problem const& p = mProblem;
  FlashAttentionArgs a{};
  a.dtype = p.dtype;
  a.batch = p.batch;
  a.q_num_heads = p.heads_q;
  a.kv_num_heads = p.heads_kv;
  a.head_dim = p.head_dim;
  a.v_head_dim = p.v_head_dim;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_kv = p.seqlen_kv;
  a.query = mQuery.view();
  a.key = mKey.view();
  a.value = mValue.view();
  a.output = mOutput.view();
  a.scale = p.softmaxScale();
  a.softcap = p.softcap;
  a.causal = p.causal;
  a.diagonal = p.diagonal;
  a.window_left = p.window_left;
  a.window_right = p.window_right;
  a.bias = mBiasBytes.empty() ? nullptr : mBiasBytes.data();
  a.bias_dtype = p.float_bias ? kFlashFloat32 : p.dtype;
  std::copy_n(mBiasStride, 4, a.bias_stride);
  a.kv_lengths = mLengths.empty() ? nullptr : mLengths.data();
  a.kv_lengths_stride = mLengths.size() > 1 ? 1 : 0;
  a.sinks = mSinks.empty() ? nullptr : mSinks.data();
  a.sinks_stride = mSinks.size() > 1 ? 1 : 0;
  a.lse = p.wants_lse ? mLse.data() : nullptr;
  if (!mStartsQ.empty()) {
    a.cu_seqlens_q = mStartsQ.data();
    a.total_q = mQuery.rows;
  }
  if (!mStartsKv.empty()) {
    a.cu_seqlens_kv = mStartsKv.data();
    a.total_kv = mKey.rows;
  }
  if (p.page_size != 0) {
    a.page_table = mPages.data();
    a.page_table_stride = mKey.table_width;
    a.page_size = p.page_size;
    a.page_count = mPageCount;
  }
  return a;
}

std::string Tensors::checkGuards() const {
  std::vector<bool> owned(mOutputBytes.size(), false);
  int const bytes = bytesOf(mProblem.dtype);
  for (int b = 0; b < mProblem.batch; ++b) {
    for (int h = 0; h < mProblem.heads_q; ++h) {
      for (int row = 0; row < mProblem.rowsOf(b); ++row) {
        int64_t const first = mOutput.index(b, h, row, 0) * bytes;
        std::fill_n(owned.begin() + first, mProblem.v_head_dim * bytes, true);
      }
    }
  }
  for (size_t i = 0; i < owned.size(); ++i) {
    if (!owned[i] && mOutputBytes[i] != 0xff)
      return "byte " + std::to_string(i) + " beside the output was written";
  }
  std::vector<bool> owned_lse(mLse.size(), false);
  for (int b = 0; b < mProblem.batch; ++b) {
    for (int i = 0; i < mProblem.heads_q * mProblem.rowsOf(b); ++i) {
      owned_lse[lseIndex(b, i / mProblem.rowsOf(b), i % mProblem.rowsOf(b))] = true;
    }
  }
  for (size_t i = 0; i < mLse.size(); ++i) {
    if (!owned_lse[i] && !std::isnan(mLse[i]))
      return "lse " + std::to_string(i) + " of no sequence was written";
  }
  return "";
}

std::string launch(FlashAttentionArgs const& args, int splits) {
  if (splits == 0) {
    Workspace workspace(flashAttentionWorkspace(&args));
    return answerOf(flashAttentionLaunch(&args, workspace.data(), nullptr));
  }
  kernels::Plan plan = kernels::planFor(args, false, 0);
  plan.splits = splits;
  size_t const rows = size_t(args.batch) * size_t(args.q_num_heads) * size_t(args.seqlen_q);
  Workspace workspace(rows * size_t(splits) * size_t(args.v_head_dim + 2) * sizeof(float));
  return answerOf(kernels::launchPlanned(args, plan, workspace.data(), nullptr));
}

std::string run(Problem const& problem) {
  Tensors tensors(problem);
  FlashAttentionArgs const args = tensors.args();
  char reasons[1024];
  if (flashAttentionWhyUnsupported(&args, reasons, sizeof reasons) != 0)
    return std::string("refused: ") + reasons;
  if (std::string wrong = launch(args, problem.splits); !wrong.empty()) return wrong;
  if (std::string wrong = tensors.checkGuards(); !wrong.empty()) return wrong;
  if (flashEmulationBankConflicts() != 0) {
    return std::to_string(flashEmulationBankConflicts()) + " bank conflicts of ldmatrix";
  }
  return tensors.judge();
}

}  // namespace kernel_tests
