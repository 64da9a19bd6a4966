#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/match.h"
#include "server/metrics/metric_table.h"
#include "tests/server/metrics/http_exchange.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::Not;

TEST(MetricTableTest, FollowsTheConventions) {
  std::set<std::string> names;
  ASSERT_EQ(MetricTable().size(), static_cast<size_t>(Metric::kCount));
  for (size_t i = 0; i < MetricTable().size(); ++i) {
    const MetricSpec& spec = MetricTable()[i];
    const std::string name = spec.name;
    EXPECT_EQ(static_cast<size_t>(spec.metric), i) << name;
    EXPECT_TRUE(names.insert(name).second) << name << " is declared twice";
    EXPECT_TRUE(absl::StartsWith(name, "stillhouse_") || absl::StartsWith(name, "grpc_server_")) << name;
    EXPECT_EQ(absl::EndsWith(name, "_total"), spec.type == MetricType::kCounter) << name;
    EXPECT_EQ(spec.type == MetricType::kHistogram, !spec.buckets.empty()) << name;
    if (absl::EndsWith(name, "_seconds")) {
      EXPECT_EQ(spec.buckets.front(), 0.001) << name;
    }
    for (const MetricLabel& label : spec.labels) {
      EXPECT_THAT((std::set<std::string>{"corpus", "request", "request_id", "cache"}),
                  Not(::testing::Contains(label.name)))
          << name;
    }
    EXPECT_EQ(std::string(spec.help).back(), '.') << name;
  }
}

TEST(MetricsTest, KnownSeriesExistAtZeroBeforeTheFirstEvent) {
  Metrics metrics;
  const std::string text = metrics.Expose();
  EXPECT_THAT(text, HasSubstr("stillhouse_requests_total{finish_reason=\"end_of_turn\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_requests_running 0\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_time_to_first_token_seconds_bucket{le=\"0.001\"} 0\n"));
}

TEST(MetricsTest, CountsSetsAndObserves) {
  Metrics metrics;
  metrics.Increment(Metric::kTokens, {"prompt"}, 12);
  metrics.Increment(Metric::kTokens, {"prompt"});
  metrics.Set(Metric::kRequestsWaiting, 3, {"queue"});
  metrics.Observe(Metric::kTimeToFirstToken, 0.002);
  const std::string text = metrics.Expose();
  EXPECT_THAT(text, HasSubstr("stillhouse_tokens_total{kind=\"prompt\"} 13\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_requests_waiting{reason=\"queue\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_time_to_first_token_seconds_bucket{le=\"0.001\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_time_to_first_token_seconds_bucket{le=\"0.0025\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_time_to_first_token_seconds_sum 0.002"));
}

TEST(MetricsTest, UnlistedLabelValuesBecomeOther) {
  Metrics metrics({.tenant_labels = {"acme"}});
  metrics.Increment(Metric::kRequests, {"a-reason-nobody-listed"});
  metrics.Increment(Metric::kTenantRequests, {"acme"});
  metrics.Increment(Metric::kTenantRequests, {"stranger-1"});
  metrics.Increment(Metric::kTenantRequests, {"stranger-2"});
  const std::string text = metrics.Expose();
  EXPECT_THAT(text, HasSubstr("stillhouse_requests_total{finish_reason=\"_other\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_tenant_requests_total{tenant=\"acme\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("stillhouse_tenant_requests_total{tenant=\"_other\"} 2\n"));
  EXPECT_THAT(text, Not(HasSubstr("stranger")));
}

TEST(MetricsTest, ServesOverHttpAndRunsSamplers) {
  Metrics metrics;
  const GaugeHandle running = metrics.GetGauge(Metric::kRequestsRunning);
  int samples = 0;
  metrics.AddSampler([&] { running.Set(++samples); });
  const absl::StatusOr<int> port = metrics.Serve("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  ASSERT_GT(*port, 0);
  EXPECT_THAT(HttpGet(*port, "/metrics"), HasSubstr("stillhouse_requests_running 1\n"));
  EXPECT_THAT(HttpGet(*port, "/metrics"), HasSubstr("stillhouse_requests_running 2\n"));
  EXPECT_THAT(HttpGet(*port, "/etc/passwd"), HasSubstr("404"));

  Metrics second;
  const absl::Status taken = second.Serve("127.0.0.1:" + std::to_string(*port)).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("bind: Address already in use"));
  // An address for documentation, which no machine has.
  const absl::Status elsewhere = second.Serve("192.0.2.1:0").status();
  EXPECT_THAT(std::string(elsewhere.message()), HasSubstr("bind: Cannot assign requested address"));
  EXPECT_THAT(std::string(second.Serve("no.such.host:0").status().message()), HasSubstr("must be an IP address"));
  metrics.StopServing();
  EXPECT_EQ(HttpGet(*port, "/metrics"), "");
}

TEST(MetricsTest, RefusesAddressesThatAreNone) {
  Metrics metrics;
  for (const char* address : {"", "9464", ":9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000", "127.0.0.1:-1"}) {
    EXPECT_EQ(metrics.Serve(address).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
}

TEST(MetricsDeathTest, WrongTypeOrLabelsAreBugs) {
  Metrics metrics;
  EXPECT_DEATH(metrics.Increment(Metric::kRequestsRunning), "another type");
  EXPECT_DEATH(metrics.Increment(Metric::kTokens), "stillhouse_tokens_total");
}

}  // namespace
}  // namespace stillhouse
