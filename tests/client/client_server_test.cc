// The client library against an in-process server that misbehaves on demand.
#include <gmock/gmock.h>
#include <google/protobuf/any.pb.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/error.h"
#include "stillhouse/v1/caches.grpc.pb.h"
#include "stillhouse/v1/corpora.grpc.pb.h"
#include "stillhouse/v1/errors.pb.h"
#include "stillhouse/v1/inference.grpc.pb.h"
#include "stillhouse/v1/operations.grpc.pb.h"
#include "stillhouse/v1/server.grpc.pb.h"

namespace stillhouse::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

grpc::Status Refusal(grpc::StatusCode code, const std::string& message, const std::string& reason,
                     const std::map<std::string, std::string>& facts = {}, int retry_ms = -1) {
  v1::Status status;
  v1::ErrorInfo info;
  info.set_reason(reason);
  for (const auto& [key, value] : facts) (*info.mutable_metadata())[key] = value;
  auto* any = status.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value(info.SerializeAsString());
  if (retry_ms >= 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(retry_ms * 1000000);
    any = status.add_details();
    any->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
    any->set_value(retry.SerializeAsString());
  }
  return grpc::Status(code, message, status.SerializeAsString());
}

// Stores one document; each entry of `breaks` ends one stream as soon as so many bytes are there.
class FakeCorpora : public v1::Corpora::Service {
 public:
  grpc::Status UploadCorpus(grpc::ServerContext* context, grpc::ServerReader<v1::UploadCorpusRequest>* reader,
                            v1::Corpus* corpus) override {
    ++streams;
    v1::UploadCorpusRequest message;
    if (!reader->Read(&message) || !message.has_header()) return Refusal(grpc::INVALID_ARGUMENT, "No header.", "X");
    header = message.header();
    if (drop) return grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer");
    while (reader->Read(&message)) {
      if (message.chunk().offset() != static_cast<int64_t>(bytes.size())) {
        return Refusal(grpc::OUT_OF_RANGE, "A gap.", "UPLOAD_OFFSET_MISMATCH",
                       {{"committed_bytes", std::to_string(bytes.size())}});
      }
      largest = std::max(largest, message.chunk().data().size());
      bytes += message.chunk().data();
      if (!breaks.empty() && bytes.size() >= breaks.front()) {
        breaks.erase(breaks.begin());
        return grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer");
      }
    }
    if (refuse) return Refusal(grpc::INVALID_ARGUMENT, "The document is not text.", "NOT_TEXT");
    if (*Sha256Of(*FromBytes(bytes)) != header.sha256()) return Refusal(grpc::DATA_LOSS, "Hash.", "CHECKSUM_MISMATCH");
    corpus->set_name(header.parent() + "/corpora/" + header.corpus_id());
    corpus->set_size_bytes(static_cast<int64_t>(bytes.size()));
    sealed = *corpus;
    return grpc::Status::OK;
  }
  grpc::Status GetUpload(grpc::ServerContext*, const v1::GetUploadRequest*, v1::Upload* upload) override {
    if (bytes.empty()) return Refusal(grpc::NOT_FOUND, "There is no such upload.", "UPLOAD_NOT_FOUND");
    upload->set_committed_bytes(static_cast<int64_t>(bytes.size()) - forget);
    if (!sealed.name().empty()) *upload->mutable_corpus() = sealed;
    forget = 0;
    return grpc::Status::OK;
  }
  grpc::Status ListCorpora(grpc::ServerContext* context, const v1::ListCorporaRequest* request,
                           v1::ListCorporaResponse* response) override {
    const auto& metadata = context->client_metadata();
    const auto it = metadata.find("authorization");
    authorization = it == metadata.end() ? "" : std::string(it->second.data(), it->second.size());
    const int begin = request->page_token().empty() ? 0 : std::stoi(request->page_token());
    const int end = std::min(begin + std::min(request->page_size(), 3), 8);
    for (int i = begin; i < end; ++i) response->add_corpora()->set_name(absl::StrCat("c", i));
    if (end < 8) response->set_next_page_token(std::to_string(end));
    return grpc::Status::OK;
  }

