// What the services do with calls: streams, uploads, keys, a drain.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/base/sha256.h"
#include "server/service/validation.h"
#include "tests/server/service/calls_fixture.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

std::string Text(const std::vector<v1::QueryEvent>& events) {
  std::string text;
  for (const v1::QueryEvent& event : events) text += event.token().text();
  return text;
}

TEST_F(CallsTest, AQueryStreamsAcceptedTokensFinish) {
  grpc::ClientContext context;
  v1::QueryRequest request = Ask("hello");
  request.mutable_sampling()->set_logprobs(1);
  request.mutable_sampling()->set_seed(9);
  auto reader = inference_->Query(&context, request);
  FakeEngine::Job job = engine_.Next();
  EXPECT_EQ(job.request.prompt, Ids("hello"));
  EXPECT_EQ(job.request.tenant, "default");
  EXPECT_EQ(job.request.sampling.seed, 9u);
  EXPECT_EQ(job.request.stop_ids, tokenizer_->end_of_generation());
  for (int32_t id : Ids("wörld 🙂")) EXPECT_TRUE(job.sink->OnToken(Drawn(id)));
  const int32_t end = tokenizer_->end_of_generation()[0];
  EXPECT_TRUE(job.sink->OnToken(Drawn(end)));
  GenerationUsage usage;
  usage.prompt_tokens = 5;
  usage.completion_tokens = 3;
  job.sink->OnFinish(FinishReason::kStopId, usage, absl::OkStatus());
  const auto [events, status] = ReadAll(reader.get());
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.front().accepted().seed(), 9u);
  EXPECT_EQ(events.front().accepted().request_id().size(), 36u);
  EXPECT_EQ(Text(events), "wörld 🙂");
  int tokens = 0;
  for (const v1::QueryEvent& event : events) {
    for (const v1::TokenInfo& info : event.token().tokens()) {
      ++tokens;
      EXPECT_EQ(info.logprob(), -0.5);
      EXPECT_EQ(info.top_size(), 1);
    }
  }
  EXPECT_EQ(tokens, static_cast<int>(Ids("wörld 🙂").size()) + 1);
  EXPECT_EQ(events.back().finish().reason(), v1::Finish::END_OF_TURN);
  EXPECT_EQ(events.back().finish().usage().completion_tokens(), 3);
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_requests_total{finish_reason=\"end_of_turn\"} 1\n"));
  EXPECT_THAT(metrics_.Expose(), HasSubstr("grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"Query\"} 1\n"));
}

TEST_F(CallsTest, AStopStringAcrossTokensEndsTheAnswerAndNeverLeaks) {
  grpc::ClientContext context;
  v1::QueryRequest request = Ask("hello");
  request.mutable_sampling()->add_stop("XYZ");
  auto reader = inference_->Query(&context, request);
  FakeEngine::Job job = engine_.Next();
  bool go_on = true;
  for (const char* piece : {"a", "X", "Y", "b", "X", "Y", "Z"}) {
    for (int32_t id : Ids(piece)) go_on = job.sink->OnToken(Drawn(id));
  }
  EXPECT_FALSE(go_on);
  job.sink->OnFinish(FinishReason::kSink, {}, absl::OkStatus());
  const auto [events, status] = ReadAll(reader.get());
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(Text(events), "aXYb");
  EXPECT_EQ(events.back().finish().reason(), v1::Finish::STOP_STRING);
  EXPECT_EQ(events.back().finish().stop(), "XYZ");
}

TEST_F(CallsTest, TextHeldBackIsSentAtTheEnd) {
  grpc::ClientContext context;
  v1::QueryRequest request = Ask("hello");
  request.mutable_sampling()->add_stop("XYZ");
  auto reader = inference_->Query(&context, request);
  FakeEngine::Job job = engine_.Next();
  for (int32_t id : Ids("aXY")) job.sink->OnToken(Drawn(id));
  job.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  const auto [events, status] = ReadAll(reader.get());
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(Text(events), "aXY");
  EXPECT_EQ(events.back().finish().reason(), v1::Finish::MAX_TOKENS);
}

