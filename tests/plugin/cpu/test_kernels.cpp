// SPDX-License-Identifier: Apache-2.0
// The CPU's kernels in fp32 on tensors with guards around their rows, judged by the tolerance rule. A program
// of its own, so that it also runs where Python does not: compiled for another processor, in an emulator.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "reference.h"

namespace {

using flash_export::cpu::Kernels;
using reference::Problem;

constexpr int64_t kGap = 3;  // elements behind every row, so that nothing is aligned
constexpr float kGuard = NAN;

std::vector<Problem> problems() {
  Problem basic;
  basic.heads_q = 4, basic.heads_kv = 2;
  basic.seqlen_q = 67, basic.seqlen_kv = 141;
  basic.head_dim = basic.v_head_dim = 64;
  basic.scale = 0.3;
  std::vector<Problem> all(8, basic);
  all[1].causal = true;
  all[2].causal = all[2].bottom_right = true;
  all[2].head_dim = 37, all[2].v_head_dim = 51;
  all[3].batch = 2, all[3].window_left = 40, all[3].window_right = 3;
  all[3].kv_lengths = {90, 5};
  all[4].softcap = 3.0, all[4].bias = {0};
  all[5].causal = true, all[5].bias = {0}, all[5].sinks = {0};
  all[6].seqlen_q = 1, all[6].seqlen_kv = 700, all[6].bias = {0};
  all[6].head_dim = 129, all[6].v_head_dim = 7;
  all[7].seqlen_q = 200, all[7].head_dim = all[7].v_head_dim = 1;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (Problem& p : all) {
    auto const fill = [&](std::vector<float>& to, int64_t count) {
      to.resize(size_t(count));
      for (float& x : to) x = normal(random);
    };
    fill(p.query, p.batch * p.heads_q * p.seqlen_q * p.head_dim);
    fill(p.key, p.batch * p.heads_kv * p.seqlen_kv * p.head_dim);
    fill(p.value, p.batch * p.heads_kv * p.seqlen_kv * p.v_head_dim);
    if (!p.bias.empty()) fill(p.bias, p.batch * p.heads_q * p.seqlen_q * p.seqlen_kv);
    if (!p.sinks.empty()) fill(p.sinks, p.heads_q);
  }
  return all;
}

// Heads-first rows with a gap of guards behind each.
struct Rows {
  Rows(int64_t batch, int64_t heads, int64_t rows, int64_t dim, std::vector<float> const& dense)
      : mDim(dim), mStorage(size_t(batch * heads * rows * (dim + kGap)), kGuard) {
    view = {mStorage.data(), heads * rows * (dim + kGap), rows * (dim + kGap), dim + kGap};
    for (size_t i = 0; i < dense.size(); ++i) mStorage[place(i)] = dense[i];
  }
  std::vector<float> dense() const {
    std::vector<float> out(mStorage.size() / size_t(mDim + kGap) * size_t(mDim));
    for (size_t i = 0; i < out.size(); ++i) out[i] = mStorage[place(i)];
    return out;
  }
  bool guardsHold() const {
    size_t const row = size_t(mDim + kGap);
    for (size_t i = 0; i < mStorage.size(); ++i) {
      if (i % row >= size_t(mDim) && !std::isnan(mStorage[i])) return false;
    }
    return true;
  }

  FlashTensor view;

 private:
  size_t place(size_t i) const { return i / size_t(mDim) * size_t(mDim + kGap) + i % size_t(mDim); }