  v1::UploadHeader header;
  std::string bytes;
  v1::Corpus sealed;
  std::vector<size_t> breaks;
  bool refuse = false;
  bool drop = false;
  int64_t forget = 0;
  int streams = 0;
  size_t largest = 0;
  std::string authorization;
};

class FakeCaches : public v1::Caches::Service {
 public:
  grpc::Status BuildCache(grpc::ServerContext*, const v1::BuildCacheRequest* request,
                          v1::Operation* operation) override {
    request_ids.push_back(request->request_id());
    if (failures > 0) {
      --failures;
      return grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer");
    }
    operation->set_name("operations/b1");
    return grpc::Status::OK;
  }
  grpc::Status GetCache(grpc::ServerContext*, const v1::GetCacheRequest*, v1::Cache*) override {
    ++gets;
    return Refusal(grpc::NOT_FOUND, "There is no cache \"x\".", "CACHE_NOT_FOUND");
  }
  grpc::Status DeleteCache(grpc::ServerContext*, const v1::DeleteCacheRequest*, v1::DeleteCacheResponse*) override {
    if (!std::exchange(there, false)) return Refusal(grpc::NOT_FOUND, "There is no cache \"x\".", "CACHE_NOT_FOUND");
    return failures-- > 0 ? grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer") : grpc::Status::OK;
  }
  grpc::Status ExportCache(grpc::ServerContext*, const v1::ExportCacheRequest*,
                           grpc::ServerWriter<v1::ExportCacheResponse>* writer) override {
    const std::string file(3 << 20, 'k');
    v1::ExportCacheResponse message;
    message.mutable_header()->set_size_bytes(static_cast<int64_t>(file.size()));
    message.mutable_header()->set_sha256(*Sha256Of(*FromBytes(file)));
    writer->Write(message);
    for (size_t offset = 0; offset < file.size(); offset += 1 << 20) {
      message.mutable_chunk()->set_offset(static_cast<int64_t>(offset));
      message.mutable_chunk()->set_data(file.substr(offset, 1 << 20));
      if (corrupt && offset > 0) (*message.mutable_chunk()->mutable_data())[7] ^= 1;
      writer->Write(message);
    }
    return grpc::Status::OK;
  }
  grpc::Status ImportCache(grpc::ServerContext*, grpc::ServerReader<v1::ImportCacheRequest>* reader,
                           v1::Cache* cache) override {
    v1::ImportCacheRequest message;
    reader->Read(&message);
    const v1::ImportHeader header = message.header();
    std::string bytes;
    while (reader->Read(&message)) bytes += message.chunk().data();
    if (*Sha256Of(*FromBytes(bytes)) != header.sha256()) return Refusal(grpc::DATA_LOSS, "Hash.", "CHECKSUM_MISMATCH");
    cache->set_name(header.parent() + "/caches/" + header.cache_id());
    return grpc::Status::OK;
  }

  std::vector<std::string> request_ids;
  int failures = 0;
  int gets = 0;
  bool there = true;  // the cache that DeleteCache deletes
  bool corrupt = false;
};

class FakeInference : public v1::Inference::Service {
 public:
  grpc::Status Query(grpc::ServerContext* context, const v1::QueryRequest* request,
                     grpc::ServerWriter<v1::QueryEvent>* writer) override {
    ++queries;
    if (busy > 0) {
      --busy;
      return Refusal(grpc::RESOURCE_EXHAUSTED, "The queue is full.", "QUEUE_FULL", {}, 5);
    }
    v1::QueryEvent event;
    event.mutable_accepted()->set_model("m");
    writer->Write(event);
    for (const char* text : {"Hel", "", "lo"}) {
      event.mutable_token()->set_text(text);
      writer->Write(event);
    }
    if (hang) {
      while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      saw_cancel = true;
      return grpc::Status::CANCELLED;
    }
    if (die) return grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer");
    if (!forget_finish) {
      event.mutable_finish()->set_reason(v1::Finish::END_OF_TURN);
      event.mutable_finish()->mutable_usage()->set_completion_tokens(2);
      writer->Write(event);
    }
    return grpc::Status::OK;
  }

  std::atomic<int> queries{0};
  int busy = 0;
  bool hang = false, die = false, forget_finish = false;
  std::atomic<bool> saw_cancel{false};
};

