// Threads for work that may block on the disk: gRPC's own threads must not.
#ifndef STILLHOUSE_SERVER_SERVICE_WORK_POOL_H_
#define STILLHOUSE_SERVER_SERVICE_WORK_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace stillhouse {

// Runs jobs in the order of their arrival. A job may block on the disk, never on another job. The queue is bounded by
// the calls in flight: each has at most two jobs here. Thread-safe.
class WorkPool {
 public:
  explicit WorkPool(int threads);
  ~WorkPool();  // runs what was posted, then joins
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  void Post(std::function<void()> job) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  bool HasWorkOrStops() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || !jobs_.empty(); }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_WORK_POOL_H_
