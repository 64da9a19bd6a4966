#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"
#include "cache_store/garbage_collector.h"
#include "cache_store/store.h"
#include "kernels/base/sha256.h"
#include "tests/cache_store/temp_dir.h"
#include "tests/support/fault_env.h"

namespace stillhouse {
namespace {

using testing::HasSubstr;

absl::Time g_now;

class StoreUploadTest : public testing::Test {
 protected:
  StoreUploadTest() {
    g_now = absl::FromUnixSeconds(1700000000);
    Reopen();
    EXPECT_TRUE(store_->EnsureTenant("acme").ok());
    EXPECT_TRUE(store_->EnsureTenant("other").ok());
  }
  void Reopen() {
    store_.reset();
    StoreOptions options;
    options.directory = dir_.path();
    options.env = &env_;
    options.now = [] { return g_now; };
    absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  UploadSpec Spec(const std::string& text, const std::string& corpus = "doc") {
    UploadSpec spec;
    spec.tenant = "acme";
    spec.corpus_id = corpus;
    spec.display_name = "A document";
    spec.media_type = "text/plain";
    spec.size = text.size();
    spec.sha256 = Sha256Hex(text);
    return spec;
  }
  std::string Begin(const UploadSpec& spec) {
    absl::StatusOr<UploadState> state = store_->BeginUpload(spec);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? state->upload_id : "";
  }
  uint64_t Received(const std::string& id) {
    absl::StatusOr<UploadState> state = store_->GetUpload("acme", id);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? state->received : UINT64_MAX;
  }
  std::vector<std::string> Files(const std::string& folder) {
    return PosixEnv()->ListDirectory(dir_.path() + "/" + folder).value();
  }

  TempDir dir_;
  FaultEnv env_;
  std::unique_ptr<Store> store_;
};

TEST_F(StoreUploadTest, UploadIsVisibleOnlyOnceSealed) {
  const std::string text = "Every moonlit mash tun.\xff\x00 not UTF-8";
  const std::string id = Begin(Spec(text));
  EXPECT_EQ(store_->WriteChunk("acme", id, 0, text.substr(0, 5)).value(), 5u);
  EXPECT_TRUE(absl::IsNotFound(store_->GetCorpus("acme", "doc").status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Seal("acme", id).status()));
  EXPECT_EQ(store_->WriteChunk("acme", id, 5, text.substr(5)).value(), text.size());
  EXPECT_TRUE(absl::IsNotFound(store_->GetCorpus("acme", "doc").status()));
  EXPECT_TRUE(store_->ListCorpora("acme", {}).value().rows.empty());
  absl::StatusOr<CorpusRow> row = store_->Seal("acme", id);
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(row->sha256, Sha256Hex(text));
  EXPECT_EQ(row->size, text.size());
  EXPECT_EQ(row->display_name, "A document");
  EXPECT_EQ(row->create_time, g_now);
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), text);
  EXPECT_EQ(store_->Seal("acme", id).value().etag, row->etag) << "sealing again gives the same row";
  absl::StatusOr<UploadState> state = store_->GetUpload("acme", id);
  ASSERT_TRUE(state.ok() && state->corpus.has_value());
  EXPECT_EQ(state->corpus->etag, row->etag);
  EXPECT_TRUE(absl::IsNotFound(store_->WriteChunk("acme", id, 0, "x").status()));
  EXPECT_TRUE(Files("uploads").empty());
  EXPECT_EQ(Files("blobs"), std::vector<std::string>{row->sha256});
}

TEST_F(StoreUploadTest, EmptyDocument) {
  const std::string id = Begin(Spec(""));
  ASSERT_TRUE(store_->Seal("acme", id).ok());
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), "");
}

