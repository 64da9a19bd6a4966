#include "server/tenancy/quota.h"

#include <gtest/gtest.h>

#include <vector>

#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

TEST(QuotaTest, CountsStreamsPerTenantAndGivesThemBack) {
  Quota quota({.streams_per_tenant = 2});
  std::vector<Quota::StreamLease> leases;
  for (int i = 0; i < 2; ++i) leases.push_back(*quota.AdmitStream("a"));
  const absl::Status full = quota.AdmitStream("a").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetReason(full).reason, "TOO_MANY_STREAMS");
  EXPECT_TRUE(GetReason(full).retry_after);
  EXPECT_TRUE(quota.AdmitStream("b").ok());  // another tenant's share
  leases.pop_back();
  EXPECT_TRUE(quota.AdmitStream("a").ok());  // dropped at once, so the next fits too
  leases.push_back(*quota.AdmitStream("a"));
  EXPECT_FALSE(quota.AdmitStream("a").ok());
  // Moving a lease moves the place.
  Quota::StreamLease moved = std::move(leases[0]);
  leases.clear();
  leases.push_back(*quota.AdmitStream("a"));
  EXPECT_FALSE(quota.AdmitStream("a").ok());
}

TEST(QuotaTest, ChecksSizesBeforeBytesCome) {
  Quota quota({.corpus_bytes = 10, .artifact_bytes = 20, .evaluation_bytes = 5});
  EXPECT_TRUE(quota.AdmitCorpus("a", 10).ok());
  EXPECT_EQ(quota.AdmitCorpus("a", 11).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(quota.AdmitCorpus("a", 0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(quota.AdmitArtifact("a", 20).ok());
  EXPECT_FALSE(quota.AdmitArtifact("a", ~uint64_t{0}).ok());
  EXPECT_TRUE(quota.AdmitEvaluation("a", 0).ok());
  EXPECT_FALSE(quota.AdmitEvaluation("a", 6).ok());
}

}  // namespace
}  // namespace stillhouse
