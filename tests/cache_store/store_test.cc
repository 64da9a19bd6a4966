#include "cache_store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <filesystem>
#include <fstream>

#include "cache_store/artifact.h"
#include "kernels/base/sha256.h"
#include "tests/cache_store/sample_artifact.h"
#include "tests/cache_store/temp_dir.h"

namespace stillhouse {
namespace {

using testing::HasSubstr;

absl::Time g_now;

class StoreTest : public testing::Test {
 protected:
  StoreTest() {
    g_now = absl::FromUnixSeconds(1700000000);
    Reopen();
    EXPECT_TRUE(store_->EnsureTenant("acme").ok());
    EXPECT_TRUE(store_->EnsureTenant("other").ok());
  }
  StoreOptions Options() {
    StoreOptions options;
    options.directory = dir_.path() + "/store";
    options.min_free_bytes = 0;
    options.now = [] { return g_now; };
    return options;
  }
  void Reopen() {
    store_.reset();
    absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(Options());
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void AddCorpus(const std::string& tenant, const std::string& corpus, const std::string& text) {
    UploadSpec spec;
    spec.tenant = tenant;
    spec.corpus_id = corpus;
    spec.size = text.size();
    spec.sha256 = Sha256Hex(text);
    absl::StatusOr<UploadState> state = store_->BeginUpload(spec);
    ASSERT_TRUE(state.ok()) << state.status();
    ASSERT_TRUE(store_->WriteChunk(tenant, state->upload_id, 0, text).ok());
    ASSERT_TRUE(store_->Seal(tenant, state->upload_id).ok());
  }
  ArtifactSpec Spec(const std::string& cache = "k") {
    ArtifactSpec spec;
    spec.tenant = "acme";
    spec.corpus_id = "doc";
    spec.cache_id = cache;
    spec.method = "CARTRIDGE";
    spec.summary_json = "{}";
    return spec;
  }
  OperationRow Operation(const std::string& id, const std::string& tenant = "acme") {
    OperationRow row;
    row.tenant = tenant;
    row.operation_id = id;
    row.kind = "BUILD_CACHE";
    row.target = "corpora/doc/caches/" + id;
    row.request_json = R"({"p":128})";
    return row;
  }
  std::vector<std::string> Files(const std::string& folder) {
    return PosixEnv()->ListDirectory(Options().directory + "/" + folder).value();
  }
  std::string BlobPath(const std::string& sha256) { return Options().directory + "/blobs/" + sha256; }

  TempDir dir_;
  std::unique_ptr<Store> store_;
};

TEST_F(StoreTest, SecondServerOnTheSameFolderIsRefused) {
  absl::StatusOr<std::unique_ptr<Store>> second = OpenEmbeddedStore(Options());
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another server"));
  Reopen();
}

TEST_F(StoreTest, ForeignNewerAndDamagedCatalogsAreRefused) {
  store_.reset();
  const std::string catalog = Options().directory + "/catalog.db";
  auto execute = [&](const char* sql) {
    sqlite3* db = nullptr;
    ASSERT_EQ(sqlite3_open(catalog.c_str(), &db), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(db, sql, nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(db);
  };
  execute("PRAGMA user_version = 2");
  absl::Status status = OpenEmbeddedStore(Options()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("newer"));
  execute("PRAGMA user_version = 1; PRAGMA application_id = 7");
  EXPECT_TRUE(absl::IsFailedPrecondition(OpenEmbeddedStore(Options()).status()));
  execute("PRAGMA application_id = 1398033480");
  Reopen();
  store_.reset();
  {
    std::fstream file(catalog, std::ios::in | std::ios::out | std::ios::binary);
    for (int page = 1; page < 8; ++page) {
      file.seekp(page * 4096);
      file << std::string(2000, '\x5a');
    }
  }
  EXPECT_TRUE(absl::IsDataLoss(OpenEmbeddedStore(Options()).status())) << OpenEmbeddedStore(Options()).status();
  std::ofstream(catalog, std::ios::trunc) << std::string(8192, 'x');
  EXPECT_TRUE(absl::IsDataLoss(OpenEmbeddedStore(Options()).status()));
}

TEST_F(StoreTest, PagingIsCompleteOrderedAndBoundToItsList) {
  for (int i = 0; i < 7; ++i) AddCorpus("acme", "c" + std::to_string(i), "text " + std::to_string(i));
  AddCorpus("other", "c3", "elsewhere");
  std::vector<std::string> seen;
  PageRequest request{3, ""};
  int pages = 0;
  do {
    absl::StatusOr<Page<CorpusRow>> page = store_->ListCorpora("acme", request);
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_LE(page->rows.size(), 3u);
    for (const CorpusRow& row : page->rows) seen.push_back(row.corpus_id);
    request.page_token = page->next_page_token;
    if (++pages == 1) {
      ASSERT_TRUE(store_->DeleteCorpus("acme", "c2").ok());  // the row that the token stands on
      EXPECT_TRUE(absl::IsInvalidArgument(store_->ListCorpora("other", request).status()));
      EXPECT_TRUE(absl::IsInvalidArgument(store_->ListArtifacts("acme", "", request).status()));
    }
  } while (!request.page_token.empty());
  EXPECT_EQ(seen, (std::vector<std::string>{"c0", "c1", "c2", "c3", "c4", "c5", "c6"}));
  EXPECT_EQ(pages, 3);
  EXPECT_TRUE(store_->ListCorpora("acme", {6, ""}).value().next_page_token.empty()) << "exactly full";
  for (const char* token : {"x", "MQ", "////", "MTAwMDAwMDAwYzE"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(store_->ListCorpora("acme", {3, token}).status())) << token;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(store_->ListCorpora("acme", {-1, ""}).status()));
  EXPECT_EQ(store_->ListCorpora("acme", {100000, ""}).value().rows.size(), 6u);
}

TEST_F(StoreTest, ArtifactLifeCycle) {
  AddCorpus("acme", "doc", "the text");
  const std::string bytes = SampleArtifactFile(1);
  ArtifactSpec spec = Spec();
  spec.summary_json = R"({"p":5})";
  EXPECT_TRUE(absl::IsNotFound(store_->GetArtifact("acme", "doc", "k").status()));
  absl::StatusOr<ArtifactRow> row = store_->PutArtifact(spec, bytes);
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(row->sha256, Sha256Hex(bytes));
  EXPECT_EQ(row->size, bytes.size());
  EXPECT_EQ(row->summary_json, spec.summary_json);
  EXPECT_TRUE(absl::IsAlreadyExists(store_->PutArtifact(spec, bytes).status()));
  Reopen();
  absl::StatusOr<StoredArtifact> stored = store_->OpenArtifactFile("acme", "doc", "k");
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->row.etag, row->etag);
  ASSERT_TRUE(OpenArtifact(stored->file).ok());

  // Replaced: the reader keeps the old bytes.
  const std::string newer = SampleArtifactFile(2);
  spec.replace = true;
  spec.expected_etag = "stale";
  EXPECT_TRUE(absl::IsAborted(store_->PutArtifact(spec, newer).status()));
  spec.expected_etag = row->etag;
  absl::StatusOr<ArtifactRow> replaced = store_->PutArtifact(spec, newer);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_NE(replaced->etag, row->etag);
  EXPECT_EQ(Files("blobs").size(), 2u);
  ASSERT_TRUE(store_->CollectGarbage().ok());
  std::string old(stored->file->size(), '\0');
  ASSERT_TRUE(stored->file->Read(0, old.size(), old.data()).ok());
  EXPECT_EQ(old, bytes);
  // Replaced by the same bytes: still there.
  spec.expected_etag = "";
  ASSERT_TRUE(store_->PutArtifact(spec, newer).ok());
  EXPECT_TRUE(store_->OpenArtifactFile("acme", "doc", "k").ok());

  EXPECT_TRUE(absl::IsFailedPrecondition(store_->DeleteCorpus("acme", "doc")));
  EXPECT_TRUE(absl::IsAborted(store_->DeleteArtifact("acme", "doc", "k", "stale")));
  ASSERT_TRUE(store_->DeleteArtifact("acme", "doc", "k").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->DeleteArtifact("acme", "doc", "k")));
  EXPECT_EQ(Files("blobs").size(), 1u);
  ASSERT_TRUE(store_->PutArtifact(Spec("k2"), bytes).ok());
  ASSERT_TRUE(store_->DeleteCorpus("acme", "doc", /*cascade=*/true).ok());
  EXPECT_TRUE(Files("blobs").empty());
  EXPECT_TRUE(Files("tmp").empty());
}

TEST_F(StoreTest, ArtifactsStreamIn) {
  AddCorpus("acme", "doc", "the text");
  const std::string bytes = SampleArtifactFile();
  {
    absl::StatusOr<std::unique_ptr<BlobWriter>> dropped = store_->NewBlob();
    ASSERT_TRUE(dropped.ok() && (*dropped)->Append("half").ok());
    ASSERT_TRUE(store_->CollectGarbage().ok());
    EXPECT_EQ(Files("tmp").size(), 1u) << "in use";
  }
  EXPECT_TRUE(Files("tmp").empty());
  absl::StatusOr<std::unique_ptr<BlobWriter>> blob = store_->NewBlob();
  ASSERT_TRUE(blob.ok());
  for (size_t at = 0; at < bytes.size(); at += 100) ASSERT_TRUE((*blob)->Append(bytes.substr(at, 100)).ok());
  absl::StatusOr<std::shared_ptr<ReadableFile>> check = (*blob)->OpenForReading();
  ASSERT_TRUE(check.ok() && OpenArtifact(*check).ok());
  ArtifactSpec spec = Spec();
  spec.corpus_id = "nope";
  EXPECT_TRUE(absl::IsNotFound(store_->PutArtifact(spec, blob->get()).status()));
  ASSERT_TRUE(store_->PutArtifact(Spec(), blob->get()).ok()) << "after an error it may be put again";
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->PutArtifact(Spec("k2"), blob->get()).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition((*blob)->Append("x")));
}

TEST_F(StoreTest, ArtifactRequestsAreIdempotent) {
  AddCorpus("acme", "doc", "the text");
  ArtifactSpec spec = Spec();
  spec.request_id = "req-7";
  const std::string etag = store_->PutArtifact(spec, "aaa").value().etag;
  EXPECT_EQ(store_->PutArtifact(spec, "aaa").value().etag, etag);
  EXPECT_TRUE(absl::IsAlreadyExists(store_->PutArtifact(spec, "bbb").status()));
  OperationRow operation = Operation("op1");
  EXPECT_TRUE(absl::IsAlreadyExists(store_->InsertOperation(operation, "req-7", "x").status()))
      << "another kind of request";
  operation.tenant = "other";
  EXPECT_TRUE(store_->InsertOperation(operation, "req-7", "x").ok()) << "another tenant's ids are its own";
}

TEST_F(StoreTest, ListsArtifactsOfOneOrAllCorpora) {
  AddCorpus("acme", "doc", "the text");
  AddCorpus("acme", "doc2", "other text");
  for (const char* cache : {"b", "a", "c"}) ASSERT_TRUE(store_->PutArtifact(Spec(cache), cache).ok());
  ArtifactSpec second = Spec("a");
  second.corpus_id = "doc2";
  ASSERT_TRUE(store_->PutArtifact(second, "a").ok());
  std::vector<std::string> seen;
  PageRequest request{2, ""};
  do {
    absl::StatusOr<Page<ArtifactRow>> page = store_->ListArtifacts("acme", "", request);
    ASSERT_TRUE(page.ok());
    for (const ArtifactRow& row : page->rows) seen.push_back(row.corpus_id + "/" + row.cache_id);
    request.page_token = page->next_page_token;
  } while (!request.page_token.empty());
  EXPECT_EQ(seen, (std::vector<std::string>{"doc/a", "doc/b", "doc/c", "doc2/a"}));
  EXPECT_EQ(store_->ListArtifacts("acme", "doc2", {}).value().rows.size(), 1u);
  EXPECT_TRUE(absl::IsNotFound(store_->ListArtifacts("acme", "doc3", {}).status()));
  EXPECT_TRUE(store_->ListArtifacts("other", "", {}).value().rows.empty());
}

TEST_F(StoreTest, TheNewestArtifactIsTheLastThatIsFit) {
  AddCorpus("acme", "doc", "the text");
  EXPECT_TRUE(absl::IsNotFound(store_->GetNewestArtifact("acme", "doc").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->GetNewestArtifact("acme", "doc2").status()));
  for (const char* cache : {"b", "a", "c"}) {
    g_now += absl::Seconds(1);
    ASSERT_TRUE(store_->PutArtifact(Spec(cache), cache).ok());
  }
  ASSERT_TRUE(store_->PutArtifact(Spec("d"), "d").ok());  // at the same time as c
  EXPECT_EQ(store_->GetNewestArtifact("acme", "doc").value().cache_id, "d");
  ASSERT_TRUE(store_->DeleteArtifact("acme", "doc", "d").ok());
  EXPECT_EQ(store_->GetNewestArtifact("acme", "doc").value().cache_id, "c");
  ASSERT_TRUE(store_->QuarantineArtifact("acme", "doc", "c", "bad").ok());
  EXPECT_EQ(store_->GetNewestArtifact("acme", "doc").value().cache_id, "a");
  EXPECT_TRUE(absl::IsNotFound(store_->GetNewestArtifact("other", "doc").status()));
}

TEST_F(StoreTest, DamagedFilesAreDataLossAndQuarantineMovesThem) {
  AddCorpus("acme", "doc", "the text");
  AddCorpus("other", "doc", "the text");
  const std::string bytes = SampleArtifactFile();
  const std::string sha256 = store_->PutArtifact(Spec(), bytes).value().sha256;
  ArtifactSpec theirs = Spec();
  theirs.tenant = "other";
  ASSERT_TRUE(store_->PutArtifact(theirs, bytes).ok());
  {
    std::fstream file(BlobPath(sha256), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(bytes.size()) - 3);
    file.put('!');
  }
  absl::StatusOr<StoredArtifact> stored = store_->OpenArtifactFile("acme", "doc", "k");
  ASSERT_TRUE(stored.ok());
  EXPECT_TRUE(absl::IsDataLoss(OpenArtifact(stored->file).status()));
  EXPECT_TRUE(absl::IsAborted(store_->QuarantineArtifact("acme", "doc", "k", "bad", std::string(64, '0'))));
  ASSERT_TRUE(store_->QuarantineArtifact("acme", "doc", "k", "its SHA-256 does not match", sha256).ok());
  ASSERT_TRUE(store_->QuarantineArtifact("acme", "doc", "k", "again").ok());
  EXPECT_EQ(Files("quarantine"), std::vector<std::string>{sha256});
  EXPECT_EQ(Files("blobs").size(), 1u);  // the corpus
  for (const char* tenant : {"acme", "other"}) {
    const ArtifactRow row = store_->GetArtifact(tenant, "doc", "k").value();
    EXPECT_TRUE(row.quarantined);
    EXPECT_EQ(row.quarantine_reason, "its SHA-256 does not match");
    EXPECT_TRUE(absl::IsFailedPrecondition(store_->OpenArtifactFile(tenant, "doc", "k").status()));
  }
  EXPECT_EQ(store_->GetUsage("acme").value().cache_bytes, 0u);
  EXPECT_EQ(store_->GetStoreBytes().value().quarantine, bytes.size());
  // Built again in its place.
  ArtifactSpec again = Spec();
  again.replace = true;
  ASSERT_TRUE(store_->PutArtifact(again, bytes).ok());
  EXPECT_FALSE(store_->GetArtifact("acme", "doc", "k").value().quarantined);
  ASSERT_TRUE(store_->DeleteArtifact("other", "doc", "k").ok());
  EXPECT_TRUE(OpenArtifact(store_->OpenArtifactFile("acme", "doc", "k").value().file).ok());
  Reopen();
  EXPECT_EQ(Files("quarantine").size(), 1u);

  const std::string text_sha = Sha256Hex("the text");
  std::ofstream(BlobPath(text_sha)) << "the tExt";
  EXPECT_TRUE(absl::IsDataLoss(store_->ReadCorpus("acme", "doc").status()));
  std::ofstream(BlobPath(text_sha)) << "short";
  EXPECT_TRUE(absl::IsDataLoss(store_->OpenCorpus("acme", "doc").status()));
  std::filesystem::remove(BlobPath(text_sha));
  EXPECT_TRUE(absl::IsDataLoss(store_->ReadCorpus("acme", "doc").status()));
  AddCorpus("acme", "healer", "the text");
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), "the text") << "the same bytes sent again heal the blob";
}

