// SPDX-License-Identifier: Apache-2.0
// The emulation itself: small kernels that are right, and the same with one fault, which must be named.
#include <set>
#include <string>

#include "../runner.h"
#include "device_ops.h"
#include "emulation/launch_emulated.h"
#include "emulation/numbers.h"

using namespace flash_export;
using namespace flash_export::ops;

namespace {

constexpr int kThreads = 64;
constexpr int kSharedBytes = 4096;

struct alignas(16) Buffer {
  float in[256];
  float out[256];
};

// What the emulation says of a kernel that may read `in` and write `out`.
std::string launch(void (*kernel)(Buffer&), Buffer& buffer, uint64_t seed = 1, int64_t blocks = 1) {
  struct Context {
    void (*kernel)(Buffer&);
    Buffer& buffer;
  } const context{kernel, buffer};
  emulation::Machine& m = emulation::machine();
  m.global.clear();
  m.global.add("in", buffer.in, buffer.in + 256, false);
  m.global.add("out", buffer.out, buffer.out + 256, true);
  return m.launch(
      blocks, kThreads, kSharedBytes, seed,
      [](void const* c) {
        auto const& the_context = *static_cast<Context const*>(c);
        the_context.kernel(the_context.buffer);
      },
      &context);
}

// The fault must be named on every schedule, with this file and a line.
void expectFault(void (*kernel)(Buffer&), char const* words) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Buffer buffer{};
    std::string const error = launch(kernel, buffer, seed);
    EXPECT(error.find(words) != std::string::npos, "'" << error << "' lacks '" << words << "'");
    EXPECT(error.find("test_emulation.cpp:") != std::string::npos, error);
  }
}

void expectFine(void (*kernel)(Buffer&)) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Buffer buffer{};
    std::string const error = launch(kernel, buffer, seed, 2);
    EXPECT(error.empty(), error);
  }
}

uint32_t slot(int thread) { return sharedBase() + uint32_t(thread) * 16; }

}  // namespace

TEST(a_copy_that_is_waited_for_and_met_is_fine) {
  expectFine([](Buffer& b) {
    copyAsync(slot(threadIndex()), b.in + threadIndex() * 4, 16);
    copyAsyncCommit();
    copyAsyncWait<0>();
    syncThreads();
    Words4 const words = loadShared128(slot(63 - threadIndex()));
    storeGlobal128(b.out + threadIndex() * 4, words);
  });
}

TEST(a_missing_wait_is_named) {
  expectFault(
      [](Buffer& b) {
        copyAsync(slot(threadIndex()), b.in, 16);
        copyAsyncCommit();
        syncThreads();
        loadShared128(slot(63 - threadIndex()));
        copyAsyncWait<0>();
      },
      "still in flight (missing wait)");
}

TEST(waiting_for_all_but_the_newest_copy_lands_the_older_ones_only) {
  expectFine([](Buffer& b) {
    copyAsync(slot(threadIndex()), b.in, 16);
    copyAsyncCommit();
    copyAsync(slot(64 + threadIndex()), b.in, 16);
    copyAsyncCommit();
    copyAsyncWait<1>();
    loadShared128(slot(threadIndex()));
    copyAsyncWait<0>();
  });
  expectFault(
      [](Buffer& b) {
        copyAsync(slot(threadIndex()), b.in, 16);
        copyAsyncCommit();
        copyAsync(slot(64 + threadIndex()), b.in, 16);
        copyAsyncCommit();
        copyAsyncWait<1>();
        loadShared128(slot(64 + threadIndex()));
        copyAsyncWait<0>();
      },
      "still in flight");
}

TEST(a_copy_that_nobody_waits_for_is_named) {
  expectFault(
      [](Buffer& b) {
        copyAsync(slot(threadIndex()), b.in, 16);
        copyAsyncCommit();
      },
      "cp.async at test_emulation.cpp");
}

TEST(a_missing_barrier_is_named_whatever_order_the_schedule_takes) {
  // If the reader comes first, nothing is there yet; if it comes last, only the clocks can tell.
  expectFault(
      [](Buffer&) {
        storeShared64(slot(threadIndex()), {{1u, 2u}});
        syncWarp();
        loadShared64(slot(63 - threadIndex()));
      },
      "shared address");
  std::set<bool> races;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Buffer buffer{};
    std::string const error = launch(
        [](Buffer&) {
          if (threadIndex() == 0) storeShared64(slot(0), {{1u, 2u}});
          if (threadIndex() == 32) loadShared64(slot(0));
        },
        buffer, seed);
    EXPECT(!error.empty());
    races.insert(error.find("with no barrier between (race)") != std::string::npos);
  }
  EXPECT(races.size() == 2, "both orders occur in 20 schedules");
}

