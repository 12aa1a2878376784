// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <cstring>

namespace flash_export::emulation {
namespace {

constexpr uint32_t kGranule = 4;

std::string number(uint64_t n) { return std::to_string(n); }

}  // namespace

void Clocks::start(int threads) {
  mThreads = threads;
  mKnown.assign(size_t(threads) * size_t(threads), 0);
  for (int t = 0; t < threads; ++t) mKnown[size_t(t) * size_t(threads) + size_t(t)] = 1;
}

void Clocks::join(int first, int count) {
  size_t const threads = size_t(mThreads);
  uint32_t* const joined = &mKnown[size_t(first) * threads];
  for (int t = first + 1; t < first + count; ++t) {
    uint32_t const* const known = &mKnown[size_t(t) * threads];
    for (size_t k = 0; k < threads; ++k) joined[k] = std::max(joined[k], known[k]);
  }
  for (int t = first + 1; t < first + count; ++t) {
    std::memcpy(&mKnown[size_t(t) * threads], joined, threads * sizeof(uint32_t));
  }
  // What a thread does from here on is new to the others.
  for (int t = first; t < first + count; ++t) ++mKnown[size_t(t) * threads + size_t(t)];
}

void SharedMemory::start(int threads, int bytes) {
  mWarps = threads / 32;
  mClocks.start(threads);
  size_t const granules = (size_t(bytes) + kGranule - 1) / kGranule;
  mBytes.assign(granules * kGranule, 0xff);
  mGranules.assign(granules, Granule{});
  mReaders.assign(granules * size_t(mWarps), Readers{});
}

// The next block starts after everything that the last one did, so its accesses need not be forgotten, only
// ordered.
void SharedMemory::startBlock() {
  std::fill(mBytes.begin(), mBytes.end(), 0xff);  // NaN in fp16, bf16 and fp32
  for (Granule& g : mGranules) g.written = g.in_flight = false;
  mClocks.join(0, mWarps * 32);
}

std::string SharedMemory::checkRange(uint32_t address, uint32_t bytes) const {
  if (address < kSharedBase || address - kSharedBase + uint64_t(bytes) > mBytes.size()) {
    return "touches " + number(bytes) + " bytes at shared address " + number(address) + ", outside the " +
           number(mBytes.size()) + " bytes from " + number(kSharedBase) + " on";
  }
  if (address % bytes != 0) {
    return "touches shared address " + number(address) + ", which is not aligned to " + number(bytes) +
           " bytes";
  }
  return "";
}

std::string SharedMemory::read(uint32_t address, uint32_t bytes, int thread, void* target) {
  if (std::string wrong = checkRange(address, bytes); !wrong.empty()) return wrong;
  uint32_t const first = (address - kSharedBase) / kGranule;
  for (uint32_t g = first; g < first + bytes / kGranule; ++g) {
    Granule const& granule = mGranules[g];
    auto const where = [&] { return "shared address " + number(kSharedBase + g * kGranule); };
    if (granule.in_flight)
      return "reads " + where() + " while a copy to it is still in flight (missing wait)";
    if (!granule.written) return "reads " + where() + ", which nothing has written";
    if (unordered(granule.writer, thread)) {
      return "reads " + where() + " that thread " + number(uint64_t(granule.writer.thread)) +
             " has written, with no barrier between (race)";
    }
    Readers& readers = mReaders[size_t(g) * size_t(mWarps) + size_t(thread / 32)];
    if (readers.newest.thread != thread) readers.other = readers.newest;
    readers.newest = {int16_t(thread), mClocks.now(thread)};
  }
  std::memcpy(target, at(address), bytes);
  return "";
}

std::string SharedMemory::noteWrite(uint32_t address, uint32_t bytes, int thread, bool in_flight) {
  uint32_t const first = (address - kSharedBase) / kGranule;
  for (uint32_t g = first; g < first + bytes / kGranule; ++g) {
    Granule& granule = mGranules[g];
    auto const where = [&] { return "shared address " + number(kSharedBase + g * kGranule); };
    if (granule.in_flight) return "overwrites " + where() + " while a copy to it is still in flight";
    if (unordered(granule.writer, thread)) {
      return "overwrites " + where() + " that thread " + number(uint64_t(granule.writer.thread)) +
             " has written, with no barrier between (race)";
    }
    Readers const* const readers = &mReaders[size_t(g) * size_t(mWarps)];
    for (int warp = 0; warp < mWarps; ++warp) {
      for (Access const* reader : {&readers[warp].newest, &readers[warp].other}) {
        if (unordered(*reader, thread)) {
          return "overwrites " + where() + " that thread " + number(uint64_t(reader->thread)) +
                 " may still be reading (missing barrier)";
        }
      }
    }
    granule = {true, in_flight, {int16_t(thread), mClocks.now(thread)}};
  }
  return "";
}

std::string SharedMemory::write(uint32_t address, uint32_t bytes, int thread, void const* source) {
  if (std::string wrong = checkRange(address, bytes); !wrong.empty()) return wrong;
  if (std::string wrong = noteWrite(address, bytes, thread, false); !wrong.empty()) return wrong;
  std::memcpy(at(address), source, bytes);
  return "";
}

std::string SharedMemory::startCopy(uint32_t address, uint32_t bytes, int thread) {
  if (std::string wrong = checkRange(address, bytes); !wrong.empty()) return wrong;
  if (std::string wrong = noteWrite(address, bytes, thread, true); !wrong.empty()) return wrong;
  std::memset(at(address), 0xff, bytes);
  return "";
}

std::string SharedMemory::land(uint32_t address, void const* source, uint32_t copied, uint32_t bytes,
                               int thread) {
  uint32_t const first = (address - kSharedBase) / kGranule;
  for (uint32_t g = first; g < first + bytes / kGranule; ++g) mGranules[g].in_flight = false;
  if (std::string wrong = noteWrite(address, bytes, thread, false); !wrong.empty()) return wrong;
  std::memset(at(address), 0, bytes);
  if (copied > 0) std::memcpy(at(address), source, copied);
  return "";
}

void GlobalMemory::add(char const* name, void const* begin, void const* end, bool writable) {
  mTensors.push_back({name, uintptr_t(begin), uintptr_t(end), writable});
}

void GlobalMemory::guard(void const* begin, void const* end) {
  mBands.push_back({uintptr_t(begin), uintptr_t(end)});
}

void GlobalMemory::unguard(void const* begin) {
  auto const same = [begin](Band const& band) { return band.begin == uintptr_t(begin); };
  mBands.erase(std::find_if(mBands.begin(), mBands.end(), same));
}

std::string GlobalMemory::check(void const* p, size_t bytes, size_t alignment, bool write) const {
  uintptr_t const address = uintptr_t(p);
  for (Band const& band : mBands) {
    if (address < band.end && address + bytes > band.begin) {
      return std::string(write ? "writes " : "reads ") + number(bytes) +
             " bytes outside every tensor; this is a guard band, " + number(address - band.begin) +
             " bytes from its start";
    }
  }
  std::string nearest = "; the launch has no tensor";
  uintptr_t distance = UINTPTR_MAX;
  bool only_input = false;
  for (Tensor const& t : mTensors) {
    if (address >= t.begin && address + bytes <= t.end) {
      if (!write || t.writable) {
        if (address % alignment == 0) return "";
        return "touches an address in '" + std::string(t.name) + "' that is not aligned to " +
               number(alignment) + " bytes";
      }
      only_input = true;
      nearest = std::string(" of the input '") + t.name + "'";
      continue;
    }
    bool const after = address + bytes > t.end;
    uintptr_t const away = after ? address + bytes - t.end : t.begin - address;
    if (!only_input && away < distance) {
      distance = away;
      nearest = "; the nearest is '" + std::string(t.name) + "', " + number(away) + " bytes " +
                (after ? "past its end" : "before its start");
    }
  }
  std::string const what = std::string(write ? "writes " : "reads ") + number(bytes) + " bytes";
  return only_input ? what + nearest : what + " outside every tensor" + nearest;
}

}  // namespace flash_export::emulation
