// The server's metrics: declared in one table, exposed to Prometheus over HTTP.
#ifndef STILLHOUSE_SERVER_METRICS_METRICS_H_
#define STILLHOUSE_SERVER_METRICS_METRICS_H_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

namespace stillhouse {

// One name per line of the table in metric_table.cc, which holds the exposed name, the unit, the labels and the
// buckets.
enum class Metric : uint8_t {
  // Latency, seconds.
  kTimeToFirstToken,
  kInterTokenLatency,
  kRequestQueue,
  kRequestPrefill,
  kRequestDecode,
  kE2eRequest,
  kCacheLoad,   // {tier}
  kBuildStage,  // {method, stage}
  // Memory, bytes.
  kKvCanonicalBytes,  // {method}
  kKvAllocatedBytes,  // {tier}
  kWeightsBytes,
  kStoreBytes,  // {kind}
  kResidentCaches,
  kCompressionRatio,
  kDeviceMemoryBytes,     // {state}
  kDeviceAllocatedBytes,  // {use}
  kDeviceMemoryLimit,
  kDeviceMemoryOverflow,
  // Which memory answered.
  kCacheRoute,     // {method, outcome}
  kAttentionMass,  // {segment}
  // Traffic.
  kRequests,  // {finish_reason}
  kTokens,    // {kind}
  kRequestsRunning,
  kRequestsWaiting,      // {reason}
  kAdmissionRejections,  // {reason}
  kPreemptions,
  kNanLogits,
  kChecksumFailures,
  kTenantRequests,  // {tenant}
  kTenantTokens,    // {tenant, kind}
  kUploadBytes,
  kGrpcStarted,  // {grpc_method}
  kGrpcHandled,  // {grpc_method, grpc_code}
  // Builds.
  kBuilds,  // {method, outcome}
  kBuildsRunning,
  kBuildsWaiting,
  // The process.
  kBuildInfo,  // {version, backend}
  kCount,
};

// Handles of single time series: a pointer each, valid as long as their Metrics. Any thread, no lock of our own.
class CounterHandle {
 public:
  void Add(double amount = 1) const;

 private:
  friend class Metrics;
  explicit CounterHandle(prometheus::Counter* counter) : counter_(counter) {}
  prometheus::Counter* counter_;
};

class GaugeHandle {
 public:
  void Set(double value) const;
  void Add(double amount) const;

 private:
  friend class Metrics;
  explicit GaugeHandle(prometheus::Gauge* gauge) : gauge_(gauge) {}
  prometheus::Gauge* gauge_;
};

class HistogramHandle {
 public:
  void Observe(double value) const;

 private:
  friend class Metrics;
  explicit HistogramHandle(prometheus::Histogram* histogram) : histogram_(histogram) {}
  prometheus::Histogram* histogram_;
};

struct MetricsOptions {
  // Tenants that appear by name in the `tenant` label; all others are "_other". Bounds the number of series.
  std::vector<std::string> tenant_labels;
};

// Owns every series and the HTTP endpoint. Made once by the wiring; everyone else holds a pointer. Thread-safe.
//
// Label values are given in the table's order. A label whose values the table lists takes no others: an unlisted value
// is counted as "_other", so no caller can make series without bound. Asking for a metric as another type than the
// table's, or with another number of labels, is a bug (checked).
class Metrics {
 public:
  using LabelValues = std::initializer_list<std::string_view>;

  explicit Metrics(MetricsOptions options = {});
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Handles, for hot paths: look up once, keep.
  CounterHandle GetCounter(Metric metric, LabelValues labels = {});
  GaugeHandle GetGauge(Metric metric, LabelValues labels = {});
  HistogramHandle GetHistogram(Metric metric, LabelValues labels = {});

  // The same in one call (a hash and a lock).
  void Increment(Metric metric, LabelValues labels = {}, double amount = 1);
  void Set(Metric metric, double value, LabelValues labels = {});
  void Observe(Metric metric, double value, LabelValues labels = {});

  // Runs before every exposition, on the thread that serves it: for gauges that are cheaper to read than to keep. What
  // it captures must outlive serving (StopServing).
  void AddSampler(std::function<void()> sampler);

  // Everything as Prometheus text, samplers run first.
  std::string Expose();

  // Serves GET /metrics on `address` ("127.0.0.1:9464", "[::1]:9464"; port 0 picks one) and returns the port.
  // INVALID_ARGUMENT for an address that is none, UNAVAILABLE if it cannot be bound.
  absl::StatusOr<int> Serve(std::string_view address);
  // Returns when no exposition is running any more.
  void StopServing();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_METRICS_METRICS_H_
