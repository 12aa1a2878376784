// SPDX-License-Identifier: Apache-2.0
// Cuts a problem into tasks and hands them to the host's threads: tiles of many rows, or slices of the keys
// where there are few rows.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "kernels/geometry.h"
#include "kernels/reasons.h"

namespace flash_export::cpu {
namespace {

using kernels::Band;
using kernels::ceilDiv;
using kernels::KeySpan;

constexpr int64_t kTasksPerThread = 4;   // so that the last ones, the shortest, even out
constexpr int64_t kSmallestSlice = 256;  // keys; fewer are not worth a task

int64_t elementSize(int32_t dtype) { return dtype == kFlashFloat32 ? 4 : 2; }

void* at(void const* start, int64_t elements, int32_t dtype) {
  return static_cast<char*>(const_cast<void*>(start)) + elements * elementSize(dtype);
}

int64_t threadCount() {
  static int64_t const count = std::max<int64_t>(1, std::thread::hardware_concurrency());  // asks the kernel
  return count;
}

// Floats on 64 bytes.
class Room {
 public:
  explicit Room(int64_t floats)
      : mStart(static_cast<float*>(std::aligned_alloc(64, size_t(ceilDiv(floats * 4 + 1, 64) * 64)))) {
    if (mStart == nullptr) throw std::bad_alloc();
  }
  float* get() const { return mStart.get(); }

 private:
  struct Free {
    void operator()(float* start) const { std::free(start); }
  };
  std::unique_ptr<float, Free> mStart;
};

// A pair of batch entry and key head: the rows that share keys. Row r is query r / group of its group's head
// r % group, so neighbours see nearly the same keys.
struct Head {
  int64_t batch, kv_head;
};

// A batch entry and what a head of it has to do.
struct Entry {
  int64_t batch;
  int64_t first, last;  // some query sees the keys first <= j < last
  int64_t pairs;        // of a query and a key that it sees
};

class Problem {
 public:
  explicit Problem(FlashAttentionArgs const& args)
      : mArgs(args), mGroup(args.q_num_heads / args.kv_num_heads) {
    for (int64_t batch = 0; batch < args.batch; ++batch) {
      bool const same = batch > 0 && (args.kv_lengths == nullptr || args.kv_lengths_stride == 0);
      mEntries.push_back(same ? mEntries.front() : makeEntry(batch));
      mEntries.back().batch = batch;
    }
    std::stable_sort(mEntries.begin(), mEntries.end(),
                     [](Entry const& a, Entry const& b) { return a.pairs > b.pairs; });
  }

  int64_t heads() const { return int64_t{mArgs.batch} * mArgs.kv_num_heads; }
  int64_t rowsOfHead() const { return mArgs.seqlen_q * mGroup; }
  // The batch entries, those with the most work first: what a thread takes last is short.
  std::vector<Entry> const& entries() const { return mEntries; }
  Head head(int64_t index) const {
    return {mEntries[size_t(index / mArgs.kv_num_heads)].batch, index % mArgs.kv_num_heads};
  }

  RowProblem shared(Head head) const {
    FlashAttentionArgs const& a = mArgs;
    bool const paged = a.page_table != nullptr;
    auto const rows = [&](FlashTensor const& t) -> KeyRows {
      if (t.data == nullptr) return {};
      int64_t const first = (paged ? 0 : head.batch * t.batch_stride) + head.kv_head * t.head_stride;
      return {at(t.data, first, a.dtype), t.row_stride, t.batch_stride};
    };
    RowProblem p{};
    p.dtype = a.dtype, p.bias_dtype = a.bias_dtype;
    p.head_dim = a.head_dim, p.v_head_dim = a.v_head_dim;
    p.scale = a.scale, p.softcap = a.softcap;
    p.key = rows(a.key), p.value = rows(a.value);
    if (paged) p.pages = {a.page_table + head.batch * a.page_table_stride, a.page_size, a.page_count};
    p.bias_stride = a.bias_stride[3];
    return p;
  }

