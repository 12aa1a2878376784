// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../device_ops.h"

namespace flash_export::ops {

using emulation::Machine;
using emulation::Site;

float exchange(float value, int source_lane, char const* operation, Site site) {
  struct Lane {
    float value;
    int source;
    float result;
  } self{value, source_lane, 0.0f};
  emulation::machine().warpWide(self, operation, site, [](Lane** lanes) {
    for (int i = 0; i < 32; ++i) lanes[i]->result = lanes[lanes[i]->source]->value;
  });
  return self.result;
}

bool anyLane(bool b, char const* file, int line) {
  struct Lane {
    bool own, any;
  } self{b, false};
  emulation::machine().warpWide(self, "vote.any", FLASH_HERE, [](Lane** lanes) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any = any || lanes[i]->own;
    for (int i = 0; i < 32; ++i) lanes[i]->any = any;
  });
  return self.any;
}

namespace {

// The 8 rows of one matrix are read in one go: rows whose 16 bytes lie in the same 4 of 32 banks wait for
// each other.
int bankConflicts(uint32_t const (&row_addresses)[8]) {
  int rows_in_banks[8] = {};
  int most = 0;
  for (uint32_t address : row_addresses) most = std::max(most, ++rows_in_banks[(address >> 4) & 7]);
  return most - 1;
}

}  // namespace

void loadMatrices(uint32_t (&r)[4], uint32_t address, bool transposed, Site site) {
  struct Lane {
    uint32_t* r;
    uint32_t address;
  } self{r, address};
  char const* const operation = transposed ? "ldmatrix.trans" : "ldmatrix";
  Machine& m = emulation::machine();
  int const first = m.warpFirst();
  m.warpWide(self, operation, site, [&](Lane** lanes) {
    uint16_t matrix[4][8][8];
    for (int i = 0; i < 32; ++i) {
      std::string const wrong = m.shared.read(lanes[i]->address, 16, first + i, matrix[i / 8][i % 8]);
      if (!wrong.empty()) m.fail(operation, site, wrong);
    }
    for (int k = 0; k < 4; ++k) {
      uint32_t rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = lanes[k * 8 + i]->address;
      m.bank_conflicts += uint64_t(bankConflicts(rows));
    }
    for (int i = 0; i < 32; ++i) {
      int const row = i / 4, column = i % 4 * 2;
      for (int k = 0; k < 4; ++k) {
        uint16_t const lo = transposed ? matrix[k][column][row] : matrix[k][row][column];
        uint16_t const hi = transposed ? matrix[k][column + 1][row] : matrix[k][row][column + 1];
        lanes[i]->r[k] = lo | uint32_t(hi) << 16;
      }
    }
  });
}

void multiply(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1, bool bfloat, Site site) {
  struct Lane {
    float* d;
    uint32_t const* a;
    uint32_t b[2];
  } self{d, a, {b0, b1}};
  emulation::machine().warpWide(self, "mma.m16n8k16", site, [bfloat](Lane** lanes) {
    auto const& table = emulation::halfTable();
    auto const value = [&](uint32_t word, int half) {
      uint16_t const bits = uint16_t(word >> (16 * half));
      return bfloat ? emulation::bfloatToFloat(bits) : table[bits];
    };
    float a_matrix[16][16], b_matrix[16][8], product[16][8] = {};
    for (int i = 0; i < 32; ++i) {
      int const g = i / 4, t = i % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        for (int k = 0; k < 4; ++k)
          a_matrix[g + k % 2 * 8][t + k / 2 * 8 + half] = value(lanes[i]->a[k], half);
        for (int k = 0; k < 2; ++k) b_matrix[t + k * 8 + half][g] = value(lanes[i]->b[k], half);
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column)
          product[row][column] += a_matrix[row][k] * b_matrix[k][column];
      }
    }
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 4; ++j) lanes[i]->d[j] += product[i / 4 + j / 2 * 8][i % 4 * 2 + j % 2];
    }
  });
}

void readShared(uint32_t address, uint32_t bytes, void* target, Site site) {
  Machine& m = emulation::machine();
  std::string const wrong = m.shared.read(address, bytes, m.thread(), target);
  if (!wrong.empty()) m.fail("ld.shared", site, wrong);
}

void writeShared(uint32_t address, uint32_t bytes, void const* source, Site site) {
  Machine& m = emulation::machine();
  std::string const wrong = m.shared.write(address, bytes, m.thread(), source);
  if (!wrong.empty()) m.fail("st.shared", site, wrong);
}

void readGlobal(void const* p, size_t bytes, void* target, Site site) {
  Machine& m = emulation::machine();
  std::string const wrong = m.global.check(p, bytes, bytes, false);
  if (!wrong.empty()) m.fail("ld.global", site, wrong);
  std::memcpy(target, p, bytes);
}

void writeGlobal(void* p, size_t bytes, void const* source, Site site) {
  Machine& m = emulation::machine();
  std::string const wrong = m.global.check(p, bytes, bytes, true);
  if (!wrong.empty()) m.fail("st.global", site, wrong);
  std::memcpy(p, source, bytes);
}

}  // namespace flash_export::ops