  int64_t mDim;
  std::vector<float> mStorage;
};

void runHere(void*, void (*body)(void*, size_t), size_t count, void* user) {
  for (size_t i = 0; i < count; ++i) body(user, i);
}

// "" or what is wrong.
std::string run(Problem const& p, Kernels const& kernels) {
  Rows query(p.batch, p.heads_q, p.seqlen_q, p.head_dim, p.query);
  Rows key(p.batch, p.heads_kv, p.seqlen_kv, p.head_dim, p.key);
  Rows value(p.batch, p.heads_kv, p.seqlen_kv, p.v_head_dim, p.value);
  Rows output(p.batch, p.heads_q, p.seqlen_q, p.v_head_dim, {});
  std::vector<float> lse(size_t(p.batch * p.heads_q * p.seqlen_q), kGuard);

  FlashAttentionArgs args{};
  args.batch = int32_t(p.batch), args.q_num_heads = int32_t(p.heads_q),
  args.kv_num_heads = int32_t(p.heads_kv);
  args.seqlen_q = p.seqlen_q, args.seqlen_kv = p.seqlen_kv;
  args.head_dim = int32_t(p.head_dim), args.v_head_dim = int32_t(p.v_head_dim);
  args.query = query.view, args.key = key.view, args.value = value.view, args.output = output.view;
  args.scale = float(p.scale), args.softcap = float(p.softcap);
  args.causal = p.causal, args.diagonal = p.bottom_right;
  args.window_left = int32_t(p.window_left), args.window_right = int32_t(p.window_right);
  args.lse = lse.data();
  if (!p.bias.empty()) {
    int64_t const strides[] = {p.heads_q * p.seqlen_q * p.seqlen_kv, p.seqlen_q * p.seqlen_kv, p.seqlen_kv,
                               1};
    args.bias = p.bias.data();
    std::copy(strides, strides + 4, args.bias_stride);
  }
  if (!p.kv_lengths.empty()) args.kv_lengths = p.kv_lengths.data(), args.kv_lengths_stride = 1;
  if (!p.sinks.empty()) args.sinks = p.sinks.data(), args.sinks_stride = 1;
  flash_export::cpu::attention(args, {nullptr, runHere}, kernels);

  if (!output.guardsHold()) return "an element beside the output was written";
  reference::Result const truth = reference::attention<double>(p);
  for (size_t i = 0; i < lse.size(); ++i) {
    if (lse[i] != truth.lse[i] && !(std::fabs(lse[i] - truth.lse[i]) <= 1e-3)) return "the lse differs";
  }
  return reference::judge(output.dense(), truth.output, reference::attention<float>(p).output);
}

// Rows of two heads and three rows, each row more than 2^31 elements behind the last: address space of which
// a few pages are touched.
class FarRows {
 public:
  static constexpr int64_t kHeads = 2, kRows = 3, kHeadStep = 64, kRowStep = (int64_t{1} << 31) + 9;

  FarRows() : mStart(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0)) {}
  ~FarRows() {
    if (isThere()) munmap(mStart, kBytes);
  }
  FarRows(FarRows const&) = delete;
  bool isThere() const { return mStart != MAP_FAILED; }
  FlashTensor view() const { return {mStart, kRows * kRowStep, kHeadStep, kRowStep}; }
  float& at(int64_t head, int64_t row, int64_t d) const {
    return static_cast<float*>(mStart)[head * kHeadStep + row * kRowStep + d];
  }
  void put(std::vector<float> const& dense, int64_t dim) const {
    for (size_t i = 0; i < dense.size(); ++i) {
      int64_t const row = int64_t(i) / dim;
      at(row / kRows, row % kRows, int64_t(i) % dim) = dense[i];
    }
  }

 private:
  static constexpr size_t kBytes = size_t(kRows * kRowStep) * sizeof(float);
  static constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mStart;
};

// "" or what is wrong.
std::string runFarApart(Kernels const& kernels) {
  Problem p;
  p.heads_q = p.heads_kv = FarRows::kHeads;
  p.seqlen_q = p.seqlen_kv = FarRows::kRows;
  p.head_dim = p.v_head_dim = 21;
  p.scale = 0.4;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  int64_t const rows = p.heads_q * p.seqlen_q;
  for (auto* to : {&p.query, &p.key, &p.value}) to->resize(size_t(rows * p.head_dim));
  p.bias.resize(size_t(rows * p.seqlen_kv));
  for (auto* to : {&p.query, &p.key, &p.value, &p.bias}) {
    for (float& x : *to) x = normal(random);
  }
  FarRows const query, key, value, output, bias;
  for (FarRows const* far : {&query, &key, &value, &output, &bias}) {
    if (!far->isThere()) return "skipped: no address space of 26 GB a tensor";
  }
  query.put(p.query, p.head_dim), key.put(p.key, p.head_dim), value.put(p.value, p.head_dim);
  bias.put(p.bias, p.seqlen_kv);

  FlashAttentionArgs args{};
  args.batch = 1, args.q_num_heads = args.kv_num_heads = int32_t(p.heads_q);
  args.seqlen_q = p.seqlen_q, args.seqlen_kv = p.seqlen_kv;
  args.head_dim = args.v_head_dim = int32_t(p.head_dim);
  args.query = query.view(), args.key = key.view(), args.value = value.view(), args.output = output.view();
  args.scale = float(p.scale), args.window_left = args.window_right = -1;
  args.bias = bias.view().data;
  int64_t const strides[] = {0, FarRows::kHeadStep, FarRows::kRowStep, 1};
  std::copy(strides, strides + 4, args.bias_stride);
  flash_export::cpu::attention(args, {nullptr, runHere}, kernels);

  std::vector<float> found;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t d = 0; d < p.head_dim; ++d) {
      found.push_back(output.at(row / FarRows::kRows, row % FarRows::kRows, d));
    }
  }
  return reference::judge(found, reference::attention<double>(p).output,
                          reference::attention<float>(p).output);
}

