#include "kernels/base/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

namespace stillhouse::testing {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(static_cast<size_t>(tasks));
      pool.ParallelFor(tasks, [&](int64_t task, int thread) {
        EXPECT_LT(thread, threads);
        ++count[static_cast<size_t>(task)];
      });
      for (const auto& c : count) EXPECT_EQ(c.load(), 1);
    }
  }
}

TEST(ThreadPool, RangesCoverTheSizeOnce) {
  ThreadPool pool(3);
  for (int64_t size : {0, 1, 5, 64, 1001}) {
    for (int64_t grain : {1, 7, 5000}) {
      std::vector<std::atomic<int>> count(static_cast<size_t>(size));
      pool.ParallelRanges(size, grain, [&](int64_t begin, int64_t end, int) {
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++count[static_cast<size_t>(i)];
      });
      for (const auto& c : count) EXPECT_EQ(c.load(), 1);
    }
  }
}

// Results of a loop are visible to its caller, and those of the caller to the loop, without further synchronisation;
// loops in a row and after a sleep. (The thread sanitizer checks the same.)
TEST(ThreadPool, LoopsInARowSeeEachOthersWrites) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64, 0);
  for (int round = 1; round <= 2000; ++round) {
    pool.ParallelFor(64, [&](int64_t task, int) { values[static_cast<size_t>(task)] += task; });
    ++values[0];
    if (round == 1000) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(values[static_cast<size_t>(i)], i == 0 ? 2000 : 2000 * i);
}

TEST(ThreadPool, CallersOnDifferentThreadsWaitForEachOther) {
  ThreadPool pool(3);
  std::vector<int64_t> per_thread(3, 0);  // indexed by the pool's thread: exclusive to one loop at a time
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        pool.ParallelFor(5, [&](int64_t, int thread) { ++per_thread[static_cast<size_t>(thread)]; });
        pool.ParallelFor(1, [&](int64_t, int thread) { ++per_thread[static_cast<size_t>(thread)]; });
      }
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(std::accumulate(per_thread.begin(), per_thread.end(), int64_t{0}), 4 * 200 * 6);
}

// A pool may be used inside the loop of another.
TEST(ThreadPool, PoolsNest) {
  ThreadPool outer(2), inner(2);
  std::atomic<int> count{0};
  outer.ParallelFor(3, [&](int64_t, int) { inner.ParallelFor(5, [&](int64_t, int) { ++count; }); });
  EXPECT_EQ(count.load(), 15);
}

TEST(ThreadPoolDeathTest, ALoopInsideALoopIsABug) {
  ThreadPool pool(2);
  EXPECT_DEATH(pool.ParallelFor(1, [&](int64_t, int) { pool.ParallelFor(1, [](int64_t, int) {}); }),
               "may not start another loop");
  EXPECT_DEATH(pool.ParallelFor(2, [&](int64_t, int) { pool.ParallelFor(2, [](int64_t, int) {}); }),
               "may not start another loop");
}

}  // namespace
}  // namespace stillhouse::testing
