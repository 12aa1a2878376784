// SPDX-License-Identifier: Apache-2.0
// What a problem's result must be, and the tolerance rule.
#include <algorithm>
#include <cmath>
#include <limits>

#include "problem.h"

namespace kernel_tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A sum in fp32 as the libraries of matrix products take it: a block of terms in a register, then the next,
// each added to the result when it is whole. One chain over all terms would be off by many times as much.
template <class Term>
float sumOf(int count, Term term) {
  constexpr int kBlock = 256;
  float total = 0.0f;
  for (int first = 0; first < count; first += kBlock) {
    float sum = 0.0f;
    for (int i = first; i < std::min(first + kBlock, count); ++i) sum += term(i);
    total += sum;
  }
  return total;
}

}  // namespace

// float64, the definition of docs/op.md line by line.
Tensors::Expected Tensors::expected() const {
  Problem const& p = mProblem;
  Expected e;
  std::vector<double> scores(size_t(p.seqlen_kv));
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads_q; ++h) {
      int const kv = h / (p.heads_q / p.heads_kv);
      for (int row = 0; row < p.rowsOf(b); ++row) {
        double const sink = double(sinkAt(h));
        double row_max = sink;
        for (int key = 0; key < p.seqlen_kv; ++key) {
          double& s = scores[size_t(key)];
          s = -kInfinity;
          if (!p.sees(b, row, key)) continue;
          s = 0.0;
          for (int d = 0; d < p.head_dim; ++d) s += mQuery.at(b, h, row, d) * mKey.at(b, kv, key, d);
          s *= double(p.softmaxScale());
          if (p.softcap > 0.0f) s = double(p.softcap) * std::tanh(s / double(p.softcap));
          s += double(biasAt(b, h, row, key));
          row_max = std::max(row_max, s);
        }
        std::vector<double> output(size_t(p.v_head_dim), 0.0);
        double row_sum = row_max > -kInfinity ? std::exp(sink - row_max) : 0.0;
        for (int key = 0; key < p.seqlen_kv; ++key) {
          if (scores[size_t(key)] == -kInfinity) continue;
          double const weight = std::exp(scores[size_t(key)] - row_max);
          row_sum += weight;
          for (int d = 0; d < p.v_head_dim; ++d) output[size_t(d)] += weight * mValue.at(b, kv, key, d);
        }
        for (double x : output) e.output.push_back(row_sum > 0.0 ? x / row_sum : 0.0);
        e.lse.push_back(row_sum > 0.0 ? row_max + std::log(row_sum) : -kInfinity);
      }
    }
  }
  return e;
}

// The unfused formula as a framework runs it in the dtype: the scale applied to the key, every operator's
// result rounded, sums in fp32. A float bias keeps the scores in fp32, as type promotion does.
std::vector<double> Tensors::base() const {
  Problem const& p = mProblem;
  auto const round = [&](float x) { return float(rounded(p.dtype, double(x))); };
  std::vector<double> all;
  std::vector<float> scores(size_t(p.seqlen_kv));
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads_q; ++h) {
      int const kv = h / (p.heads_q / p.heads_kv);
      for (int row = 0; row < p.rowsOf(b); ++row) {
        float const sink = sinkAt(h);
        float row_max = sink;
        for (int key = 0; key < p.seqlen_kv; ++key) {
          float& s = scores[size_t(key)];
          s = -std::numeric_limits<float>::infinity();
          if (!p.sees(b, row, key)) continue;
          s = round(sumOf(p.head_dim, [&](int d) {
            return float(mQuery.at(b, h, row, d)) * round(float(mKey.at(b, kv, key, d)) * p.softmaxScale());
          }));
          if (p.softcap > 0.0f) s = round(round(std::tanh(round(s / p.softcap))) * p.softcap);
          if (p.bias != Bias::kNone)
            s = p.float_bias ? s + biasAt(b, h, row, key) : round(s + biasAt(b, h, row, key));
          row_max = std::max(row_max, s);
        }
        if (row_max == -std::numeric_limits<float>::infinity()) row_max = 0.0f;
        for (float& s : scores) s = std::exp(s - row_max);
        float const row_sum =
            std::exp(sink - row_max) + sumOf(p.seqlen_kv, [&](int key) { return scores[size_t(key)]; });
        for (int d = 0; d < p.v_head_dim; ++d) {
          all.push_back(double(round(sumOf(p.keysOf(b), [&](int key) {
            return round(scores[size_t(key)] / (row_sum == 0.0f ? 1.0f : row_sum)) *
                   float(mValue.at(b, kv, key, d));
          }))));
        }
      }
    }
  }
  return all;
}