TEST(overwriting_what_another_lane_may_still_read_is_named) {
  expectFault(
      [](Buffer&) {
        storeShared64(slot(threadIndex()), {{1u, 2u}});
        syncThreads();
        loadShared64(slot((threadIndex() + 1) % 64));
        shuffleXor(1.0f, 1);  // lanes meet, but shuffles order no memory
        storeShared64(slot(threadIndex()), {{3u, 4u}});
      },
      "may still be reading (missing barrier)");
  expectFine([](Buffer&) {
    storeShared64(slot(threadIndex()), {{1u, 2u}});
    syncThreads();
    loadShared64(slot((threadIndex() + 1) % 64));
    syncThreads();
    storeShared64(slot(threadIndex()), {{3u, 4u}});
  });
}

TEST(two_threads_that_write_one_place_are_named) {
  expectFault([](Buffer&) { storeShared32(slot(0), uint32_t(threadIndex())); },
              "has written, with no barrier");
}

TEST(shared_memory_that_nobody_wrote_is_not_read) {
  expectFault([](Buffer&) { loadShared64(slot(threadIndex())); }, "which nothing has written");
}

TEST(shared_memory_ends_where_it_ends) {
  expectFault([](Buffer&) { storeShared32(sharedBase() + kSharedBytes, 0u); }, "outside the 4096 bytes");
  expectFault([](Buffer&) { storeShared32(sharedBase() - 4, 0u); }, "outside the 4096 bytes");
  expectFault([](Buffer&) { storeShared64(sharedBase() + uint32_t(threadIndex()) * 16 + 4, {{0u, 0u}}); },
              "not aligned to 8 bytes");
}

TEST(global_memory_is_the_tensors_and_nothing_else) {
  expectFault([](Buffer& b) { loadGlobal(b.in - 1); },
              "reads 4 bytes outside every tensor; the nearest is 'in', 4");
  expectFault([](Buffer& b) { storeBits(b.out + 256, 1u); }, "writes 4 bytes outside every tensor");
  expectFault([](Buffer& b) { storeBits(b.in, 1u); }, "of the input 'in'");
  expectFault([](Buffer& b) { copyAsync(slot(threadIndex()), b.in + 1, 16); }, "not aligned to 16 bytes");
}

TEST(a_copy_of_no_bytes_reads_nothing_and_zeroes) {
  expectFine([](Buffer& b) {
    copyAsync(slot(threadIndex()), b.out + 100000, 0);
    copyAsyncCommit();
    copyAsyncWait<0>();
    storeGlobal128(b.out + threadIndex() * 4, loadShared128(slot(threadIndex())));
  });
}

TEST(divergent_warps_and_deadlocks_are_named) {
  expectFault([](Buffer&) { lane() < 7 ? syncWarp() : void(shuffleXor(0.0f, 1)); }, "is divergent");
  expectFault(
      [](Buffer&) {
        if (threadIndex() != 5) syncThreads();
      },
      "deadlock");
}

TEST(ldmatrix_hands_out_rows_and_transposed_columns) {
  auto const kernel = [](Buffer& b) {
    for (int i = 0; i < 4; ++i) {  // element (matrix, row, column) = 64 * matrix + 8 * row + column
      if (warp() == 0)
        storeShared32(sharedBase() + uint32_t(lane() * 16 + i * 4),
                      uint32_t(lane() * 8 + i * 2) | uint32_t(lane() * 8 + i * 2 + 1) << 16);
    }
    syncThreads();
    uint32_t rows[4], columns[4];
    ldmatrix(rows, sharedBase() + uint32_t(lane()) * 16);
    ldmatrixTransposed(columns, sharedBase() + uint32_t(lane()) * 16);
    bool good = true;
    for (int k = 0; k < 4; ++k) {
      for (int half = 0; half < 2; ++half) {
        int const major = lane() / 4, minor = lane() % 4 * 2 + half;
        good = good && ((rows[k] >> (16 * half)) & 0xffff) == uint32_t(64 * k + 8 * major + minor);
        good = good && ((columns[k] >> (16 * half)) & 0xffff) == uint32_t(64 * k + 8 * minor + major);
      }
    }
    storeBits(b.out + threadIndex(), good ? 1u : 0u);
  };
  Buffer buffer{};
  std::string const error = launch(kernel, buffer);
  EXPECT(error.empty(), error);
  for (int t = 0; t < kThreads; ++t) EXPECT(bitsOf(buffer.out[t]) == 1u, "lane " << t);
  EXPECT(emulation::machine().bank_conflicts == 0);
}

