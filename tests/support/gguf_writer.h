// Writes GGUF files, for tests.
#ifndef STILLHOUSE_TESTS_SUPPORT_GGUF_WRITER_H_
#define STILLHOUSE_TESTS_SUPPORT_GGUF_WRITER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/load/gguf_types.h"

namespace stillhouse::testing {

// Collects entries and tensors in order and lays them out as version 3. Checks nothing: it also writes files that must
// be refused.
class GgufWriter {
 public:
  void AddU32(std::string_view key, uint32_t value);
  void AddU64(std::string_view key, uint64_t value);
  void AddI32(std::string_view key, int32_t value);
  void AddF32(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddString(std::string_view key, std::string_view value);
  void AddStrings(std::string_view key, const std::vector<std::string>& values);
  void AddI32s(std::string_view key, const std::vector<int32_t>& values);
  // An entry whose type and value are given as they shall lie in the file.
  void AddRaw(std::string_view key, uint32_t type, std::string_view value_bytes);

  // Changes to what was added, for files that are wrong in one place.
  void SetRaw(std::string_view key, uint32_t type, std::string_view value_bytes);  // adds the entry if it is absent
  void SetString(std::string_view key, std::string_view value);
  void RenameKeys(std::string_view prefix, std::string_view replacement);
  void RemoveTensor(std::string_view name);

  // `dims[0]` is the row length. `values` are row-major; quantised here where the type is Q8_0, Q4_1 or F16.
  void AddTensor(std::string_view name, std::vector<uint64_t> dims, GgufType type, const std::vector<float>& values);
  void AddRawTensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, std::string data);

  // Alignment of the data section; the key general.alignment is the caller's business.
  void set_alignment(uint32_t alignment) { alignment_ = alignment; }
  void set_version(uint32_t version) { version_ = version; }

  std::string Serialize() const;
  absl::Status WriteFile(const std::string& path) const;

 private:
  struct Entry {
    std::string key;
    uint32_t type;
    std::string value;
  };
  struct TensorEntry {
    std::string name;
    std::vector<uint64_t> dims;
    uint32_t type;
    std::string data;
  };
  uint32_t version_ = 3;
  uint32_t alignment_ = 32;
  std::vector<Entry> entries_;
  std::vector<TensorEntry> tensors_;
};

// Rounds to nearest, ties to even.
uint16_t FloatToHalf(float value);
float HalfToFloat(uint16_t half);

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SUPPORT_GGUF_WRITER_H_