TEST_F(StoreUploadTest, GapsOverlapsAndExcess) {
  const std::string text = "0123456789";
  const std::string id = Begin(Spec(text));
  absl::StatusOr<uint64_t> gap = store_->WriteChunk("acme", id, 1, "1");
  EXPECT_TRUE(absl::IsOutOfRange(gap.status())) << gap.status();
  EXPECT_THAT(std::string(gap.status().message()), HasSubstr("0 bytes were received"));
  EXPECT_EQ(store_->WriteChunk("acme", id, 0, "01234").value(), 5u);
  EXPECT_TRUE(absl::IsOutOfRange(store_->WriteChunk("acme", id, 6, "6").status()));
  EXPECT_TRUE(absl::IsOutOfRange(store_->WriteChunk("acme", id, UINT64_MAX, "6").status()));
  EXPECT_EQ(store_->WriteChunk("acme", id, 0, "01234").value(), 5u) << "sent again";
  EXPECT_EQ(store_->WriteChunk("acme", id, 2, "23").value(), 5u) << "part sent again";
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteChunk("acme", id, 2, "xx").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteChunk("acme", id, 3, "3x5").status()));
  EXPECT_EQ(Received(id), 5u) << "refused chunks change nothing";
  EXPECT_EQ(store_->WriteChunk("acme", id, 3, "345").value(), 6u) << "overlap that goes on";
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteChunk("acme", id, 6, "6789+").status()));
  EXPECT_EQ(store_->WriteChunk("acme", id, 6, "").value(), 6u);
  EXPECT_EQ(store_->WriteChunk("acme", id, 6, "6789").value(), 10u);
  EXPECT_TRUE(absl::IsInvalidArgument(store_->WriteChunk("acme", id, 10, "x").status()));
  ASSERT_TRUE(store_->Seal("acme", id).ok());
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), text);
}

TEST_F(StoreUploadTest, WrongHashDiscardsTheUpload) {
  UploadSpec spec = Spec("right");
  spec.request_id = "11111111-1111-4111-8111-111111111111";
  const std::string id = Begin(spec);
  ASSERT_TRUE(store_->WriteChunk("acme", id, 0, "wrong").ok());
  absl::StatusOr<CorpusRow> row = store_->Seal("acme", id);
  EXPECT_TRUE(absl::IsInvalidArgument(row.status())) << row.status();
  EXPECT_TRUE(absl::IsNotFound(store_->GetUpload("acme", id).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->GetCorpus("acme", "doc").status()));
  EXPECT_TRUE(Files("uploads").empty());
  const std::string again = Begin(spec);  // the same request may try again
  ASSERT_TRUE(store_->WriteChunk("acme", again, 0, "right").ok());
  EXPECT_TRUE(store_->Seal("acme", again).ok());
}

TEST_F(StoreUploadTest, ResumesAfterReopen) {
  std::string text(3 << 20, 'a');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  UploadSpec spec = Spec(text);
  spec.upload_id = "my-upload_1";
  ASSERT_EQ(Begin(spec), "my-upload_1");
  ASSERT_TRUE(store_->WriteChunk("acme", "my-upload_1", 0, text.substr(0, 1 << 20)).ok());
  ASSERT_TRUE(store_->WriteChunk("acme", "my-upload_1", 1 << 20, text.substr(1 << 20, 100)).ok());
  Reopen();
  EXPECT_EQ(Received("my-upload_1"), (1u << 20) + 100);
  absl::StatusOr<UploadState> begun = store_->BeginUpload(spec);
  ASSERT_TRUE(begun.ok());
  EXPECT_EQ(begun->received, (1u << 20) + 100);
  ASSERT_TRUE(store_->WriteChunk("acme", "my-upload_1", begun->received, text.substr(begun->received)).ok());
  Reopen();
  ASSERT_TRUE(store_->Seal("acme", "my-upload_1").ok());
  Reopen();
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), text);
  EXPECT_EQ(store_->Seal("acme", "my-upload_1").value().corpus_id, "doc");
}

TEST_F(StoreUploadTest, ResumeTrustsOnlyBytesThatMatchTheirLog) {
  const std::string text = "0123456789abcdef";
  const std::string id = Begin(Spec(text));
  for (uint64_t at = 0; at < 16; at += 4) ASSERT_TRUE(store_->WriteChunk("acme", id, at, text.substr(at, 4)).ok());
  store_.reset();
  std::string data, log;
  for (const std::string& name : Files("uploads"))
    (name.ends_with(".log") ? log : data) = dir_.path() + "/uploads/" + name;
  auto poke = [](const std::string& path, std::streamoff at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at);
    file.put('!');
  };
  Reopen();
  EXPECT_EQ(Received(id), 16u);
  store_.reset();
  std::filesystem::resize_file(log, 16 * 3 + 7);  // a torn record
  Reopen();
  EXPECT_EQ(Received(id), 12u);
  store_.reset();
  poke(data, 9);  // a block that never reached the disk
  Reopen();
  EXPECT_EQ(Received(id), 8u);
  store_.reset();
  poke(log, 16);
  Reopen();
  EXPECT_EQ(Received(id), 4u);
  store_.reset();
  std::filesystem::resize_file(data, 3);
  Reopen();
  EXPECT_EQ(Received(id), 0u);
  ASSERT_TRUE(store_->WriteChunk("acme", id, 0, text).ok());
  ASSERT_TRUE(store_->Seal("acme", id).ok());
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), text);
}

