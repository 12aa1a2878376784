// SPDX-License-Identifier: Apache-2.0
// The online softmax of one tile of scores, as a warp holds it: in the mma fragment layout (products.h).
#pragma once
#include "device_ops.h"
#include "softmax.h"

namespace flash_export::kernels {

template <class Shape, class Softmax>
struct TileSoftmax {
  using Rows = RowState[Shape::kFragmentsQ][2];
  using Scores = float[Shape::kFragmentsQ][Shape::kFragmentsKv][4];
  using Output = float[Shape::kFragmentsQ][Shape::kFragmentsOut][4];

  // Scores become weights. Most tiles hold no score past the limit of its row: the warp asks once, and only
  // then looks for the rows' maxima and rescales.
  static FLASH_DEVICE void weigh(Softmax const& policy, Rows& rows, Scores& s, Output& out) {
    float tile_max[Shape::kFragmentsQ][2];  // of this lane's columns
    bool past_limit = false;
    FLASH_UNROLL
    for (int m = 0; m < Shape::kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        float largest = kNegativeInfinity;
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          largest = ops::maximum(largest, ops::maximum(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        }
        tile_max[m][h] = largest;
        past_limit = past_limit || largest > rows[m][h].limit;
      }
    }
    if (ops::anyLane(past_limit)) rescale(policy, rows, tile_max, s, out);
    FLASH_UNROLL
    for (int m = 0; m < Shape::kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        RowState& row = rows[m][h];
        float sum = 0.0f;  // of the tile: a sum over many keys is then no chain as long as they
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsKv; ++n) {
          FLASH_UNROLL
          for (int e = 0; e < 2; ++e) {
            float const weight = policy.weight(s[m][n][h * 2 + e], row.offset);
            s[m][n][h * 2 + e] = weight;
            sum = n + e == 0 ? weight : sum + weight;
          }
        }
        row.sum += sum;
      }
    }
  }

 private:
  // Rows whose maximum passed their limit move to it; the scores of steep rows become distances from it.
  static FLASH_DEVICE void rescale(Softmax const& policy, Rows& rows,
                                   float const (&tile_max)[Shape::kFragmentsQ][2], Scores& s, Output& out) {
    FLASH_UNROLL
    for (int m = 0; m < Shape::kFragmentsQ; ++m) {
      FLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        // The four lanes of a quad hold one row.
        float largest = tile_max[m][h];
        largest = ops::maximum(largest, ops::shuffleXor(largest, 1));
        largest = ops::maximum(largest, ops::shuffleXor(largest, 2));
        float const shrink = rows[m][h].raise(policy, largest);
        FLASH_UNROLL
        for (int n = 0; n < Shape::kFragmentsOut; ++n) {
          out[m][n][h * 2] *= shrink;
          out[m][n][h * 2 + 1] *= shrink;
        }
        if (policy.steep(rows[m][h].maximum)) {
          FLASH_UNROLL
          for (int n = 0; n < Shape::kFragmentsKv; ++n) {
            s[m][n][h * 2] -= rows[m][h].maximum;
            s[m][n][h * 2 + 1] -= rows[m][h].maximum;
          }
        }
      }
    }
  }
};

}  // namespace flash_export::kernels
