#include "server/metrics/metrics.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <unordered_set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "server/metrics/metric_table.h"

namespace stillhouse {
namespace {

constexpr const char* kOther = "_other";

const MetricSpec& Spec(Metric metric, MetricType type) {
  const MetricSpec& spec = MetricTable()[static_cast<size_t>(metric)];
  STILLHOUSE_CHECK(spec.metric == metric) << "metric_table.cc is not in the order of the enum at " << spec.name;
  STILLHOUSE_CHECK(spec.type == type) << spec.name << " is of another type";
  return spec;
}

// Binds and listens as the HTTP server would, to learn why it could not: its exceptions do not say. The port that was
// free, or UNAVAILABLE with the system's reason.
absl::StatusOr<int> TryPort(std::string host, int port) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return absl::UnavailableError("the host must be an IP address, such as 127.0.0.1 or [::1]");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
  const auto failed = [](const char* call) {
    return absl::UnavailableError(absl::StrCat(call, ": ", std::strerror(errno)));
  };
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return failed("socket");
  const std::unique_ptr<const int, void (*)(const int*)> closed(&fd, [](const int* open) { close(*open); });
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (bind(fd, found->ai_addr, found->ai_addrlen) != 0) return failed("bind");
  if (listen(fd, 1) != 0) return failed("listen");
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return failed("getsockname");
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

// The HTTP server, or nullptr; `said`, if given, receives what it wrote about its start.
std::unique_ptr<prometheus::Exposer> StartExposer(const std::string& address, std::string* said) {
  std::vector<std::string> options = {"listening_ports", address, "num_threads", "2"};
  int log = -1;
  if (said != nullptr && (log = memfd_create("metrics-start", MFD_CLOEXEC | MFD_ALLOW_SEALING)) >= 0) {
    options.insert(options.end(), {"error_log_file", absl::StrCat("/proc/self/fd/", log)});
  }
  std::unique_ptr<prometheus::Exposer> exposer;
  try {
    exposer = std::make_unique<prometheus::Exposer>(options);
    if (exposer->GetListeningPorts().empty()) exposer.reset();
  } catch (const std::exception&) {
  }
  if (log < 0) return exposer;
  char text[1024];
  const ssize_t size = pread(log, text, sizeof(text), 0);
  if (size > 0) said->assign(text, static_cast<size_t>(size));
  // A server that did start may go on writing there: the descriptor stays its own, and takes no more.
  if (exposer != nullptr) {
    fcntl(log, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_WRITE);
  } else {
    close(log);
  }
  return exposer;
}

}  // namespace

void CounterHandle::Add(double amount) const { counter_->Increment(amount); }
void GaugeHandle::Set(double value) const { gauge_->Set(value); }
void GaugeHandle::Add(double amount) const { gauge_->Increment(amount); }
void HistogramHandle::Observe(double value) const { histogram_->Observe(value); }

struct Metrics::Impl : public prometheus::Collectable {
  union Family {
    prometheus::Family<prometheus::Counter>* counter;
    prometheus::Family<prometheus::Gauge>* gauge;
    prometheus::Family<prometheus::Histogram>* histogram;
  };

  prometheus::Registry registry;
  std::vector<Family> families;
  std::unordered_set<std::string> tenant_labels;
  mutable std::mutex samplers_mutex;
  std::vector<std::function<void()>> samplers;           // guarded by samplers_mutex
  std::shared_ptr<prometheus::Collectable> collectable;  // an alias of this, for the exposer's weak pointer
  std::mutex exposer_mutex;
  std::unique_ptr<prometheus::Exposer> exposer;  // guarded by exposer_mutex

  std::vector<prometheus::MetricFamily> Collect() const override {
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
  impl_->collectable = std::shared_ptr<prometheus::Collectable>(impl_.get(), [](prometheus::Collectable*) {});
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
  std::string_view host = address.substr(0, colon);
  if (host == "localhost") host = "127.0.0.1";
  std::lock_guard<std::mutex> lock(impl_->exposer_mutex);
  const auto listen_at = [&host](int at) { return absl::StrCat(std::string(host), ":", at); };
  impl_->exposer = StartExposer(listen_at(port), nullptr);
  std::string cause;
  if (impl_->exposer == nullptr) {
    const absl::StatusOr<int> free_port = TryPort(std::string(host), port);
    if (free_port.ok()) {
      // The address is fine, so the HTTP server has another complaint: once more, with a port that is known to be free.
      impl_->exposer = StartExposer(listen_at(*free_port), &cause);
      // The first line, without its time and level in brackets.
      cause = cause.substr(0, cause.find('\n'));
      if (const size_t bracket = cause.rfind("] "); bracket != std::string::npos) cause = cause.substr(bracket + 2);
      if (cause.empty()) cause = "the HTTP server does not start";
    } else {
      cause = std::string(free_port.status().message());
    }
  }
  if (impl_->exposer == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", std::string(address), ": ", cause,
                                               "; choose another --metrics-address, or none with an empty one"));
  }
  impl_->exposer->RegisterCollectable(impl_->collectable, "/metrics");
  return impl_->exposer->GetListeningPorts().front();
}

void Metrics::StopServing() {
  std::lock_guard<std::mutex> lock(impl_->exposer_mutex);
  impl_->exposer.reset();
}

}  // namespace stillhouse
