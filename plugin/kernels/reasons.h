// SPDX-License-Identifier: Apache-2.0
// Why a problem is refused: sentences, and how they reach a caller in C.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "geometry.h"
#include "tensors.h"

namespace flash_export::kernels {

constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;  // of a CUDA grid's first axis

// Takes sentences; each names what it got and what it needs. A sentence is made only where it is needed, as
// every launch asks.
class Reasons {
 public:
  template <class MakeSentence>
  void unless(bool good, MakeSentence sentence) {
    if (!good) mSentences.push_back(sentence());
  }
  void inRange(char const* name, int64_t value, int64_t low, int64_t high) {
    unless(value >= low && value <= high, [=] {
      return std::string(name) + " is " + std::to_string(value) + "; the kernels take " +
             std::to_string(low) + " to " + std::to_string(high) + ".";
    });
  }
  void aligned(char const* name, void const* address, int bytes) {
    unless(reinterpret_cast<uintptr_t>(address) % uintptr_t(bytes) == 0, [=] {
      return std::string(name) + " is no address of elements of " + std::to_string(bytes) +
             " bytes; the kernels take multiples of that.";
    });
  }
  // Of a tensor that is written, where its memory is there already.
  void rowsApart(char const* name, FlashTensor const& t, Extent extent, int64_t columns) {
    if (t.data == nullptr) return;
    char const* const stride = overlappingStride(t, extent, columns);
    unless(stride == nullptr, [=] {
      return std::string(stride) + " of " + name + " puts rows of " + std::to_string(columns) +
             " elements onto one another; the kernels need steps of that at least.";
    });
  }
  void pages(int page_size) {
    bool const in_range = page_size >= kSmallestPage && page_size <= kLargestPage;
    unless(in_range && (page_size & (page_size - 1)) == 0, [=] {
      return "page_size is " + std::to_string(page_size) + "; the kernels take powers of 2 from " +
             std::to_string(kSmallestPage) + " to " + std::to_string(kLargestPage) + ".";
    });
  }
  // A grid's blocks, as a number that no product of sizes overflows; exact wherever it is near the limit.
  void blocks(double count, std::string const& sizes) {
    unless(count <= kMaxBlocks, [&] {
      char text[64];
      std::snprintf(text, sizeof text, "%.0f", count);
      return sizes + " make " + text + " blocks; a grid takes " + std::to_string(kMaxBlocks) + ".";
    });
  }
  std::vector<std::string> const& sentences() const { return mSentences; }

 private:
  std::vector<std::string> mSentences;
};

// One a line into `text`, cut where it is full; returns how many there are.
inline int32_t joinReasons(std::vector<std::string> const& reasons, char* text, size_t text_size) {
  std::string all;
  for (std::string const& reason : reasons) all += (all.empty() ? "" : "\n") + reason;
  if (text != nullptr && text_size > 0) std::snprintf(text, text_size, "%s", all.c_str());
  return int32_t(reasons.size());
}

}  // namespace flash_export::kernels
