#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cache_store/env.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

absl::Status ErrnoStatus(std::string_view what, const std::string& path, int error) {
  const std::string base = path.substr(path.find_last_of('/') + 1);
  const std::string message = StrCat(what, " ", base, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::StatusOr<Descriptor> OpenDescriptor(std::string_view what, const std::string& path, int flags) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoStatus(what, path, errno);
  return Descriptor(fd);
}

class PosixReadableFile : public ReadableFile {
 public:
  PosixReadableFile(Descriptor fd, std::string path, uint64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}
  uint64_t size() const override { return size_; }
  absl::Status Read(uint64_t offset, size_t size, char* out) const override {
    if (offset > size_ || size > size_ - offset) return absl::OutOfRangeError("read past the end of a file");
    while (size > 0) {
      const ssize_t n = ::pread(fd_.get(), out, std::min<size_t>(size, 1u << 30), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus("reading", path_, errno);
      if (n == 0) return absl::DataLossError("a file became shorter while it was read");
      out += n;
      offset += static_cast<uint64_t>(n);
      size -= static_cast<size_t>(n);
    }
    return absl::OkStatus();
  }

 private:
  Descriptor fd_;
  std::string path_;
  uint64_t size_;
};

class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  absl::Status WriteAt(uint64_t offset, std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t n =
          ::pwrite(fd_.get(), bytes.data(), std::min<size_t>(bytes.size(), 1u << 30), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus("writing", path_, errno);
      offset += static_cast<uint64_t>(n);
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }
  absl::Status Truncate(uint64_t size) override {
    if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) return ErrnoStatus("truncating", path_, errno);
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    // Not retried after an error: the kernel may have dropped the dirty pages, and a second fsync would then lie.
    if (::fsync(fd_.get()) != 0) return ErrnoStatus("syncing", path_, errno);
    return absl::OkStatus();
  }

 private:
  Descriptor fd_;
  std::string path_;
};

class FileLock : public DirectoryLock {
 public:
  explicit FileLock(Descriptor fd) : fd_(std::move(fd)) {}

 private:
  Descriptor fd_;
};

class PosixEnvironment : public Env {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    STILLHOUSE_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor("creating", path, O_RDWR | O_CREAT | O_EXCL));
    return std::make_unique<PosixWritableFile>(std::move(fd), path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> OpenForWriting(const std::string& path) override {
    STILLHOUSE_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor("opening", path, O_RDWR));
    return std::make_unique<PosixWritableFile>(std::move(fd), path);
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenForReading(const std::string& path) override {
    STILLHOUSE_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor("opening", path, O_RDONLY));
    struct stat info;
    if (::fstat(fd.get(), &info) != 0) return ErrnoStatus("opening", path, errno);
    if (!S_ISREG(info.st_mode)) return absl::FailedPreconditionError("not a regular file");
    return std::make_unique<PosixReadableFile>(std::move(fd), path, static_cast<uint64_t>(info.st_size));
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return ErrnoStatus("renaming", from, errno);
    return absl::OkStatus();
  }
  absl::Status Unlink(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) return ErrnoStatus("removing", path, errno);
    return absl::OkStatus();
  }
  absl::Status CreateDirectory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
    const int error = errno;
    struct stat info;
    if (error == EEXIST && ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return absl::OkStatus();
    return ErrnoStatus("making folder", path, error);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    STILLHOUSE_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor("opening folder", path, O_RDONLY | O_DIRECTORY));
    if (::fsync(fd.get()) != 0) return ErrnoStatus("syncing folder", path, errno);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return ErrnoStatus("listing folder", path, errno);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
      errno = 0;
    }
    const int error = errno;
    ::closedir(directory);
    if (error != 0) return ErrnoStatus("listing folder", path, error);
    std::sort(names.begin(), names.end());
    return names;
  }
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) return ErrnoStatus("looking at", path, errno);
    return static_cast<uint64_t>(info.st_size);
  }
  absl::StatusOr<uint64_t> FreeSpace(const std::string& path) override {
    struct statvfs info;
    if (::statvfs(path.c_str(), &info) != 0) return ErrnoStatus("asking for the free space of", path, errno);
    return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  }
  absl::StatusOr<std::unique_ptr<DirectoryLock>> Lock(const std::string& path) override {
    STILLHOUSE_ASSIGN_OR_RETURN(Descriptor fd, OpenDescriptor("opening", path, O_RDWR | O_CREAT));
    // flock belongs to the open file, so a second store in this very process is refused too.
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus("locking", path, errno);
      return absl::FailedPreconditionError(
          "another server has this store open: stop it, or give this one a store folder of its own");
    }
    return std::make_unique<FileLock>(std::move(fd));
  }
};

}  // namespace

Env* PosixEnv() {
  static PosixEnvironment* const env = new PosixEnvironment;
  return env;
}

}  // namespace stillhouse
