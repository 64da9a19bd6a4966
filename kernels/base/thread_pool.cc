#include "kernels/base/thread_pool.h"

#include <algorithm>
#include <utility>

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

// About 20 microseconds: longer than the gap between two ops of a step, shorter than anyone notices.
constexpr int kSpins = 4000;

constexpr uint64_t kOpen = uint64_t{1} << 15;
constexpr uint64_t kLoop = uint64_t{1} << 16;

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
  stop_.store(true);
  state_.fetch_add(kLoop);
  {
    // A worker that is about to sleep holds the lock from its last look at the state until it waits.
    std::lock_guard<std::mutex> lock(mutex_);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::WorkerLoop(int thread) {
  uint64_t seen = 0;
  while (true) {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (int spins = 0; state / kLoop == seen && spins < kSpins; ++spins) {
      CpuRelax();
      state = state_.load(std::memory_order_acquire);
    }
    if (state / kLoop == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return state_.load() / kLoop != seen; });
      sleeping_.fetch_sub(1);
      state = state_.load(std::memory_order_acquire);
    }
    if (stop_.load()) return;
    seen = state / kLoop;
    // Joins the loop that was seen, if it is still open.
    while ((state & kOpen) && state / kLoop == seen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        RunTasks(thread);
        state_.fetch_sub(1, std::memory_order_release);
        break;
      }
    }
  }
}

void ThreadPool::RunTasks(int thread) {
  const ThreadPool* outer = std::exchange(t_inside, this);
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
    const ThreadPool* outer = std::exchange(t_inside, this);
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    t_inside = outer;
    return;
  }
  std::lock_guard<std::mutex> exclusive(callers_);
  // Nobody is in the last loop any more: its caller waited for them.
  body_ = &body;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  // Sequentially consistent with `sleeping_`: either this thread sees the sleeper, or the sleeper sees the new state.
  state_.store((state_.load(std::memory_order_relaxed) / kLoop + 1) * kLoop + kOpen);
  if (sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  RunTasks(0);
  state_.fetch_sub(kOpen, std::memory_order_acq_rel);
  for (int spins = 0; state_.load(std::memory_order_acquire) % kLoop != 0; ++spins) {
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
  // Large pieces first, smaller ones towards the end: threads that run at different speeds finish together.
  constexpr int kMostPieces = 64;
  int64_t begins[kMostPieces + 1];
  int pieces = 0;
  for (int64_t begin = 0; begin < size; ++pieces) {
    begins[pieces] = begin;
    const int64_t left = size - begin;
    const int64_t share = pieces + 1 < kMostPieces ? left / (3 * num_threads()) : left;
    begin += std::min(left, (std::max(share, grain) + grain - 1) / grain * grain);
  }
  begins[pieces] = size;
  ParallelFor(pieces, [&](int64_t task, int thread) { body(begins[task], begins[task + 1], thread); });
}

}  // namespace stillhouse