TEST_F(StoreTest, OperationsLiveAndEndOnce) {
  absl::StatusOr<OperationRow> row = store_->InsertOperation(Operation("op1"), "req-1", "content");
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(store_->InsertOperation(Operation("op2"), "req-1", "content").value().operation_id, "op1");
  EXPECT_TRUE(absl::IsAlreadyExists(store_->InsertOperation(Operation("op2"), "req-1", "other").status()));
  EXPECT_TRUE(absl::IsAlreadyExists(store_->InsertOperation(Operation("op1")).status()));
  OperationUpdate update;
  update.state = OperationState::kRunning;
  update.progress_json = R"({"stage":"TRAIN","fraction":0.25})";
  g_now += absl::Seconds(1);
  ASSERT_TRUE(store_->UpdateOperation("acme", "op1", update).ok());
  Reopen();
  absl::StatusOr<OperationRow> read = store_->GetOperation("acme", "op1");
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->state, OperationState::kRunning);
  EXPECT_EQ(read->progress_json, *update.progress_json);
  EXPECT_EQ(read->request_json, R"({"p":128})");
  EXPECT_EQ(read->update_time, g_now);
  EXPECT_NE(read->etag, row->etag);
  EXPECT_EQ(read->end_time, absl::InfiniteFuture());
  EXPECT_EQ(store_->ListUnfinishedOperations().value().size(), 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->DeleteOperation("acme", "op1")));

  EXPECT_TRUE(absl::IsNotFound(store_->GetCheckpoint("acme", "op1").status()));
  ASSERT_TRUE(store_->PutCheckpoint("acme", "op1", "step 10").ok());
  ASSERT_TRUE(store_->PutCheckpoint("acme", "op1", "step 20").ok());
  ASSERT_TRUE(store_->PutCheckpoint("acme", "op1", "step 20").ok());
  EXPECT_EQ(store_->GetUsage("acme").value().checkpoint_bytes, 7u);
  EXPECT_EQ(store_->GetStoreBytes().value().checkpoints, 7u);
  Reopen();
  EXPECT_TRUE(store_->GetOperation("acme", "op1").value().has_checkpoint);
  EXPECT_EQ(store_->GetCheckpoint("acme", "op1").value(), "step 20");
  EXPECT_TRUE(absl::IsNotFound(store_->GetCheckpoint("other", "op1").status()));
  EXPECT_EQ(Files("blobs").size(), 1u);
  std::ofstream(BlobPath(Sha256Hex("step 20"))) << "step 30";
  EXPECT_TRUE(absl::IsDataLoss(store_->GetCheckpoint("acme", "op1").status()));

  OperationUpdate end;
  end.state = OperationState::kCancelled;
  end.error_code = 1;
  end.error_message = "cancelled by the caller";
  ASSERT_TRUE(store_->UpdateOperation("acme", "op1", end).ok());
  EXPECT_TRUE(Files("blobs").empty());
  end.state = OperationState::kSucceeded;
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->UpdateOperation("acme", "op1", end).status())) << "the first end wins";
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->PutCheckpoint("acme", "op1", "late")));
  EXPECT_TRUE(Files("tmp").empty());
  EXPECT_EQ(store_->GetOperation("acme", "op1").value().end_time, g_now);
  EXPECT_TRUE(store_->ListUnfinishedOperations().value().empty());
  g_now += absl::Hours(24 * 29);
  ASSERT_TRUE(store_->CollectGarbage().ok());
  EXPECT_TRUE(store_->GetOperation("acme", "op1").ok());
  g_now += absl::Hours(24 * 2);
  ASSERT_TRUE(store_->CollectGarbage().ok());
  EXPECT_TRUE(absl::IsNotFound(store_->GetOperation("acme", "op1").status()));
  EXPECT_EQ(store_->InsertOperation(Operation("op2"), "req-1", "other").value().operation_id, "op2");
}

