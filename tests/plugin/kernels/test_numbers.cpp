// SPDX-License-Identifier: Apache-2.0
// The emulation's element types and fast units.
#include <cmath>
#include <limits>

#include "../runner.h"
#include "device_ops.h"

using namespace flash_export;
using namespace flash_export::emulation;

TEST(every_half_survives_the_way_to_float_and_back) {
  for (uint32_t i = 0; i < 65536; ++i) {
    float const x = halfToFloat(uint16_t(i));
    if (std::isnan(x)) continue;
    EXPECT(floatToHalf(x) == i, i);
    EXPECT(halfTable()[i] == x);
  }
}

TEST(halves_round_to_the_nearest_and_ties_to_even) {
  for (uint32_t i = 0; i < 0x7bff; ++i) {  // positive finite neighbours
    double const low = double(halfToFloat(uint16_t(i))), high = double(halfToFloat(uint16_t(i + 1)));
    float const middle = float((low + high) / 2);
    EXPECT(floatToHalf(middle) == (i % 2 == 0 ? i : i + 1), i);
    EXPECT(floatToHalf(std::nextafter(middle, 0.0f)) == i, i);
    EXPECT(floatToHalf(std::nextafter(middle, 1e6f)) == i + 1, i);
  }
  EXPECT(floatToHalf(65519.996f) == 0x7bff && floatToHalf(65520.0f) == 0x7c00);
  EXPECT(floatToHalf(-0.0f) == 0x8000 && floatToHalf(1e-9f) == 0);
}

TEST(bfloats_round_to_the_nearest_and_ties_to_even) {
  for (uint32_t i = 0; i < 0x7f7f; ++i) {
    float const low = bfloatToFloat(uint16_t(i));
    EXPECT(floatToBFloat(low) == i);
    float const middle = ops::floatOf((i << 16) + 0x8000u);
    EXPECT(floatToBFloat(middle) == (i % 2 == 0 ? i : i + 1), i);
    EXPECT(floatToBFloat(std::nextafter(middle, std::numeric_limits<float>::infinity())) == i + 1, i);
  }
  EXPECT(std::isnan(bfloatToFloat(floatToBFloat(std::nanf("")))));
}

TEST(the_fast_exponential_errs_by_up_to_two_ulp_and_never_at_zero) {
  double worst = 0.0;
  for (float x = -20.0f; x < 1.0f; x += 0.0123f) {
    double const exact = std::exp2(double(x));
    worst = std::max(worst, std::fabs(double(ops::exp2Approx(x)) / exact - 1.0));
  }
  EXPECT(worst > 1.5e-7 && worst < 3.1e-7, worst);
  EXPECT(ops::exp2Approx(0.0f) == 1.0f && ops::exp2Approx(-0.0f) == 1.0f);
  EXPECT(ops::exp2Approx(-200.0f) == 0.0f && ops::exp2Approx(-127.5f) == 0.0f);
  EXPECT(std::isnan(ops::exp2Approx(std::nanf(""))));
}
