#include "server/tenancy/listen_policy.h"

#include <gtest/gtest.h>

namespace stillhouse {
namespace {

TEST(ListenPolicyTest, KnowsLoopback) {
  for (const char* yes : {"127.0.0.1:1", "127.9.8.7:1", "localhost:1", "[::1]:1", "unix:/run/x.sock"}) {
    EXPECT_TRUE(IsLoopback(yes)) << yes;
  }
  for (const char* no : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.com:1", "127.evil.example:1", "1.127.0.0:1",
                         "localhost.example:1", "[::2]:1", ""}) {
    EXPECT_FALSE(IsLoopback(no)) << no;
  }
}

TEST(ListenPolicyTest, OffLoopbackSomethingMustSayWhoCalls) {
  ListenPlan plan;
  plan.address = "0.0.0.0:7070";
  EXPECT_EQ(CheckListenPlan(plan).code(), absl::StatusCode::kFailedPrecondition);
  plan.tls = true;  // encrypted, but anyone may call
  EXPECT_EQ(CheckListenPlan(plan).code(), absl::StatusCode::kFailedPrecondition);
  plan.client_certificates = true;
  EXPECT_TRUE(CheckListenPlan(plan).ok());
  plan = {.address = "0.0.0.0:7070", .keys = true};
  EXPECT_TRUE(CheckListenPlan(plan).ok());
  plan = {.address = "0.0.0.0:7070", .insecure_listen = true};
  EXPECT_TRUE(CheckListenPlan(plan).ok());
  plan = {.address = "127.0.0.1:7070"};
  EXPECT_TRUE(CheckListenPlan(plan).ok());
  plan = {.address = "127.0.0.1:7070", .client_certificates = true};
  EXPECT_EQ(CheckListenPlan(plan).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ListenPolicyTest, RefusesAddressesThatAreNone) {
  for (const char* bad : {"", "7070", ":7070", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"}) {
    ListenPlan plan;
    plan.address = bad;
    EXPECT_EQ(CheckListenPlan(plan).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace stillhouse