class FakeOperations : public v1::Operations::Service {
 public:
  grpc::Status WaitOperation(grpc::ServerContext*, const v1::WaitOperationRequest* request,
                             v1::Operation* operation) override {
    operation->set_name(request->name());
    ++waits;
    if (absent > 0) {
      --absent;
      return grpc::Status(grpc::UNAVAILABLE, "Connection reset by peer");
    }
    operation->mutable_metadata()->set_fraction(waits / 10.0);
    operation->set_done(waits >= 4 && !never);
    if (operation->done() && fail) {
      operation->mutable_error()->set_code(9);
      operation->mutable_error()->set_message("The document is too short.");
      operation->mutable_error()->set_reason("CORPUS_TOO_SHORT");
    } else if (operation->done()) {
      operation->set_cache("tenants/t/corpora/c/caches/k");
    }
    return grpc::Status::OK;
  }
  int waits = 0, absent = 0;
  bool fail = false, never = false;
};

class FakeInfo : public v1::Server::Service {
 public:
  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*, v1::ServerInfo* info) override {
    ++calls;
    info->set_tenant("tenants/t");
    return grpc::Status::OK;
  }
  int calls = 0;
};

class ClientServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    for (grpc::Service* service :
         std::initializer_list<grpc::Service*>{&corpora, &caches, &inference, &operations, &info}) {
      builder.RegisterService(service);
    }
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    ChannelOptions options;
    options.address = absl::StrCat("127.0.0.1:", port_);
    options.key = "the-key";
    options.backoff = absl::Milliseconds(2);
    client = *Client::Create(options);
  }
  void TearDown() override {
    client.reset();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  FakeCorpora corpora;
  FakeCaches caches;
  FakeInference inference;
  FakeOperations operations;
  FakeInfo info;
  std::unique_ptr<Client> client;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

std::string Text(size_t size) {
  std::string text;
  for (size_t i = 0; text.size() < size; ++i) text += std::to_string(i * 2654435761u) + " ";
  text.resize(size);
  return text;
}

TEST_F(ClientServerTest, UploadsInChunksAndReportsProgress) {
  const std::string text = Text((1 << 20) + 17);
  const auto source = FromBytes(text);
  int64_t last = -1;
  const auto corpus =
      client->Upload({.corpus_id = "doc", .display_name = "A text"}, *source, [&](int64_t done, int64_t size) {
        EXPECT_GE(done, last);
        EXPECT_EQ(size, static_cast<int64_t>(text.size()));
        last = done;
      });
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpus->name(), "tenants/t/corpora/doc");
  EXPECT_EQ(corpora.bytes, text);
  EXPECT_EQ(last, static_cast<int64_t>(text.size()));
  EXPECT_LE(corpora.largest, size_t{256} << 10);
  EXPECT_EQ(corpora.header.request_id(), "");
  // The tenant is asked for once.
  EXPECT_EQ(info.calls, 1);
}

TEST_F(ClientServerTest, UploadGoesOnAfterBrokenStreams) {
  const std::string text = Text(1 << 20);
  corpora.breaks = {1, 300000, 900000};
  const auto source = FromBytes(text);
  const auto corpus = client->Upload({.corpus_id = "doc", .chunk_bytes = 64 << 10}, *source);
  ASSERT_TRUE(corpus.ok()) << corpus.status();
  EXPECT_EQ(corpora.bytes, text);
  EXPECT_EQ(corpora.streams, 4);
}

TEST_F(ClientServerTest, UploadTakesUpWhatAnEarlierProcessBegan) {
  const std::string text = Text(500000);
  corpora.bytes = text.substr(0, 123456);
  const auto source = FromBytes(text);
  ASSERT_TRUE(client->Upload({.corpus_id = "doc"}, *source).ok());
  EXPECT_EQ(corpora.bytes, text);
}

TEST_F(ClientServerTest, UploadBelievesTheServersOffset) {
  const std::string text = Text(500000);
  corpora.bytes = text.substr(0, 200000);
  // The first answer names an older offset than the server has by the time the chunk arrives.
  corpora.forget = 100000;
  const auto source = FromBytes(text);
  ASSERT_TRUE(client->Upload({.corpus_id = "doc"}, *source).ok());
  EXPECT_EQ(corpora.bytes, text);
}

