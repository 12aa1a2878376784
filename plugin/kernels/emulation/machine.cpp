// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

#if !defined(__x86_64__)
#error "the emulation switches fibers in x86-64 assembly; on this host build without FLASH_EXPORT_TESTS"
#endif

// Saves the running fiber's stack pointer to *save and continues the one whose stack pointer is `to`. Only
// what a call preserves (System V ABI) goes over, so a switch takes 11 ns; ucontext, with its two system
// calls, takes 503.
extern "C" void flashEmulationSwitch(void** save, void* to);
asm(R"(
.text
.local flashEmulationSwitch
.type flashEmulationSwitch,@function
flashEmulationSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashEmulationSwitch, .-flashEmulationSwitch
)");

namespace flash_export::emulation {
namespace {

constexpr size_t kStackBytes = 64 * 1024;

uint64_t nextRandom(uint64_t& state) {  // SplitMix64: Steele, Lea & Flood 2014
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

std::string text(Site site) {
  char const* const slash = std::strrchr(site.file, '/');
  return std::string(slash == nullptr ? site.file : slash + 1) + ":" + std::to_string(site.line);
}

Machine& machine() {
  static thread_local Machine the_machine;
  return the_machine;
}

std::string Machine::launch(int64_t blocks, int threads, int shared_bytes, uint64_t seed,
                            void (*body)(void const*), void const* context) {
  if (threads % 32 != 0 || threads > kMaxThreads) return "the emulation takes whole warps, 16 at most";
  mThreads = threads;
  mBody = body;
  mContext = context;
  mRandom = seed;
  mError.clear();
  bank_conflicts = 0;
  shared.start(threads, shared_bytes);
  mFibers.resize(std::max(mFibers.size(), size_t(threads)));
  for (int64_t block = 0; block < blocks && mError.empty(); ++block) {
    startBlock(block);
    runBlock();
  }
  return mError;
}

void Machine::startBlock(int64_t block) {
  mBlock = block;
  mLive = mThreads;
  shared.startBlock();
  mBlockMeeting = Meeting{};
  for (Meeting& meeting : mWarpMeetings) meeting = Meeting{};
  for (int t = 0; t < mThreads; ++t) {
    Fiber& fiber = mFibers[size_t(t)];
    fiber.done = false;
    fiber.waits_on = nullptr;
    fiber.open.clear();
    fiber.groups.clear();
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    // A fiber of the last block was left where it stood, with what AddressSanitizer knew of its frames.
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack.get(), kStackBytes);
    // As the switch leaves it: six registers, the return address, and one word so that the entry is aligned
    // as after a call.
    auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack.get()) + kStackBytes) &
                                         ~uintptr_t(63));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Machine::fiberMain);
    top -= 6;
    std::fill(top, top + 6, nullptr);
    fiber.stack_pointer = top;
  }
}

void Machine::runBlock() {
  std::vector<int> order(size_t(mThreads), 0);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[nextRandom(mRandom) % i]);
  while (mLive > 0 && mError.empty()) {
    bool ran = false;
    for (int t : order) {
      Fiber const& fiber = mFibers[size_t(t)];
      if (fiber.done || (fiber.waits_on != nullptr && *fiber.waits_on == fiber.wait_value)) continue;
      ran = true;
      resume(t);
      if (!mError.empty()) return;
    }
    if (!ran) reportDeadlock();
  }
}

void Machine::resume(int thread) {
  mThread = thread;
  flashEmulationSwitch(&mSchedulerStack, mFibers[size_t(thread)].stack_pointer);
}

void Machine::leave() { flashEmulationSwitch(&mFibers[size_t(mThread)].stack_pointer, mSchedulerStack); }

void Machine::fiberMain() {
  Machine& m = machine();
  m.mBody(m.mContext);
  Fiber& fiber = m.mFibers[size_t(m.mThread)];
  if (!fiber.open.empty() || !fiber.groups.empty()) {
    AsyncCopy const& copy = fiber.open.empty() ? fiber.groups.front().front() : fiber.open.front();
    m.fail("cp.async", copy.site, "is still in flight as its thread exits");
  }
  fiber.done = true;
  --m.mLive;
  for (;;) m.leave();
}

void Machine::fail(char const* operation, Site site, std::string const& what) {
  if (mError.empty()) {
    mError = "block " + std::to_string(mBlock) + ", thread " + std::to_string(mThread) + ": " + operation +
             " at " + text(site) + " " + what;
  }
  for (;;) leave();
}

void Machine::reportDeadlock() {
  mError = "block " + std::to_string(mBlock) + ": deadlock;";
  int shown = 0;
  for (int t = 0; t < mThreads && shown < 4; ++t) {
    Fiber const& fiber = mFibers[size_t(t)];
    if (fiber.done) continue;
    ++shown;
    mError +=
        " thread " + std::to_string(t) + " waits in " + fiber.operation + " at " + text(fiber.site) + ";";
  }
  mError += " " + std::to_string(mThreads - mLive) + " threads have exited";
}

void Machine::arrive(Meeting& meeting, int first, void* argument, char const* operation, Site site) {
  if (meeting.arrived == 0) {
    meeting.operation = operation;
    meeting.site = site;
  } else if (std::strcmp(meeting.operation, operation) != 0 || meeting.site.line != site.line ||
             std::strcmp(meeting.site.file, site.file) != 0) {
    fail(operation, site,
         std::string("is divergent: others are in ") + meeting.operation + " at " + text(meeting.site));
  }
  meeting.arguments[mThread - first] = argument;
  ++meeting.arrived;
}

void Machine::waitForRound(Meeting& meeting, char const* operation, Site site) {
  Fiber& fiber = mFibers[size_t(mThread)];
  fiber.waits_on = &meeting.round;
  fiber.wait_value = meeting.round;
  fiber.operation = operation;
  fiber.site = site;
  leave();
  fiber.waits_on = nullptr;
}

void Machine::syncThreads(Site site) {
  meet(mBlockMeeting, 0, mThreads, nullptr, "__syncthreads", site,
       [&](void**) { shared.barrier(0, mThreads); });
}

void Machine::syncWarp(Site site) {
  meet(mWarpMeetings[mThread / 32], warpFirst(), 32, nullptr, "__syncwarp", site,
       [&](void**) { shared.barrier(warpFirst(), 32); });
}

void Machine::startCopy(AsyncCopy const& copy) {
  std::string wrong = shared.startCopy(copy.destination, 16, mThread);
  if (wrong.empty() && copy.bytes > 0) wrong = global.check(copy.source, size_t(copy.bytes), 16, false);
  if (!wrong.empty()) fail("cp.async", copy.site, wrong);
  mFibers[size_t(mThread)].open.push_back(copy);
}

void Machine::commitCopies() {
  Fiber& fiber = mFibers[size_t(mThread)];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

// Copies land only here: as late as the program allows, which is when a missing wait shows.
void Machine::waitCopies(int newest) {
  Fiber& fiber = mFibers[size_t(mThread)];
  while (fiber.groups.size() > size_t(newest)) {
    for (AsyncCopy const& copy : fiber.groups.front()) {
      std::string const wrong = shared.land(copy.destination, copy.source, uint32_t(copy.bytes), 16, mThread);
      if (!wrong.empty()) fail("cp.async", copy.site, wrong);
    }
    fiber.groups.erase(fiber.groups.begin());
  }
}

}  // namespace flash_export::emulation
