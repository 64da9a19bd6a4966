#ifndef STILLHOUSE_SERVER_LOAD_GGUF_H_
#define STILLHOUSE_SERVER_LOAD_GGUF_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/strings.h"
#include "server/load/gguf_types.h"

namespace stillhouse {

// One tensor of a GGUF file; name and data lie in the file's bytes.
struct GgufTensor {
  std::string_view name;
  int rank = 0;                                 // 1..4
  std::array<uint64_t, 4> dims = {1, 1, 1, 1};  // dims[0] is the contiguous row length; unused ones are 1
  GgufType type = GgufType::kF32;
  absl::Span<const uint8_t> data;  // exactly the tensor's bytes, at a multiple of the file's alignment

  uint64_t elements() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
};

// A GGUF file (version 3, and the identical layout of version 2), read-only. Everything is validated before Open
// returns: every count and length against the bytes that remain, every product and sum against overflow, every tensor
// against the end of the file. Views (strings, tensor data) live as long as the GgufFile: whoever keeps them keeps the
// shared_ptr.
//
// Immutable, any thread. A mapped file must not be truncated by others while it is in use; replace it by rename.
class GgufFile {
 public:
  // Maps the file. NOT_FOUND or PERMISSION_DENIED if it cannot be opened, INVALID_ARGUMENT with one sentence that
  // begins with the file's name if it is not a sound GGUF file.
  static absl::StatusOr<std::shared_ptr<const GgufFile>> Open(const std::string& path);

  // The same over bytes that the caller keeps alive.
  static absl::StatusOr<std::shared_ptr<const GgufFile>> Parse(absl::Span<const uint8_t> bytes);

  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  // Getters: NOT_FOUND if the key is absent, INVALID_ARGUMENT if it has another type. Integers of every width are
  // accepted for GetUnsigned (negative ones refused) and GetIntegers, both float widths for GetFloat (NaN passes: the
  // caller knows the range).
  bool Has(std::string_view key) const;
  absl::StatusOr<uint64_t> GetUnsigned(std::string_view key) const;
  absl::StatusOr<double> GetFloat(std::string_view key) const;
  absl::StatusOr<bool> GetBool(std::string_view key) const;
  absl::StatusOr<std::string_view> GetString(std::string_view key) const;
  absl::StatusOr<std::vector<std::string_view>> GetStrings(std::string_view key) const;
  absl::StatusOr<std::vector<int64_t>> GetIntegers(std::string_view key) const;

  // In the order of the file.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  // Null if absent.
  const GgufTensor* FindTensor(std::string_view name) const;

  uint64_t alignment() const { return alignment_; }
  absl::Span<const uint8_t> bytes() const { return bytes_; }

  // SHA-256 (lower-case hex) of the whole file, computed on each call: a pass over all its bytes.
  std::string Sha256() const;

 private:
  struct Value {
    GgufValueType type;
    GgufValueType element;            // of an array
    uint64_t count;                   // of an array; else 1
    absl::Span<const uint8_t> bytes;  // the value as it lies in the file; a string without its length
  };
  class Reader;

  GgufFile() = default;
  absl::Status ParseAll(absl::Span<const uint8_t> bytes);
  absl::Status ReadKeyValues(Reader* reader, uint64_t count);
  absl::Status ReadTensors(Reader* reader, uint64_t count);
  absl::StatusOr<const Value*> Find(std::string_view key) const;

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  absl::Span<const uint8_t> bytes_;
  uint64_t alignment_ = 32;
  absl::flat_hash_map<std::string_view, Value, StringHash> values_;
  std::vector<GgufTensor> tensors_;
  absl::flat_hash_map<std::string_view, size_t, StringHash> tensor_index_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_LOAD_GGUF_H_