TEST_F(ClientServerTest, UploadOfASealedCorpusSendsNothing) {
  corpora.bytes = "x";
  corpora.sealed.set_name("tenants/t/corpora/doc");
  const auto source = FromBytes("x");
  const auto corpus = client->Upload({.corpus_id = "doc"}, *source);
  ASSERT_TRUE(corpus.ok());
  EXPECT_EQ(corpora.streams, 0);
}

TEST_F(ClientServerTest, UploadGivesUpOnARefusal) {
  corpora.refuse = true;
  const auto source = FromBytes("x");
  const auto corpus = client->Upload({.corpus_id = "doc"}, *source);
  EXPECT_EQ(Reason(corpus.status()), "NOT_TEXT");
  EXPECT_EQ(corpora.streams, 1);
}

TEST_F(ClientServerTest, UploadGivesUpWhenNothingMoves) {
  corpora.drop = true;
  const auto source = FromBytes(Text(1000));
  const auto corpus = client->Upload({.corpus_id = "doc", .chunk_bytes = 1000, .attempts = 3}, *source);
  EXPECT_EQ(OriginOf(corpus.status()), Origin::kTransport);
  EXPECT_EQ(corpora.streams, 3);
}

TEST_F(ClientServerTest, UploadChecksBeforeItCalls) {
  const auto empty = FromBytes("");
  EXPECT_TRUE(absl::IsInvalidArgument(client->Upload({.corpus_id = "doc"}, *empty).status()));
  const auto source = FromBytes("x");
  EXPECT_TRUE(absl::IsInvalidArgument(client->Upload({.corpus_id = "Doc"}, *source).status()));
  EXPECT_EQ(corpora.streams, 0);
}

TEST_F(ClientServerTest, ListsAllPages) {
  const auto all = client->ListCorpora();
  ASSERT_TRUE(all.ok());
  EXPECT_THAT(*all, SizeIs(8));
  EXPECT_EQ((*all)[7].name(), "c7");
  EXPECT_THAT(*client->ListCorpora(4), SizeIs(4));
  EXPECT_EQ(corpora.authorization, "Bearer the-key");
}

TEST_F(ClientServerTest, ARetriedBuildKeepsItsRequestId) {
  caches.failures = 2;
  const auto operation = client->Build({});
  ASSERT_TRUE(operation.ok()) << operation.status();
  ASSERT_THAT(caches.request_ids, SizeIs(3));
  EXPECT_FALSE(caches.request_ids[0].empty());
  EXPECT_EQ(caches.request_ids[0], caches.request_ids[2]);
}

TEST_F(ClientServerTest, ADeletionWhoseAnswerWasLostIsDone) {
  caches.failures = 1;
  EXPECT_TRUE(client->DeleteCache("tenants/t/corpora/c/caches/x").ok());
  EXPECT_TRUE(absl::IsNotFound(client->DeleteCache("tenants/t/corpora/c/caches/x")));
}

TEST_F(ClientServerTest, RefusalsAreNotRetried) {
  const auto cache = client->GetCache("tenants/t/corpora/c/caches/x");
  EXPECT_EQ(Describe(cache.status()), "NOT_FOUND: There is no cache \"x\". (CACHE_NOT_FOUND)");
  EXPECT_EQ(OriginOf(cache.status()), Origin::kServer);
  EXPECT_EQ(caches.gets, 1);
}

TEST_F(ClientServerTest, ExportWritesTheWholeFile) {
  const std::string path = ::testing::TempDir() + "/export_test.safetensors";
  std::filesystem::remove(path);
  const auto header = client->Export("tenants/t/corpora/c/caches/k", path);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(std::filesystem::file_size(path), 3u << 20);
  std::filesystem::remove(path);
}