TEST_F(StoreTest, ListsOperationsNewestFirstWithFilters) {
  for (int i = 0; i < 5; ++i) {
    OperationRow row = Operation("op" + std::to_string(i));
    if (i == 3) row.kind = "IMPORT_CACHE";
    ASSERT_TRUE(store_->InsertOperation(row).ok());
    if (i != 1) g_now += absl::Seconds(1);  // op1 and op2 share their time
  }
  OperationUpdate end;
  end.state = OperationState::kFailed;
  ASSERT_TRUE(store_->UpdateOperation("acme", "op0", end).ok());
  auto ids = [&](const OperationFilter& filter, int page_size) {
    std::string all;
    PageRequest request{page_size, ""};
    do {
      absl::StatusOr<Page<OperationRow>> page = store_->ListOperations("acme", filter, request);
      EXPECT_TRUE(page.ok()) << page.status();
      if (!page.ok()) break;
      for (const OperationRow& row : page->rows) all += row.operation_id + " ";
      request.page_token = page->next_page_token;
    } while (!request.page_token.empty());
    return all;
  };
  EXPECT_EQ(ids({}, 0), "op4 op3 op2 op1 op0 ");
  EXPECT_EQ(ids({}, 1), "op4 op3 op2 op1 op0 ");
  EXPECT_EQ(ids({.done = false}, 2), "op4 op3 op2 op1 ");
  EXPECT_EQ(ids({.done = true}, 2), "op0 ");
  EXPECT_EQ(ids({.kind = "IMPORT_CACHE"}, 2), "op3 ");
  EXPECT_EQ(ids({.target = "corpora/doc/caches/op2"}, 2), "op2 ");
  const std::string token = store_->ListOperations("acme", {}, {2, ""}).value().next_page_token;
  EXPECT_TRUE(absl::IsInvalidArgument(store_->ListOperations("acme", {.done = false}, {2, token}).status()));
}

