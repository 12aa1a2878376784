// SPDX-License-Identifier: Apache-2.0
// geometry.h against brute force.
#include <set>
#include <utility>
#include <vector>

#include "../runner.h"
#include "geometry.h"
#include "variants.h"

using namespace flash_export::kernels;

namespace {

struct Mask {
  int causal, diagonal, left, right, seqlen_q, kv_length;
};

std::vector<Mask> masks() {
  std::vector<Mask> all;
  int const lengths[][2] = {{1, 1}, {1, 70}, {70, 1}, {37, 53}, {53, 37}, {64, 64}, {65, 127}, {9, 0}};
  for (auto const& [q, kv] : lengths) {
    for (int causal : {0, 1}) {
      for (int diagonal : {0, 1}) {
        for (int left : {-1, 0, 5, 64, INT32_MAX}) {
          for (int right : {-1, 0, 3, INT32_MAX}) all.push_back({causal, diagonal, left, right, q, kv});
        }
      }
    }
  }
  return all;
}

// docs/op.md, in 64 bits.
bool sees(Mask const& m, int64_t row, int64_t key) {
  int64_t const stands_at = row + (m.diagonal != 0 ? m.kv_length - m.seqlen_q : 0);
  if (key >= m.kv_length || (m.causal != 0 && key > stands_at)) return false;
  if (m.left >= 0 && key < stands_at - m.left) return false;
  return m.right < 0 || key <= stands_at + m.right;
}

Band bandOf(Mask const& m) {
  return makeBand(m.causal, m.diagonal, m.left, m.right, m.seqlen_q, m.kv_length);
}

std::string show(Mask const& m) {
  return "causal " + std::to_string(m.causal) + " diagonal " + std::to_string(m.diagonal) + " left " +
         std::to_string(m.left) + " right " + std::to_string(m.right) + " Sq " + std::to_string(m.seqlen_q) +
         " keys " + std::to_string(m.kv_length);
}

}  // namespace

TEST(a_row_sees_the_keys_that_the_operator_says) {
  for (Mask const& m : masks()) {
    for (int row = 0; row < m.seqlen_q; ++row) {
      int const key0 = 16;
      KeySpan const visible = visibleKeys(bandOf(m), row, key0);
      for (int key = 0; key < m.kv_length + 3; ++key) {
        bool const in_span = key - key0 >= visible.first && key - key0 < visible.last;
        EXPECT(in_span == sees(m, row, key), show(m) << " row " << row << " key " << key);
      }
    }
  }
}

TEST(key_tiles_hold_every_visible_key_and_no_tile_that_nobody_needs) {
  for (Mask const& m : masks()) {
    for (int tile_q : {16, 32}) {
      for (int row0 = 0; row0 < m.seqlen_q; row0 += tile_q) {
        int const row_end = smaller(row0 + tile_q, m.seqlen_q);
        KeyTiles const tiles = keyTiles(bandOf(m), row0, row_end, 16);
        int first = INT32_MAX, last = -1;
        for (int row = row0; row < row_end; ++row) {
          for (int key = 0; key < m.kv_length; ++key) {
            if (!sees(m, row, key)) continue;
            first = smaller(first, key / 16);
            last = larger(last, key / 16);
          }
        }
        if (last < 0) continue;  // a range that holds nothing may be visited; masks hide it
        EXPECT(tiles.begin == first && tiles.end == last + 1,
               show(m) << " rows " << row0 << ": " << tiles.begin << ".." << tiles.end << ", not " << first
                       << ".." << last + 1);
      }
    }
  }
}

TEST(tiles_that_need_no_mask_are_seen_whole_by_every_row_and_the_others_are_not) {
  for (Mask const& m : masks()) {
    for (int row0 = 0; row0 < m.seqlen_q; row0 += 32) {
      int const row_end = smaller(row0 + 32, m.seqlen_q);
      KeyTiles const tiles = keyTiles(bandOf(m), row0, row_end, 16);
      for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        bool whole = true;
        for (int row = row0; row < row_end; ++row) {
          for (int key = tile * 16; key < tile * 16 + 16; ++key) whole = whole && sees(m, row, key);
        }
        EXPECT(tiles.needsMask(tile) == !whole, show(m) << " rows " << row0 << " tile " << tile);
      }
    }
  }
}