TEST_F(ClientServerTest, ADamagedExportLeavesNothing) {
  caches.corrupt = true;
  const std::string path = ::testing::TempDir() + "/export_bad.safetensors";
  EXPECT_TRUE(absl::IsDataLoss(client->Export("tenants/t/corpora/c/caches/k", path).status()));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(ClientServerTest, ImportSendsTheFile) {
  const auto source = FromBytes(Text(3 << 20));
  const auto cache = client->Import("tenants/t/corpora/c", "k", "", *source);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(cache->name(), "tenants/t/corpora/c/caches/k");
}

TEST_F(ClientServerTest, QueryStreamsEvents) {
  std::vector<std::string> texts;
  const auto finish = client->Query({}, [&](const v1::QueryEvent& event) {
    if (event.has_token()) texts.push_back(event.token().text());
  });
  ASSERT_TRUE(finish.ok()) << finish.status();
  EXPECT_EQ(finish->reason(), v1::Finish::END_OF_TURN);
  EXPECT_THAT(texts, ElementsAre("Hel", "", "lo"));
  const auto answer = client->Ask({});
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->text, "Hello");
  EXPECT_LE(answer->first_token, answer->total);
}

TEST_F(ClientServerTest, AFullQueueIsTriedAgain) {
  inference.busy = 2;
  EXPECT_TRUE(client->Ask({}).ok());
  EXPECT_EQ(inference.queries, 3);
}

TEST_F(ClientServerTest, ABegunAnswerIsNeverAskedTwice) {
  inference.die = true;
  const auto answer = client->Ask({});
  EXPECT_EQ(OriginOf(answer.status()), Origin::kTransport);
  EXPECT_EQ(inference.queries, 1);
}

TEST_F(ClientServerTest, AnAnswerWithoutAnEndIsAnError) {
  inference.forget_finish = true;
  EXPECT_TRUE(absl::IsDataLoss(client->Ask({}).status()));
}

TEST_F(ClientServerTest, CancellationReachesTheServer) {
  inference.hang = true;
  Cancellation cancellation;
  const auto finish = client->Query(
      {},
      [&](const v1::QueryEvent& event) {
        if (event.token().text() == "lo") cancellation.Cancel();
      },
      &cancellation);
  EXPECT_TRUE(absl::IsCancelled(finish.status())) << finish.status();
  for (int i = 0; i < 1000 && !inference.saw_cancel; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(inference.saw_cancel);
}

TEST_F(ClientServerTest, WaitFollowsAnOperationThroughARestart) {
  operations.absent = 2;
  std::vector<double> fractions;
  const auto done = client->Wait("operations/b1", {.interval = absl::Milliseconds(10)},
                                 [&](const v1::Operation& state) { fractions.push_back(state.metadata().fraction()); });
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(*Client::Result(*done), "tenants/t/corpora/c/caches/k");
  EXPECT_THAT(fractions, ElementsAre(0.3, 0.4));
}

TEST_F(ClientServerTest, AFailedOperationIsItsError) {
  operations.fail = true;
  const auto done = client->Wait("operations/b1", {.interval = absl::Milliseconds(1)});
  ASSERT_TRUE(done.ok());
  const absl::Status status = Client::Result(*done).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(Reason(status), "CORPUS_TOO_SHORT");
}

TEST_F(ClientServerTest, WaitHasALimitAndCanBeEnded) {
  operations.never = true;
  const auto late =
      client->Wait("operations/b1", {.interval = absl::Milliseconds(5), .timeout = absl::Milliseconds(40)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
  Cancellation cancellation;
  const auto ended = client->Wait("operations/b1", {.interval = absl::Milliseconds(5), .cancellation = &cancellation},
                                  [&](const v1::Operation&) { cancellation.Cancel(); });
  EXPECT_TRUE(absl::IsCancelled(ended.status())) << ended.status();
}

TEST_F(ClientServerTest, HealthReadsTheStandardService) {
  EXPECT_TRUE(client->Health().ok());
  server_->GetHealthCheckService()->SetServingStatus(false);
  const absl::Status status = client->Health();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(OriginOf(status), Origin::kServer);
}

TEST(ClientCreate, RefusesBadOptions) {
  ChannelOptions options;
  options.key = "a b";
  EXPECT_THAT(std::string(Client::Create(options).status().message()), HasSubstr("printable"));
  options = {};
  options.attempts = 0;
  EXPECT_FALSE(Client::Create(options).ok());
  options = {};
  options.certificate_file = "/none";
  EXPECT_THAT(std::string(Client::Create(options).status().message()), HasSubstr("both"));
  options = {};
  options.tenant = "No";
  EXPECT_FALSE(Client::Create(options).ok());
}

}  // namespace
}  // namespace stillhouse::client
