// What a tenant's quotas refuse, and that what was refused took nothing.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include "kernels/base/sha256.h"
#include "tests/server/service/calls_fixture.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

TEST_F(CallsTest, RequestsPerMinuteAreQueriesAndScores) {
  std::atomic<int> seconds{0};
  Quota quota({.requests_per_minute = 2}, [&] { return absl::UnixEpoch() + absl::Seconds(seconds.load()); });
  service_->quota = &quota;
  service_->doors.score = [](const ScoreRequest&) { return ScoreResult(); };
  v1::ScoreRequest request;
  request.set_prompt("hello");
  request.set_continuation("world");
  v1::ScoreResponse response;
  const auto score = [&] {
    grpc::ClientContext context;
    return inference_->Score(&context, request, &response);
  };
  EXPECT_TRUE(score().ok());
  EXPECT_TRUE(score().ok());
  for (const grpc::Status& refused : {score(), Query("hello")}) {
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(refused.error_message(), "your tenant has used its 2 requests a minute; retry in 30s");
    EXPECT_EQ(Info(refused).reason(), "REQUESTS_PER_MINUTE");
    EXPECT_EQ(RetryDelay(refused), absl::Seconds(30));
  }
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_admission_rejections_total{reason=\"quota\"} 2\n"));
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_admission_rejections_total{reason=\"no_memory\"} 0\n"));
  seconds = 30;
  EXPECT_TRUE(score().ok());
}

TEST_F(CallsTest, TokensThatWereComputedDelayTheNextQuery) {
  std::atomic<int> seconds{0};
  Quota quota({.tokens_per_minute = 60}, [&] { return absl::UnixEpoch() + absl::Seconds(seconds.load()); });
  service_->quota = &quota;
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, Ask("hello"));
  FakeEngine::Job job = engine_.Next();
  GenerationUsage usage;
  usage.prompt_tokens = 70;
  usage.completion_tokens = 19;
  job.sink->OnFinish(FinishReason::kMaxTokens, usage, absl::OkStatus());
  // Charged before anybody read the answer.
  grpc::Status refused = Query("hello");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Info(refused).reason(), "TOKENS_PER_MINUTE");
  EXPECT_EQ(RetryDelay(refused), absl::Seconds(30));
  EXPECT_TRUE(ReadAll(reader.get()).second.ok());
  seconds = 30;
  service_->doors.score = [](const ScoreRequest& request) {
    request.computed(60);
    return absl::CancelledError("nobody waits");  // what was computed until then counts
  };
  v1::ScoreRequest request;
  request.set_prompt("hello");
  request.set_continuation("world");
  v1::ScoreResponse response;
  grpc::ClientContext cancelled;
  EXPECT_EQ(inference_->Score(&cancelled, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  refused = Query("hello");
  EXPECT_EQ(Info(refused).reason(), "TOKENS_PER_MINUTE");
  EXPECT_EQ(RetryDelay(refused), absl::Minutes(1));
}

// Documents of a tenant that may have 20 bytes in all.
class StoredBytesTest : public CallsTest {
 protected:
  void SetUp() override {
    CallsTest::SetUp();
    service_->quota = &quota_of_20_;
  }
  grpc::Status Send(const std::string& id, const std::string& text, size_t sent) {
    v1::Corpus corpus;
    return Upload(id, text, Sha256Hex(text), {{0, text.substr(0, sent)}}, &corpus);
  }
  Quota quota_of_20_{{.stored_corpora_bytes = 20, .stored_caches_bytes = 20}};
};

TEST_F(StoredBytesTest, UploadsThatHaveNoRoomAreRefusedAtTheirStart) {
  const std::string text = "12 bytes of it", other = "7 bytes";
  EXPECT_EQ(Send("book", text, 4).error_code(), grpc::StatusCode::FAILED_PRECONDITION);  // no end, but begun
  const grpc::Status refused = Send("other", other, 7);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Info(refused).reason(), "TOO_MANY_CORPORA_BYTES");
  EXPECT_EQ(Info(refused).metadata().at("limit_bytes"), "20");
  EXPECT_EQ(Info(refused).metadata().at("used_bytes"), "14");
  EXPECT_EQ(RetryDelay(refused), absl::InfiniteDuration());  // time alone does not help
  EXPECT_THAT(refused.error_message(), HasSubstr("delete documents"));
  EXPECT_TRUE(store_->ListCorpora("default", {})->rows.empty());
  EXPECT_EQ(store_->GetUsage("default")->uploads, 1u);
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_admission_rejections_total{reason=\"quota\"} 1\n"));
  // What was begun goes on, and what is there is found again, although neither would fit beside itself.
  EXPECT_TRUE(Send("book", text, text.size()).ok());
  EXPECT_TRUE(Send("book", text, 0).ok());
  EXPECT_EQ(Send("book", other, 7).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Send("other", other, 7).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(store_->DeleteCorpus("default", "book").ok());
  EXPECT_TRUE(Send("other", other, 7).ok());
}

TEST_F(StoredBytesTest, ImportsCountFromTheirHeaderToTheirEnd) {
  ASSERT_TRUE(Send("book", "a document", 10).ok());
  const auto begin = [this](grpc::ClientContext* context, v1::Cache* cache, const std::string& id, int64_t size) {
    auto writer = caches_->ImportCache(context, cache);
    v1::ImportCacheRequest message;
    v1::ImportHeader* header = message.mutable_header();
    header->set_parent("tenants/default/corpora/book");
    header->set_cache_id(id);
    header->set_size_bytes(size);
    header->set_sha256(Sha256Hex("x"));
    writer->Write(message);
    message.mutable_chunk()->set_data("x");
    writer->Write(message);
    return writer;
  };
  const auto refuse = [&](int64_t size) {
    grpc::ClientContext context;
    v1::Cache cache;
    auto writer = begin(&context, &cache, "other", size);
    writer->WritesDone();
    return writer->Finish();
  };
  grpc::ClientContext context;
  v1::Cache cache;
  auto first = begin(&context, &cache, "k", 12);
  // What never fits takes nothing, and tells when the header was read.
  while (Info(refuse(21)).metadata().at("used_bytes") != "12") std::this_thread::yield();
  const grpc::Status status = refuse(9);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Info(status).reason(), "TOO_MANY_CACHE_BYTES");
  EXPECT_EQ(Info(refuse(8)).reason(), "UPLOAD_INCOMPLETE");
  first->WritesDone();
  EXPECT_EQ(Info(first->Finish()).reason(), "UPLOAD_INCOMPLETE");
  EXPECT_EQ(Info(refuse(20)).reason(), "UPLOAD_INCOMPLETE");  // given back before its end was told
  EXPECT_EQ(Info(refuse(21)).reason(), "TOO_MANY_CACHE_BYTES");
}

}  // namespace
}  // namespace stillhouse
