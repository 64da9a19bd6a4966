// What each metric is called and measures. Private to this room and its tests.
#ifndef STILLHOUSE_SERVER_METRICS_METRIC_TABLE_H_
#define STILLHOUSE_SERVER_METRICS_METRIC_TABLE_H_

#include <vector>

#include "absl/types/span.h"
#include "server/metrics/metrics.h"

namespace stillhouse {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricLabel {
  const char* name;
  // All values there are ("_other" besides). Empty: values come from our own code (gRPC method names, versions) or pass
  // the tenants' allow-list.
  std::vector<const char*> values;
};

struct MetricSpec {
  Metric metric;
  MetricType type;
  const char* name;
  const char* help;
  std::vector<MetricLabel> labels;
  std::vector<double> buckets;  // of a histogram
};

// In the order of the enum.
absl::Span<const MetricSpec> MetricTable();

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_METRICS_METRIC_TABLE_H_
