#include "client/source.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace stillhouse::client {
namespace {

constexpr int64_t kBlock = 1 << 20;

absl::Status FileError(absl::string_view verb, const std::string& path, int error) {
  const std::string text = absl::StrCat("Cannot ", verb, " ", path, ": ", std::strerror(error), ".");
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == ENOSPC) return absl::ResourceExhaustedError(text);
  return absl::FailedPreconditionError(text);
}

class FileSource : public ByteSource {
 public:
  FileSource(std::string path, int fd, int64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}
  ~FileSource() override { close(fd_); }
  int64_t size() const override { return size_; }
  absl::Status Read(int64_t offset, int64_t length, std::string& out) override {
    length = std::clamp<int64_t>(size_ - offset, 0, length);
    out.resize(length);
    int64_t done = 0;
    while (done < length) {
      const ssize_t n = pread(fd_, out.data() + done, length - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return FileError("read", path_, errno);
      if (n == 0) return absl::AbortedError(absl::StrCat(path_, " became shorter while it was read; run it again."));
      done += n;
    }
    return absl::OkStatus();
  }

 private:
  std::string path_;
  int fd_;
  int64_t size_;
};

class MemorySource : public ByteSource {
 public:
  explicit MemorySource(std::string bytes) : bytes_(std::move(bytes)) {}
  int64_t size() const override { return static_cast<int64_t>(bytes_.size()); }
  absl::Status Read(int64_t offset, int64_t length, std::string& out) override {
    length = std::clamp<int64_t>(size() - offset, 0, length);
    out.assign(bytes_, std::min<size_t>(offset, bytes_.size()), length);
    return absl::OkStatus();
  }

 private:
  std::string bytes_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ByteSource>> OpenFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError("open", path, errno);
  struct stat info;
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    return FileError("read", path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file; pipe it in and write - for standard input."));
  }
  return std::make_unique<FileSource>(path, fd, info.st_size);
}

std::unique_ptr<ByteSource> FromBytes(std::string bytes) { return std::make_unique<MemorySource>(std::move(bytes)); }

absl::StatusOr<std::unique_ptr<ByteSource>> ReadStandardInput(int64_t limit) {
  std::string bytes;
  std::string block(kBlock, '\0');
  while (true) {
    const ssize_t n = read(STDIN_FILENO, block.data(), block.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError("read", "standard input", errno);
    if (n == 0) break;
    bytes.append(block, 0, n);
    if (static_cast<int64_t>(bytes.size()) > limit) {
      return absl::OutOfRangeError(absl::StrCat("Standard input holds more than ", limit, " bytes, the limit here."));
    }
  }
  return FromBytes(std::move(bytes));
}

absl::StatusOr<std::unique_ptr<ByteSource>> OpenInput(const std::string& path, int64_t stdin_limit) {
  return path == "-" ? ReadStandardInput(stdin_limit) : OpenFile(path);
}

absl::StatusOr<std::string> ReadText(const std::string& path, int64_t limit) {
  auto source = OpenInput(path, limit);
  if (!source.ok()) return source.status();
  if ((*source)->size() > limit) {
    return absl::OutOfRangeError(absl::StrCat(path, " is larger than ", limit, " bytes, the limit here."));
  }
  std::string text;
  if (auto status = (*source)->Read(0, (*source)->size(), text); !status.ok()) return status;
  return text;
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), EVP_sha256(), nullptr);
}

Sha256::~Sha256() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Sha256::Update(absl::string_view bytes) {
  EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), bytes.data(), bytes.size());
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_), digest, &length);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<char*>(digest), length));
}

absl::StatusOr<std::string> Sha256Of(ByteSource& source) {
  Sha256 sha;
  std::string block;
  for (int64_t offset = 0; offset < source.size(); offset += kBlock) {
    if (auto status = source.Read(offset, kBlock, block); !status.ok()) return status;
    sha.Update(block);
  }
  return sha.Hex();
}

absl::StatusOr<std::unique_ptr<PartialFile>> PartialFile::Create(const std::string& path) {
  // Not mkostemp, whose files are private: asking for the umask to widen them would change it for other threads.
  std::random_device random;
  while (true) {
    std::string partial = absl::StrCat(path, ".part-", absl::Hex(random(), absl::kZeroPad8));
    const int fd = open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) return std::unique_ptr<PartialFile>(new PartialFile(path, std::move(partial), fd));
    if (errno != EEXIST && errno != EINTR) return FileError("write", path, errno);
  }
}

PartialFile::PartialFile(std::string path, std::string partial, int fd)
    : path_(std::move(path)), partial_(std::move(partial)), fd_(fd) {}

PartialFile::~PartialFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(partial_.c_str());
}

absl::Status PartialFile::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError("write", path_, errno);
    bytes.remove_prefix(n);
  }
  return absl::OkStatus();
}

absl::Status PartialFile::Commit() {
  if (fsync(fd_) != 0) return FileError("write", path_, errno);
  if (rename(partial_.c_str(), path_.c_str()) != 0) return FileError("write", path_, errno);
  close(std::exchange(fd_, -1));
  return absl::OkStatus();
}

}  // namespace stillhouse::client
