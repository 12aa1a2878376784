// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "dispatch.h"
#include "named_cases.h"
#include "problem.h"

namespace kernel_tests {
namespace {

using flash_export::kernels::Features;
using flash_export::kernels::kSmallestTileKv;
using flash_export::kernels::kVariants;
using flash_export::kernels::Plan;
using flash_export::kernels::planFor;
using flash_export::kernels::Variant;
using flash_export::kernels::variantFor;

constexpr int kMultiprocessors = 108;  // the emulation's

// Few queries over five tiles of keys, the last not full.
Problem problemOf(Variant const& v) {
  Problem p;
  p.dtype = FlashDtype(v.dtype);
  p.head_dim = p.v_head_dim = v.head_dim;
  p.seqlen_q = 3;
  p.seqlen_kv = 5 * v.tile_kv - 3;
  p.page_size = v.features == Features::kPaged ? 64 : 0;
  if (v.general() && v.dtype != kFlashFloat32) p.softcap = 1000.0f;
  return p;
}

// Where tiles are the smallest, the workspace that is asked for is used to its last byte: else a size that is
// too small might still do.
std::string runInExactWorkspace(Variant const& v) {
  Problem const p = problemOf(v);
  Tensors tensors(p);
  FlashAttentionArgs const args = tensors.args();
  if (std::string(variantFor(args).name) != v.name)
    return std::string("is served by ") + variantFor(args).name;
  Plan const plan = planFor(args, true, kMultiprocessors);
  size_t const rows = size_t(plan.splits) * size_t(p.batch * p.heads_q * p.seqlen_q);
  size_t const used = rows * size_t(p.v_head_dim + 2) * sizeof(float), asked = flashAttentionWorkspace(&args);
  bool const tight = v.tile_kv > kSmallestTileKv || used == asked;
  if (plan.splits < 2 || used > asked || !tight) {
    return std::to_string(plan.splits) + " splits use " + std::to_string(used) + " bytes of " +
           std::to_string(asked);
  }
  return run(p);
}

std::string runWithBrokenTable(Variant const& v) {
  Tensors tensors(problemOf(v));
  FlashAttentionArgs args = tensors.args();
  for (int32_t entry : {args.page_count, INT32_MAX, INT32_MIN, -1}) {
    std::vector<int32_t> const table(size_t(args.page_table_stride), entry);
    args.page_table = table.data();
    for (int splits : {1, 3}) {
      if (std::string wrong = launch(args, splits); !wrong.empty()) return wrong;
    }
  }
  return "";
}

}  // namespace

std::vector<NamedCase> memoryCases() {
  std::vector<NamedCase> all;
  for (Variant const& v : kVariants) {
    all.push_back({std::string("exact workspace ") + v.name, [&v] { return runInExactWorkspace(v); }});
    if (v.features == Features::kPaged) {
      all.push_back({std::string("broken table ") + v.name, [&v] { return runWithBrokenTable(v); }});
    }
  }
  return all;
}

}  // namespace kernel_tests