TEST_F(CallsTest, AClientThatLeavesFreesTheSequenceAndTheId) {
  const std::string id = "123e4567-e89b-12d3-a456-426614174000";
  v1::QueryRequest request = Ask("hello");
  request.set_request_id(id);
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, request);
  FakeEngine::Job job = engine_.Next();
  job.sink->OnToken(Drawn(Ids("a")[0]));
  v1::QueryEvent event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.accepted().request_id(), id);
  {
    grpc::ClientContext second;
    const grpc::Status status = ReadAll(inference_->Query(&second, request).get()).second;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
    EXPECT_EQ(Info(status).reason(), "REQUEST_IN_FLIGHT");
  }
  context.TryCancel();
  engine_.WaitForCancel(job.id);
  job.sink->OnFinish(FinishReason::kCancelled, {}, absl::CancelledError("x"));
  std::weak_ptr<GenerationSink> sink = job.sink;
  job.sink.reset();
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  while (!sink.expired()) std::this_thread::yield();  // the call is gone
  EXPECT_EQ(service_->calls_in_flight.load(), 0);
  grpc::ClientContext third;
  auto again = inference_->Query(&third, request);
  FakeEngine::Job next = engine_.Next();
  next.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  EXPECT_TRUE(ReadAll(again.get()).second.ok());
}

TEST_F(CallsTest, TheDeadlineReachesTheEngineAndItsVerdictTheClient) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
  auto reader = inference_->Query(&context, Ask("hello"));
  FakeEngine::Job job = engine_.Next();
  EXPECT_LT(job.request.deadline, absl::Now() + absl::Minutes(6));
  EXPECT_GT(job.request.deadline, absl::Now() + absl::Minutes(4));
  job.sink->OnFinish(FinishReason::kCancelled, {}, absl::DeadlineExceededError("the deadline passed"));
  EXPECT_EQ(ReadAll(reader.get()).second.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(CallsTest, ASlowReaderGetsTheWholeAnswerInFewEvents) {
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, Ask("hello"));
  FakeEngine::Job job = engine_.Next();
  const int32_t a = Ids("a")[0];
  constexpr int kTokens = 20000;
  for (int i = 0; i < kTokens; ++i) ASSERT_TRUE(job.sink->OnToken(Drawn(a)));
  job.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  const auto [events, status] = ReadAll(reader.get());
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(Text(events), std::string(kTokens, 'a'));
  EXPECT_LT(events.size(), static_cast<size_t>(kTokens));
}

TEST_F(CallsTest, TokensStreamWhileEveryWorkerWaitsForALoad) {
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, Ask("hello"));
  FakeEngine::Job job = engine_.Next();
  v1::QueryEvent event;
  ASSERT_TRUE(reader->Read(&event));
  const auto loaded = std::make_shared<absl::Notification>();
  for (int i = 0; i < 64; ++i) service_->work.Post([loaded] { loaded->WaitForNotification(); });
  ASSERT_TRUE(job.sink->OnToken(Drawn(Ids("a")[0])));
  absl::Notification read;
  std::thread client([&] {
    if (reader->Read(&event)) read.Notify();
  });
  EXPECT_TRUE(read.WaitForNotificationWithTimeout(absl::Seconds(10)));
  loaded->Notify();
  client.join();
  EXPECT_EQ(event.token().text(), "a");
  job.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  EXPECT_TRUE(ReadAll(reader.get()).second.ok());
}

TEST_F(CallsTest, AScoreWhoseClientLeftIsToldSo) {
  absl::Notification began, ended;
  service_->doors.score = [&](const ScoreRequest& request) -> absl::StatusOr<ScoreResult> {
    began.Notify();
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!request.cancelled() && absl::Now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(request.cancelled());
    ended.Notify();
    return absl::CancelledError("x");
  };
  grpc::ClientContext context;
  v1::ScoreRequest request;
  request.set_prompt("hello");
  request.set_continuation("world");
  std::thread client([&] {
    v1::ScoreResponse response;
    EXPECT_EQ(inference_->Score(&context, request, &response).error_code(), grpc::StatusCode::CANCELLED);
  });
  began.WaitForNotification();
  context.TryCancel();
  ended.WaitForNotification();
  client.join();
}