TEST_F(StoreTest, TenantsAndKeys) {
  TenantRow row;
  row.tenant = "team";
  row.display_name = "Team";
  row.quotas_json = R"({"corpus_bytes":100})";
  absl::StatusOr<TenantRow> made = store_->CreateTenant(row, "req");
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(store_->CreateTenant(row, "req").value().etag, made->etag);
  EXPECT_TRUE(absl::IsAlreadyExists(store_->CreateTenant(row).status()));
  row.display_name = "Else";
  EXPECT_TRUE(absl::IsAlreadyExists(store_->CreateTenant(row, "req").status()));
  EXPECT_EQ(store_->EnsureTenant("team").value().etag, made->etag);
  row.etag = "stale";
  EXPECT_TRUE(absl::IsAborted(store_->UpdateTenant(row).status()));
  row.etag = made->etag;
  EXPECT_EQ(store_->UpdateTenant(row).value().display_name, "Else");
  EXPECT_EQ(store_->ListTenants({}).value().rows.size(), 3u);

  ApiKeyRow key;
  key.key_id = "Ab_9-";
  key.tenant = "team";
  key.key_sha256 = Sha256Hex("secret");
  key.label = "laptop";
  ASSERT_TRUE(store_->InsertApiKey(key).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->InsertApiKey(key).status()));
  key.tenant = "nobody", key.key_id = "k2";
  EXPECT_TRUE(absl::IsNotFound(store_->InsertApiKey(key).status()));
  Reopen();
  EXPECT_EQ(store_->GetApiKey("Ab_9-").value().key_sha256, Sha256Hex("secret"));
  EXPECT_TRUE(absl::IsNotFound(store_->GetApiKey("nope").status()));
  EXPECT_EQ(store_->ListApiKeys("team").value().size(), 1u);
  EXPECT_TRUE(store_->ListApiKeys("acme").value().empty());
  EXPECT_TRUE(absl::IsNotFound(store_->RevokeApiKey("acme", "Ab_9-").status()));
  EXPECT_EQ(store_->GetApiKey("Ab_9-").value().revoke_time, absl::InfiniteFuture());
  EXPECT_EQ(store_->RevokeApiKey("team", "Ab_9-").value().revoke_time, g_now);
  const absl::Time first = g_now;
  g_now += absl::Seconds(9);
  EXPECT_EQ(store_->RevokeApiKey("team", "Ab_9-").value().revoke_time, first);

  AddCorpus("team", "doc", "text");
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->DeleteTenant("team")));
  ASSERT_TRUE(store_->DeleteCorpus("team", "doc").ok());
  ASSERT_TRUE(store_->DeleteTenant("team").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->GetTenant("team").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->GetApiKey("Ab_9-").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->ListCorpora("team", {}).status()));
}

