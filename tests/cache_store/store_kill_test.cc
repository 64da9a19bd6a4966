// A child process writes to a store without pause and is killed; the parent opens what is left. Twenty times over one
// folder.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "cache_store/artifact.h"
#include "cache_store/store.h"
#include "kernels/base/sha256.h"
#include "tests/cache_store/sample_artifact.h"
#include "tests/cache_store/store_invariants.h"
#include "tests/cache_store/temp_dir.h"

namespace stillhouse {
namespace {

StoreOptions Options(const TempDir& dir) {
  StoreOptions options;
  options.directory = dir.path() + "/store";
  options.min_free_bytes = 0;
  return options;
}

// Every acknowledged step is reported through the pipe as one byte, so that the parent knows what must have survived.
[[noreturn]] void WriteForever(const TempDir& dir, int round, int report) {
  absl::StatusOr<std::unique_ptr<Store>> opened = OpenEmbeddedStore(Options(dir));
  if (!opened.ok()) _exit(3);
  Store& store = **opened;
  auto need = [](bool ok) {
    if (!ok) _exit(4);
  };
  need(store.EnsureTenant("acme").ok());
  for (int i = 0;; ++i) {
    const std::string name = "r" + std::to_string(round) + "-" + std::to_string(i);
    const std::string text(30000 + i, static_cast<char>('a' + i % 26));
    UploadSpec upload;
    upload.tenant = "acme";
    upload.corpus_id = name;
    upload.size = text.size();
    upload.sha256 = Sha256Hex(text);
    upload.upload_id = name;
    need(store.BeginUpload(upload).ok());
    for (size_t at = 0; at < text.size(); at += 7000)
      need(store.WriteChunk("acme", name, at, text.substr(at, 7000)).ok());
    need(store.Seal("acme", name).ok());
    need(::write(report, "c", 1) == 1);
    ArtifactSpec artifact;
    artifact.tenant = "acme";
    artifact.corpus_id = name;
    artifact.cache_id = "k";
    artifact.method = "CARTRIDGE";
    artifact.replace = true;
    for (int version = 0; version < 2; ++version)
      need(store.PutArtifact(artifact, SampleArtifactFile(i * 2 + version)).ok());
    OperationRow operation;
    operation.tenant = "acme";
    operation.operation_id = name;
    need(store.InsertOperation(operation).ok());
    need(store.PutCheckpoint("acme", name, text).ok());
    need(store.PutCheckpoint("acme", name, text + "2").ok());
    OperationUpdate update;
    update.state = OperationState::kSucceeded;
    if (i % 2 == 0) need(store.UpdateOperation("acme", name, update).ok());
    if (i % 3 == 2) need(store.DeleteCorpus("acme", name, true).ok());
  }
}

TEST(StoreKillTest, NothingIsHalfVisibleAfterKill) {
  TempDir dir;
  std::mt19937 random(7);
  int acknowledged_in_all = 0;
  for (int round = 0; round < 20; ++round) {
    int pipes[2];
    ASSERT_EQ(::pipe(pipes), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(pipes[0]);
      WriteForever(dir, round, pipes[1]);
    }
    ::close(pipes[1]);
    // Some rounds die early, some after a few corpora: wait for so many reports, then a moment more.
    const int wait_for = static_cast<int>(random() % 4);
    int acknowledged = 0;
    char byte;
    while (acknowledged < wait_for && ::read(pipes[0], &byte, 1) == 1) ++acknowledged;
    ::usleep(static_cast<useconds_t>(random() % 30000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << WEXITSTATUS(status);
    while (::read(pipes[0], &byte, 1) == 1) ++acknowledged;
    ::close(pipes[0]);
    acknowledged_in_all += acknowledged;

    absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(Options(dir));
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)->EnsureTenant("acme").ok());
    EXPECT_EQ(BrokenInvariant(**store, Options(dir).directory, "acme", true), "") << "round " << round;
    const Page<ArtifactRow> artifacts = (*store)->ListArtifacts("acme", "", {1000, ""}).value();
    for (const ArtifactRow& row : artifacts.rows) {
      EXPECT_TRUE(OpenArtifact((*store)->OpenArtifactFile("acme", row.corpus_id, row.cache_id).value().file).ok());
    }
    for (int i = 0; i < acknowledged; ++i) {
      const std::string name = "r" + std::to_string(round) + "-" + std::to_string(i);
      if (i % 3 == 2) continue;  // may have been deleted again
      EXPECT_TRUE((*store)->ReadCorpus("acme", name).ok()) << name << " was acknowledged and is gone";
    }
  }
  EXPECT_GT(acknowledged_in_all, 10) << "the children hardly wrote anything";
}

}  // namespace
}  // namespace stillhouse