TEST(ldmatrix_counts_bank_conflicts) {
  Buffer buffer{};
  launch(
      [](Buffer&) {
        if (warp() == 0) {
          for (int i = 0; i < 4; ++i) storeShared64(sharedBase() + uint32_t(lane() * 128), {{0u, 0u}});
          for (int i = 0; i < 4; ++i) storeShared64(sharedBase() + uint32_t(lane() * 128 + 8), {{0u, 0u}});
        }
        syncThreads();
        uint32_t r[4];
        if (warp() == 0) ldmatrix(r, sharedBase() + uint32_t(lane() * 128));  // all rows in one bank group
      },
      buffer);
  EXPECT(emulation::machine().bank_conflicts == 4 * 7, emulation::machine().bank_conflicts);
}

namespace {

// PTX ISA, mma.m16n8k16: where each lane's elements lie.
template <class T>
void multiplyOnce(Buffer& b) {
  int const g = lane() / 4, t = lane() % 4 * 2;
  auto const element = [](int row, int column) { return float((row * 7 + column * 3) % 11) - 5.0f; };
  auto const pair = [&](int row, int column) {
    return packPair<T>(element(row, column), element(row, column + 1));
  };
  uint32_t const a[4] = {pair(g, t), pair(g + 8, t), pair(g, t + 8), pair(g + 8, t + 8)};
  auto const b_pair = [&](int row) { return packPair<T>(element(g, row + 1), element(g, row + 2)); };
  float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  mma<T>(d, a, b_pair(t), b_pair(t + 8));
  bool good = true;
  for (int j = 0; j < 4; ++j) {
    int const row = g + j / 2 * 8, column = t + j % 2;
    float wanted = float(j + 1);
    for (int k = 0; k < 16; ++k) wanted += element(row, k) * element(column, k + 1);
    good = good && d[j] == wanted;
  }
  storeBits(b.out + threadIndex(), good ? 1u : 0u);
}

}  // namespace

TEST(mma_multiplies_in_the_fragment_layout) {
  for (auto kernel : {&multiplyOnce<Half>, &multiplyOnce<BFloat>}) {
    Buffer buffer{};
    std::string const error = launch(kernel, buffer);
    EXPECT(error.empty(), error);
    for (int t = 0; t < kThreads; ++t) EXPECT(bitsOf(buffer.out[t]) == 1u, "lane " << t);
  }
}

TEST(shuffles_take_the_named_lane) {
  expectFine([](Buffer& b) {
    float const from_neighbour = shuffleXor(float(lane()), 3);
    float const from_seven = shuffle(float(lane()), 7);
    storeBits(b.out + threadIndex(),
              bitsOf(from_neighbour == float(lane() ^ 3) && from_seven == 7.0f ? 1.0f : 0.0f));
  });
}

TEST(the_seed_decides_the_schedule) {
  auto const firstWarpToArrive = [](uint64_t seed) {
    Buffer buffer{};
    std::string const error = launch([](Buffer&) { storeShared32(slot(0), 1u); }, buffer, seed);
    return error;  // names the second thread to write
  };
  std::set<std::string> errors;
  for (uint64_t seed = 1; seed < 20; ++seed) {
    errors.insert(firstWarpToArrive(seed));
    EXPECT(firstWarpToArrive(seed) == firstWarpToArrive(seed), "a seed repeats its schedule");
  }
  EXPECT(errors.size() > 10, errors.size() << " different schedules in 19");
}

TEST(a_guard_band_is_no_part_of_the_tensor_that_it_lies_in_as_long_as_it_lives) {
  auto const write = [](Buffer& b) { storeGlobal128(b.out + threadIndex() * 4, Words4{}); };
  Buffer buffer{};
  {
    emulation::GuardBand const band(buffer.out + 21 * 4, 1);
    std::string const error = launch(write, buffer);
    EXPECT(error.find("thread 21: st.global") != std::string::npos, error);
    EXPECT(error.find("16 bytes outside every tensor; this is a guard band, 0 bytes") != std::string::npos,
           error);
  }
  EXPECT(launch(write, buffer).empty());
}