std::string Tensors::judge() const {
  Problem const& p = mProblem;
  Expected const e = expected();
  std::vector<double> const plain = base();
  double worst = 0, worst_base = 0, mean = 0, mean_base = 0, mean_ref = 0, ulp = 0;
  std::vector<double> outputs;
  std::vector<float> lses;
  for (int b = 0; b < p.batch; ++b) {
    for (int i = 0; i < p.heads_q * p.rowsOf(b); ++i) {
      int const h = i / p.rowsOf(b), row = i % p.rowsOf(b);
      for (int d = 0; d < p.v_head_dim; ++d) outputs.push_back(mOutput.at(b, h, row, d));
      lses.push_back(lse(b, h, row));
    }
  }
  for (size_t i = 0; i < e.output.size(); ++i) {
    double const out = outputs[i];
    if (!std::isfinite(out)) return "output " + std::to_string(i) + " is " + std::to_string(out);
    double const error = std::fabs(out - e.output[i]), base_error = std::fabs(plain[i] - e.output[i]);
    double const r = rounded(p.dtype, e.output[i]);
    double const there = rounded(p.dtype, r + rounded(p.dtype, 0.3));
    ulp = std::max(ulp, std::fabs(rounded(p.dtype, there - rounded(p.dtype, 0.3)) - r));
    worst = std::max(worst, error);
    worst_base = std::max(worst_base, base_error);
    mean += error;
    mean_base += base_error;
    mean_ref += std::fabs(e.output[i]);
  }
  char text[160];
  double const limit = (p.softcap > 0.0f ? 3.0 : 2.0) * worst_base + 2.0 * ulp;
  if (worst > limit) {
    std::snprintf(text, sizeof text, "max error %.3e > %.3e (base %.3e, ulp %.1e)", worst, limit, worst_base,
                  ulp);
    return text;
  }
  if (double const n = double(e.output.size()); n >= 1024) {
    double const m = rounded(p.dtype, mean_ref / n);
    int const digits = p.dtype == kFlashFloat32 ? 23 : (p.dtype == kFlashFloat16 ? 10 : 7);
    double const mean_ulp = m > 0 ? std::ldexp(1.0, std::ilogb(m) - digits) : 0.0;
    if (mean / n > 1.5 * mean_base / n + mean_ulp) {
      std::snprintf(text, sizeof text, "mean error %.3e > 1.5 * %.3e + %.1e", mean / n, mean_base / n,
                    mean_ulp);
      return text;
    }
  }
  for (size_t i = 0; p.wants_lse && i < e.lse.size(); ++i) {
    float const next = std::nextafter(std::fabs(lses[i]), std::numeric_limits<float>::infinity());
    double const tolerance = std::max(1e-3, 4.0 * double(next - std::fabs(lses[i])));
    bool const good = std::isinf(e.lse[i]) ? double(lses[i]) == e.lse[i]
                                           : std::fabs(double(lses[i]) - e.lse[i]) <= tolerance;
    if (!good) {
      std::snprintf(text, sizeof text, "lse of row %zu is %g, not %g", i, double(lses[i]), e.lse[i]);
      return text;
    }
  }
  return "";
}

}  // namespace kernel_tests
