// SPDX-License-Identifier: Apache-2.0
// Packed sequences and paged caches against the same problem without them: the same bits; and tables that are
// broken: no access outside.
#include <cstring>
#include <vector>

#include "../runner.h"
#include "dispatch.h"
#include "emulation/launch_emulated.h"
#include "problem.h"

using namespace kernel_tests;

namespace {

// One of each softmax policy; rows make two tiles, the last batch's keys fill neither its last tile nor page.
std::vector<Problem> onePerPolicy(bool decode) {
  std::vector<Problem> all(4);
  all[1].softcap = 5.0f;
  all[2].dtype = kFlashFloat32;
  all[3].dtype = kFlashBFloat16;
  for (Problem& p : all) {
    p.batch = 3;
    p.heads_q = decode ? 4 : 2;
    p.heads_kv = 2;
    p.seqlen_q = decode ? 2 : 131;
    p.seqlen_kv = 291;
    p.kv_lengths = {291, 0, 77};
    p.causal = p.diagonal = 1;
  }
  return all;
}

void mustRun(FlashAttentionArgs const& args, int splits) {
  std::string const wrong = launch(args, splits);
  EXPECT(wrong.empty(), wrong);
}

void copyNumbers(Problem const& p, Tensors const& from, Tensors& to) {
  for (int b = 0; b < p.batch; ++b) {
    for (int d = 0; d < p.head_dim; ++d) {
      for (int i = 0; i < p.heads_kv * p.keysOf(b); ++i) {
        int const h = i / p.keysOf(b), key = i % p.keysOf(b);
        to.setKey(b, h, key, d, from.key(b, h, key, d));
        to.setValue(b, h, key, d, from.value(b, h, key, d));
      }
      for (int i = 0; i < p.heads_q * p.rowsOf(b); ++i) {
        int const h = i / p.rowsOf(b), row = i % p.rowsOf(b);
        to.setQuery(b, h, row, d, from.query(b, h, row, d));
      }
    }
  }
}

bool sameBits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void expectSameBits(Problem const& p, Tensors const& a, Tensors const& b, std::string const& what) {
  for (int batch = 0; batch < p.batch; ++batch) {
    for (int i = 0; i < p.heads_q * p.rowsOf(batch); ++i) {
      int const h = i / p.rowsOf(batch), row = i % p.rowsOf(batch);
      EXPECT(sameBits(a.lse(batch, h, row), b.lse(batch, h, row)), what << ", lse of row " << row);
      for (int d = 0; d < p.v_head_dim; ++d) {
        EXPECT(sameBits(float(a.output(batch, h, row, d)), float(b.output(batch, h, row, d))),
               what << ", batch " << batch << ", row " << row);
      }
    }
  }
}

}  // namespace

TEST(a_paged_cache_gives_the_bits_of_a_contiguous_one) {
  for (bool decode : {false, true}) {
    for (Problem const& p : onePerPolicy(decode)) {
      for (int page_size : {16, 64, 256}) {
        for (int splits : {1, 3}) {
          if (splits > 1 && !decode) continue;
          Problem in_pages = p;
          in_pages.page_size = page_size;
          Tensors contiguous(p), paged(in_pages);
          copyNumbers(p, contiguous, paged);
          mustRun(contiguous.args(), splits);
          mustRun(paged.args(), splits);
          expectSameBits(p, contiguous, paged, in_pages.describe() + ", splits " + std::to_string(splits));
        }
      }
    }
  }
}

TEST(packed_sequences_give_the_bits_of_each_alone) {
  for (bool decode : {false, true}) {
    for (Problem p : onePerPolicy(decode)) {
      p.rows_of = decode ? std::vector<int>{2, 0, 1} : std::vector<int>{131, 0, 5};
      p.keys_of_sequence = {291, 3, 77};
      p.kv_lengths.clear();
      int const splits = decode ? 3 : 1;
      Tensors packed(p), alone(p);
      mustRun(packed.args(), splits);
      for (int b = 0; b < p.batch; ++b) {
        FlashAttentionArgs args = alone.args();
        int64_t const bytes = p.dtype == kFlashFloat32 ? 4 : 2;
        int64_t const row = args.cu_seqlens_q[b], key = args.cu_seqlens_kv[b];
        for (FlashTensor* t : {&args.query, &args.output}) {
          t->data = static_cast<char*>(t->data) + row * t->row_stride * bytes;
        }
        for (FlashTensor* t : {&args.key, &args.value}) {
          t->data = static_cast<char*>(t->data) + key * t->row_stride * bytes;
        }
        args.cu_seqlens_q = args.cu_seqlens_kv = nullptr;
        args.batch = 1;
        args.seqlen_kv = p.keysOf(b);
        // Packed heads are the plan's of the longest sequence; rows past this one's end are another's.
        args.seqlen_q = p.rowsOf(b);
        std::vector<float> lse(size_t(p.heads_q) * size_t(p.rowsOf(b)));
        args.lse = lse.data();
        mustRun(args, splits);
        for (int i = 0; i < int(lse.size()); ++i) {
          float const wanted = packed.lse(b, i / p.rowsOf(b), i % p.rowsOf(b));
          EXPECT(sameBits(lse[size_t(i)], wanted), p.describe() << ", lse " << i << " of " << b);
        }
      }
      for (int b = 0; b < p.batch; ++b) {
        for (int i = 0; i < p.heads_q * p.rowsOf(b) * p.v_head_dim; ++i) {
          int const d = i % p.v_head_dim, row = i / p.v_head_dim % p.rowsOf(b);
          int const h = i / p.v_head_dim / p.rowsOf(b);
          EXPECT(packed.output(b, h, row, d) == alone.output(b, h, row, d), p.describe() << ", row " << row);
        }
      }
    }
  }
}

// The emulation knows the tensors' ends; a number in a table leads to none of them being passed.
TEST(a_broken_table_touches_nothing_outside) {
  for (Problem p : onePerPolicy(true)) {
    Problem in_pages = p;
    in_pages.page_size = 16;
    Tensors paged(in_pages);
    FlashAttentionArgs args = paged.args();
    std::vector<int32_t> const table(3 * 19, INT32_MIN);
    args.page_table = table.data();
    mustRun(args, 1);
    std::vector<int32_t> const past_the_end(3 * 19, args.page_count);
    args.page_table = past_the_end.data();
    mustRun(args, 3);

    p.rows_of = {2, 0, 1};
    p.keys_of_sequence = {291, 3, 77};
    Tensors packed(p);
    args = packed.args();
    for (std::vector<int32_t> const& starts :
         {std::vector<int32_t>{0, 1 << 30, 2, 1}, {-5, INT32_MIN, INT32_MAX, INT32_MAX}, {7, 7, -7, 7}}) {
      args.cu_seqlens_q = args.cu_seqlens_kv = starts.data();
      mustRun(args, 1);
      mustRun(args, 3);
    }
  }
}
