#ifndef STILLHOUSE_CACHE_STORE_SAFETENSORS_H_
#define STILLHOUSE_CACHE_STORE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stillhouse {

// The safetensors container, as hostile input: u64 little-endian header length, a JSON object, data. Knows names,
// element types, shapes and byte ranges; no tensors.

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // bytes of JSON
inline constexpr size_t kMaxSafetensorsDims = 16;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as in the file: F32, BF16, I64, …; always one that SafetensorsDtypeSize knows
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // bytes from the start of the data; end − begin = product(shape) × dtype size
  uint64_t end = 0;
};

struct SafetensorsIndex {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> entries;  // by offset; contiguous from 0 to the end of the file
  uint64_t data_begin = 0;                // file offset of the data
  // nullptr if there is no such tensor. Linear: make a map of your own for many look-ups.
  const SafetensorsEntry* Find(std::string_view name) const;
};

// Bytes per element; 0 for an unknown type.
size_t SafetensorsDtypeSize(std::string_view dtype);

// The header's length from the file's first 8 bytes: checked against the cap and against the file's size.
absl::StatusOr<uint64_t> ParseSafetensorsHeaderLength(std::string_view first_8_bytes, uint64_t file_size);

// Parses the header's JSON (without the 8 length bytes) of a file of `file_size` bytes. Refuses, with DATA_LOSS and one
// sentence: no '{' first, invalid UTF-8 or JSON, NUL or anything but spaces after the object, duplicate keys, unknown
// or missing fields, non-string metadata, negative, fractional or overflowing integers, unknown dtypes, too many
// dimensions, sizes that overflow or disagree with the shape, ranges that leave holes, overlap, or do not end with the
// file.
absl::StatusOr<SafetensorsIndex> ParseSafetensorsHeader(std::string_view json, uint64_t file_size);

// Both of the above on a whole file in memory (or mapped).
absl::StatusOr<SafetensorsIndex> ParseSafetensors(std::string_view file);

// The length bytes and the JSON for entries whose begin/end are ignored and laid out in the given order. Metadata keys
// are written in the given order. The JSON is padded with spaces so that the data starts at a multiple of `alignment`.
struct SafetensorsLayout {
  std::string header;  // 8 length bytes and JSON
  std::vector<SafetensorsEntry> entries;
  uint64_t file_size = 0;
};
absl::StatusOr<SafetensorsLayout> LayOutSafetensors(const std::vector<std::pair<std::string, std::string>>& metadata,
                                                    std::vector<SafetensorsEntry> entries, uint64_t alignment = 64);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_SAFETENSORS_H_
