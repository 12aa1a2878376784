// SPDX-License-Identifier: Apache-2.0
// Every line of variants.inc on a dozen problems of odd sizes, in the emulation, judged by the tolerance
// rule.
//
//   forward_tests [WORDS]   only the cases whose description holds WORDS
//   FLASH_EMULATION_SEED    repeats a schedule; printed at the start
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "append_cases.h"
#include "dispatch.h"
#include "launched.h"
#include "named_cases.h"
#include "problem.h"
#include "sizes.h"

namespace kernel_tests {
namespace {

using flash_export::kernels::Features;
using flash_export::kernels::kVariants;
using flash_export::kernels::Variant;

// The next smaller tile's head dim plus one: the smallest head dim that a line serves.
int smallestHeadDim(Variant const& v) {
  int below = 0;
  for (Variant const& other : kVariants) {
    if (other.dtype == v.dtype && other.head_dim < v.head_dim) below = std::max(below, other.head_dim);
  }
  return below + 1;
}

// One head of two tiles of rows and three of keys, neither full. Big tiles get one head: time goes with their
// size.
Problem basicProblem(Variant const& v) {
  Problem p;
  p.dtype = FlashDtype(v.dtype);
  p.heads_q = v.head_dim > 128 ? 1 : 2;
  p.heads_kv = 1;
  p.seqlen_q = v.tile_q + 3;
  p.seqlen_kv = 2 * v.tile_kv + 5;
  p.head_dim = p.v_head_dim = v.head_dim;
  return p;
}

// What both feature classes serve.
std::vector<Problem> commonProblems(Variant const& v) {
  Problem const basic = basicProblem(v);
  std::vector<Problem> all(10, basic);
  all[1].causal = 1;  // more rows than keys see
  all[1].seqlen_kv = v.tile_kv - 1;
  all[2].causal = all[2].diagonal = 1;
  all[2].layout = Layout::kHeadsFirst;
  all[3].causal = all[3].diagonal = 1;  // the first rows see nothing
  all[3].seqlen_kv = v.tile_kv / 2 + 1;
  all[3].sinks = 1;
  all[4].window_left = v.tile_kv + 7;
  all[4].window_right = 3;
  all[4].diagonal = 1;
  all[5].batch = 2;
  all[5].heads_q = 2;
  all[5].seqlen_q = 5;
  all[5].kv_lengths = {v.tile_kv + 1, 0};
  all[5].sinks = 2;
  all[6].seqlen_q = 1;  // decode
  all[6].seqlen_kv = v.tile_kv * 3 + 1;
  all[6].causal = all[6].diagonal = 1;
  all[6].wants_lse = false;
  all[7].seqlen_q = v.tile_q;  // whole tiles
  all[7].seqlen_kv = v.tile_kv;
  all[7].causal = 1;
  all[7].score_std = 20.0f;
  all[8].batch = 2;  // packed, grouped heads, lengths with a bottom-right diagonal
  all[8].heads_q = 3;
  all[8].layout = Layout::kPacked;
  all[8].seqlen_q = all[8].seqlen_kv = 21;
  all[8].causal = all[8].diagonal = 1;
  all[8].kv_lengths = {1000, 13};
  all[9].heads_q = 2;  // neither packed nor split; a window that leaves whole tiles on both sides
  all[9].seqlen_q = v.tile_q + 33;
  all[9].seqlen_kv = 5 * v.tile_kv + 1;
  all[9].causal = all[9].diagonal = 1;
  all[9].window_left = 2 * v.tile_kv + 9;
  return all;
}

// Maxima that grow around the threshold from which on a row is rescaled (kLazyGrowth, of tiles of 32 or 64
// keys), a little every tile until they pass it together, and that fall.
std::vector<Problem> growingProblems(Variant const& v) {
  float const per_tile = 32.0f / float(v.tile_kv);
  std::vector<Problem> all(4, basicProblem(v));
  for (Problem& p : all) {
    p.heads_q = 1;
    p.seqlen_q = 19;
    p.seqlen_kv = 4 * v.tile_kv + 5;
    p.score_std = 0.5f;
  }
  all[0].growth = 7.5f * per_tile;
  all[1].growth = 8.5f * per_tile;
  all[2].growth = 3.1f * per_tile;
  all[2].causal = all[2].diagonal = 1;
  all[3].growth = -40.0f * per_tile;
  return all;
}

// Few queries over many keys: packed heads, split keys.
std::vector<Problem> decodeProblems(Variant const& v) {
  std::vector<Problem> all(6, basicProblem(v));
  for (Problem& p : all) {
    p.seqlen_q = 1;
    p.heads_q = 6;
    p.heads_kv = 2;
    p.seqlen_kv = 4 * v.tile_kv + 3;
    p.causal = p.diagonal = 1;
  }
  all[0].batch = 2;
  all[0].kv_lengths = {2 * v.tile_kv + 1, 9};  // most splits of the second batch have no key
  all[0].sinks = 2;
  all[1].seqlen_q = 3;
  all[1].splits = 3;
  all[1].layout = Layout::kHeadsFirst;
  all[2].splits = 5;  // the last one is empty: 5 tiles, 1 each, and a window that hides the first ones
  all[2].window_left = v.tile_kv + 1;
  all[3].heads_kv = 1;
  all[3].seqlen_q = 4;
  all[3].splits = 2;
  all[3].sinks = 1;
  all[3].wants_lse = false;
  all[4].seqlen_q = 7;  // 21 rows: packed, not split
  all[4].v_head_dim = std::max(v.head_dim - 8, 8);
  all[5].splits = 64;  // more splits than tiles
  all[5].kv_lengths = {0};
  all[5].sinks = 1;
  return all;
}

// Packed sequences, none of them as long as the longest may be, empty ones among them.
std::vector<Problem> packedProblems(Variant const& v) {
  std::vector<Problem> all(4, basicProblem(v));
  for (Problem& p : all) {
    p.batch = 4;
    p.rows_of = {v.tile_q + 3, 0, 5, 1};
    p.keys_of_sequence = {v.tile_kv + 1, 7, 0, 2 * v.tile_kv + 5};
    p.seqlen_q = v.tile_q + 9;
    p.seqlen_kv = 3 * v.tile_kv;
  }
  all[0].causal = 1;
  all[1].causal = all[1].diagonal = 1;
  all[1].kv_lengths = {v.tile_kv, 1, 3, 1000};
  all[1].sinks = 2;
  all[1].layout = Layout::kHeadsFirst;
  all[2].heads_q = 6;  // packed heads, split keys
  all[2].heads_kv = 2;
  all[2].rows_of = {1, 0, 3, 2};
  all[2].seqlen_q = 4;
  all[2].splits = 3;
  all[2].sinks = 1;
  all[3].keys_of_sequence = {};  // of queries alone, beside padded keys
  all[3].window_left = v.tile_kv;
  all[3].window_right = 2;
  all[3].diagonal = 1;
  all[3].heads_q = 2;
  all[3].wants_lse = false;
  return all;
}

// The same with keys and values in pages; sizes take turns.
std::vector<Problem> inPages(std::vector<Problem> problems) {
  int const sizes[] = {16, 32, 64, 128, 256};
  for (size_t i = 0; i < problems.size(); ++i) {
    Problem& p = problems[i];
    p.page_size = sizes[i % 5];
    if (p.isPacked()) p.layout = Layout::kHeadsFirst;
    if (p.kv_lengths.empty()) p.kv_lengths = p.keys_of_sequence;
    p.keys_of_sequence.clear();
  }
  return problems;
}

// The head dims that a 16-byte copy can serve: the smallest and one in between, padded to the tile.
std::vector<Problem> plainProblems(Variant const& v) {
  std::vector<Problem> all(2, basicProblem(v));
  int const chunk = v.dtype == kFlashFloat32 ? 4 : 8;
  all[0].head_dim = (smallestHeadDim(v) + chunk - 1) / chunk * chunk;
  all[0].v_head_dim = std::max(all[0].head_dim - chunk, chunk);
  all[0].seqlen_q = 33;
  all[1].head_dim = chunk;  // V decides the tile
  all[1].seqlen_q = 17;
  all[1].causal = 1;
  return all;
}

// What only a general kernel serves.
std::vector<Problem> generalProblems(Variant const& v) {
  std::vector<Problem> all(16, basicProblem(v));
  for (Problem& p : all) p.seqlen_q = std::min(p.seqlen_q, 39);
  all[0].head_dim = all[0].v_head_dim = smallestHeadDim(v);  // 1, 33, 65, 129: rows off 16 bytes
  all[1].layout = Layout::kGaps;
  all[1].v_head_dim = smallestHeadDim(v) + 2;
  all[1].causal = 1;
  all[2].bias = Bias::kFull;
  all[2].batch = 2;
  all[3].bias = Bias::kOfKeys;
  all[3].causal = all[3].diagonal = 1;
  all[3].float_bias = true;
  all[4].bias = Bias::kOfQueries;
  all[4].scale = -0.3f;
  all[5].bias = Bias::kHoles;
  all[5].kv_lengths = {v.tile_kv + 3};
  all[6].bias = Bias::kHiddenRows;
  all[6].sinks = 2;
  all[7].bias = Bias::kLowestRows;
  all[7].float_bias = true;
  all[8].bias = Bias::kLowestRows;
  all[8].window_left = 1000;
  all[9].softcap = 3.0f;
  all[9].causal = 1;
  all[10].softcap = 2.0f;
  all[10].bias = Bias::kHoles;
  all[10].layout = Layout::kHeadsFirst;
  all[11].bias = Bias::kFull;  // packed heads have a bias of their own each
  all[11].batch = 2;
  all[11].heads_q = 6;
  all[11].heads_kv = 2;
  all[11].seqlen_q = 2;
  all[11].splits = 2;
  all[12].bias = Bias::kHiddenRows;
  all[12].layout = Layout::kGaps;
  all[12].heads_q = 4;
  all[12].seqlen_q = 5;
  all[12].splits = 3;
  all[13].bias = Bias::kAlibi;
  all[13].heads_q = 2;
  all[13].causal = all[13].diagonal = 1;
  all[14].bias = Bias::kAlibi;
  all[14].float_bias = true;
  all[14].heads_q = 4;
  all[14].heads_kv = 2;
  all[14].seqlen_q = 1;
  all[14].splits = 3;
  all[14].sinks = 2;
  all[15].bias = Bias::kLowestRows;  // splits of unlike lengths whose maxima are equal and huge
  all[15].seqlen_q = 5;
  all[15].splits = 2;
  return all;
}

// What a general kernel, which asks whether keys are paged, is tried on in pages.
std::vector<Problem> pagedProblems(Variant const& v) {
  std::vector<Problem> all(5, basicProblem(v));
  all[0].causal = all[0].diagonal = 1;
  all[0].seqlen_q = 39;
  all[1].layout = Layout::kGaps;  // element by element
  all[1].seqlen_q = 19;
  all[1].batch = 2;
  all[1].kv_lengths = {v.tile_kv + 3, 0};
  all[2].bias = Bias::kHoles;
  all[2].seqlen_q = 7;
  all[2].batch = 3;
  all[2].rows_of = {2, 0, 6};
  all[2].kv_lengths = {9, 4, 2 * v.tile_kv + 5};
  all[3].seqlen_q = 1;
  all[3].heads_q = 6;
  all[3].heads_kv = 2;
  all[3].seqlen_kv = 4 * v.tile_kv + 3;
  all[3].splits = 3;
  all[3].window_left = v.tile_kv + 9;
  all[3].diagonal = 1;
  all[4].head_dim = smallestHeadDim(v);
  all[4].v_head_dim = v.head_dim;
  all[4].seqlen_q = 33;
  all[4].sinks = 1;
  return all;
}

// Problems that belong to no line in particular.
std::vector<Problem> oddProblems() {
  std::vector<Problem> all;
  for (FlashDtype dtype : {kFlashFloat16, kFlashBFloat16, kFlashFloat32}) {
    std::vector<Problem> few(5);
    for (Problem& p : few) p.dtype = dtype;
    few[0].seqlen_q = few[0].seqlen_kv = 1;
    few[1].seqlen_kv = 0;  // rows without any key
    few[1].sinks = 1;
    few[2].seqlen_q = 255;
    few[2].seqlen_kv = 257;
    few[2].causal = 1;
    few[2].heads_q = 1;
    few[3].head_dim = few[3].v_head_dim = 15;
    few[3].heads_q = 6;
    few[3].heads_kv = 3;
    few[3].seqlen_q = 19;
    few[4].score_std = 300.0f;  // one key takes nearly all
    few[4].heads_q = 1;
    all.insert(all.end(), few.begin(), few.end());
  }
  return all;
}

// A Plain or Paged line's case must run on it, else nothing tests the line; a general one is reached by what
// it alone can do.
std::string runOn(Variant const& v, Problem const& problem) {
  Tensors tensors(problem);
  Variant const& served_by = flash_export::kernels::variantFor(tensors.args());
  bool const good = v.general() ? (served_by.general() && served_by.head_dim == v.head_dim)
                                : std::string(served_by.name) == v.name;
  if (!good) return std::string("is served by ") + served_by.name + ", not by " + v.name;
  return run(problem);
}

class Tally {
 public:
  explicit Tally(std::string words) : mWords(std::move(words)) {}

