// SPDX-License-Identifier: Apache-2.0
// The operator's library on a CPU in eight threads at once, from its registration to its results, in a host
// that is compiled with the same sanitizer; ONNX Runtime's own builds hide what happens in their threads.
#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "fake_runtime.h"
#include "op.h"
#include "reference.h"
#include "threads.h"

namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 3;

fake::NodeInfo nodeOf(reference::Problem const& p) {
  fake::NodeInfo node{"attention", {}, {}, {{"plugin_version", flash_export::kVersion}}};
#define SMALLEST(name, smallest, largest) node.ints[#name] = smallest;
  FLASH_ATTENTION_INT_ATTRIBUTES(SMALLEST)
#undef SMALLEST
  node.ints["layout"] = 1;
  node.ints["q_num_heads"] = p.heads_q;
  node.ints["kv_num_heads"] = p.heads_kv;
  node.ints["causal"] = p.causal;
  node.floats = {{"scale", float(p.scale)}, {"softcap", float(p.softcap)}};
  return node;
}

// A problem of its own for each thread: tiles where there are many queries, slices where there are few.
reference::Problem problemOf(int thread) {
  reference::Problem p;
  p.heads_q = 4, p.heads_kv = 2;
  p.seqlen_q = thread % 2 == 0 ? 67 + thread : 1;
  p.seqlen_kv = 141 + 10 * thread;
  p.head_dim = 32, p.v_head_dim = 37;
  p.causal = thread % 4 == 0;
  std::mt19937 random(unsigned(thread) + 3);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  auto const fill = [&](std::vector<float>& to, int64_t count) {
    to.resize(size_t(count));
    for (float& x : to) x = normal(random);
  };
  fill(p.query, p.heads_q * p.seqlen_q * p.head_dim);
  fill(p.key, p.heads_kv * p.seqlen_kv * p.head_dim);
  fill(p.value, p.heads_kv * p.seqlen_kv * p.v_head_dim);
  return p;
}

fake::Run runOf(reference::Problem const& p) {
  return {{{{1, p.heads_q, p.seqlen_q, p.head_dim}, p.query},
           {{1, p.heads_kv, p.seqlen_kv, p.head_dim}, p.key},
           {{1, p.heads_kv, p.seqlen_kv, p.v_head_dim}, p.value}},
          std::vector<fake::Tensor>(1)};
}

void expectRight(reference::Problem const& p, fake::Run const& run) {
  std::string const wrong = reference::judge(run.outputs[0].values, reference::attention<double>(p).output,
                                             reference::attention<float>(p).output);
  EXPECT(wrong.empty(), wrong);
}

TEST(eight_sessions_that_open_at_once_compute_what_they_should) {
  runner::inThreads(kThreads, [](int thread) {
    reference::Problem const problem = problemOf(thread);
    for (int round = 0; round < kRounds; ++round) {
      fake::Session const session("FlashAttention", nodeOf(problem));
      fake::Run run = runOf(problem);
      session.run(run);
      expectRight(problem, run);
    }
  });
}

TEST(one_session_runs_eight_times_at_once) {
  for (int seed : {0, 1}) {
    reference::Problem const problem = problemOf(seed);
    fake::Session const session("FlashAttention", nodeOf(problem));
    runner::inThreads(kThreads, [&](int) {
      for (int round = 0; round < kRounds; ++round) {
        fake::Run run = runOf(problem);
        session.run(run);
        expectRight(problem, run);
      }
    });
  }
}

// Tiles and slices alike are bodies for the session's threads, for all of those where there are several: what
// the pool leaves undone nobody does.
TEST(the_sessions_threads_do_all_of_the_work) {
  for (int seed : {0, 1}) {
    reference::Problem const problem = problemOf(seed);
    fake::Session const session("FlashAttention", nodeOf(problem));
    fake::Run run = runOf(problem);
    run.idle = true;
    session.run(run);
    std::vector<float> const& output = run.outputs[0].values;
    EXPECT(!output.empty() && std::all_of(output.begin(), output.end(), [](float x) { return x == 7.0f; }),
           "something was computed without the pool");
    size_t const processors = std::max(1u, std::thread::hardware_concurrency());
    EXPECT(run.handed >= std::min(processors, size_t(problem.heads_kv)),
           std::to_string(run.handed) + " bodies for the pool");
  }
}

constexpr int64_t kHeld = 70, kCapacity = 96, kPage = 16;

fake::NodeInfo cacheNodeOf(reference::Problem const& p) {
  fake::NodeInfo node = nodeOf(p);
  node.ints["has_kv_lengths"] = 1;
  node.ints["diagonal"] = 1;
  return node;
}

