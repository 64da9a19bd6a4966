#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <mutex>
#include <unordered_set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "server/metrics/metric_table.h"
#include "server/metrics/page_server.h"

namespace stillhouse {
namespace {

constexpr const char* kOther = "_other";

const MetricSpec& Spec(Metric metric, MetricType type) {
  const MetricSpec& spec = MetricTable()[static_cast<size_t>(metric)];
  STILLHOUSE_CHECK(spec.metric == metric) << "metric_table.cc is not in the order of the enum at " << spec.name;
  STILLHOUSE_CHECK(spec.type == type) << spec.name << " is of another type";
  return spec;
}

}  // namespace

void CounterHandle::Add(double amount) const { counter_->Increment(amount); }
void GaugeHandle::Set(double value) const { gauge_->Set(value); }
void GaugeHandle::Add(double amount) const { gauge_->Increment(amount); }
void HistogramHandle::Observe(double value) const { histogram_->Observe(value); }

struct Metrics::Impl {
  union Family {
    prometheus::Family<prometheus::Counter>* counter;
    prometheus::Family<prometheus::Gauge>* gauge;
    prometheus::Family<prometheus::Histogram>* histogram;
  };

  prometheus::Registry registry;
  std::vector<Family> families;
  std::unordered_set<std::string> tenant_labels;
  mutable std::mutex samplers_mutex;
  std::vector<std::function<void()>> samplers;  // guarded by samplers_mutex
  std::mutex server_mutex;
  std::unique_ptr<PageServer> server;  // guarded by server_mutex

  std::vector<prometheus::MetricFamily> Collect() const {
    std::vector<std::function<void()>> run;
    {
      std::lock_guard<std::mutex> lock(samplers_mutex);
      run = samplers;
    }
    for (const auto& sampler : run) sampler();
    return registry.Collect();
  }

  // The value as it may appear, which bounds the series.
  std::string Bounded(const MetricLabel& label, std::string_view value) const {
    if (!label.values.empty()) {
      for (const char* known : label.values) {
        if (value == known) return std::string(value);
      }
      return kOther;
    }
    if (std::string_view(label.name) == "tenant" && tenant_labels.count(std::string(value)) == 0) return kOther;
    return std::string(value);
  }

  prometheus::Labels Labels(const MetricSpec& spec, LabelValues values) const {
    STILLHOUSE_CHECK_EQ(values.size(), spec.labels.size()) << spec.name;
    prometheus::Labels labels;
    size_t i = 0;
    for (std::string_view value : values) {
      const MetricLabel& label = spec.labels[i++];
      labels.emplace(label.name, Bounded(label, value));
    }
    return labels;
  }

  void Declare(const MetricSpec& spec) {
    Family family{};
    switch (spec.type) {
      case MetricType::kCounter:
        family.counter = &prometheus::BuildCounter().Name(spec.name).Help(spec.help).Register(registry);
        break;
      case MetricType::kGauge:
        family.gauge = &prometheus::BuildGauge().Name(spec.name).Help(spec.help).Register(registry);
        break;
      case MetricType::kHistogram:
        family.histogram = &prometheus::BuildHistogram().Name(spec.name).Help(spec.help).Register(registry);
        break;
    }
    families.push_back(family);
    // Series that are known beforehand exist from the start, at 0: a rate over a counter that appears with its first
    // event misses that event. Pairs of labels are left out: most never meet.
    if (spec.labels.empty()) {
      AddSeries(spec, family, {});
    } else if (spec.labels.size() == 1) {
      for (const char* value : spec.labels[0].values) AddSeries(spec, family, {{spec.labels[0].name, value}});
    }
  }

  static void AddSeries(const MetricSpec& spec, const Family& family, const prometheus::Labels& labels) {
    switch (spec.type) {
      case MetricType::kCounter:
        family.counter->Add(labels);
        break;
      case MetricType::kGauge:
        family.gauge->Add(labels);
        break;
      case MetricType::kHistogram:
        family.histogram->Add(labels, spec.buckets);
        break;
    }
  }
};

Metrics::Metrics(MetricsOptions options) : impl_(std::make_unique<Impl>()) {
  STILLHOUSE_CHECK_EQ(MetricTable().size(), static_cast<size_t>(Metric::kCount));
  impl_->tenant_labels.insert(options.tenant_labels.begin(), options.tenant_labels.end());
  for (const MetricSpec& spec : MetricTable()) impl_->Declare(spec);
}

Metrics::~Metrics() { StopServing(); }

CounterHandle Metrics::GetCounter(Metric metric, LabelValues labels) {
  const MetricSpec& spec = Spec(metric, MetricType::kCounter);
  return CounterHandle(&impl_->families[static_cast<size_t>(metric)].counter->Add(impl_->Labels(spec, labels)));
}

GaugeHandle Metrics::GetGauge(Metric metric, LabelValues labels) {
  const MetricSpec& spec = Spec(metric, MetricType::kGauge);
  return GaugeHandle(&impl_->families[static_cast<size_t>(metric)].gauge->Add(impl_->Labels(spec, labels)));
}

HistogramHandle Metrics::GetHistogram(Metric metric, LabelValues labels) {
  const MetricSpec& spec = Spec(metric, MetricType::kHistogram);
  return HistogramHandle(
      &impl_->families[static_cast<size_t>(metric)].histogram->Add(impl_->Labels(spec, labels), spec.buckets));
}

void Metrics::Increment(Metric metric, LabelValues labels, double amount) { GetCounter(metric, labels).Add(amount); }
void Metrics::Set(Metric metric, double value, LabelValues labels) { GetGauge(metric, labels).Set(value); }
void Metrics::Observe(Metric metric, double value, LabelValues labels) { GetHistogram(metric, labels).Observe(value); }

void Metrics::AddSampler(std::function<void()> sampler) {
  std::lock_guard<std::mutex> lock(impl_->samplers_mutex);
  impl_->samplers.push_back(std::move(sampler));
}

std::string Metrics::Expose() { return prometheus::TextSerializer().Serialize(impl_->Collect()); }

absl::StatusOr<int> Metrics::Serve(std::string_view address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(std::string(address.substr(colon + 1)), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", std::string(address), "' is no address for metrics; write HOST:PORT, such as 127.0.0.1:9464"));
  }
  std::string host(address.substr(0, colon));
  if (host == "localhost") host = "127.0.0.1";
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  absl::StatusOr<std::unique_ptr<PageServer>> server = PageServer::Start(
      host, port, {"/metrics", "text/plain; version=0.0.4; charset=utf-8", [this] { return Expose(); }});
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", std::string(address), ": ",
                                               server.status().message(),
                                               "; choose another --metrics-address, or none with an empty one"));
  }
  std::lock_guard<std::mutex> lock(impl_->server_mutex);
  impl_->server = *std::move(server);
  return impl_->server->port();
}

void Metrics::StopServing() {
  std::lock_guard<std::mutex> lock(impl_->server_mutex);
  impl_->server.reset();
}

}  // namespace stillhouse