// "" or what is wrong: a paged cache whose pages lie as far apart, in another order than their keys.
std::string runFarPages(Kernels const& kernels) {
  constexpr int32_t kPage = 16, kPages = int32_t(FarRows::kRows);
  int32_t const table[kPages] = {2, 0, 1};
  Problem p;
  p.heads_q = 2, p.heads_kv = 1;
  p.seqlen_q = 5, p.seqlen_kv = 41;
  p.head_dim = p.v_head_dim = 3;
  p.causal = p.bottom_right = true;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  p.query.resize(size_t(p.heads_q * p.seqlen_q * p.head_dim));
  for (auto* to : {&p.key, &p.value}) to->resize(size_t(p.seqlen_kv * p.head_dim));
  for (auto* to : {&p.query, &p.key, &p.value}) {
    for (float& x : *to) x = normal(random);
  }
  FarRows const key, value;
  if (!key.isThere() || !value.isThere()) return "skipped: no address space of 26 GB a tensor";
  for (int64_t i = 0; i < p.seqlen_kv * p.head_dim; ++i) {
    int64_t const row = i / p.head_dim;
    key.at(0, table[row / kPage], row % kPage * p.head_dim + i % p.head_dim) = p.key[size_t(i)];
    value.at(0, table[row / kPage], row % kPage * p.head_dim + i % p.head_dim) = p.value[size_t(i)];
  }
  std::vector<float> output(size_t(p.heads_q * p.seqlen_q * p.v_head_dim));
  auto const near = [&](std::vector<float>& of) {
    return FlashTensor{of.data(), 0, p.seqlen_q * p.head_dim, p.head_dim};
  };

  FlashAttentionArgs args{};
  args.batch = 1, args.q_num_heads = int32_t(p.heads_q), args.kv_num_heads = 1;
  args.seqlen_q = p.seqlen_q, args.seqlen_kv = kPages * kPage;
  args.head_dim = args.v_head_dim = int32_t(p.head_dim);
  args.query = near(p.query), args.output = near(output);
  args.key = {key.view().data, FarRows::kRowStep, 0, p.head_dim};
  args.value = {value.view().data, FarRows::kRowStep, 0, p.head_dim};
  args.scale = float(p.scale), args.causal = args.diagonal = 1;
  args.window_left = args.window_right = -1;
  int32_t const length = int32_t(p.seqlen_kv);
  args.kv_lengths = &length;
  args.page_table = table, args.page_table_stride = kPages, args.page_size = kPage, args.page_count = kPages;
  flash_export::cpu::attention(args, {nullptr, runHere}, kernels);
  return reference::judge(output, reference::attention<double>(p).output,
                          reference::attention<float>(p).output);
}

// Tasks in the order in which one thread takes them.
struct Task {
  void const* key;  // of the head
  int64_t last;     // key that its last row sees, and one
  int64_t pairs;    // of a query and a key
};
std::vector<Task> gTasks;

void noteTile(flash_export::cpu::RowProblem const& problem, flash_export::cpu::Row const* rows, int32_t count,
              float*) {
  gTasks.push_back({problem.key.start, rows[count - 1].last, 0});
  for (int32_t r = 0; r < count; ++r) gTasks.back().pairs += rows[r].last - rows[r].first;
}

void noteSlice(flash_export::cpu::RowProblem const& problem, flash_export::cpu::Row const* rows, int32_t,
               int32_t first, int32_t last, float*, float*) {
  gTasks.push_back({problem.key.start, rows[0].last, last - first});
}

void noCombine(flash_export::cpu::RowProblem const&, flash_export::cpu::Row const&, float const*, int64_t,
               int32_t, float*) {}