TEST_F(StoreTest, OtherTenantsRowsDoNotExist) {
  AddCorpus("acme", "doc", "the text");
  ASSERT_TRUE(store_->PutArtifact(Spec(), "bytes").ok());
  ASSERT_TRUE(store_->InsertOperation(Operation("op1")).ok());
  auto missing = [](const absl::Status& status) { return absl::IsNotFound(status); };
  EXPECT_TRUE(missing(store_->GetCorpus("other", "doc").status()));
  EXPECT_TRUE(missing(store_->ReadCorpus("other", "doc").status()));
  EXPECT_TRUE(missing(store_->OpenCorpus("other", "doc").status()));
  EXPECT_TRUE(missing(store_->DeleteCorpus("other", "doc")));
  EXPECT_TRUE(missing(store_->GetArtifact("other", "doc", "k").status()));
  EXPECT_TRUE(missing(store_->OpenArtifactFile("other", "doc", "k").status()));
  EXPECT_TRUE(missing(store_->QuarantineArtifact("other", "doc", "k", "spite")));
  EXPECT_TRUE(missing(store_->DeleteArtifact("other", "doc", "k")));
  EXPECT_TRUE(missing(store_->GetOperation("other", "op1").status()));
  EXPECT_TRUE(missing(store_->UpdateOperation("other", "op1", {}).status()));
  EXPECT_TRUE(missing(store_->DeleteOperation("other", "op1")));
  EXPECT_TRUE(missing(store_->PutCheckpoint("other", "op1", "x")));
  EXPECT_TRUE(store_->ListOperations("other", {}, {}).value().rows.empty());
  ArtifactSpec spec = Spec("k2");
  spec.tenant = "other";
  EXPECT_TRUE(missing(store_->PutArtifact(spec, "bytes").status()));
  // The very same answer as for a name that nobody has.
  EXPECT_EQ(store_->GetCorpus("other", "doc").status().message(), "no corpus 'doc'");
  EXPECT_EQ(store_->GetUsage("other").value().corpus_bytes, 0u);
  EXPECT_TRUE(store_->GetCorpus("acme", "doc").ok());
}

