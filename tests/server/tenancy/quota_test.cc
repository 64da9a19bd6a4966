#include "server/tenancy/quota.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "cache_store/store.h"
#include "kernels/base/sha256.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

TEST(QuotaTest, CountsStreamsPerTenantAndGivesThemBack) {
  Quota quota({.streams_per_tenant = 2});
  std::vector<Quota::Lease> leases;
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
  Quota::Lease moved = std::move(leases[0]);
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

// A clock that the test moves.
class RatesTest : public ::testing::Test {
 protected:
  Quota Make(int64_t requests, int64_t tokens) {
    return Quota({.requests_per_minute = requests, .tokens_per_minute = tokens}, [this] { return now_; });
  }
  // The hint of a refusal with this reason.
  static absl::Duration Wait(const absl::Status& status, const char* reason) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(GetReason(status).reason, reason);
    EXPECT_TRUE(IsQuotaReason(GetReason(status).reason));
    return GetReason(status).retry_after.value_or(absl::InfiniteDuration());
  }

  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(RatesTest, WithoutLimitsAnythingGoes) {
  Quota quota = Make(0, 0);
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(quota.AdmitRequest("a").ok());
  quota.ChargeTokens("a", int64_t{1} << 50);
  EXPECT_TRUE(quota.AdmitRequest("a").ok());
}

TEST_F(RatesTest, RequestsComeBackEvenlyToEachTenant) {
  Quota quota = Make(6, 0);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(quota.AdmitRequest("a").ok());
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "REQUESTS_PER_MINUTE"), absl::Seconds(10));
  EXPECT_TRUE(quota.AdmitRequest("b").ok());  // another tenant's share
  now_ += absl::Seconds(4);
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "REQUESTS_PER_MINUTE"), absl::Seconds(6));  // refusals take nothing
  now_ += absl::Seconds(6);
  EXPECT_TRUE(quota.AdmitRequest("a").ok());
  EXPECT_FALSE(quota.AdmitRequest("a").ok());
  now_ += absl::Hours(9);  // not more than a minute's worth is saved
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(quota.AdmitRequest("a").ok());
  EXPECT_FALSE(quota.AdmitRequest("a").ok());
  now_ -= absl::Hours(9);  // a clock that is put back gives nothing and takes nothing
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "REQUESTS_PER_MINUTE"), absl::Seconds(10));
}

TEST_F(RatesTest, TheHintIsLongEnough) {
  Quota quota = Make(7, 0);
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(quota.AdmitRequest("a").ok());
  for (int i = 0; i < 50; ++i) {
    now_ += Wait(quota.AdmitRequest("a"), "REQUESTS_PER_MINUTE");
    ASSERT_TRUE(quota.AdmitRequest("a").ok()) << i;
  }
}

TEST_F(RatesTest, TokensAreChargedAfterwardsAndADebtDelays) {
  Quota quota = Make(0, 600);
  ASSERT_TRUE(quota.AdmitRequest("a").ok());
  quota.ChargeTokens("a", 599);
  EXPECT_TRUE(quota.AdmitRequest("a").ok());  // one is left, and nobody knows how many the next takes
  quota.ChargeTokens("a", 901);
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "TOKENS_PER_MINUTE"), absl::Seconds(90.1));
  EXPECT_TRUE(quota.AdmitRequest("b").ok());
  now_ += absl::Seconds(90);
  EXPECT_FALSE(quota.AdmitRequest("a").ok());
  now_ += absl::Seconds(0.1);
  EXPECT_TRUE(quota.AdmitRequest("a").ok());
}

TEST_F(RatesTest, OfTwoLimitsTheLongerWaitIsTold) {
  Quota quota = Make(1, 60);
  ASSERT_TRUE(quota.AdmitRequest("a").ok());
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "REQUESTS_PER_MINUTE"), absl::Minutes(1));
  quota.ChargeTokens("a", 239);
  EXPECT_EQ(Wait(quota.AdmitRequest("a"), "TOKENS_PER_MINUTE"), absl::Minutes(3));
  now_ += absl::Minutes(3);
  EXPECT_TRUE(quota.AdmitRequest("a").ok());
}

class StoredBytesQuotaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = ::testing::TempDir() + "/quota_test_" + std::to_string(getpid());
    std::filesystem::remove_all(directory_);
    StoreOptions options;
    options.directory = directory_;
    options.min_free_bytes = 0;
    store_ = *OpenEmbeddedStore(options);
    for (const char* tenant : {"a", "b"}) ASSERT_TRUE(store_->EnsureTenant(tenant).ok());
  }
  void TearDown() override {
    store_.reset();
    std::filesystem::remove_all(directory_);
  }
  void Begin(const std::string& corpus_id, const std::string& text) {
    ASSERT_TRUE(store_->BeginUpload({"a", corpus_id, "", "", text.size(), Sha256Hex(text), corpus_id, ""}).ok());
  }
  void Seal(const std::string& corpus_id, const std::string& text) {
    ASSERT_TRUE(store_->WriteChunk("a", corpus_id, 0, text).ok());
    ASSERT_TRUE(store_->Seal("a", corpus_id).ok());
  }

  std::string directory_;
  std::unique_ptr<Store> store_;
};

TEST_F(StoredBytesQuotaTest, CountsWhatIsStoredBegunAndOnItsWay) {
  Quota quota({.stored_corpora_bytes = 30});
  const auto room = [&](uint64_t bytes) { return quota.AdmitBytes(store_.get(), "a", Stored::kCorpora, bytes).ok(); };
  Begin("c", "0123456789");
  EXPECT_TRUE(room(20));
  EXPECT_FALSE(room(21));
  Seal("c", "0123456789");
  EXPECT_TRUE(room(20));
  EXPECT_FALSE(room(21));
  {
    const absl::StatusOr<Quota::Lease> lease = quota.AdmitBytes(store_.get(), "a", Stored::kCorpora, 15);
    ASSERT_TRUE(lease.ok());
    EXPECT_TRUE(room(5));
    EXPECT_FALSE(room(6));
    EXPECT_TRUE(quota.AdmitBytes(store_.get(), "b", Stored::kCorpora, 30).ok());  // another tenant's share
  }
  EXPECT_TRUE(room(20));
  EXPECT_FALSE(room(~uint64_t{0}));
  EXPECT_TRUE(quota.AdmitBytes(store_.get(), "a", Stored::kCaches, ~uint64_t{0}).ok());  // no limit
  const absl::Status refused = quota.AdmitBytes(store_.get(), "a", Stored::kCorpora, 21).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetReason(refused).reason, "TOO_MANY_CORPORA_BYTES");
  EXPECT_FALSE(GetReason(refused).retry_after);
}

TEST_F(StoredBytesQuotaTest, ACacheMayTakeThePlaceOfAnother) {
  Quota quota({.stored_caches_bytes = 30});
  Begin("c", "x");
  Seal("c", "x");
  ArtifactSpec spec;
  spec.tenant = "a";
  spec.corpus_id = "c";
  spec.cache_id = "k";
  spec.method = "FULL";
  spec.summary_json = "{}";
  ASSERT_TRUE(store_->PutArtifact(spec, std::string(25, 'x')).ok());
  const absl::Status refused = quota.AdmitBytes(store_.get(), "a", Stored::kCaches, 6).status();
  EXPECT_EQ(GetReason(refused).reason, "TOO_MANY_CACHE_BYTES");
  EXPECT_TRUE(quota.AdmitBytes(store_.get(), "a", Stored::kCaches, 5).ok());
  EXPECT_TRUE(quota.AdmitBytes(store_.get(), "a", Stored::kCaches, 30, 25).ok());
  EXPECT_FALSE(quota.AdmitBytes(store_.get(), "a", Stored::kCaches, 31, 25).ok());
}

}  // namespace
}  // namespace stillhouse
