// SPDX-License-Identifier: Apache-2.0
// softmax.h against float64.
#include <cmath>
#include <limits>
#include <random>

#include "../runner.h"
#include "softmax.h"

using namespace flash_export::kernels;
namespace ops = flash_export::ops;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ForwardParams withScale(float scale) {
  ForwardParams p{};
  p.scale = scale;
  p.scale_log2 = scale * kLog2E;
  p.lazy_growth = kLazyGrowth / p.scale_log2;
  return p;
}

// A row taken in tiles of three scores; the scores are natural, so a policy on raw ones is given score /
// scale.
template <class Softmax>
RowEnd rowInTiles(std::vector<float> const& scores, float scale, float sink) {
  Softmax const policy(withScale(scale));
  RowState row;
  row.clear();
  for (size_t first = 0; first < scores.size(); first += 3) {
    float tile_max = -kInfinity;
    size_t const last = std::min(first + 3, scores.size());
    auto const own = [&](size_t i) { return Softmax::kRawScores ? scores[i] / scale : scores[i]; };
    for (size_t i = first; i < last; ++i) tile_max = std::max(tile_max, own(i));
    row.raise(policy, tile_max);
    for (size_t i = first; i < last; ++i) row.sum += policy.weight(own(i), row.offset);
  }
  return endRow<Softmax>(policy.natural(row.maximum), row.sum, sink);
}

double lseOf(std::vector<float> const& scores, float sink) {
  double row_max = double(sink);
  for (float s : scores) row_max = std::max(row_max, double(s));
  double sum = std::exp(double(sink) - row_max);
  for (float s : scores) sum += std::exp(double(s) - row_max);
  return row_max + std::log(sum);
}

template <class Softmax>
void expectLse(char const* policy) {
  std::mt19937 random{7};
  std::normal_distribution<float> normal{0.0f, 5.0f};
  for (int round = 0; round < 50; ++round) {
    std::vector<float> scores;
    for (int i = 0; i < 1 + round % 11; ++i) scores.push_back(normal(random));
    if (round % 5 == 0) scores[0] = -kInfinity;
    if (round % 10 == 0) scores.insert(scores.begin(), 3, -kInfinity);  // a tile without any key
    for (float sink : {-kInfinity, normal(random)}) {
      if (sink == -kInfinity && round % 55 == 0) continue;
      double const wanted = lseOf(scores, sink);
      float const got = rowInTiles<Softmax>(scores, 0.125f, sink).lse;
      EXPECT(std::fabs(double(got) - wanted) < 1e-5, policy << " gives " << got << ", not " << wanted);
    }
  }
}

}  // namespace

TEST(exp_precise_is_within_one_and_a_half_ulp) {
  double worst = 0.0;
  for (float x = -86.9f; x < 5.0f; x += 0.00137f) {
    double const exact = std::exp(double(x));
    worst = std::max(worst, std::fabs(double(expPrecise(x)) / exact - 1.0));
  }
  EXPECT(worst < 1.5 * std::ldexp(1.0, -23), worst);
}

TEST(exp_precise_of_odd_arguments) {
  EXPECT(expPrecise(0.0f) == 1.0f);
  EXPECT(expPrecise(-kInfinity) == 0.0f);
  EXPECT(expPrecise(-3.4e38f) == 0.0f);
  EXPECT(expPrecise(-88.0f) == 0.0f);
  EXPECT(std::isnan(expPrecise(kNan)));
}

TEST(every_policy_gives_the_log_sum_exp) {
  expectLse<FoldedSoftmax>("FoldedSoftmax");
  expectLse<NaturalSoftmax>("NaturalSoftmax");
  expectLse<PreciseSoftmax>("PreciseSoftmax");
}

TEST(a_row_without_keys_gives_zero_and_the_sink) {
  RowEnd const none = rowInTiles<NaturalSoftmax>({-kInfinity, -kInfinity}, 1.0f, -kInfinity);
  EXPECT(none.multiplier == 0.0f && none.lse == -kInfinity);
  RowEnd const sink = rowInTiles<FoldedSoftmax>({-kInfinity}, 0.5f, 1.25f);
  EXPECT(sink.lse == 1.25f && std::isfinite(sink.multiplier), sink.lse << " " << sink.multiplier);
}

TEST(a_row_of_the_lowest_number_weighs_all_keys_alike) {
  float const lowest = std::numeric_limits<float>::lowest();
  RowEnd const end = rowInTiles<NaturalSoftmax>({lowest, lowest, lowest, lowest}, 1.0f, -kInfinity);
  EXPECT(end.multiplier == 0.25f, end.multiplier);
  EXPECT(end.lse == lowest);
}

