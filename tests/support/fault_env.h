#ifndef STILLHOUSE_TESTS_SUPPORT_FAULT_ENV_H_
#define STILLHOUSE_TESTS_SUPPORT_FAULT_ENV_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cache_store/env.h"

namespace stillhouse {

// The real file system, with failures on order and a memory of what a power cut would leave. Every step that changes
// the disk (create, write, truncate, sync, rename, unlink, folder sync; SQLite's through a VFS of this object's own)
// has a number, counted from the last Arm. Thread-safe. One at a time should carry a catalog.
//
// The model of a power cut is the harshest that POSIX allows: file content since the last sync is lost, and so are
// names since the last sync of their folder.
class FaultEnv : public Env {
 public:
  enum class Fault {
    kNone,
    kNoSpace,     // ENOSPC
    kShortWrite,  // half of the bytes, then ENOSPC; other steps as kNoSpace
    kIoError,     // EIO
    kSyncError,   // EIO from syncs only: the disk takes writes and loses them
    kCrash,       // this and every later step fail with EIO, and nothing more reaches the disk
  };

  FaultEnv();
  ~FaultEnv() override;

  // Fails step number `step` from now, and with `sticky` all later ones, until the next Arm.
  void Arm(int64_t step, Fault fault, bool sticky = false);
  void Disarm() { Arm(-1, Fault::kNone); }
  bool tripped() const;
  int64_t steps() const;  // since the last Arm
  // Makes the folder what a power cut would have left. The store must be closed.
  void LoseUnsynced();
  void SetFreeSpace(uint64_t bytes);
  // From now on all files together, SQLite's included, may have so many bytes: a write that needs more is ENOSPC.
  void SetCapacity(uint64_t bytes);
  uint64_t UsedBytes() const;

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWriting(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenForReading(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Unlink(const std::string& path) override;
  absl::Status CreateDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override;
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override;
  absl::StatusOr<uint64_t> FreeSpace(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<DirectoryLock>> Lock(const std::string& path) override;
  const char* SqliteVfs() const override { return vfs_name_.c_str(); }

  // For the VFS and the files of this environment: what to do about the next step, and what became of it.
  Fault NextStep(bool sync = false);
  struct Inode {
    std::string path;     // where it is now
    std::string durable;  // content at the last sync
  };
  std::shared_ptr<Inode> Find(const std::string& path);  // makes a record for a file not seen yet
  void Synced(const std::shared_ptr<Inode>& inode);
  void NameSynced(const std::string& path);
  void Removed(const std::string& path);
  bool Fits(const std::string& path, uint64_t end) const;

 private:
  struct Vfs;
  mutable std::mutex mu_;
  int64_t step_ = 0;
  int64_t fail_at_ = -1;
  Fault fault_ = Fault::kNone;
  bool sticky_ = false;
  bool tripped_ = false;
  uint64_t free_space_ = UINT64_MAX;
  uint64_t capacity_ = UINT64_MAX;
  std::map<std::string, std::shared_ptr<Inode>> names_;    // as they are
  std::map<std::string, std::shared_ptr<Inode>> durable_;  // as a power cut would leave them
  std::string vfs_name_;
  std::unique_ptr<Vfs> vfs_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_SUPPORT_FAULT_ENV_H_