// "" or what is wrong: the tasks of long batch entries must come first.
std::string runUnequalLengths(Kernels kernels) {
  kernels.tile = noteTile, kernels.slice = noteSlice, kernels.combine = noCombine;
  std::vector<int32_t> const lengths{300, 5000, 0, 5000, 40};
  FlashAttentionArgs args{};
  args.batch = int32_t(lengths.size()), args.q_num_heads = args.kv_num_heads = 2;
  args.seqlen_kv = 5000, args.head_dim = args.v_head_dim = 8;
  args.kv_lengths = lengths.data(), args.kv_lengths_stride = 1;
  args.window_left = args.window_right = -1;
  int64_t const threads = std::max(1u, std::thread::hardware_concurrency());
  for (int64_t seqlen_q : {64, 1}) {
    args.seqlen_q = seqlen_q;
    gTasks.clear();
    flash_export::cpu::attention(args, {nullptr, runHere}, kernels);
    int64_t total = 0, longest = 0;
    for (Task const& task : gTasks) total += task.pairs, longest = std::max(longest, task.pairs);
    if (total != 2 * 10340 * seqlen_q) return "some pairs of query and key are nobody's task, or two tasks'";
    for (size_t i = 1; i < gTasks.size(); ++i) {
      if (gTasks[i].last > gTasks[i - 1].last) return "a long entry's task comes after a short one's";
    }
    bool const cut = seqlen_q == 1 && threads > 1;
    if (cut && longest > std::max<int64_t>(256, total / (4 * threads)) + 16) return "a slice is too long";
  }
  return "";
}

// "" or what is wrong: of each head the tiles with the most keys, the last under a causal mask, must come
// first, and every head's tiles one behind the other.
std::string runCausalTiles(Kernels kernels) {
  kernels.tile = noteTile;
  float keys[2] = {};
  FlashAttentionArgs args{};
  args.batch = 1, args.q_num_heads = args.kv_num_heads = 2;
  args.seqlen_q = args.seqlen_kv = 5000, args.head_dim = args.v_head_dim = 8;
  args.key = {keys, 0, 1, 0};  // never read
  args.causal = 1, args.window_left = args.window_right = -1;
  gTasks.clear();
  flash_export::cpu::attention(args, {nullptr, runHere}, kernels);
  int64_t total = 0, heads = 1;
  for (size_t i = 0; i < gTasks.size(); ++i) {
    total += gTasks[i].pairs;
    if (i == 0) continue;
    bool const same = gTasks[i].key == gTasks[i - 1].key;
    heads += !same;
    if (same && gTasks[i].last >= gTasks[i - 1].last) return "a tile of more keys comes after one of fewer";
    if (!same && gTasks[i].last != 5000) return "a head does not begin with its longest tile";
  }
  if (total != int64_t{2} * 5000 * 5001 / 2)
    return "some pairs of query and key are nobody's task, or two tasks'";
  return heads == 2 && gTasks.size() > 8 ? "" : "not every head's tiles are one behind the other";
}

// Every problem with `kernels` as they choose, in tiles alone and in slices alone; returns the failures.
int runAll(Kernels kernels) {
  int failed = 0;
  for (auto const& runOrder : {runUnequalLengths, runCausalTiles}) {
    std::string const order = runOrder(kernels);
    if (!order.empty()) std::printf("FAILED the order of tasks with %s: %s\n", kernels.name, order.c_str());
    failed += !order.empty();
  }
  std::vector<Problem> const all = problems();
  for (int slice_rows : {kernels.slice_rows, 0, 1 << 20}) {
    kernels.slice_rows = slice_rows;
    for (size_t i = 0; i < all.size(); ++i) {
      std::string const wrong = run(all[i], kernels);
      if (wrong.empty()) continue;
      std::printf("FAILED problem %zu with %s, slices up to %d rows: %s\n", i, kernels.name, slice_rows,
                  wrong.c_str());
      ++failed;
    }
    for (auto const& runFar : {runFarApart, runFarPages}) {
      std::string const far = runFar(kernels);
      if (!far.empty()) std::printf("rows far apart with %s: %s\n", kernels.name, far.c_str());
      failed += !far.empty() && far.rfind("skipped", 0) != 0;
    }
  }
  std::printf("%s: %d failed\n", kernels.name, failed);
  return failed;
}

}  // namespace

int main() {
  int failed = 0;
  for (char const* name : {"plain", "avx2", "avx512"}) {
    Kernels const* const kernels = flash_export::cpu::kernelsNamed(name);
    if (kernels == nullptr) {
      std::printf("skipped %s: this processor does not run it\n", name);
    } else {
      failed += runAll(*kernels);
    }
  }
  return failed == 0 ? 0 : 1;
}
