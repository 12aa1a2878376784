// SPDX-License-Identifier: Apache-2.0
// One emulated streaming multiprocessor that runs one thread block at a time. The block's threads are fibers;
// warp-wide and block-wide operations are meetings at which the last to come does the work for all.
//
// Which fiber runs next is drawn from a seed, so threads overtake each other as far as the barriers let them.
// A fault ends the launch: the first one is kept as text that names block, thread, operation, file and line.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"

namespace flash_export::emulation {

constexpr int kMaxWarps = 16;
constexpr int kMaxThreads = kMaxWarps * 32;

// A place in the kernel's source, filled in by the compiler at the call (FLASH_SITE in
// device_ops_emulated.h).
struct Site {
  char const* file;
  int line;
};
std::string text(Site site);  // "products.h:47"

// A copy global -> shared under way.
struct AsyncCopy {
  uint32_t destination;
  void const* source;
  int bytes;
  Site site;
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  bool done = false;
  uint64_t const* waits_on = nullptr;  // runs on once *waits_on differs from wait_value
  uint64_t wait_value = 0;
  char const* operation = "";
  Site site{"", 0};
  std::vector<AsyncCopy> open;                 // since the last commit
  std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
};

// Where `count` threads meet. Rounds are counted, so who waits sees that the round is over.
struct Meeting {
  uint64_t round = 0;
  int arrived = 0;
  char const* operation = "";
  Site site{"", 0};
  void* arguments[kMaxThreads] = {};
};

class Machine {
 public:
  // Runs `body(context)` on every thread of `blocks` blocks. Returns "" or what went wrong.
  std::string launch(int64_t blocks, int threads, int shared_bytes, uint64_t seed, void (*body)(void const*),
                     void const* context);

  int thread() const { return mThread; }
  int64_t block() const { return mBlock; }
  int warpFirst() const { return mThread & ~31; }

  // Ends the launch. Never returns to the fiber.
  [[noreturn]] void fail(char const* operation, Site site, std::string const& what);

  // Meets the `count` threads from `first` on; the last to come calls act(arguments) before all go on.
  template <class Act>
  void meet(Meeting& meeting, int first, int count, void* argument, char const* operation, Site site,
            Act act) {
    arrive(meeting, first, argument, operation, site);
    if (meeting.arrived < count) {
      waitForRound(meeting, operation, site);
      return;
    }
    act(meeting.arguments);
    meeting.arrived = 0;
    ++meeting.round;
  }

  // Warp-wide operation; act takes the 32 lanes' arguments.
  template <class Argument, class Act>
  void warpWide(Argument& argument, char const* operation, Site site, Act act) {
    meet(mWarpMeetings[mThread / 32], warpFirst(), 32, &argument, operation, site,
         [&](void** all) { act(reinterpret_cast<Argument**>(all)); });
  }

  void syncThreads(Site site);
  void syncWarp(Site site);
  void startCopy(AsyncCopy const& copy);
  void commitCopies();
  void waitCopies(int newest);

  SharedMemory shared;
  GlobalMemory global;
  uint64_t bank_conflicts = 0;  // of ldmatrix, over the last launch

 private:
  void arrive(Meeting& meeting, int first, void* argument, char const* operation, Site site);
  void waitForRound(Meeting& meeting, char const* operation, Site site);
  void startBlock(int64_t block);
  void runBlock();
  void resume(int thread);
  void leave();  // back to the scheduler
  void reportDeadlock();
  static void fiberMain();

  int mThreads = 0, mThread = 0, mLive = 0;
  int64_t mBlock = 0;
  uint64_t mRandom = 0;
  void (*mBody)(void const*) = nullptr;
  void const* mContext = nullptr;
  void* mSchedulerStack = nullptr;
  std::vector<Fiber> mFibers;
  Meeting mBlockMeeting, mWarpMeetings[kMaxWarps];
  std::string mError;
};

Machine& machine();  // this host thread's

}  // namespace flash_export::emulation
