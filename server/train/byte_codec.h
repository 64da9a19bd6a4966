// Plain bytes for checkpoints: written and read by one version of one program on one kind of machine (the store guards
// them with a hash), so numbers keep the machine's layout. Every length is checked against what is left.
#ifndef STILLHOUSE_SERVER_TRAIN_BYTE_CODEC_H_
#define STILLHOUSE_SERVER_TRAIN_BYTE_CODEC_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"

namespace stillhouse {

class ByteWriter {
 public:
  void Int(int64_t value) { Raw(&value, sizeof(value)); }
  void Double(double value) { Raw(&value, sizeof(value)); }
  void Text(std::string_view text) {
    Int(static_cast<int64_t>(text.size()));
    bytes_.append(text);
  }
  template <typename T>
  void Array(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Int(static_cast<int64_t>(values.size()));
    Raw(values.data(), values.size() * sizeof(T));
  }

  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  void Raw(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }

  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  absl::Status Int(int64_t* value) { return Raw(value, sizeof(*value)); }
  absl::Status Double(double* value) { return Raw(value, sizeof(*value)); }
  absl::Status Text(std::string* text) {
    int64_t size = 0;
    if (absl::Status status = Length(1, &size); !status.ok()) return status;
    text->assign(rest_.substr(0, static_cast<size_t>(size)));
    rest_.remove_prefix(static_cast<size_t>(size));
    return absl::OkStatus();
  }
  template <typename T>
  absl::Status Array(std::vector<T>* values) {
    static_assert(std::is_trivially_copyable_v<T>);
    int64_t size = 0;
    if (absl::Status status = Length(sizeof(T), &size); !status.ok()) return status;
    values->resize(static_cast<size_t>(size));
    return Raw(values->data(), static_cast<size_t>(size) * sizeof(T));
  }
  // A count of things of at least `least_bytes` each.
  absl::Status Length(size_t least_bytes, int64_t* count) {
    if (absl::Status status = Int(count); !status.ok()) return status;
    if (*count < 0 || static_cast<uint64_t>(*count) > rest_.size() / least_bytes) return Short();
    return absl::OkStatus();
  }
  bool empty() const { return rest_.empty(); }

 private:
  static absl::Status Short() { return absl::DataLossError("a checkpoint ends too early"); }
  absl::Status Raw(void* out, size_t size) {
    if (size > rest_.size()) return Short();
    if (size > 0) std::memcpy(out, rest_.data(), size);
    rest_.remove_prefix(size);
    return absl::OkStatus();
  }

  std::string_view rest_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TRAIN_BYTE_CODEC_H_
