// The services over a real channel on loopback, with a real store and a stand-in for the engine.
#ifndef STILLHOUSE_TESTS_SERVER_SERVICE_CALLS_FIXTURE_H_
#define STILLHOUSE_TESTS_SERVER_SERVICE_CALLS_FIXTURE_H_

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics/metrics.h"
#include "server/service/grpc_server.h"
#include "server/service/service_context.h"
#include "server/tenancy/authenticator.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/tenant_registry.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"
#include "stillhouse/v1/caches.grpc.pb.h"
#include "stillhouse/v1/corpora.grpc.pb.h"
#include "stillhouse/v1/errors.pb.h"
#include "stillhouse/v1/inference.grpc.pb.h"
#include "stillhouse/v1/tenants.grpc.pb.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {

// Holds what was submitted until the test plays the engine's part.
class FakeEngine {
 public:
  struct Job {
    GenerationRequest request;
    std::shared_ptr<GenerationSink> sink;
    uint64_t id = 0;
  };

  absl::StatusOr<GenerationHandle> Submit(GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!refusal_.ok()) return refusal_;
    jobs_.push_back({std::move(request), std::move(sink), ++last_id_});
    changed_.notify_all();
    return GenerationHandle(last_id_);
  }
  void Cancel(GenerationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_.push_back(handle.id());
    changed_.notify_all();
  }
  Job Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !jobs_.empty(); });
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }
  void WaitForCancel(uint64_t id) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return std::find(cancelled_.begin(), cancelled_.end(), id) != cancelled_.end(); });
  }
  void Refuse(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    refusal_ = std::move(status);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<uint64_t> cancelled_;
  absl::Status refusal_;
  uint64_t last_id_ = 0;
};

inline SampledToken Drawn(int32_t id) {
  SampledToken token;
  token.id = id;
  token.logprob = -0.5f;
  token.top = {{id, -0.5f}};
  return token;
}

class CallsTest : public ::testing::Test {
 protected:
  explicit CallsTest(std::string admin_key = "") : admin_key_(std::move(admin_key)) {}

  void SetUp() override {
    directory_ = ::testing::TempDir() + "/calls_test_" + std::to_string(getpid());
    std::filesystem::remove_all(directory_);
    StoreOptions options;
    options.directory = directory_;
    options.min_free_bytes = 0;
    auto store = OpenEmbeddedStore(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    if (admin_key_.empty()) {
      ASSERT_TRUE(store_->EnsureTenant("default").ok());
    }
    tokenizer_ = *Tokenizer::Create(testing::TinyTokenizerData());
    chat_ = *ChatTemplate::Create(tokenizer_.get(), "");
    authenticator_ = std::make_unique<Authenticator>(store_.get(), admin_key_);
    tenants_ = std::make_unique<TenantRegistry>(store_.get());
    service_ = std::make_unique<ServiceContext>();
    service_->store = store_.get();
    service_->authenticator = authenticator_.get();
    service_->tenants = tenants_.get();
    service_->quota = &quota_;
    service_->metrics = &metrics_;
    service_->tokenizer = tokenizer_.get();
    service_->chat = chat_.get();
    service_->facts.model.name = "tiny";
    service_->facts.context_tokens = 512;
    service_->doors.submit = [this](GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
      return engine_.Submit(std::move(request), std::move(sink));
    };
    service_->doors.cancel = [this](GenerationHandle handle) { engine_.Cancel(handle); };
    service_->doors.pin = [](std::string_view, std::string_view, std::string_view) -> absl::StatusOr<PinnedMemory> {
      return absl::NotFoundError("the directory says no");
    };
    GrpcServerOptions server;
    server.address = "127.0.0.1:0";
    auto started = GrpcServer::Start(service_.get(), server);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials());
    inference_ = v1::Inference::NewStub(channel_);
    corpora_ = v1::Corpora::NewStub(channel_);
    caches_ = v1::Caches::NewStub(channel_);
    tenant_stub_ = v1::Tenants::NewStub(channel_);
  }

  void TearDown() override {
    server_.reset();
    service_.reset();
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  static v1::QueryRequest Ask(const std::string& prompt) {
    v1::QueryRequest request;
    request.set_prompt(prompt);
    return request;
  }

  std::vector<int32_t> Ids(const std::string& text) { return tokenizer_->Encode(text); }

  static v1::ErrorInfo Info(const grpc::Status& status) {
    v1::Status details;
    v1::ErrorInfo info;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_GT(details.details_size(), 0);
    if (details.details_size() > 0) {
      EXPECT_TRUE(details.details(0).UnpackTo(&info));
    }
    return info;
  }

  // Events until the end, and the status.
  std::pair<std::vector<v1::QueryEvent>, grpc::Status> ReadAll(grpc::ClientReader<v1::QueryEvent>* reader) {
    std::vector<v1::QueryEvent> events;
    v1::QueryEvent event;
    while (reader->Read(&event)) events.push_back(event);
    return {events, reader->Finish()};
  }

  // The end of a query that is refused.
  grpc::Status Query(const std::string& prompt) {
    grpc::ClientContext context;
    return ReadAll(inference_->Query(&context, Ask(prompt)).get()).second;
  }

  static absl::Duration RetryDelay(const grpc::Status& status) {
    v1::Status details;
    v1::RetryInfo retry;
    EXPECT_TRUE(details.ParseFromString(status.error_details()));
    if (details.details_size() < 2 || !details.details(1).UnpackTo(&retry)) return absl::InfiniteDuration();
    return absl::Seconds(retry.retry_delay().seconds()) + absl::Nanoseconds(retry.retry_delay().nanos());
  }

  grpc::Status Upload(const std::string& id, const std::string& bytes, const std::string& sha256,
                      const std::vector<std::pair<int64_t, std::string>>& chunks, v1::Corpus* corpus) {
    grpc::ClientContext context;
    auto writer = corpora_->UploadCorpus(&context, corpus);
    v1::UploadCorpusRequest message;
    FillHeader(id, bytes, sha256, message.mutable_header());
    writer->Write(message);
    for (const auto& [offset, data] : chunks) {
      message.mutable_chunk()->set_offset(offset);
      message.mutable_chunk()->set_data(data);
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }
  static void FillHeader(const std::string& id, const std::string& bytes, const std::string& sha256,
                         v1::UploadHeader* header) {
    header->set_corpus_id(id);
    header->set_size_bytes(static_cast<int64_t>(bytes.size()));
    header->set_sha256(sha256);
  }

  const std::string admin_key_;
  std::string directory_;
  Metrics metrics_;
  Quota quota_{QuotaLimits{}};
  std::unique_ptr<Store> store_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> chat_;
  std::unique_ptr<Authenticator> authenticator_;
  std::unique_ptr<TenantRegistry> tenants_;
  FakeEngine engine_;
  std::unique_ptr<ServiceContext> service_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> inference_;
  std::unique_ptr<v1::Corpora::Stub> corpora_;
  std::unique_ptr<v1::Caches::Stub> caches_;
  std::unique_ptr<v1::Tenants::Stub> tenant_stub_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_SERVER_SERVICE_CALLS_FIXTURE_H_
