// From what the engine, the directory and the builder see to the metrics.
#ifndef STILLHOUSE_SERVER_OBSERVERS_H_
#define STILLHOUSE_SERVER_OBSERVERS_H_

#include <map>
#include <string>
#include <string_view>

#include "server/corpus/build_queue.h"
#include "server/corpus/directory.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"

namespace stillhouse {

// Latency between tokens is seen by the engine alone; what a whole query took, its call counts.
class EngineMetrics final : public EngineObserver {
 public:
  explicit EngineMetrics(Metrics* metrics) : gap_(metrics->GetHistogram(Metric::kInterTokenLatency)) {}
  void OnTokenGap(absl::Duration gap) override { gap_.Observe(absl::ToDoubleSeconds(gap)); }

 private:
  const HistogramHandle gap_;
};

class DirectoryMetrics final : public DirectoryObserver {
 public:
  explicit DirectoryMetrics(Metrics* metrics) : metrics_(metrics) {}
  void OnRoute(std::string_view method, std::string_view outcome) override {
    metrics_->Increment(Metric::kCacheRoute, {method, outcome});
  }
  void OnLoad(std::string_view tier, absl::Duration duration) override {
    metrics_->Observe(Metric::kCacheLoad, absl::ToDoubleSeconds(duration), {tier});
  }
  void OnResident(const ArtifactHeader& header) override {
    if (header.corpus_tokens == 0) return;  // imported, and silent about it
    metrics_->Observe(Metric::kCompressionRatio, static_cast<double>(header.corpus_tokens) / header.slots);
  }
  void OnChecksumFailure() override { metrics_->Increment(Metric::kChecksumFailures); }

 private:
  Metrics* const metrics_;
};

class BuildMetrics final : public BuildObserver {
 public:
  explicit BuildMetrics(Metrics* metrics) : metrics_(metrics) {}
  void OnStage(BuildMethod method, BuildStage stage, absl::Duration duration) override {
    metrics_->Observe(Metric::kBuildStage, absl::ToDoubleSeconds(duration),
                      {BuildMethodName(method), StageLabel(stage)});
  }
  void OnEnd(BuildMethod method, const absl::Status& status) override {
    const char* outcome = status.ok() ? "succeeded" : absl::IsCancelled(status) ? "cancelled" : "failed";
    metrics_->Increment(Metric::kBuilds, {BuildMethodName(method), outcome});
  }

 private:
  static std::string_view StageLabel(BuildStage stage) {
    switch (stage) {
      case BuildStage::kQueued:
        return "queued";
      case BuildStage::kTokenising:
        return "tokenising";
      case BuildStage::kSelfStudy:
        return "self_study";
      case BuildStage::kCompacting:
        return "compacting";
      case BuildStage::kTraining:
        return "training";
      case BuildStage::kEvaluating:
        return "evaluating";
      case BuildStage::kStoring:
      case BuildStage::kDone:
        return "storing";
    }
    return "";
  }

  Metrics* const metrics_;
};

// Gauges that are read when Prometheus asks. All outlive its last Sample.
class GaugeSampler {
 public:
  GaugeSampler(Metrics* metrics, Engine* engine, Directory* directory, Store* store, Backend* backend,
               int64_t weight_bytes);
  // One thread at a time.
  void Sample();

 private:
  void SampleEngine();
  void SampleDirectory();
  void SampleStore();
  // What the memory of the device is used for: all of it that was taken, once.
  void SampleMemory();

  Metrics* const metrics_;
  Engine* const engine_;
  Directory* const directory_;
  Store* const store_;
  Backend* const backend_;
  const int64_t weight_bytes_;
  std::map<std::string, int64_t> canonical_bytes_;  // by method
  int64_t memory_bytes_ = 0;                        // of memories and of sequences, on the device
  int64_t sequence_bytes_ = 0;
  int64_t overflowed_ = 0;                       // counted so far
  EngineStats last_;                             // counters are kept by the engine: what came since
  absl::Time next_walk_ = absl::InfinitePast();  // the store's bytes are counted now and then
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_OBSERVERS_H_