// The first `count` of each head's `all` rows behind its first `skip`.
std::vector<float> rowsOf(std::vector<float> const& from, int64_t heads, int64_t all, int64_t dim,
                          int64_t skip, int64_t count) {
  std::vector<float> rows;
  for (int64_t head = 0; head < heads; ++head) {
    auto const first = from.begin() + (head * all + skip) * dim;
    rows.insert(rows.end(), first, first + count * dim);
  }
  return rows;
}

// Pages in the order 5, 4, ... 0 that hold each head's first kHeld rows.
std::vector<float> pagesOf(std::vector<float> const& from, int64_t heads, int64_t all, int64_t dim) {
  std::vector<float> pool(size_t(heads * kCapacity * dim), NAN);
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t row = 0; row < kHeld; ++row) {
      int64_t const page = kCapacity / kPage - 1 - row / kPage;
      auto const key = from.begin() + (head * all + row) * dim;
      std::copy(key, key + dim, pool.begin() + ((page * heads + head) * kPage + row % kPage) * dim);
    }
  }
  return pool;
}

// The problem's keys from kHeld on are new, those before lie in a cache of pages.
fake::Run cacheRunOf(reference::Problem const& p, bool in_place) {
  int64_t const all = p.seqlen_kv, fresh = all - kHeld, pages = kCapacity / kPage;
  auto const newRows = [&](std::vector<float> const& from, int64_t dim) {
    return rowsOf(from, p.heads_kv, all, dim, kHeld, fresh);
  };
  fake::Run run{{{{1, p.heads_q, p.seqlen_q, p.head_dim}, p.query},
                 {{1, p.heads_kv, fresh, p.head_dim}, newRows(p.key, p.head_dim)},
                 {{1, p.heads_kv, fresh, p.v_head_dim}, newRows(p.value, p.v_head_dim)},
                 {{1, 1, 1, 1}, {0}},
                 fake::tensorOf({1}, {int32_t(kHeld)}),
                 {{1}, {0}},
                 {{pages, p.heads_kv, kPage, p.head_dim}, pagesOf(p.key, p.heads_kv, all, p.head_dim)},
                 {{pages, p.heads_kv, kPage, p.v_head_dim}, pagesOf(p.value, p.heads_kv, all, p.v_head_dim)},
                 fake::tensorOf({1, pages}, {5, 4, 3, 2, 1, 0})},
                std::vector<fake::Tensor>(5),
                {}};
  if (in_place) run.in_place = {{2, 4}, {3, 6}, {4, 7}};
  return run;
}

TEST(eight_threads_write_a_paged_cache_each_in_place_or_not) {
  runner::inThreads(kThreads, [](int thread) {
    reference::Problem problem = problemOf(thread);
    problem.seqlen_kv = kHeld + 1 + thread;
    problem.bottom_right = true;
    problem.key.resize(size_t(problem.heads_kv * problem.seqlen_kv * problem.head_dim));
    problem.value.resize(size_t(problem.heads_kv * problem.seqlen_kv * problem.v_head_dim));
    fake::Session const session("FlashAttentionPagedCache", cacheNodeOf(problem));
    for (int round = 0; round < kRounds; ++round) {
      bool const in_place = (thread + round) % 2 == 0;
      fake::Run run = cacheRunOf(problem, in_place);
      session.run(run);
      expectRight(problem, run);
      fake::Tensor const& lengths = in_place ? run.inputs[4] : run.outputs[2];
      EXPECT(fake::intAt(lengths, 0) == problem.seqlen_kv, "the length is not that of the cache");
    }
  });
}

template <class Call>
void expectRefused(Call const& call, std::string const& words) {
  std::string text = "nothing was refused";
  try {
    call();
  } catch (std::runtime_error const& error) {
    text = error.what();
  }
  EXPECT(text.find(words) != std::string::npos, text);
}

TEST(eight_sessions_that_are_refused_each_get_their_message) {
  runner::inThreads(kThreads, [](int thread) {
    reference::Problem problem = problemOf(thread);
    fake::Session const session("FlashAttention", nodeOf(problem));
    fake::Run run = runOf(problem);
    run.inputs[1].shape[3] -= 1 + thread;
    expectRefused([&] { session.run(run); }, "head dim " + std::to_string(31 - thread));
    problem.heads_kv = 3;
    expectRefused([&] { fake::Session("FlashAttention", nodeOf(problem)); }, "3 key and value heads");
  });
}

}  // namespace
