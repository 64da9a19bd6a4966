// Every operation of the store, failed at every step that changes the disk, in every way: once (a full disk, a short
// write, a device error), for good, and by a power cut that loses what was not synced or a kill that keeps it.
// Afterwards the operation happened wholly or not at all, whatever was reported as done is there, and the store works.

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "cache_store/store.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "tests/cache_store/store_invariants.h"
#include "tests/cache_store/temp_dir.h"
#include "tests/support/fault_env.h"

namespace stillhouse {
namespace {

using Fault = FaultEnv::Fault;

const std::string kText = std::string(5000, 'x') + "the text";

UploadSpec Upload(const std::string& corpus, const std::string& text) {
  UploadSpec spec;
  spec.tenant = "acme";
  spec.corpus_id = corpus;
  spec.upload_id = "upload-of-" + corpus;
  spec.request_id = "request-of-" + corpus;
  spec.size = text.size();
  spec.sha256 = Sha256Hex(text);
  return spec;
}

// As a client does it: begin or find, send what is missing, seal.
absl::Status UploadAll(Store& store, const std::string& corpus, const std::string& text) {
  STILLHOUSE_ASSIGN_OR_RETURN(UploadState state, store.BeginUpload(Upload(corpus, text)));
  if (state.corpus.has_value()) return absl::OkStatus();
  for (uint64_t at = state.received; at < text.size();) {
    STILLHOUSE_ASSIGN_OR_RETURN(at, store.WriteChunk("acme", state.upload_id, at, text.substr(at, 2000)));
  }
  return store.Seal("acme", state.upload_id).status();
}

ArtifactSpec Artifact(const std::string& corpus = "doc", const std::string& cache = "k", bool replace = false) {
  ArtifactSpec spec;
  spec.tenant = "acme";
  spec.corpus_id = corpus;
  spec.cache_id = cache;
  spec.method = "CARTRIDGE";
  spec.replace = replace;
  return spec;
}

OperationRow Operation() {
  OperationRow row;
  row.tenant = "acme";
  row.operation_id = "op";
  row.kind = "BUILD_CACHE";
  return row;
}

struct Scenario {
  friend void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

