#include "kernels/base/thread_pool.h"

#include <algorithm>

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

// About 20 microseconds: longer than the gap between two ops of a step, shorter than anyone notices.
constexpr int kSpins = 4000;

thread_local const ThreadPool* t_inside = nullptr;

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  STILLHOUSE_CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { WorkerLoop(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::WorkerLoop(int thread) {
  uint64_t seen = 0;
  while (true) {
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen && spins < kSpins) {
      CpuRelax();
      ++spins;
    }
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      sleeping_.fetch_sub(1);
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    RunTasks(thread);
    busy_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::RunTasks(int thread) {
  const ThreadPool* outer = t_inside;
  t_inside = this;
  while (true) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) break;
    (*body_)(task, thread);
  }
  t_inside = outer;
}

void ThreadPool::ParallelFor(int64_t tasks, const std::function<void(int64_t, int)>& body) {
  STILLHOUSE_CHECK(t_inside != this) << "a loop body may not start another loop of its pool";
  if (tasks <= 0) return;
  if (workers_.empty() || tasks == 1) {
    // Serial, but still exclusive, so that thread index 0 is never used by two callers at once.
    std::lock_guard<std::mutex> exclusive(callers_);
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  std::lock_guard<std::mutex> exclusive(callers_);
  body_ = &body;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    // The lock orders the increment against a worker that is about to sleep.
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  if (sleeping_.load() > 0) wake_.notify_all();
  RunTasks(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpins) {
      CpuRelax();
    } else {
      std::this_thread::yield();
    }
  }
  body_ = nullptr;
}

void ThreadPool::ParallelRanges(int64_t size, int64_t grain, const std::function<void(int64_t, int64_t, int)>& body) {
  if (size <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = std::min<int64_t>((size + grain - 1) / grain, 4 * num_threads());
  const int64_t step = (size + pieces - 1) / pieces;
  ParallelFor((size + step - 1) / step,
              [&](int64_t task, int thread) { body(task * step, std::min(size, (task + 1) * step), thread); });
}

}  // namespace stillhouse
