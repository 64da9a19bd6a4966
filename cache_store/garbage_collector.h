// Keeps a store that is open for weeks as tidy as one that was just opened.

#ifndef STILLHOUSE_CACHE_STORE_GARBAGE_COLLECTOR_H_
#define STILLHOUSE_CACHE_STORE_GARBAGE_COLLECTOR_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cache_store/store.h"

namespace stillhouse {

class GarbageCollector {
 public:
  // Collects the store's garbage every `every`, the first time after one. Keeps the pointer.
  GarbageCollector(Store* store, absl::Duration every);
  ~GarbageCollector();  // waits for a collection that runs
  GarbageCollector(const GarbageCollector&) = delete;
  GarbageCollector& operator=(const GarbageCollector&) = delete;

 private:
  void Loop();

  Store* store_;
  absl::Duration every_;
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_GARBAGE_COLLECTOR_H_
