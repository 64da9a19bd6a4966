#include "cache_store/garbage_collector.h"

#include "absl/status/status.h"
#include "kernels/base/logging.h"

namespace stillhouse {

GarbageCollector::GarbageCollector(Store* store, absl::Duration every)
    : store_(store), every_(every), thread_([this] { Loop(); }) {}

GarbageCollector::~GarbageCollector() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void GarbageCollector::Loop() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), every_)) return;
    }
    if (absl::Status status = store_->CollectGarbage(); !status.ok()) {
      STILLHOUSE_LOG(WARNING) << "collecting garbage: " << status;
    }
  }
}

}  // namespace stillhouse