TEST_F(StoreUploadTest, SameUploadIdOrRequestIdWithOtherContent) {
  UploadSpec spec = Spec("text");
  spec.upload_id = "u1";
  spec.request_id = "req-1";
  ASSERT_EQ(Begin(spec), "u1");
  EXPECT_EQ(Begin(spec), "u1") << "the same again";
  UploadSpec without = spec;
  without.upload_id = "";
  EXPECT_EQ(Begin(without), "u1") << "found by its request";
  for (auto change : {+[](UploadSpec& s) { s.corpus_id = "else"; }, +[](UploadSpec& s) { s.size = 5; },
                      +[](UploadSpec& s) { s.sha256 = Sha256Hex("else"); },
                      +[](UploadSpec& s) { s.display_name = "B"; }, +[](UploadSpec& s) { s.media_type = "x/y"; }}) {
    UploadSpec by_upload = spec, by_request = spec;
    change(by_upload), change(by_request);
    by_upload.request_id = "";
    by_request.upload_id = "";
    EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUpload(by_upload).status()));
    EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUpload(by_request).status()));
  }
  UploadSpec two_ids = spec;
  two_ids.upload_id = "u2";
  EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUpload(two_ids).status()));
  ASSERT_TRUE(store_->WriteChunk("acme", "u1", 0, "text").ok());
  ASSERT_TRUE(store_->Seal("acme", "u1").ok());
  for (const UploadSpec& again : {spec, without}) {
    absl::StatusOr<UploadState> state = store_->BeginUpload(again);
    ASSERT_TRUE(state.ok() && state->corpus.has_value()) << state.status();
    EXPECT_EQ(state->received, 4u);
    EXPECT_EQ(state->upload_id, "u1");
  }
  UploadSpec fresh = Spec("text");
  EXPECT_TRUE(absl::IsAlreadyExists(store_->BeginUpload(fresh).status())) << "the corpus id is taken";
  ASSERT_TRUE(store_->DeleteCorpus("acme", "doc").ok());
  EXPECT_FALSE(store_->BeginUpload(spec).value().corpus.has_value()) << "the request died with its corpus";
}

TEST_F(StoreUploadTest, TwoUploadsRaceForOneCorpusId) {
  const std::string a = Begin(Spec("first")), b = Begin(Spec("second"));
  ASSERT_TRUE(store_->WriteChunk("acme", a, 0, "first").ok());
  ASSERT_TRUE(store_->WriteChunk("acme", b, 0, "second").ok());
  ASSERT_TRUE(store_->Seal("acme", a).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Seal("acme", b).status()));
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), "first");
  ASSERT_TRUE(store_->AbortUpload("acme", b).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->AbortUpload("acme", b)));
  EXPECT_TRUE(absl::IsNotFound(store_->AbortUpload("acme", a)));
}

TEST_F(StoreUploadTest, BadArguments) {
  auto refused = [&](auto change) {
    UploadSpec spec = Spec("x");
    change(spec);
    return absl::IsInvalidArgument(store_->BeginUpload(spec).status());
  };
  for (const char* id : {"", "A", "1a", "a-", "-a", "a_b", "a/b", "..", "a\n"}) {
    EXPECT_TRUE(refused([&](UploadSpec& s) { s.corpus_id = id; })) << id;
    EXPECT_TRUE(refused([&](UploadSpec& s) { s.tenant = id; })) << id;
  }
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.corpus_id = std::string(64, 'a'); }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.upload_id = "../../x"; }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.request_id = "a b"; }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.sha256 = "abc"; }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.sha256 = std::string(64, 'A'); }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.size = UINT64_MAX; }));
  EXPECT_TRUE(refused([&](UploadSpec& s) { s.display_name = std::string(2000, 'x'); }));
  UploadSpec spec = Spec("x");
  spec.tenant = "nobody";
  EXPECT_TRUE(absl::IsNotFound(store_->BeginUpload(spec).status()));
}

