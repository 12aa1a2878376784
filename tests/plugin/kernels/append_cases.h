// SPDX-License-Identifier: Apache-2.0
// The append kernel on caches of odd sizes; forward_tests runs them.
#pragma once
#include <string>
#include <vector>

#include "flash_attention.h"

namespace kernel_tests {

struct AppendCase {
  FlashDtype dtype = kFlashFloat16;
  int batch = 3, heads = 2, head_dim = 64, v_head_dim = 64, seqlen_new = 5, capacity = 70;
  int gap = 0;      // elements behind every row; 1: nothing is aligned
  int shifted = 0;  // 1 ... 4: key, value, key cache or value cache alone starts one element off 16 bytes
  bool heads_first = false;
  int page_size = 0;
  std::vector<int> kv_lengths = {0, 33, 62};  // [B] or [1]
  std::vector<int> rows_of;                   // packed: new rows of each batch
  bool broken_table = false;                  // every third entry names no page
  bool wants_lengths = true;

  std::string describe() const;
};

std::vector<AppendCase> appendCases();

// "" or what is wrong: every byte of both caches is compared.
std::string runAppend(AppendCase const& c);

}  // namespace kernel_tests
