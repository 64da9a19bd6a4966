#ifndef STILLHOUSE_CACHE_STORE_ENV_H_
#define STILLHOUSE_CACHE_STORE_ENV_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stillhouse {

// A file open for reading at any offset. Any thread may read; the bytes stay readable while the object lives, even if
// the file is unlinked or replaced meanwhile.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  // Length in bytes when the file was opened.
  virtual uint64_t size() const = 0;
  // Fills out[0, size) from `offset`. Exactly that many bytes, or an error: OUT_OF_RANGE past the end, DATA_LOSS if the
  // file became shorter than size(), UNAVAILABLE on a device error.
  virtual absl::Status Read(uint64_t offset, size_t size, char* out) const = 0;
};

// A file open for writing at any offset. One thread at a time. Nothing is durable before Sync().
class WritableFile {
 public:
  virtual ~WritableFile() = default;  // closes; does not sync
  virtual absl::Status WriteAt(uint64_t offset, std::string_view bytes) = 0;
  virtual absl::Status Truncate(uint64_t size) = 0;
  virtual absl::Status Sync() = 0;
};

// Held while the object lives; released when the process dies, however it dies.
class DirectoryLock {
 public:
  virtual ~DirectoryLock() = default;
};

// Everything that the store asks of a file system, so that tests can fail any single step. Thread-safe.
// Errors: RESOURCE_EXHAUSTED for a full disk or quota, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, UNAVAILABLE for
// device errors. Messages name what was attempted and the file's base name, never its folder.
class Env {
 public:
  virtual ~Env() = default;

  // Makes a new file; ALREADY_EXISTS if there is one.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // Opens an existing file for writing, content kept.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWriting(const std::string& path) = 0;
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> OpenForReading(const std::string& path) = 0;

  // Replaces `to` atomically. Durable after SyncDirectory of the folder(s).
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Unlink(const std::string& path) = 0;
  // Makes the folder if it is missing (parents must exist).
  virtual absl::Status CreateDirectory(const std::string& path) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Base names of the entries, sorted, without "." and "..".
  virtual absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) = 0;
  virtual absl::StatusOr<uint64_t> FileSize(const std::string& path) = 0;
  // Bytes that an ordinary user can still write on the file system that holds `path`.
  virtual absl::StatusOr<uint64_t> FreeSpace(const std::string& path) = 0;
  // Takes an exclusive lock on the file `path` (made if missing); FAILED_PRECONDITION if another open store holds it.
  virtual absl::StatusOr<std::unique_ptr<DirectoryLock>> Lock(const std::string& path) = 0;
  // Name of the registered SQLite VFS that carries the catalog's own I/O; nullptr is SQLite's default.
  virtual const char* SqliteVfs() const { return nullptr; }
};

// The real file system. Never destroyed.
Env* PosixEnv();

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_ENV_H_