  std::string name;
  std::function<absl::Status(Store&)> set_up;
  std::function<absl::Status(Store&)> act;  // may be tried again after an error
  // What the act changes, as text: the same before and after an act that did not happen.
  std::function<std::string(Store&)> observe;
};

std::string Show(const absl::StatusOr<std::string>& bytes) {
  return bytes.ok() ? Sha256Hex(*bytes).substr(0, 8) : std::string(absl::StatusCodeToString(bytes.status().code()));
}
std::string ShowCorpus(Store& store, const std::string& corpus) { return Show(store.ReadCorpus("acme", corpus)); }
std::string ShowArtifact(Store& store, const std::string& cache) {
  return Show(ReadArtifact(store, "acme", "doc", cache));
}
std::string ShowOperation(Store& store) {
  absl::StatusOr<OperationRow> row = store.GetOperation("acme", "op");
  if (!row.ok()) return std::string(absl::StatusCodeToString(row.status().code()));
  return std::to_string(static_cast<int>(row->state)) + row->progress_json + Show(store.GetCheckpoint("acme", "op"));
}

absl::Status Tolerate(absl::Status status, absl::StatusCode code) {
  return status.code() == code ? absl::OkStatus() : status;
}

std::vector<Scenario> Scenarios() {
  auto with_doc = [](Store& s) { return UploadAll(s, "doc", kText); };
  auto with_artifact = [=](Store& s) {
    STILLHOUSE_RETURN_IF_ERROR(with_doc(s));
    return s.PutArtifact(Artifact(), "old bytes").status();
  };
  auto with_operation = [](Store& s) {
    STILLHOUSE_RETURN_IF_ERROR(s.InsertOperation(Operation()).status());
    return s.PutCheckpoint("acme", "op", "step 1");
  };
  auto none = [](Store&) { return absl::OkStatus(); };
  return {
      {"CreateTenant", none,
       [](Store& s) {
         TenantRow row;
         row.tenant = "new";
         return s.CreateTenant(row, "req").status();
       },
       [](Store& s) { return std::to_string(s.GetTenant("new").ok()); }},
      {"Upload", none, [](Store& s) { return UploadAll(s, "doc", kText); },
       [](Store& s) { return ShowCorpus(s, "doc"); }},
      {"UploadOfKnownBytes", [=](Store& s) { return UploadAll(s, "twin", kText); },
       [](Store& s) { return UploadAll(s, "doc", kText); },
       [](Store& s) { return ShowCorpus(s, "doc") + ShowCorpus(s, "twin"); }},
      {"AbortUpload",
       [](Store& s) {
         STILLHOUSE_RETURN_IF_ERROR(s.BeginUpload(Upload("doc", kText)).status());
         return s.WriteChunk("acme", "upload-of-doc", 0, kText.substr(0, 3000)).status();
       },
       [](Store& s) { return Tolerate(s.AbortUpload("acme", "upload-of-doc"), absl::StatusCode::kNotFound); },
       [](Store& s) { return std::to_string(s.GetUpload("acme", "upload-of-doc").ok()); }},
      {"PutArtifact", with_doc,
       [](Store& s) {
         ArtifactSpec spec = Artifact();
         spec.request_id = "req";
         return s.PutArtifact(spec, "new bytes").status();
       },
       [](Store& s) { return ShowArtifact(s, "k"); }},
      {"ReplaceArtifact", with_artifact,
       [](Store& s) { return s.PutArtifact(Artifact("doc", "k", true), "new bytes").status(); },
       [](Store& s) { return ShowArtifact(s, "k"); }},
      {"ReplaceArtifactBySameBytes", with_artifact,
       [](Store& s) { return s.PutArtifact(Artifact("doc", "k", true), "old bytes").status(); },
       [](Store& s) { return ShowArtifact(s, "k"); }},
      {"DeleteArtifact", with_artifact,
       [](Store& s) { return Tolerate(s.DeleteArtifact("acme", "doc", "k"), absl::StatusCode::kNotFound); },
       [](Store& s) { return ShowArtifact(s, "k"); }},
      {"QuarantineArtifact", with_artifact, [](Store& s) { return s.QuarantineArtifact("acme", "doc", "k", "test"); },
       [](Store& s) { return ShowArtifact(s, "k"); }},
      {"DeleteCorpusWithCaches", with_artifact,
       [](Store& s) { return Tolerate(s.DeleteCorpus("acme", "doc", true), absl::StatusCode::kNotFound); },
       [](Store& s) { return ShowCorpus(s, "doc") + ShowArtifact(s, "k"); }},
      {"InsertOperation", none, [](Store& s) { return s.InsertOperation(Operation(), "req", "content").status(); },
       [](Store& s) { return ShowOperation(s); }},
      {"PutCheckpoint", with_operation, [](Store& s) { return s.PutCheckpoint("acme", "op", "step 2"); },
       [](Store& s) { return ShowOperation(s); }},
      {"FinishOperation", with_operation,
       [](Store& s) {
         OperationUpdate update;
         update.state = OperationState::kSucceeded;
         update.progress_json = "done";
         return Tolerate(s.UpdateOperation("acme", "op", update).status(), absl::StatusCode::kFailedPrecondition);
       },
       [](Store& s) { return ShowOperation(s); }},
  };
}

// How a run goes on after the fault.
enum class After { kSameStore, kReopen, kPowerCut };

class FaultSweepTest : public testing::TestWithParam<Scenario> {
 protected:
  StoreOptions Options(const TempDir& dir, FaultEnv& env) {
    StoreOptions options;
    options.directory = dir.path() + "/store";
    options.env = &env;
    options.min_free_bytes = 0;
    return options;
  }

