// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

// Whether query `row` sees key `column`: lengths, causal and window.
bool isVisible(Problem const& p, int64_t batch, int64_t row, int64_t column) {
  int64_t const length =
      p.kv_lengths.empty() ? p.seqlen_kv : std::clamp<int64_t>(p.kv_lengths[batch], 0, p.seqlen_kv);
  int64_t const diagonal = row + (p.bottom_right ? length - p.seqlen_q : 0);
  if (column >= length) return false;
  if (p.causal && column > diagonal) return false;
  if (p.window_left >= 0 && column < diagonal - p.window_left) return false;
  return p.window_right < 0 || column <= diagonal + p.window_right;
}

template <class Number>
Number scoreOf(Problem const& p, int64_t b, int64_t h, int64_t row, int64_t column) {
  int64_t const kv = b * p.heads_kv + h / (p.heads_q / p.heads_kv);
  float const* const query = &p.query[((b * p.heads_q + h) * p.seqlen_q + row) * p.head_dim];
  float const* const key = &p.key[(kv * p.seqlen_kv + column) * p.head_dim];
  Number score = 0;
  for (int64_t d = 0; d < p.head_dim; ++d) score += Number(query[d]) * (Number(key[d]) * Number(p.scale));
  if (p.softcap > 0) score = Number(p.softcap) * std::tanh(score / Number(p.softcap));
  if (!p.bias.empty()) score += p.bias[((b * p.heads_q + h) * p.seqlen_q + row) * p.seqlen_kv + column];
  return score;
}

// One row of the output; returns its log-sum-exp.
template <class Number>
Number attendRow(Problem const& p, int64_t b, int64_t h, int64_t row, double* output) {
  std::vector<Number> scores;
  std::vector<int64_t> columns;
  Number top = p.sinks.empty() ? -INFINITY : p.sinks[h];
  for (int64_t column = 0; column < p.seqlen_kv; ++column) {
    if (!isVisible(p, b, row, column)) continue;
    scores.push_back(scoreOf<Number>(p, b, h, row, column));
    columns.push_back(column);
    top = std::max(top, scores.back());
  }
  std::fill(output, output + p.v_head_dim, 0.0);
  if (top == -INFINITY) return top;
  Number sum = p.sinks.empty() ? 0 : std::exp(Number(p.sinks[h]) - top);
  for (Number& score : scores) sum += score = std::exp(score - top);
  int64_t const kv = b * p.heads_kv + h / (p.heads_q / p.heads_kv);
  for (int64_t d = 0; d < p.v_head_dim; ++d) {
    Number total = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      total += scores[i] / sum * p.value[(kv * p.seqlen_kv + columns[i]) * p.v_head_dim + d];
    }
    output[d] = total;
  }
  return top + std::log(sum);
}

}  // namespace

template <class Number>
Result attention(Problem const& p) {
  int64_t const rows = p.batch * p.heads_q * p.seqlen_q;
  Result result{std::vector<double>(rows * p.v_head_dim), std::vector<double>(rows)};
  for (int64_t i = 0; i < rows; ++i) {
    int64_t const b = i / (p.heads_q * p.seqlen_q);
    int64_t const h = i / p.seqlen_q % p.heads_q;
    result.lse[i] = attendRow<Number>(p, b, h, i % p.seqlen_q, result.output.data() + i * p.v_head_dim);
  }
  return result;
}

template Result attention<double>(Problem const&);
template Result attention<float>(Problem const&);

char const* judge(std::vector<float> const& output, std::vector<double> const& truth,
                  std::vector<double> const& base) {
  if (output.size() != truth.size()) return "another number of elements";
  double error = 0, noise = 0, ulp = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (std::isinf(truth[i]) || std::isinf(output[i])) {
      if (output[i] != truth[i]) return "an infinity where the reference has none, or the reverse";
      continue;
    }
    if (!std::isfinite(output[i])) return "a NaN";
    error = std::max(error, std::abs(output[i] - truth[i]));
    noise = std::max(noise, std::abs(base[i] - truth[i]));
    float const rounded = (float(truth[i]) + 0.3f) - 0.3f;
    ulp = std::max(ulp, std::abs(double{rounded} - truth[i]));
  }
  return error <= 2 * noise + 2 * ulp ? "" : "an error above the tolerance rule's";
}

char const* judgeLse(std::vector<float> const& lse, std::vector<double> const& truth) {
  if (lse.size() != truth.size()) return "another number of elements";
  for (size_t i = 0; i < truth.size(); ++i) {
    if (std::isinf(truth[i]) || std::isinf(lse[i])) {
      if (lse[i] != truth[i]) return "an infinity where the reference has none, or the reverse";
      continue;
    }
    float const size = std::abs(float(truth[i]));
    double const ulp = double{std::nextafter(size, INFINITY)} - size;
    // Written so that NaN fails.
    if (!(std::abs(lse[i] - truth[i]) <= std::max(1e-3, 4 * ulp))) return "an error above the lse's bound";
  }
  return "";
}

}  // namespace reference