  void makeRows(Head head, int64_t first_row, Row* rows, int64_t count) const {
    Band const band = bandOf(head.batch);
    int64_t query = first_row / mGroup, member = first_row % mGroup;
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = makeRow(head, band, query, head.kv_head * mGroup + member);
      if (++member == mGroup) ++query, member = 0;
    }
  }

 private:
  Entry makeEntry(int64_t batch) const {
    Band const band = bandOf(batch);
    Entry entry{batch, 0, 0, 0};
    for (int64_t i = 0; i < mArgs.seqlen_q; ++i) {
      KeySpan const keys = keysOf(band, i);
      if (keys.first == keys.last) continue;
      entry.first = entry.pairs == 0 ? keys.first : std::min<int64_t>(entry.first, keys.first);
      entry.last = std::max<int64_t>(entry.last, keys.last);
      entry.pairs += keys.last - keys.first;
    }
    return entry;
  }

  // 0 and 0: none.
  static KeySpan keysOf(Band band, int64_t query) {
    KeySpan const span = kernels::visibleKeys(band, int(query), 0);
    int const first = std::max(span.first, 0);
    return first < span.last ? KeySpan{first, span.last} : KeySpan{0, 0};
  }

  Band bandOf(int64_t batch) const {
    FlashAttentionArgs const& a = mArgs;
    int64_t length = a.seqlen_kv;
    if (a.kv_lengths != nullptr) {
      length = std::clamp<int64_t>(a.kv_lengths[batch * a.kv_lengths_stride], 0, length);
    }
    return kernels::makeBand(a.causal, a.diagonal, a.window_left, a.window_right, int(a.seqlen_q),
                             int(length));
  }

  Row makeRow(Head head, Band band, int64_t i, int64_t q_head) const {
    FlashAttentionArgs const& a = mArgs;
    auto const start = [&](FlashTensor const& t) {
      return at(t.data, head.batch * t.batch_stride + q_head * t.head_stride + i * t.row_stride, a.dtype);
    };
    Row row{};
    row.query = start(a.query);
    row.output = start(a.output);
    if (a.bias != nullptr) {
      int64_t const* const stride = a.bias_stride;
      row.bias = at(a.bias, head.batch * stride[0] + q_head * stride[1] + i * stride[2], a.bias_dtype);
    }
    if (a.lse != nullptr) row.lse = a.lse + (head.batch * a.q_num_heads + q_head) * a.seqlen_q + i;
    row.sink = a.sinks != nullptr ? a.sinks[q_head * a.sinks_stride] : -INFINITY;
    KeySpan const keys = keysOf(band, i);
    row.first = keys.first, row.last = keys.last;
    return row;
  }

  FlashAttentionArgs const& mArgs;
  int64_t mGroup;
  std::vector<Entry> mEntries;
};

// Hands out 0 ... count-1, in this order, to one worker a thread; each worker makes its own room once.
template <class Work>
void runTasks(Parallel const& parallel, int64_t count, int64_t room_floats, Work const& work) {
  struct Shared {
    Work const& work;
    int64_t count, room_floats;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};
  } shared{work, count, room_floats};
  auto const worker = [](void* user, size_t) {
    Shared& s = *static_cast<Shared*>(user);
    try {
      int64_t task = s.next.fetch_add(1);
      if (task >= s.count) return;
      Room const room(s.room_floats);
      for (; task < s.count; task = s.next.fetch_add(1)) s.work(task, room.get());
    } catch (std::bad_alloc const&) {  // A worker must not throw through the host.
      s.out_of_memory.store(true);
    }
  };
  parallel.run(parallel.host, worker, size_t(std::min(count, threadCount())), &shared);
  if (shared.out_of_memory.load()) throw std::bad_alloc();
}