  template <class Run>
  void take(std::string const& name, Run run_problem) {
    if (name.find(mWords) == std::string::npos) return;
    std::string const wrong = run_problem();
    ++(wrong.empty() ? mPassed : mFailed);
    if (!wrong.empty()) std::printf("FAILED %s\n  %s\n", name.c_str(), wrong.c_str());
  }

  int end() const {
    std::printf("%d passed, %d failed\n", mPassed, mFailed);
    return mFailed == 0 && mPassed > 0 ? 0 : 1;
  }

 private:
  std::string mWords;
  int mPassed = 0, mFailed = 0;
};

int runAll(std::string const& words) {
  Tally tally(words);
  for (Variant const& v : kVariants) {
    std::vector<Problem> problems = v.general() ? generalProblems(v) : plainProblems(v);
    std::vector<Problem> shared = commonProblems(v);
    for (Problem const& growing : growingProblems(v)) shared.push_back(growing);
    for (Problem const& decode : decodeProblems(v)) shared.push_back(decode);
    for (Problem const& packed : packedProblems(v)) shared.push_back(packed);
    if (v.features == Features::kPaged) {
      problems = inPages(problems);
      shared = inPages(shared);
    }
    if (v.general()) {
      for (Problem const& paged : inPages(pagedProblems(v))) shared.push_back(paged);
    }
    for (Problem common : shared) {
      // A general line gets the common problems by a softcap that changes little.
      if (v.general() && v.dtype != kFlashFloat32) common.softcap = 1000.0f;
      problems.push_back(common);
    }
    for (Problem const& huge : hugeProblems(v)) {
      problems.push_back(v.features == Features::kPaged ? inPages({huge})[0] : huge);
    }
    for (Problem const& p : problems) {
      tally.take(p.describe(), [&] { return runOn(v, p); });
    }
  }
  for (Problem const& p : oddProblems()) {
    tally.take(p.describe(), [&] { return run(p); });
  }
  for (Problem const& p : longProblems()) {
    tally.take(p.describe(), [&] { return run(p); });
  }
  for (AppendCase const& c : appendCases()) {
    tally.take(c.describe(), [&] { return runAppend(c); });
  }
  for (auto const& cases : {farCases(), memoryCases(), sinkCases()}) {
    for (NamedCase const& c : cases) tally.take(c.name, c.run);
  }
  if (words.empty()) {
    tally.take("every kernel was launched", [] {
      std::string const missing = kernelsNotLaunched();
      return missing.empty() ? "" : "not" + missing;
    });
  }
  return tally.end();
}

}  // namespace
}  // namespace kernel_tests

int main(int argc, char** argv) {
  if (std::getenv("FLASH_EMULATION_SEED") == nullptr) {
    setenv("FLASH_EMULATION_SEED", std::to_string(std::random_device{}()).c_str(), 1);
  }
  std::printf("FLASH_EMULATION_SEED=%s\n", std::getenv("FLASH_EMULATION_SEED"));
  return kernel_tests::runAll(argc > 1 ? argv[1] : "");
}