TEST_F(StoreUploadTest, OtherTenantsUploadsDoNotExist) {
  const std::string id = Begin(Spec("text"));
  const absl::Status missing = store_->GetUpload("other", "no-such-upload").status();
  EXPECT_EQ(store_->GetUpload("other", id).status(), missing);
  EXPECT_EQ(store_->Seal("other", id).status(), missing);
  EXPECT_EQ(store_->WriteChunk("other", id, 0, "text").status(), missing);
  EXPECT_EQ(store_->AbortUpload("other", id), missing);
  ASSERT_TRUE(store_->WriteChunk("acme", id, 0, "text").ok());
  ASSERT_TRUE(store_->Seal("acme", id).ok());
  EXPECT_EQ(store_->Seal("other", id).status(), missing);
  // The same ids in another tenant are other things; the same bytes are one blob, but must be sent.
  UploadSpec spec = Spec("text");
  spec.tenant = "other";
  spec.upload_id = id;
  absl::StatusOr<UploadState> state = store_->BeginUpload(spec);
  ASSERT_TRUE(state.ok());
  EXPECT_EQ(state->received, 0u);
  ASSERT_TRUE(store_->WriteChunk("other", id, 0, "text").ok());
  ASSERT_TRUE(store_->Seal("other", id).ok());
  EXPECT_EQ(Files("blobs").size(), 1u);
  ASSERT_TRUE(store_->DeleteCorpus("acme", "doc").ok());
  EXPECT_EQ(store_->ReadCorpus("other", "doc").value(), "text");
  ASSERT_TRUE(store_->DeleteCorpus("other", "doc").ok());
  EXPECT_TRUE(Files("blobs").empty());
}

TEST_F(StoreUploadTest, FullDiskRefusesTheDeclaredSize) {
  env_.SetFreeSpace((64 << 20) + 10);
  UploadSpec spec = Spec("0123456789");
  EXPECT_TRUE(store_->BeginUpload(spec).ok());
  spec.size = 11;
  EXPECT_TRUE(absl::IsResourceExhausted(store_->BeginUpload(spec).status()));
  env_.SetFreeSpace(1);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->BeginUpload(spec).status()));
}

TEST_F(StoreUploadTest, IdleUploadsExpireAndActiveOnesDoNot) {
  const std::string idle = Begin(Spec("idle", "a")), active = Begin(Spec("active", "b"));
  ASSERT_TRUE(store_->WriteChunk("acme", idle, 0, "id").ok());
  g_now += absl::Hours(20);
  ASSERT_TRUE(store_->WriteChunk("acme", active, 0, "act").ok());
  g_now += absl::Hours(5);
  ASSERT_TRUE(store_->CollectGarbage().ok());
  EXPECT_TRUE(absl::IsNotFound(store_->GetUpload("acme", idle).status()));
  EXPECT_EQ(Received(active), 3u);
  EXPECT_EQ(Files("uploads").size(), 2u);
}

TEST_F(StoreUploadTest, GarbageGoesWhileTheStoreIsOpen) {
  const std::string idle = Begin(Spec("idle", "a"));
  g_now += absl::Hours(25);
  GarbageCollector collector(store_.get(), absl::Milliseconds(1));
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (store_->GetUpload("acme", idle).ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsNotFound(store_->GetUpload("acme", idle).status()));
}

TEST_F(StoreUploadTest, ACollectorThatWaitsStopsAtOnce) {
  GarbageCollector collector(store_.get(), absl::InfiniteDuration());
}

TEST_F(StoreUploadTest, ConcurrentUploadsAndReads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const std::string text(20000 + t * 1000 + i, static_cast<char>('a' + t));
        const std::string corpus = "c" + std::to_string(t) + "-" + std::to_string(i);
        absl::StatusOr<UploadState> state = store_->BeginUpload(Spec(text, corpus));
        ASSERT_TRUE(state.ok()) << state.status();
        for (size_t at = 0; at < text.size(); at += 8192) {
          ASSERT_TRUE(store_->WriteChunk("acme", state->upload_id, at, text.substr(at, 8192)).ok());
        }
        ASSERT_TRUE(store_->Seal("acme", state->upload_id).ok());
        ASSERT_EQ(store_->ReadCorpus("acme", corpus).value(), text);
        if (i % 2 == 0) {
          ASSERT_TRUE(store_->DeleteCorpus("acme", corpus).ok());
        }
        ASSERT_TRUE(store_->CollectGarbage().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store_->ListCorpora("acme", {}).value().rows.size(), 8u);
  // Two streams of one upload: every chunk counts once.
  const std::string text(200000, 'z');
  const std::string id = Begin(Spec(text, "shared"));
  std::vector<std::thread> streams;
  for (int t = 0; t < 2; ++t) {
    streams.emplace_back([&] {
      for (size_t at = 0; at < text.size(); at += 10000) {
        ASSERT_TRUE(store_->WriteChunk("acme", id, at, text.substr(at, 10000)).ok());
      }
    });
  }
  for (std::thread& stream : streams) stream.join();
  EXPECT_TRUE(store_->Seal("acme", id).ok());
}

}  // namespace
}  // namespace stillhouse
