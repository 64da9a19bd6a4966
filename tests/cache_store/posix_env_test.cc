#include <gtest/gtest.h>

#include <filesystem>

#include "cache_store/env.h"
#include "tests/cache_store/temp_dir.h"

namespace stillhouse {
namespace {

TEST(PosixEnvTest, FilesReadAndWrite) {
  TempDir dir;
  Env* env = PosixEnv();
  const std::string path = dir.path() + "/f";
  {
    absl::StatusOr<std::unique_ptr<WritableFile>> file = env->Create(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE((*file)->WriteAt(2, "cd").ok());
    ASSERT_TRUE((*file)->WriteAt(0, "ab").ok());
    ASSERT_TRUE((*file)->Sync().ok());
  }
  EXPECT_TRUE(absl::IsAlreadyExists(env->Create(path).status()));
  EXPECT_TRUE(absl::IsNotFound(env->OpenForReading(path + "x").status()));
  EXPECT_TRUE(absl::IsNotFound(env->OpenForWriting(path + "x").status()));
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = env->OpenForReading(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->size(), 4u);
  char out[4];
  ASSERT_TRUE((*file)->Read(1, 3, out).ok());
  EXPECT_EQ(std::string(out, 3), "bcd");
  EXPECT_TRUE(absl::IsOutOfRange((*file)->Read(2, 3, out)));
  EXPECT_TRUE(absl::IsOutOfRange((*file)->Read(UINT64_MAX, 2, out)));
  // An open file outlives its name, and says so when it was cut.
  ASSERT_TRUE(env->Rename(path, dir.path() + "/g").ok());
  EXPECT_EQ(env->ListDirectory(dir.path()).value(), std::vector<std::string>{"g"});
  std::filesystem::resize_file(dir.path() + "/g", 1);
  EXPECT_TRUE(absl::IsDataLoss((*file)->Read(0, 4, out)));
  ASSERT_TRUE(env->Unlink(dir.path() + "/g").ok());
  EXPECT_TRUE((*file)->Read(0, 1, out).ok());
  EXPECT_TRUE(absl::IsNotFound(env->Unlink(dir.path() + "/g")));
  EXPECT_TRUE(env->CreateDirectory(dir.path()).ok());
  EXPECT_TRUE(absl::IsNotFound(env->CreateDirectory(dir.path() + "/no/such")));
  EXPECT_TRUE(env->SyncDirectory(dir.path()).ok());
  EXPECT_GT(env->FreeSpace(dir.path()).value(), 0u);
}

TEST(PosixEnvTest, FullDiskIsResourceExhausted) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full on this system";
  absl::StatusOr<std::unique_ptr<WritableFile>> full = PosixEnv()->OpenForWriting("/dev/full");
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_TRUE(absl::IsResourceExhausted((*full)->WriteAt(0, "x")));
}

TEST(PosixEnvTest, LockIsExclusiveAndReleased) {
  TempDir dir;
  absl::StatusOr<std::unique_ptr<DirectoryLock>> first = PosixEnv()->Lock(dir.path() + "/LOCK");
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(PosixEnv()->Lock(dir.path() + "/LOCK").status()));
  first->reset();
  EXPECT_TRUE(PosixEnv()->Lock(dir.path() + "/LOCK").ok());
}

}  // namespace
}  // namespace stillhouse