void runTiles(Problem const& problem, Parallel const& parallel, Kernels const& kernels) {
  int64_t const rows = problem.rowsOfHead();
  int64_t const strips = ceilDiv(rows, kernels.strip_rows);
  int64_t const wanted = ceilDiv(strips * problem.heads(), kTasksPerThread * threadCount());
  int64_t const tile =
      kernels.strip_rows * std::clamp<int64_t>(wanted, 1, kernels.tile_rows / kernels.strip_rows);
  int64_t const tiles = ceilDiv(rows, tile);
  int64_t const row_floats = ceilDiv(int64_t{sizeof(Row)} * tile, 64) * 16;
  int64_t const room_floats = row_floats + kernels.tileScratch(problem.shared({0, 0}));
  runTasks(parallel, problem.heads() * tiles, room_floats, [&](int64_t task, float* room) {
    // Head by head, so that its keys stay near, those of long entries first; within a head the last rows
    // first: under a causal mask they have the most keys.
    Head const head = problem.head(task / tiles);
    int64_t const first = (tiles - 1 - task % tiles) * tile, count = std::min(tile, rows - first);
    Row* const row = reinterpret_cast<Row*>(room);
    problem.makeRows(head, first, row, count);
    kernels.tile(problem.shared(head), row, int32_t(count), room + row_floats);
  });
}

// The slices of a batch entry's heads: tasks number first_task and on, `slices` a head. Partial results of
// more than one are kept for all heads, from slice first_kept on.
struct SlicedEntry {
  Entry entry;
  int64_t slices, first_task, first_kept;
};

// Cuts so that every thread has a few slices of nearly one length, whatever the entries' lengths are.
std::vector<SlicedEntry> cutSlices(Problem const& problem, int64_t kv_heads) {
  int64_t keys = 0, tasks = 0, kept = 0;
  for (Entry const& entry : problem.entries()) keys += (entry.last - entry.first) * kv_heads;
  int64_t const fair = std::max(kSmallestSlice, ceilDiv(keys, kTasksPerThread * threadCount()));
  std::vector<SlicedEntry> cut;
  cut.reserve(problem.entries().size());
  for (Entry const& entry : problem.entries()) {
    int64_t const length = entry.last - entry.first;
    int64_t const slices = threadCount() == 1 ? 1 : std::max<int64_t>(1, ceilDiv(length, fair));
    cut.push_back({entry, slices, tasks, kept});
    tasks += slices * kv_heads;
    if (slices > 1) kept += slices * kv_heads;
  }
  return cut;
}

// A head's rows and what its slices need, in a worker's room.
struct SliceRoom {
  Row* rows;
  float* partials;  // of one slice
  float* scratch;
};