// Growth in factors of two of a weight; the row was at 3 (natural) before.
template <class Softmax>
void expectMove(float scale, double growth, bool moves) {
  Softmax const policy(withScale(scale));
  float const unit = Softmax::kRawScores ? scale : 1.0f;
  float const next = float(3.0 + growth * std::log(2.0)) / unit;
  RowState row;
  row.clear();
  EXPECT(row.raise(policy, 3.0f / unit) == 0.0f, "nothing was there");
  row.sum = 2.0f;
  float const shrink = row.raise(policy, next);
  EXPECT((row.maximum == next) == moves, "growth " << growth << ", scale " << scale);
  EXPECT(std::fabs(shrink - (moves ? std::exp2(-growth) : 1.0)) < 1e-6, shrink);
  EXPECT(row.sum == 2.0f * shrink);
  float const largest = policy.weight(next, row.offset);
  EXPECT(std::fabs(largest - (moves ? 1.0 : std::exp2(growth))) < 1e-3 * largest, largest);
}

TEST(a_row_moves_when_its_scores_have_grown_past_the_threshold) {
  for (float scale : {0.125f, 1e-6f, 3.0f}) {
    for (double growth : {-20.0, 0.0, 1.0, 7.99}) {
      expectMove<FoldedSoftmax>(scale, growth, growth == 0.0);
      expectMove<NaturalSoftmax>(scale, growth, growth == 0.0);
      expectMove<PreciseSoftmax>(scale, growth, growth == 0.0);
    }
    for (double growth : {8.01, 60.0}) {
      expectMove<FoldedSoftmax>(scale, growth, true);
      expectMove<NaturalSoftmax>(scale, growth, true);
      expectMove<PreciseSoftmax>(scale, growth, true);
    }
  }
}

// 8 / scale_log2 is then no finite number, and no score gets so far either.
TEST(a_scale_near_zero_has_no_limit_and_needs_none) {
  FoldedSoftmax const policy(withScale(1e-39f));
  RowState row;
  row.clear();
  row.raise(policy, -3e38f);
  EXPECT(row.maximum == -3e38f && row.limit == kInfinity, row.limit);
  EXPECT(row.raise(policy, 3e38f) == 1.0f);
  EXPECT(std::fabs(policy.weight(3e38f, row.offset) - std::exp(0.6f)) < 1e-3,
         policy.weight(3e38f, row.offset));
}

TEST(an_infinite_score_and_nan_stay_what_they_are) {
  NaturalSoftmax const policy(withScale(1.0f));
  RowState row;
  row.clear();
  EXPECT(row.raise(policy, kNan) == 1.0f && row.maximum == -kInfinity && row.offset == 0.0f);
  row.raise(policy, kInfinity);
  EXPECT(row.maximum == kInfinity && std::isnan(policy.weight(kInfinity, row.offset)));
  EXPECT(row.raise(policy, kInfinity) == 1.0f);
}

TEST(an_unchanged_maximum_shrinks_by_exactly_one) {
  for (float row_max : {-37.123f, 0.3f, 1234.567f}) {
    EXPECT(FoldedSoftmax(withScale(0.0883883f)).shrink(row_max, row_max) == 1.0f);
    EXPECT(NaturalSoftmax(withScale(1.0f)).shrink(row_max, row_max) == 1.0f);
    EXPECT(PreciseSoftmax(withScale(1.0f)).shrink(row_max, row_max) == 1.0f);
  }
}

TEST(a_sink_of_any_kind_is_the_lse_of_a_row_without_keys_and_shows_in_one_with_keys) {
  for (float sink : {kInfinity, -kInfinity, 3.5f}) {
    RowEnd const none = endRow<PreciseSoftmax>(-kInfinity, 0.0f, sink);
    EXPECT(none.multiplier == 0.0f && none.lse == sink, sink << " gives " << none.lse);
  }
  RowEnd const none = endRow<FoldedSoftmax>(-kInfinity, 0.0f, kNan);
  EXPECT(none.multiplier == 0.0f && std::isnan(none.lse), none.multiplier << " " << none.lse);
  RowEnd const nan = endRow<NaturalSoftmax>(1.0f, 2.0f, kNan);
  EXPECT(std::isnan(nan.multiplier) && std::isnan(nan.lse), nan.multiplier << " " << nan.lse);
  RowEnd const all = endRow<PreciseSoftmax>(1.0f, 2.0f, kInfinity);
  EXPECT(all.multiplier == 0.0f && all.lse == kInfinity, all.multiplier << " " << all.lse);
}

TEST(nan_is_passed_on) {
  RowEnd const end = endRow<NaturalSoftmax>(0.0f, kNan, -kInfinity);
  EXPECT(std::isnan(end.multiplier) && std::isnan(end.lse));
}