TEST(splits_share_out_the_tiles_each_once) {
  for (KeyTiles const all : {KeyTiles{0, 7, 0, 6}, KeyTiles{3, 11, 5, 9}, KeyTiles{2, 3, 3, 2},
                             KeyTiles{4, 4, 4, 4}, KeyTiles{5, 2, 5, 2}}) {
    for (int splits : {1, 2, 3, 7, 64}) {
      std::vector<int> visits(16, 0);
      for (int split = 0; split < splits; ++split) {
        KeyTiles const part = splitOf(all, split, splits);
        EXPECT(part.full_begin >= part.begin, "a loop down to full_begin stays in its part");
        for (int tile = part.begin; tile < part.end; ++tile) {
          ++visits[size_t(tile)];
          EXPECT(part.needsMask(tile) == all.needsMask(tile), "split " << split << " of " << splits);
        }
      }
      for (int tile = 0; tile < 16; ++tile) {
        int const wanted = tile >= all.begin && tile < all.end ? 1 : 0;
        EXPECT(visits[size_t(tile)] == wanted, "tile " << tile << ", " << splits << " splits");
      }
    }
  }
}

TEST(keys_are_split_where_multiprocessors_would_idle) {
  EXPECT(splitCount(108, 64, 108) == 1, "the device is full");
  EXPECT(splitCount(87, 64, 108) == 1, "four fifths of it are busy");
  EXPECT(splitCount(1, 1, 108) == 1, "there is one tile of keys");
  EXPECT(splitCount(54, 64, 108) == 2);
  EXPECT(splitCount(36, 64, 108) == 3);
  EXPECT(splitCount(1, 3, 108) == 3, "few tiles are split too");
  EXPECT(splitCount(0, 64, 108) == 1 && splitCount(4, 64, 0) == 1);
  for (int multiprocessors : {1, 20, 84, 108, 132, 148, 170, 188}) {
    for (int64_t blocks = 1; blocks <= 300; ++blocks) {
      for (int tiles : {1, 2, 17, 4096}) {
        int const splits = splitCount(blocks, tiles, multiprocessors);
        EXPECT(splits >= 1 && splits <= kMaxSplits && splits <= tiles, blocks << " blocks");
        EXPECT(splits == 1 || blocks * splits <= kMaxSplitBlocks, blocks << " blocks");
      }
    }
  }
}

TEST(a_span_is_inside_its_tensor_whatever_the_table_says) {
  EXPECT(spanOf(3, 10, 100, 50).first == 3 && spanOf(3, 10, 100, 50).count == 7);
  EXPECT(spanOf(3, 90, 100, 50).count == 50, "none is longer than the longest");
  for (int first : {INT32_MIN, -1, 0, 5, 100, 101, INT32_MAX}) {
    for (int end : {INT32_MIN, -1, 0, 4, 5, 100, 101, INT32_MAX}) {
      Span const span = spanOf(first, end, 100, 1 << 28);
      EXPECT(span.first >= 0 && span.count >= 0 && span.first + span.count <= 100, first << " to " << end);
    }
  }
}

TEST(a_key_is_in_the_page_that_the_table_says_or_in_the_last) {
  for (int bits = 4; bits <= 8; ++bits) {
    for (int key = 0; key < 1000; ++key) {
      PagePlace const place = pagePlaceOf(key, bits);
      EXPECT(place.entry == key / (1 << bits) && place.row == key % (1 << bits), key << ", " << bits);
    }
  }
  EXPECT(pageOf(0, 6) == 0 && pageOf(6, 6) == 6 && pageOf(7, 6) == 6);
  EXPECT(pageOf(-1, 6) == 6 && pageOf(INT32_MIN, 6) == 6 && pageOf(5, 0) == 0);
}

TEST(packed_rows_are_all_heads_of_all_queries) {
  std::set<std::pair<int, int>> seen;
  for (int row = 0; row < 7 * 5; ++row) {
    RowPlace const place = placeOf(row, 5);
    EXPECT(place.query >= 0 && place.query < 7 && place.head >= 0 && place.head < 5, row);
    seen.insert({place.query, place.head});
  }
  EXPECT(seen.size() == 35);
  EXPECT(placeOf(9, 1).query == 9 && placeOf(9, 1).head == 0);
  EXPECT(packOf(8, 1, 128) == 8 && packOf(8, 64, 128) == 8 && packOf(8, 65, 128) == 1 &&
         packOf(1, 1, 64) == 1);
}