TEST_F(CallsTest, RefusalsOfTheEngineAreMapped) {
  engine_.Refuse(absl::OutOfRangeError("the prompt has 600 tokens, the context 512"));
  grpc::ClientContext first;
  grpc::Status status = ReadAll(inference_->Query(&first, Ask("hello")).get()).second;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Info(status).reason(), "PROMPT_TOO_LONG");
  engine_.Refuse(absl::UnavailableError("the queue is full"));
  grpc::ClientContext second;
  status = ReadAll(inference_->Query(&second, Ask("hello")).get()).second;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(status).reason(), "QUEUE_FULL");
}

TEST_F(CallsTest, TextThatCannotFitIsRefusedBeforeItIsCounted) {
  // The context has 512 positions.
  const size_t most = 512 * tokenizer_->max_bytes_per_id();
  ASSERT_GT(most, 1024u);
  v1::QueryRequest chat;
  v1::Message* message = chat.mutable_messages()->add_messages();
  message->set_role("user");
  message->set_content(std::string(most + tokenizer_->max_bytes_per_id(), 'x'));
  v1::ScoreRequest score;
  score.set_prompt("hello");
  score.set_continuation(message->content());
  v1::ScoreResponse response;
  grpc::ClientContext first, second;
  for (const grpc::Status& status : {Query(message->content()), ReadAll(inference_->Query(&first, chat).get()).second,
                                     inference_->Score(&second, score, &response)}) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
    EXPECT_EQ(Info(status).reason(), "PROMPT_TOO_LONG");
    EXPECT_THAT(status.error_message(), HasSubstr(" bytes, at least 513 tokens"));
    EXPECT_THAT(status.error_message(), HasSubstr("room for 512"));
  }
  // Counting ends where there are twice as many as there may be. One byte, one token: no merges among these.
  const std::string tokens(1025, '\x7f');
  message->set_content(tokens);
  grpc::ClientContext third;
  for (const grpc::Status& status : {Query(tokens), ReadAll(inference_->Query(&third, chat).get()).second}) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
    EXPECT_THAT(status.error_message(), HasSubstr("has more than 1024 tokens"));
  }
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_admission_rejections_total{reason=\"too_long\"} 4\n"));
  // The engine says exactly how many a little more is.
  grpc::ClientContext fourth;
  auto reader = inference_->Query(&fourth, Ask(std::string(600, '\x7f')));
  FakeEngine::Job job = engine_.Next();
  EXPECT_EQ(job.request.prompt.size(), 600u);
  job.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  EXPECT_TRUE(ReadAll(reader.get()).second.ok());
}