void runSlices(Problem const& problem, FlashAttentionArgs const& args, Parallel const& parallel,
               Kernels const& kernels) {
  int64_t const rows = problem.rowsOfHead(), kv_heads = args.kv_num_heads;
  std::vector<SlicedEntry> const cut = cutSlices(problem, kv_heads);
  SlicedEntry const& end = cut.back();
  int64_t const tasks = end.first_task + end.slices * kv_heads;
  RowProblem const any = problem.shared({0, 0});
  int64_t const size = kernels.partialSize(any), slice_size = size * rows;
  int64_t const kept_slices = end.first_kept + (end.slices > 1 ? end.slices * kv_heads : 0);
  Room const kept(slice_size * kept_slices);

  int64_t const row_floats = ceilDiv(int64_t{sizeof(Row)} * rows, 64) * 16;
  int64_t const scratch_floats =
      std::max(kernels.sliceScratch(any, int32_t(rows)), kernels.combineScratch(any));
  auto const cutRoom = [&](float* room) -> SliceRoom {
    return {reinterpret_cast<Row*>(room), room + row_floats, room + row_floats + slice_size};
  };
  auto const combine = [&](Head head, SliceRoom const& room, float const* partials, int64_t slices) {
    for (int64_t r = 0; r < rows; ++r) {
      kernels.combine(problem.shared(head), room.rows[r], partials + r * size, slice_size, int32_t(slices),
                      room.scratch);
    }
  };
  int64_t const room_floats = row_floats + slice_size + scratch_floats;
  runTasks(parallel, tasks, room_floats, [&](int64_t task, float* floats) {
    SliceRoom const room = cutRoom(floats);
    SlicedEntry const& of = *std::prev(std::upper_bound(
        cut.begin(), cut.end(), task, [](int64_t t, SlicedEntry const& s) { return t < s.first_task; }));
    int64_t const slice = task - of.first_task;
    Head const head{of.entry.batch, slice / of.slices};
    int64_t const length = ceilDiv(ceilDiv(of.entry.last - of.entry.first, of.slices), 16) * 16;
    int64_t const from = std::min(of.entry.last, of.entry.first + slice % of.slices * length);
    int64_t const to = std::min(of.entry.last, from + length);
    float* const partials = of.slices > 1 ? kept.get() + (of.first_kept + slice) * slice_size : room.partials;
    problem.makeRows(head, 0, room.rows, rows);
    kernels.slice(problem.shared(head), room.rows, int32_t(rows), int32_t(from), int32_t(to), partials,
                  room.scratch);
    if (of.slices == 1) combine(head, room, partials, 1);
  });
  if (kept_slices == 0) return;
  Room const floats(room_floats);
  SliceRoom const room = cutRoom(floats.get());
  for (SlicedEntry const& of : cut) {
    for (int64_t kv_head = 0; of.slices > 1 && kv_head < kv_heads; ++kv_head) {
      Head const head{of.entry.batch, kv_head};
      problem.makeRows(head, 0, room.rows, rows);
      combine(head, room, kept.get() + (of.first_kept + kv_head * of.slices) * slice_size, of.slices);
    }
  }
}

}  // namespace

int64_t mostSliceRows(FlashAttentionArgs const& args, Kernels const& kernels, int64_t processors) {
  // Up to so many rows slices take no longer than a tile, or little; but a tile widens 16-bit keys once and
  // not for every row, and few keys need less of what a slice begins with (measured with 1 to 8 rows of 1 to
  // 256 keys).
  bool const fewer = args.dtype != kFlashFloat32 || args.seqlen_kv < 16;
  int64_t const rows = fewer ? kernels.slice_rows / 2 : kernels.slice_rows;
  // So few rows are one tile, which is one thread's work, and slices are every thread's. No more than twice
  // the rows, however many processors there are: the session may have one thread, which takes for them up to
  // 1.6 times as long as for a tile in fp32, 1.7 in bf16 and 2.5 in fp16 (measured with 64 to 2,048 keys).
  int64_t const heads = int64_t{args.batch} * args.kv_num_heads;
  return processors >= 2 * heads ? 2 * rows : rows;
}

void attention(FlashAttentionArgs const& args, Parallel const& parallel, Kernels const& kernels) {
  if (args.batch == 0 || args.seqlen_q == 0) return;
  Problem const problem(args);
  if (problem.rowsOfHead() <= mostSliceRows(args, kernels, threadCount())) {
    runSlices(problem, args, parallel, kernels);
  } else {
    runTiles(problem, parallel, kernels);
  }
}

}  // namespace flash_export::cpu

extern "C" int32_t flashAttentionWhyUnsupported(FlashAttentionArgs const* args, char* text,
                                                size_t text_size) {
  namespace kernels = flash_export::kernels;
  kernels::Reasons why;
  why.inRange("head_dim", args->head_dim, 1, 65535);
  why.inRange("v_head_dim", args->v_head_dim, 1, 65535);
  why.inRange("seqlen_q", args->seqlen_q, 0, kernels::kMaxSeqlen);
  why.inRange("seqlen_kv", args->seqlen_kv, 0, kernels::kMaxKeys);
  if (args->page_table != nullptr) {
    why.pages(args->page_size);
    if (args->batch > 0 && args->seqlen_kv > 0) why.inRange("page_count", args->page_count, 1, INT32_MAX);
  }
  return kernels::joinReasons(why.sentences(), text, text_size);
}
