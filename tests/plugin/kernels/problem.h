// SPDX-License-Identifier: Apache-2.0
// One attention problem for the kernels' tests: its numbers, its tensors in memory, and what its result must
// be.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "flash_attention.h"

namespace kernel_tests {

enum class Layout {
  kRowsFirst,    // [B, S, H, D]
  kHeadsFirst,   // [B, H, S, D]
  kPacked,       // query, key and value in one [B, S, (Hq + 2*Hkv) * D]; needs equal lengths and head dims
  kPackedHeads,  // the same in one [B, Hq + 2*Hkv, S, D]
  kGaps          // [B, H, S, D] with a gap of one element behind every row: nothing is aligned
};

enum class Bias {
  kNone,
  kFull,        // [B, Hq, Sq, Skv]
  kOfKeys,      // [B, 1, 1, Skv]
  kOfQueries,   // [1, 1, Sq, 1]
  kHoles,       // [1, Hq, Sq, Skv], -inf here and there
  kHiddenRows,  // [1, 1, Sq, Skv], every third row full of -inf
  kLowestRows,  // [1, 1, Sq, Skv], every third row full of the lowest finite number
  kAlibi,  // [1, Hq, Sq, Skv], a slope a head times the distance, which falls to the left and to the right
};

// Fields are those of FlashAttentionArgs.
struct Problem {
  FlashDtype dtype = kFlashFloat16;
  int batch = 1, heads_q = 2, heads_kv = 1, seqlen_q = 67, seqlen_kv = 133, head_dim = 64, v_head_dim = 64;
  Layout layout = Layout::kRowsFirst;
  float scale = 0.0f;  // 0: 1 / sqrt(head_dim)
  float softcap = 0.0f;
  int causal = 0, diagonal = 0, window_left = -1, window_right = -1;
  Bias bias = Bias::kNone;
  bool float_bias = false;      // fp32 beside a 16-bit query
  std::vector<int> kv_lengths;  // [B] or [1], unclamped
  int sinks = 0;                // 0 none, 1 one for all heads, 2 one a head
  bool wants_lse = true;
  std::vector<int> rows_of, keys_of_sequence;  // packed sequences (cu_seqlens), one each; empty: not packed
  int page_size = 0;                           // keys and values in pages; 0: not paged
  int splits = 0;          // blocks that share the keys of a row; 0: as a launch with a workspace plans it
  float score_std = 2.5f;  // the query is scaled so; at 1 a softmax is too flat to show a wrong mask
  float key_std = 1.0f;
  float value_mean = 0.0f;
  // Every 32 keys, from the last to the first, scores rise by this times log2 e in even rows, half as much in
  // odd ones.
  float growth = 0.0f;
  int draw = 0;  // other numbers of the same problem

  std::string describe() const;
  float softmaxScale() const;
  int rowsOf(int batch_index) const;
  int keysOf(int batch_index) const;  // kv_lengths, clamped
  bool sees(int batch_index, int row, int key) const;
  bool isPacked() const { return layout == Layout::kPacked || layout == Layout::kPackedHeads; }
};

// The tensors of a problem. Whatever is no element of theirs is NaN, and so are all keys and values past
// kv_length: one that is read as a value shows. Pages are shuffled among pages that nobody uses, and entries
// of the table past those that hold keys name no page; packed sequences have rows before and behind them.
class Tensors {
 public:
  explicit Tensors(
      Problem const& problem);  // numbers are drawn from the description, so they are the same every time

  FlashAttentionArgs args();
  // "" or what is wrong with the output and the lse, by the tolerance rule of the design: against float64 on
  // the same rounded inputs, at most twice what the unfused formula in the test dtype is off, plus 2 ulp.
  std::string judge() const;
  // "" or the first byte around or between the output's rows that changed.
  std::string checkGuards() const;
  // Whether a row sees a key: the problem's masks, and no bias of -inf.
  bool sees(int b, int h, int row, int key) const;
  double output(int b, int h, int row, int d) const { return mOutput.at(b, h, row, d); }
  float lse(int b, int h, int row) const { return mLse[lseIndex(b, h, row)]; }
  double query(int b, int h, int row, int d) const { return mQuery.at(b, h, row, d); }
  double key(int b, int h, int row, int d) const { return mKey.at(b, h, row, d); }
  double value(int b, int h, int row, int d) const { return mValue.at(b, h, row, d); }
  void setQuery(int b, int h, int row, int d, double x) { mQuery.set(b, h, row, d, x); }
  void setKey(int b, int h, int row, int d, double x) { mKey.set(b, h, row, d, x); }
  void setValue(int b, int h, int row, int d, double x) { mValue.set(b, h, row, d, x); }

 private:
  struct Tensor {
    FlashDtype dtype = kFlashFloat16;
    int rows = 0, dim = 0;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0, first = 0;  // elements; `first` of the storage
    std::vector<unsigned char>* storage = nullptr;
    std::vector<int32_t> const* starts = nullptr;  // packed: the sequences' first rows
    std::vector<int32_t> const* pages = nullptr;   // paged: the table, `table_width` entries a batch
    int table_width = 0, page_size = 0;
    int64_t index(int b, int h, int row, int d) const;
    double at(int b, int h, int row, int d) const;
    void set(int b, int h, int row, int d, double x);
    FlashTensor view() const;
  };
  struct Expected {
    std::vector<double> output;  // [B, Hq, Sq, Dv]
    std::vector<double> lse;     // [B, Hq, Sq]
  };

  Tensor place(std::vector<unsigned char>& storage, int batches, int heads, int rows, int dim);
  void placePacked();
  void makeGrow();
  void placeQueries();
  void placeKeys();
  void makePages();
  size_t lseIndex(int b, int h, int row) const;
  void fillBias();
  float biasAt(int b, int h, int row, int key) const;
  float sinkAt(int h) const;
  Expected expected() const;
  std::vector<double> base() const;

  Problem mProblem;
  std::vector<unsigned char> mQueryBytes, mKeyBytes, mValueBytes, mOutputBytes, mBiasBytes;
  Tensor mQuery, mKey, mValue, mOutput;
  int64_t mBiasStride[4] = {0, 0, 0, 0};
  std::vector<int32_t> mLengths, mStartsQ, mStartsKv, mPages;
  int mPageCount = 0;
  std::vector<float> mSinks, mLse;
};

// Launches with a workspace full of NaN and so many splits (0: as planned); "" or what failed.
std::string launch(FlashAttentionArgs const& args, int splits);

// Runs the problem in the emulation and judges it; "" when all is well.
std::string run(Problem const& problem);

int bytesOf(FlashDtype dtype);
double rounded(FlashDtype dtype, double x);  // to the nearest number of the dtype

}  // namespace kernel_tests