TEST_F(CallsTest, InvalidQueriesNeverReachTheEngine) {
  const auto code = [this](const v1::QueryRequest& request) {
    grpc::ClientContext context;
    return ReadAll(inference_->Query(&context, request).get()).second.error_code();
  };
  EXPECT_EQ(code({}), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(code(Ask("")), grpc::StatusCode::INVALID_ARGUMENT);
  v1::QueryRequest request = Ask("x");
  request.mutable_sampling()->set_top_p(0);
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  request = Ask("x");
  request.set_request_id("not-a-uuid");
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  request = Ask("x");
  request.add_caches("nonsense");
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  for (int i = 0; i < 9; ++i) request.add_caches("tenants/default/corpora/c");
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(CallsTest, AnotherTenantsCacheAndAMissingOneLookTheSame) {
  const auto ask = [this](const std::string& tenant) {
    v1::QueryRequest request = Ask("x");
    request.add_caches("tenants/" + tenant + "/corpora/c/caches/k");
    grpc::ClientContext context;
    grpc::Status status = ReadAll(inference_->Query(&context, request).get()).second;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_EQ(Info(status).reason(), "NOT_FOUND");
    return status.error_message();
  };
  EXPECT_EQ(ask("default"), "tenants/default/corpora/c/caches/k does not exist");
  EXPECT_EQ(ask("stranger"), "tenants/stranger/corpora/c/caches/k does not exist");
}

TEST_F(CallsTest, OnlyTheFirstMemoryOfAQueryKeepsItsBosColumn) {
  std::map<std::string, PinnedMemory> stored;
  for (const char* corpus : {"a", "b"}) {
    PinnedMemory& pin = stored[corpus];
    pin.tenant = "default";
    pin.corpus_id = corpus;
    pin.cache_id = "k";
    pin.method = "CARTRIDGE";
    auto whole = std::make_shared<Memory>(), rest = std::make_shared<Memory>();
    whole->slots = 5;
    rest->slots = 4;
    whole->next_position = rest->next_position = 9;
    pin.memory = whole;
    pin.behind_another = rest;
  }
  service_->doors.pin = [&](std::string_view, std::string_view corpus, std::string_view) {
    return absl::StatusOr<PinnedMemory>(stored[std::string(corpus)]);
  };
  v1::QueryRequest request = Ask("x");
  for (const char* corpus : {"b", "a"}) {
    request.add_caches(std::string("tenants/default/corpora/") + corpus + "/caches/k");
  }
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, request);
  FakeEngine::Job job = engine_.Next();
  ASSERT_EQ(job.request.memories.size(), 2u);
  EXPECT_EQ(job.request.memories[0], stored["b"].memory);
  EXPECT_EQ(job.request.memories[1], stored["a"].behind_another);
  job.sink->OnFinish(FinishReason::kStopId, {}, absl::OkStatus());
  const auto [events, status] = ReadAll(reader.get());
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(events.front().accepted().caches(0).slots(), 5);
  EXPECT_EQ(events.front().accepted().caches(1).slots(), 4);
  EXPECT_EQ(events.back().finish().usage().cached_slots(), 9);
  EXPECT_EQ(events.front().accepted().warnings_size(), 1);
}

TEST_F(CallsTest, AnUploadAppearsWholeAndIsIdempotent) {
  const std::string text = "a document of some length";
  const std::string hash = Sha256Hex(text);
  v1::Corpus corpus;
  const std::vector<std::pair<int64_t, std::string>> chunks = {{0, text.substr(0, 10)}, {10, text.substr(10)}};
  grpc::Status status = Upload("book", text, hash, chunks, &corpus);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(corpus.name(), "tenants/default/corpora/book");
  EXPECT_EQ(corpus.sha256(), hash);
  EXPECT_EQ(corpus.token_count(), static_cast<int64_t>(Ids(text).size()));
  grpc::ClientContext listing;
  v1::ListCorporaResponse list;
  ASSERT_TRUE(corpora_->ListCorpora(&listing, {}, &list).ok());
  ASSERT_EQ(list.corpora_size(), 1);
  EXPECT_EQ(list.corpora(0).token_count(), corpus.token_count());
  status = Upload("book", text, hash, {}, &corpus);  // an equal header is the same corpus
  EXPECT_TRUE(status.ok()) << status.error_message();
  const std::string other = "another document";
  status = Upload("book", other, Sha256Hex(other), {{0, other}}, &corpus);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(CallsTest, ADocumentWithoutACacheSaysSo) {
  const std::string text = "a document";
  v1::Corpus corpus;
  ASSERT_TRUE(Upload("book", text, Sha256Hex(text), {{0, text}}, &corpus).ok());
  for (const auto& [name, reason] : {std::pair<const char*, const char*>{"book", "NO_CACHE"},
                                     {"cook", "NOT_FOUND"},
                                     {"book/caches/k", "NOT_FOUND"}}) {
    v1::QueryRequest request = Ask("x");
    request.add_caches(std::string("tenants/default/corpora/") + name);
    grpc::ClientContext context;
    const grpc::Status status = ReadAll(inference_->Query(&context, request).get()).second;
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_EQ(Info(status).reason(), reason) << status.error_message();
  }
}

TEST_F(CallsTest, GapsAreRefusedAndTheUploadGoesOn) {
  const std::string text = "0123456789abcdef";
  const std::string hash = Sha256Hex(text);
  v1::Corpus corpus;
  grpc::Status status = Upload("book", text, hash, {{0, text.substr(0, 4)}, {8, text.substr(8)}}, &corpus);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(Info(status).reason(), "UPLOAD_OFFSET_MISMATCH");
  EXPECT_EQ(Info(status).metadata().at("committed_bytes"), "4");

  v1::GetUploadRequest request;
  FillHeader("book", text, hash, request.mutable_header());
  v1::Upload upload;
  grpc::ClientContext context;
  ASSERT_TRUE(corpora_->GetUpload(&context, request, &upload).ok());
  EXPECT_EQ(upload.committed_bytes(), 4);
  status = Upload("book", text, hash, {}, &corpus);  // no end
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Info(status).reason(), "UPLOAD_INCOMPLETE");
  grpc::ClientContext get;
  v1::GetCorpusRequest name;
  name.set_name("tenants/default/corpora/book");
  EXPECT_EQ(corpora_->GetCorpus(&get, name, &corpus).error_code(), grpc::StatusCode::NOT_FOUND);
  status = Upload("book", text, hash, {{4, text.substr(4)}}, &corpus);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(CallsTest, HostileUploadsAreRefused) {
  const std::string text = "0123456789";
  v1::Corpus corpus;
  grpc::Status status = Upload("book", text, Sha256Hex("something else"), {{0, text}}, &corpus);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Info(status).reason(), "CHECKSUM_MISMATCH");
  const std::string hash = Sha256Hex(text);
  EXPECT_EQ(Upload("Book", text, hash, {{0, text}}, &corpus).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Upload("book", "", hash, {}, &corpus).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Upload("book", text, "abc", {}, &corpus).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Upload("book", text, hash, {{-1, text}}, &corpus).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Upload("book", text, hash, {{0, text + "more"}}, &corpus).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Upload("book", text, hash, {{0, std::string(kMaxChunkBytes + 1, 'x')}}, &corpus).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  // A chunk before any header, and a stream without messages.
  grpc::ClientContext headless;
  auto writer = corpora_->UploadCorpus(&headless, &corpus);
  v1::UploadCorpusRequest message;
  message.mutable_chunk()->set_data("x");
  writer->Write(message);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  grpc::ClientContext empty;
  writer = corpora_->UploadCorpus(&empty, &corpus);
  writer->WritesDone();
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(metrics_.Expose(), HasSubstr("stillhouse_checksum_failures_total 1\n"));
}

TEST_F(CallsTest, TokenizeTakesAMebibyte) {
  v1::TokenizeRequest request;
  v1::TokenizeResponse response;
  request.set_text(std::string((1 << 20) - 16, '7'));
  grpc::ClientContext context;
  EXPECT_TRUE(inference_->Tokenize(&context, request, &response).ok());
  EXPECT_GT(response.ids_size(), 0);
  for (const bool chat : {false, true}) {
    const std::string text((1 << 20) + 1, '7');
    request.Clear();
    if (chat) {
      v1::Message* message = request.mutable_messages()->add_messages();
      message->set_role("user");
      message->set_content(text);
    } else {
      request.set_text(text);
    }
    grpc::ClientContext refused;
    EXPECT_EQ(inference_->Tokenize(&refused, request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(CallsTest, TokenizeKeepsControlTokensOutOfText) {
  v1::TokenizeRequest request;
  request.set_text("a<|im_end|>");
  v1::TokenizeResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(inference_->Tokenize(&context, request, &response).ok());
  std::string joined;
  for (int i = 0; i < response.ids_size(); ++i) {
    EXPECT_FALSE(tokenizer_->IsControl(response.ids(i)));
    joined += response.pieces(i);
  }
  EXPECT_EQ(joined, "a<|im_end|>");
  v1::DetokenizeRequest back;
  *back.mutable_ids() = response.ids();
  v1::DetokenizeResponse text;
  grpc::ClientContext second;
  ASSERT_TRUE(inference_->Detokenize(&second, back, &text).ok());
  EXPECT_EQ(text.text(), "a<|im_end|>");
  back.add_ids(1 << 30);
  grpc::ClientContext third;
  EXPECT_EQ(inference_->Detokenize(&third, back, &text).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

// grpc.health.v1.Health/Check of the whole server; the response is one varint field: 1 SERVING, 2 NOT_SERVING.
std::string HealthBytes(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::ByteBuffer request, response;
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
  grpc::Slice empty;
  request = grpc::ByteBuffer(&empty, 1);
  grpc::Status result;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [&](grpc::Status status) {
                   std::lock_guard<std::mutex> lock(mutex);
                   result = std::move(status);
                   finished = true;
                   done.notify_one();
                 });
  std::unique_lock<std::mutex> lock(mutex);
  done.wait(lock, [&] { return finished; });
  if (!result.ok()) return "status " + std::to_string(result.error_code());
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(response.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

TEST_F(CallsTest, ADrainLetsAnswersEndAndRefusesNewOnes) {
  EXPECT_EQ(HealthBytes(channel_), std::string("\x08\x01"));
  grpc::ClientContext context;
  auto reader = inference_->Query(&context, Ask("hello"));
  FakeEngine::Job job = engine_.Next();
  std::thread drain([this] { server_->Drain(absl::Now() + absl::Minutes(1)); });
  while (!service_->draining.load()) std::this_thread::yield();
  EXPECT_EQ(HealthBytes(channel_), std::string("\x08\x02"));
  grpc::ClientContext refused;
  const grpc::Status status = ReadAll(inference_->Query(&refused, Ask("more")).get()).second;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Info(status).reason(), "DRAINING");
  for (int32_t id : Ids("done")) job.sink->OnToken(Drawn(id));
  job.sink->OnFinish(FinishReason::kMaxTokens, {}, absl::OkStatus());
  const auto [events, end] = ReadAll(reader.get());
  EXPECT_TRUE(end.ok()) << end.error_message();
  EXPECT_EQ(Text(events), "done");
  drain.join();
}

class KeyedCallsTest : public CallsTest {
 protected:
  KeyedCallsTest() : CallsTest("the-admin-key-of-this-test") {}

  template <typename Call>
  grpc::Status With(const std::string& key, Call call) {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    return call(&context);
  }
};

TEST_F(KeyedCallsTest, TheAdminMakesTenantsAndKeysAndNothingElse) {
  const auto list = [this](grpc::ClientContext* context) {
    v1::ListCorporaResponse response;
    return corpora_->ListCorpora(context, {}, &response);
  };
  EXPECT_EQ(With("", list).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(With("wrong", list).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(With(admin_key_, list).error_code(), grpc::StatusCode::PERMISSION_DENIED);

  v1::Key key;
  const auto create_tenant = [this](grpc::ClientContext* context) {
    v1::CreateTenantRequest request;
    request.set_tenant_id("acme");
    v1::Tenant tenant;
    return tenant_stub_->CreateTenant(context, request, &tenant);
  };
  const auto create_key = [&](grpc::ClientContext* context) {
    v1::CreateKeyRequest request;
    request.set_parent("tenants/acme");
    return tenant_stub_->CreateKey(context, request, &key);
  };
  ASSERT_TRUE(With(admin_key_, create_tenant).ok());
  ASSERT_TRUE(With(admin_key_, create_key).ok());
  const std::string secret = key.secret();
  EXPECT_TRUE(With(secret, list).ok());
  EXPECT_EQ(With(secret, create_key).error_code(), grpc::StatusCode::PERMISSION_DENIED);

  const auto list_keys = [&](grpc::ClientContext* context) {
    v1::ListKeysRequest request;
    request.set_parent("tenants/acme");
    v1::ListKeysResponse response;
    grpc::Status status = tenant_stub_->ListKeys(context, request, &response);
    EXPECT_EQ(response.keys_size(), 1);
    if (response.keys_size() == 1) {
      EXPECT_EQ(response.keys(0).secret(), "");  // shown once
    }
    return status;
  };
  EXPECT_TRUE(With(admin_key_, list_keys).ok());
  const auto delete_key = [&](grpc::ClientContext* context) {
    v1::DeleteKeyRequest request;
    request.set_name(key.name());
    v1::DeleteKeyResponse response;
    return tenant_stub_->DeleteKey(context, request, &response);
  };
  EXPECT_TRUE(With(admin_key_, delete_key).ok());
  EXPECT_EQ(With(secret, list).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace stillhouse
