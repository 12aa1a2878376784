// SPDX-License-Identifier: Apache-2.0
// The emulated memories and what is known of every access to them.
//
// Shared memory is watched in granules of 4 bytes: never written (NaN until then), a copy in flight to it,
// last writer, recent readers. Order between threads is by vector clocks (Mattern 1989; FastTrack, Flanagan &
// Freund 2009): an access that no barrier puts behind a conflicting one is a race, whatever order the
// schedule happened to take.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flash_export::emulation {

constexpr uint32_t kSharedBase = 1024;  // the first address, so that 0 is never valid

// Clock k of thread t: how much of thread k's past is known to have happened before t's next step.
class Clocks {
 public:
  void start(int threads);
  void join(int first, int count);  // these threads met at a barrier
  uint32_t now(int thread) const { return of(thread, thread); }
  bool before(int past_thread, uint32_t past, int thread) const { return past <= of(thread, past_thread); }

 private:
  uint32_t of(int thread, int other) const {
    return mKnown[size_t(thread) * size_t(mThreads) + size_t(other)];
  }
  int mThreads = 0;
  std::vector<uint32_t> mKnown;
};

class SharedMemory {
 public:
  void start(int threads, int bytes);
  void startBlock();

  // Each returns "" or what is wrong with the access.
  std::string checkRange(uint32_t address, uint32_t bytes) const;
  std::string read(uint32_t address, uint32_t bytes, int thread, void* target);
  std::string write(uint32_t address, uint32_t bytes, int thread, void const* source);
  std::string startCopy(uint32_t address, uint32_t bytes, int thread);
  std::string land(uint32_t address, void const* source, uint32_t copied, uint32_t bytes, int thread);

  void barrier(int first, int count) { mClocks.join(first, count); }

 private:
  struct Access {
    int16_t thread = -1;
    uint32_t clock = 0;
  };
  // Of each warp the newest reader and the newest other one: whoever writes, one of them is another thread.
  struct Readers {
    Access newest, other;
  };
  struct Granule {
    bool written = false, in_flight = false;
    Access writer;
  };

  std::string noteWrite(uint32_t address, uint32_t bytes, int thread, bool in_flight);
  bool unordered(Access const& access, int thread) const {
    return access.thread >= 0 && access.thread != thread &&
           !mClocks.before(access.thread, access.clock, thread);
  }
  unsigned char* at(uint32_t address) { return mBytes.data() + (address - kSharedBase); }

  int mWarps = 0;
  Clocks mClocks;
  std::vector<unsigned char> mBytes;
  std::vector<Granule> mGranules;
  std::vector<Readers> mReaders;  // [granule, warp]
};

// The tensors that a launch may touch. An access outside every one of them, or a write to an input, is an
// error.
class GlobalMemory {
 public:
  void clear() { mTensors.clear(); }
  void add(char const* name, void const* begin, void const* end, bool writable);
  std::string check(void const* p, size_t bytes, size_t alignment, bool write) const;

  // Memory that is no tensor's, whatever a launch says; clear() leaves it.
  void guard(void const* begin, void const* end);
  void unguard(void const* begin);

 private:
  struct Band {
    uintptr_t begin, end;
  };
  struct Tensor {
    char const* name;
    uintptr_t begin, end;
    bool writable;
  };
  std::vector<Tensor> mTensors;
  std::vector<Band> mBands;
};

}  // namespace flash_export::emulation
