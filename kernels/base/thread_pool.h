// A fixed set of threads for data-parallel loops: the calling thread works too.
#ifndef STILLHOUSE_KERNELS_BASE_THREAD_POOL_H_
#define STILLHOUSE_KERNELS_BASE_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace stillhouse {

// Runs loops over `num_threads()` threads, of which the caller is one. One loop at a time: callers on different threads
// wait for each other. A loop body must not start another loop of the same pool (checked). Workers spin for a few
// microseconds between loops, then sleep: a decode step is a few hundred short loops in a row. A loop never waits for a
// worker that has not joined it: on a busy machine the caller does the work itself.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, tasks), each once, in any order; thread < num_threads() is stable
  // within a call and may index scratch memory. Returns when all are done.
  void ParallelFor(int64_t tasks, const std::function<void(int64_t task, int thread)>& body);

  // Splits [0, size) in ranges of at least `grain` and calls body(begin, end, thread) for each.
  void ParallelRanges(int64_t size, int64_t grain,
                      const std::function<void(int64_t begin, int64_t end, int thread)>& body);

 private:
  void WorkerLoop(int thread);
  void RunTasks(int thread);

  std::vector<std::thread> workers_;
  std::mutex callers_;  // held for the length of one loop
  std::mutex mutex_;    // only to sleep and to wake
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  // The loop in progress: written by its caller before it opens the loop, read by those who joined it.
  const std::function<void(int64_t, int)>* body_ = nullptr;
  int64_t tasks_ = 0;
  // Number of the loop, whether it is open to workers, and how many are in it: kLoop · number + kOpen + joined.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_BASE_THREAD_POOL_H_