  // Fails step `step` of the act. False once the act has no such step.
  bool RunOne(int64_t step, Fault fault, bool sticky, After after) {
    const Scenario& scenario = GetParam();
    SCOPED_TRACE(scenario.name + " step " + std::to_string(step) + " fault " + std::to_string(static_cast<int>(fault)) +
                 (sticky ? " sticky" : "") + " after " + std::to_string(static_cast<int>(after)));
    TempDir dir(TempDir::kMemory);
    FaultEnv env;
    const StoreOptions options = Options(dir, env);
    absl::StatusOr<std::unique_ptr<Store>> opened = OpenEmbeddedStore(options);
    STILLHOUSE_CHECK(opened.ok()) << opened.status();
    std::unique_ptr<Store> store = *std::move(opened);
    STILLHOUSE_CHECK(store->EnsureTenant("acme").ok());
    absl::Status set_up = scenario.set_up(*store);
    STILLHOUSE_CHECK(set_up.ok()) << set_up;
    const std::string before = scenario.observe(*store);

    env.Arm(step, fault, sticky);
    const absl::Status acted = scenario.act(*store);
    const bool tripped = env.tripped();
    if (!tripped) {
      EXPECT_TRUE(acted.ok()) << acted;
    }
    if (!acted.ok()) {
      const bool full = fault == Fault::kNoSpace || fault == Fault::kShortWrite;
      EXPECT_EQ(acted.code(), full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable) << acted;
    }
    if (after == After::kSameStore) {
      // Reading works while the disk is full.
      if (fault != Fault::kIoError) {
        EXPECT_EQ(BrokenInvariant(*store, options.directory, "acme", false), "");
        // Where the disk fails from a commit's last sync on, that commit is in doubt: made, but reported as an error.
        if (!acted.ok() && !sticky) {
          EXPECT_EQ(scenario.observe(*store), before) << "an act that failed changed something";
        }
      }
      env.Disarm();
      EXPECT_EQ(BrokenInvariant(*store, options.directory, "acme", false), "");
    } else {
      store.reset();
      if (after == After::kPowerCut) env.LoseUnsynced();
      env.Disarm();
      opened = OpenEmbeddedStore(options);
      EXPECT_TRUE(opened.ok()) << opened.status();
      if (!opened.ok()) return false;
      store = *std::move(opened);
      EXPECT_EQ(BrokenInvariant(*store, options.directory, "acme", true), "");
    }
    const std::string now = scenario.observe(*store);
    // Again, and it must come out as if nothing had happened.
    const absl::Status again = scenario.act(*store);
    EXPECT_TRUE(again.ok() || (acted.ok() && absl::IsAlreadyExists(again)) ||
                (now != before && absl::IsAlreadyExists(again)))
        << again;
    const std::string done = scenario.observe(*store);
    EXPECT_TRUE(now == before || now == done) << "half done: " << before << " → " << now << " → " << done;
    if (acted.ok()) {
      EXPECT_EQ(now, done) << "what was reported done is gone";
    }
    store.reset();
    opened = OpenEmbeddedStore(options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    if (!opened.ok()) return false;
    EXPECT_EQ(BrokenInvariant(**opened, options.directory, "acme", true), "");
    EXPECT_EQ(scenario.observe(**opened), done);
    return tripped && !testing::Test::HasFailure();
  }

  void Sweep(Fault fault, bool sticky, After after) {
    int64_t step = 0;
    while (RunOne(step, fault, sticky, after)) {
      ++step;
      ASSERT_LT(step, 500) << "the act never ends";
    }
    EXPECT_GT(step, 0) << "nothing was failed";
  }
};

TEST_P(FaultSweepTest, FullDiskOnce) { Sweep(Fault::kNoSpace, false, After::kSameStore); }
TEST_P(FaultSweepTest, FullDiskThatStaysFull) { Sweep(Fault::kNoSpace, true, After::kSameStore); }
TEST_P(FaultSweepTest, FullDiskAndReopen) { Sweep(Fault::kNoSpace, true, After::kReopen); }
TEST_P(FaultSweepTest, ShortWrite) { Sweep(Fault::kShortWrite, false, After::kSameStore); }
TEST_P(FaultSweepTest, DeviceErrorOnce) { Sweep(Fault::kIoError, false, After::kSameStore); }
TEST_P(FaultSweepTest, DeviceErrorThenPowerCut) { Sweep(Fault::kIoError, false, After::kPowerCut); }
TEST_P(FaultSweepTest, DeadDeviceAndReopen) { Sweep(Fault::kIoError, true, After::kReopen); }
TEST_P(FaultSweepTest, SyncsThatFail) { Sweep(Fault::kSyncError, true, After::kSameStore); }
TEST_P(FaultSweepTest, SyncsThatFailAndReopen) { Sweep(Fault::kSyncError, true, After::kReopen); }
TEST_P(FaultSweepTest, SyncsThatFailThenPowerCut) { Sweep(Fault::kSyncError, true, After::kPowerCut); }
TEST_P(FaultSweepTest, Kill) { Sweep(Fault::kCrash, true, After::kReopen); }
TEST_P(FaultSweepTest, PowerCut) { Sweep(Fault::kCrash, true, After::kPowerCut); }

INSTANTIATE_TEST_SUITE_P(Acts, FaultSweepTest, testing::ValuesIn(Scenarios()),
                         [](const testing::TestParamInfo<Scenario>& info) { return info.param.name; });

// The first open of a new folder, cut at every step, and the open of a folder with garbage.
TEST(StoreOpenFaultTest, EveryStepOfAnOpen) {
  for (const bool fresh : {true, false}) {
    for (const Fault fault : {Fault::kNoSpace, Fault::kIoError, Fault::kCrash}) {
      for (const bool power_cut : {false, true}) {
        bool tripped = true;
        for (int64_t step = 0; tripped; ++step) {
          ASSERT_LT(step, 500);
          SCOPED_TRACE(testing::Message()
                       << "fresh " << fresh << " fault " << static_cast<int>(fault) << " step " << step);
          TempDir dir(TempDir::kMemory);
          FaultEnv env;
          StoreOptions options;
          options.directory = dir.path() + "/store";
          options.env = &env;
          options.min_free_bytes = 0;
          std::string expected = "NOT_FOUND";
          if (!fresh) {
            absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(options);
            ASSERT_TRUE(store.ok() && (*store)->EnsureTenant("acme").ok());
            ASSERT_TRUE(UploadAll(**store, "doc", kText).ok());
            expected = ShowCorpus(**store, "doc");
            // A blob of no row, as a crash before the commit leaves it.
            absl::StatusOr<std::unique_ptr<WritableFile>> orphan =
                env.Create(options.directory + "/blobs/" + Sha256Hex("orphan"));
            ASSERT_TRUE(orphan.ok() && (*orphan)->WriteAt(0, "orphan").ok() && (*orphan)->Sync().ok());
          }
          env.Arm(step, fault);
          absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(options);
          tripped = env.tripped();
          if (!tripped) {
            EXPECT_TRUE(store.ok()) << store.status();
          }
          if (!store.ok()) {
            EXPECT_TRUE(absl::IsResourceExhausted(store.status()) || absl::IsUnavailable(store.status()))
                << store.status();
          }
          if (store.ok()) store->reset();
          if (power_cut) env.LoseUnsynced();
          env.Disarm();
          store = OpenEmbeddedStore(options);
          ASSERT_TRUE(store.ok()) << store.status();
          ASSERT_TRUE((*store)->EnsureTenant("acme").ok());
          EXPECT_EQ(BrokenInvariant(**store, options.directory, "acme", true), "");
          EXPECT_EQ(ShowCorpus(**store, "doc"), expected);
        }
      }
    }
  }
}

// A disk with no byte left: what is stored can be read, nothing can be added, and deleting works and makes room.
TEST(StoreFullDiskTest, AFullDiskCanBeEmptied) {
  for (const bool reopened : {false, true}) {
    TempDir dir(TempDir::kMemory);
    FaultEnv env;
    StoreOptions options;
    options.directory = dir.path() + "/store";
    options.env = &env;
    options.min_free_bytes = 0;
    absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(options);
    ASSERT_TRUE(store.ok() && (*store)->EnsureTenant("acme").ok());
    ASSERT_TRUE(UploadAll(**store, "doc", kText).ok());
    ASSERT_TRUE((*store)->PutArtifact(Artifact(), "bytes").ok());
    ASSERT_TRUE((*store)->InsertOperation(Operation()).ok());
    if (reopened) store->reset();  // closing folds the log away: the next commit needs a new one
    env.SetCapacity(env.UsedBytes());
    if (reopened) store = OpenEmbeddedStore(options);
    ASSERT_TRUE(store.ok()) << store.status();
    const std::string other = std::string(5000, 'y');
    const absl::Status refused = UploadAll(**store, "other", other);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_TRUE(absl::IsResourceExhausted((*store)->PutCheckpoint("acme", "op", other)));
    EXPECT_EQ(ShowCorpus(**store, "doc"), Sha256Hex(kText).substr(0, 8));
    EXPECT_EQ((*store)->ListArtifacts("acme", "", {}).value().rows.size(), 1u);
    const absl::Status deleted = (*store)->DeleteCorpus("acme", "doc", /*cascade=*/true);
    EXPECT_TRUE(deleted.ok()) << deleted;
    EXPECT_EQ(BrokenInvariant(**store, options.directory, "acme", false), "");
    env.SetCapacity(env.UsedBytes() + (4 << 20));
    EXPECT_TRUE(UploadAll(**store, "other", other).ok());
    ASSERT_TRUE((*store)->CollectGarbage().ok());
    EXPECT_EQ(env.FileSize(options.directory + "/RESERVE").value(), 1u << 20) << "the reserve is back";
  }
}

// The test's own model: content and names that were not synced do not survive.
TEST(FaultEnvTest, PowerCutKeepsWhatWasSynced) {
  TempDir dir;
  FaultEnv env;
  auto write = [&](const std::string& name, bool sync) {
    absl::StatusOr<std::unique_ptr<WritableFile>> file = env.Create(dir.path() + "/" + name);
    ASSERT_TRUE(file.ok() && (*file)->WriteAt(0, name).ok());
    if (sync) {
      ASSERT_TRUE((*file)->Sync().ok());
    }
  };
  write("both", true);
  write("name-only", false);
  ASSERT_TRUE(env.SyncDirectory(dir.path()).ok());
  write("content-only", true);
  ASSERT_TRUE(env.Rename(dir.path() + "/both", dir.path() + "/renamed").ok());
  env.LoseUnsynced();
  EXPECT_EQ(env.ListDirectory(dir.path()).value(), (std::vector<std::string>{"both", "name-only"}));
  EXPECT_EQ(env.FileSize(dir.path() + "/both").value(), 4u);
  EXPECT_EQ(env.FileSize(dir.path() + "/name-only").value(), 0u);
}

}  // namespace
}  // namespace stillhouse
