#ifndef STILLHOUSE_CLIENT_SOURCE_H_
#define STILLHOUSE_CLIENT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Bytes to send, readable at any offset (a resumed upload starts in the middle), and a file that appears only when it
// is whole.
namespace stillhouse::client {

// One reader at a time.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fixed when the source was opened.
  virtual int64_t size() const = 0;
  // Fills `out` with up to `length` bytes from `offset`; fewer only at the end. An error when the file shrank or fails.
  virtual absl::Status Read(int64_t offset, int64_t length, std::string& out) = 0;
};

// A regular file, kept open.
absl::StatusOr<std::unique_ptr<ByteSource>> OpenFile(const std::string& path);
// Owns the bytes.
std::unique_ptr<ByteSource> FromBytes(std::string bytes);
// The whole of standard input, at most `limit` bytes.
absl::StatusOr<std::unique_ptr<ByteSource>> ReadStandardInput(int64_t limit);
// `path`, or standard input for "-".
absl::StatusOr<std::unique_ptr<ByteSource>> OpenInput(const std::string& path, int64_t stdin_limit);

// A file as text; an error names it and says why it cannot be read.
absl::StatusOr<std::string> ReadText(const std::string& path, int64_t limit);

// Lower-case hexadecimal SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(absl::string_view bytes);
  // Ends the computation.
  std::string Hex();

 private:
  void* context_;
};
absl::StatusOr<std::string> Sha256Of(ByteSource& source);

// Written beside `path` under a temporary name; Commit flushes it to disk and renames it. Without Commit nothing is
// left behind.
class PartialFile {
 public:
  static absl::StatusOr<std::unique_ptr<PartialFile>> Create(const std::string& path);
  ~PartialFile();
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  absl::Status Append(absl::string_view bytes);
  absl::Status Commit();

 private:
  PartialFile(std::string path, std::string partial, int fd);
  std::string path_;
  std::string partial_;
  int fd_;
};

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_SOURCE_H_
