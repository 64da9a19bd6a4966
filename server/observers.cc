#include "server/observers.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/time/clock.h"

namespace stillhouse {
namespace {

constexpr absl::Duration kWalkEvery = absl::Seconds(15);

double ToDouble(int64_t value) { return static_cast<double>(value); }

// MemAvailable of the machine, bytes; 0 where the kernel does not say.
double AvailableMemory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    double kilobytes = 0;
    if (word == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

}  // namespace

GaugeSampler::GaugeSampler(Metrics* metrics, Engine* engine, Directory* directory, Store* store, Backend* backend,
                           int64_t weight_bytes)
    : metrics_(metrics),
      engine_(engine),
      directory_(directory),
      store_(store),
      backend_(backend),
      weight_bytes_(weight_bytes) {}

void GaugeSampler::Sample() {
  SampleEngine();
  SampleDirectory();
  SampleStore();
  SampleMemory();
}

void GaugeSampler::SampleEngine() {
  const EngineStats stats = engine_->stats();
  metrics_->Set(Metric::kRequestsRunning, ToDouble(stats.running));
  metrics_->Set(Metric::kRequestsWaiting, ToDouble(stats.waiting), {"queue"});
  metrics_->Increment(Metric::kNanLogits, {}, ToDouble(stats.invalid_logits - last_.invalid_logits));
  metrics_->Increment(Metric::kPreemptions, {}, ToDouble(stats.preemptions - last_.preemptions));
  metrics_->Increment(Metric::kTokens, {"background"}, ToDouble(stats.background_tokens - last_.background_tokens));
  last_ = stats;
}

void GaugeSampler::SampleDirectory() {
  const ResidentStats resident = directory_->stats();
  metrics_->Set(Metric::kResidentCaches, ToDouble(resident.memories));
  metrics_->Set(Metric::kRequestsWaiting, ToDouble(resident.waiting), {"load"});
  for (auto& [method, bytes] : canonical_bytes_) bytes = 0;  // those whose last memory went
  for (const ResidentStats::ByMethod& method : resident.by_method) {
    canonical_bytes_[method.method] = method.canonical_bytes;
  }
  for (const auto& [method, bytes] : canonical_bytes_) {
    metrics_->Set(Metric::kKvCanonicalBytes, ToDouble(bytes), {method});
  }
  sequence_bytes_ = (last_.pages_total - last_.pages_free) * last_.page_bytes;
  memory_bytes_ = resident.allocated_bytes;
  const int64_t here = memory_bytes_ + sequence_bytes_;
  if (backend_->device() == DeviceType::kCpu) {
    metrics_->Set(Metric::kKvAllocatedBytes, ToDouble(here + resident.host_bytes), {"host"});
  } else {
    metrics_->Set(Metric::kKvAllocatedBytes, ToDouble(here), {"device"});
    metrics_->Set(Metric::kKvAllocatedBytes, ToDouble(resident.host_bytes), {"host"});
  }
}

void GaugeSampler::SampleStore() {
  const absl::Time now = absl::Now();
  if (now < next_walk_) return;
  next_walk_ = now + kWalkEvery;
  if (const absl::StatusOr<StoreBytes> bytes = store_->GetStoreBytes(); bytes.ok()) {
    const auto set = [this](std::string_view kind, uint64_t value) {
      metrics_->Set(Metric::kStoreBytes, static_cast<double>(value), {kind});
    };
    set("corpora", bytes->corpora);
    set("caches", bytes->caches);
    set("checkpoints", bytes->checkpoints);
    set("uploads", bytes->uploads);
    set("quarantine", bytes->quarantine);
    set("catalog", bytes->catalog);
  }
  if (const auto builds = store_->ListUnfinishedOperations(); builds.ok()) {
    int64_t running = 0;
    for (const OperationRow& row : *builds) running += row.state == OperationState::kRunning;
    metrics_->Set(Metric::kBuildsRunning, ToDouble(running));
    metrics_->Set(Metric::kBuildsWaiting, ToDouble(static_cast<int64_t>(builds->size()) - running));
  }
}

void GaugeSampler::SampleMemory() {
  const TensorDevice::MemoryUse memory = backend_->memory();
  const bool driver = memory.free >= 0;
  metrics_->Set(Metric::kDeviceMemoryBytes, ToDouble(memory.used), {"used"});
  metrics_->Set(Metric::kDeviceMemoryBytes, driver ? ToDouble(memory.free) : AvailableMemory(), {"free"});
  const auto set = [this](std::string_view use, int64_t bytes) {
    // The parts are read one after the other while work goes on.
    metrics_->Set(Metric::kDeviceAllocatedBytes, ToDouble(std::max<int64_t>(0, bytes)), {use});
  };
  // On the host weights are mapped from their file, or lie beside the pool.
  const int64_t pooled_weights = driver ? weight_bytes_ : 0;
  set("weights", weight_bytes_);
  set("memories", memory_bytes_);
  set("sequences", sequence_bytes_);
  set("work", memory.taken - memory.cached - pooled_weights - memory_bytes_ - sequence_bytes_);
  set("cached", memory.cached);
  if (driver) set("other", memory.used - memory.taken);
  if (memory.limit >= 0) metrics_->Set(Metric::kDeviceMemoryLimit, ToDouble(memory.limit));
  metrics_->Increment(Metric::kDeviceMemoryOverflow, {},
                      ToDouble(memory.overflowed - std::exchange(overflowed_, memory.overflowed)));
}

}  // namespace stillhouse