TEST(the_longest_sequences_and_the_widest_windows_do_not_overflow) {
  int const longest = int(kMaxSeqlen);
  Band const band = makeBand(0, 1, INT32_MAX, INT32_MAX, longest, 1);
  EXPECT(visibleKeys(band, 0, 0).first <= 0 && visibleKeys(band, 0, 0).last == 1);
  EXPECT(visibleKeys(band, longest - 1, longest).first < 0);
  Band const far = makeBand(0, 1, kUnlimited / 2 - 1, kUnlimited / 2 - 1, 1, longest);
  EXPECT(visibleKeys(far, 0, 0).first <= 0 && visibleKeys(far, 0, 0).last == longest);
  KeyTiles const tiles = keyTiles(makeBand(1, 0, -1, -1, longest, longest), longest - 64, longest, 64);
  EXPECT(tiles.begin == 0 && tiles.end == longest / 64 && tiles.full_end == longest / 64 - 1);
}

TEST(the_swizzle_permutes_the_chunks_of_a_tile) {
  for (int chunks : {4, 8, 16, 32, 64}) {
    std::set<uint32_t> seen;
    for (int row = 0; row < 64; ++row) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        uint32_t const offset = swizzled(row, chunk, chunks);
        EXPECT(offset % 16 == 0 && offset < uint32_t(64 * chunks * 16), chunks << " chunks");
        EXPECT(int(offset / 16) / chunks == row, "a chunk stays in its row");
        seen.insert(offset);
      }
    }
    EXPECT(int(seen.size()) == 64 * chunks);
  }
}

TEST(one_xor_reaches_every_chunk_of_a_lane) {
  for (int chunks : {4, 8, 16, 32, 64}) {
    for (int row = 0; row < 16; ++row) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        for (int step = 0; step < chunks; step += 2) {
          for (int rows : {0, 8, 24}) {
            uint32_t const one_xor =
                (swizzled(row, chunk, chunks) ^ uint32_t(step * 16)) + uint32_t(rows * chunks * 16);
            EXPECT(one_xor == swizzled(row + rows, chunk + step, chunks), chunks << " chunks, row " << row);
          }
        }
      }
    }
  }
}

TEST(the_eight_rows_of_an_ldmatrix_phase_touch_all_banks_once) {
  for (int chunks : {4, 8, 16, 32}) {
    for (int row0 = 0; row0 < 64; row0 += 8) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        std::set<uint32_t> bank_groups;
        for (int row = row0; row < row0 + 8; ++row) bank_groups.insert(swizzled(row, chunk, chunks) / 16 % 8);
        EXPECT(bank_groups.size() == 8, chunks << " chunks, rows " << row0 << ", chunk " << chunk);
      }
    }
  }
}

TEST(staging_an_output_fragment_of_16_bit_elements_conflicts_on_no_bank) {
  // 32 lanes store 4 bytes each: rows lane / 4, words lane % 4 of one chunk.
  for (int chunks : {4, 8, 16, 32}) {
    std::set<uint32_t> banks;
    for (int lane = 0; lane < 32; ++lane) {
      banks.insert((swizzled(fragmentRow(lane, 0), 3, chunks) / 4 + uint32_t(lane % 4)) % 32);
    }
    EXPECT(banks.size() == 32, chunks << " chunks");
  }
}

TEST(the_loads_of_the_scalar_products_conflict_on_no_bank) {
  // A 128-bit load is served 8 lanes at a time. Lanes that read the same address share it; others must differ
  // in banks.
  for (int chunks : {8, 16, 32, 64}) {
    for (int first_lane = 0; first_lane < 32; first_lane += 8) {
      std::set<uint32_t> query, query_banks, key, key_banks;
      for (int lane = first_lane; lane < first_lane + 8; ++lane) {
        query.insert(swizzled(fragmentRow(lane, 0), 5, chunks));
        query_banks.insert(swizzled(fragmentRow(lane, 0), 5, chunks) / 16 % 8);
        key.insert(swizzled(fragmentColumn(lane, 0), 5, chunks));
        key_banks.insert(swizzled(fragmentColumn(lane, 0), 5, chunks) / 16 % 8);
      }
      EXPECT(query.size() == query_banks.size() && key.size() == key_banks.size(), chunks << " chunks");
    }
  }
}

TEST(fragments_cover_a_product_of_16_by_8_once) {
  std::set<std::pair<int, int>> seen;
  for (int lane = 0; lane < 32; ++lane) {
    for (int j = 0; j < 4; ++j) seen.insert({fragmentRow(lane, j), fragmentColumn(lane, j)});
  }
  EXPECT(seen.size() == 128 && seen.rbegin()->first == 15);
}

TEST(every_variant_fits_the_smallest_shared_memory) {
  for (Variant const& v : kVariants) {
    int const bytes = (v.tile_q + 2 * v.tile_kv) * v.head_dim * (v.dtype == kFlashFloat32 ? 4 : 2);
    EXPECT(bytes <= 99 * 1024, v.name << " takes " << bytes);
  }
}