TEST_F(StoreTest, UsageCountsRowsAndStoreBytesCountsBlobs) {
  AddCorpus("acme", "doc", "the text");
  AddCorpus("acme", "copy", "the text");
  ASSERT_TRUE(store_->PutArtifact(Spec(), "12345").ok());
  UploadSpec open;
  open.tenant = "acme";
  open.corpus_id = "open";
  open.size = 1000;
  open.sha256 = Sha256Hex("later");
  const std::string id = store_->BeginUpload(open).value().upload_id;
  ASSERT_TRUE(store_->WriteChunk("acme", id, 0, "part").ok());
  const TenantUsage usage = store_->GetUsage("acme").value();
  EXPECT_EQ(usage.corpora, 2u);
  EXPECT_EQ(usage.corpus_bytes, 16u);
  EXPECT_EQ(usage.caches, 1u);
  EXPECT_EQ(usage.cache_bytes, 5u);
  EXPECT_EQ(usage.uploads, 1u);
  EXPECT_EQ(usage.upload_bytes, 1000u);
  const StoreBytes bytes = store_->GetStoreBytes().value();
  EXPECT_EQ(bytes.corpora, 8u);
  EXPECT_EQ(bytes.caches, 5u);
  EXPECT_EQ(bytes.uploads, 4u + 16u);
  EXPECT_GT(bytes.catalog, 0u);
}

TEST_F(StoreTest, OpeningRemovesWhatNoRowNames) {
  AddCorpus("acme", "doc", "the text");
  store_.reset();
  for (const char* name : {"/blobs/0123", "/tmp/abc", "/uploads/dead.data", "/uploads/dead.log"}) {
    std::ofstream(Options().directory + name) << "garbage";
  }
  Reopen();
  EXPECT_EQ(Files("blobs"), std::vector<std::string>{Sha256Hex("the text")});
  EXPECT_TRUE(Files("tmp").empty());
  EXPECT_TRUE(Files("uploads").empty());
  EXPECT_EQ(store_->ReadCorpus("acme", "doc").value(), "the text");
}

}  // namespace
}  // namespace stillhouse
