#include "cache_store/safetensors.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "absl/strings/escaping.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "nlohmann/json.hpp"

namespace stillhouse {
namespace {

using nlohmann::json;

absl::Status Damaged(std::string_view what) { return absl::DataLossError(StrCat("safetensors file: ", what)); }

// A name from the file, fit for a message.
std::string Quoted(std::string_view name) {
  return StrCat("'", absl::Utf8SafeCHexEscape(ToAbsl(name.substr(0, 64))), name.size() > 64 ? "…'" : "'");
}

// Accepts exactly {"name": {"dtype": s, "shape": [u…], "data_offsets": [u, u]}, …, "__metadata__": {s: s, …}} as it
// streams by, so that a header of 100 MB needs no document tree, and nesting and duplicates are refused where they
// start.
class HeaderSax : public nlohmann::json_sax<json> {
 public:
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> entries;

  const std::string& error() const { return error_; }

  bool null() override { return Fail("null value"); }
  bool boolean(bool) override { return Fail("boolean value"); }
  bool number_integer(number_integer_t) override { return Fail("negative integer"); }
  bool number_float(number_float_t, const string_t&) override { return Fail("a number that is no 64-bit integer"); }
  bool binary(binary_t&) override { return Fail("binary value"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::kShape) {
      if (entry_.shape.size() == kMaxSafetensorsDims) return Fail("too many dimensions");
      entry_.shape.push_back(value);
      return true;
    }
    if (state_ == State::kOffsets) {
      if (offsets_ == 2) return Fail("data_offsets must be two integers");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return Fail("number where none belongs");
  }
  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      metadata[std::move(key_)] = std::move(value);
      return true;
    }
    if (state_ == State::kEntry && field_ == kDtype) {
      if (SafetensorsDtypeSize(value) == 0) return Fail(StrCat("unknown dtype ", Quoted(value)));
      entry_.dtype = std::move(value);
      return true;
    }
    return Fail("string where none belongs");
  }
  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
      return true;
    }
    if (state_ == State::kTop) {
      state_ = key_ == "__metadata__" ? State::kMetadata : State::kEntry;
      if (state_ == State::kEntry) {
        entry_ = SafetensorsEntry{};
        entry_.name = std::move(key_);
        seen_ = 0;
        offsets_ = 0;
      }
      return true;
    }
    return Fail("object where none belongs");
  }
  bool key(string_t& value) override {
    if (value.empty()) return Fail("empty key");
    switch (state_) {
      case State::kTop:
        if (!names_.insert(value).second) return Fail(StrCat("duplicate key ", Quoted(value)));
        break;
      case State::kMetadata:
        if (metadata.contains(value)) return Fail(StrCat("duplicate metadata key ", Quoted(value)));
        break;
      default:
        field_ = value == "dtype" ? kDtype : value == "shape" ? kShape : value == "data_offsets" ? kOffsets : 0;
        if (field_ == 0) return Fail(StrCat("unknown field ", Quoted(value)));
        if (seen_ & field_) return Fail(StrCat("duplicate key ", Quoted(value)));
        seen_ |= field_;
    }
    key_ = std::move(value);
    return true;
  }
  bool end_object() override {
    switch (state_) {
      case State::kEntry:
        if (seen_ != (kDtype | kShape | kOffsets)) {
          return Fail(StrCat("tensor ", Quoted(entry_.name), " lacks dtype, shape or data_offsets"));
        }
        entries.push_back(std::move(entry_));
        state_ = State::kTop;
        return true;
      case State::kMetadata:
        state_ = State::kTop;
        return true;
      default:
        state_ = State::kEnd;
        return true;
    }
  }
  bool start_array(size_t) override {
    if (state_ != State::kEntry || (field_ != kShape && field_ != kOffsets)) return Fail("array where none belongs");
    state_ = field_ == kShape ? State::kShape : State::kOffsets;
    return true;
  }
  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) return Fail("data_offsets must be two integers");
    state_ = State::kEntry;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(StrCat("bad JSON or UTF-8 at byte ", position, " of the header"));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kEntry, kShape, kOffsets, kEnd };
  static constexpr int kDtype = 1, kShape = 2, kOffsets = 4;

  bool Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return false;
  }

  State state_ = State::kStart;
  std::string key_;
  std::unordered_set<std::string> names_;
  SafetensorsEntry entry_;
  int field_ = 0, seen_ = 0, offsets_ = 0;
  std::string error_;
};

// Bytes of a tensor; false if the product does not fit in 64 bits. A zero anywhere does not excuse an overflow
// elsewhere.
bool ByteSize(const std::vector<uint64_t>& shape, size_t dtype_size, uint64_t* size) {
  uint64_t product = dtype_size;
  bool zero = false;
  for (uint64_t dim : shape) {
    if (dim == 0) {
      zero = true;
    } else if (__builtin_mul_overflow(product, dim, &product)) {
      return false;
    }
  }
  *size = zero ? 0 : product;
  return true;
}

}  // namespace

const SafetensorsEntry* SafetensorsIndex::Find(std::string_view name) const {
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

size_t SafetensorsDtypeSize(std::string_view dtype) {
  static constexpr std::pair<std::string_view, size_t> kSizes[] = {
      {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I32", 4}, {"I64", 8}, {"U8", 1},      {"I8", 1},      {"BOOL", 1},
      {"F64", 8}, {"I16", 2},  {"U16", 2}, {"U32", 4}, {"U64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, size] : kSizes) {
    if (name == dtype) return size;
  }
  return 0;
}

absl::StatusOr<uint64_t> ParseSafetensorsHeaderLength(std::string_view first_8_bytes, uint64_t file_size) {
  if (first_8_bytes.size() < 8 || file_size < 8) return Damaged("shorter than its 8 length bytes");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(first_8_bytes[i]);
  if (length > kMaxSafetensorsHeader) return Damaged(StrCat("header of ", length, " bytes is over the limit"));
  if (length > file_size - 8) return Damaged("the header is longer than the file");
  if (length < 2) return Damaged("empty header");
  return length;
}

absl::StatusOr<SafetensorsIndex> ParseSafetensorsHeader(std::string_view text, uint64_t file_size) {
  if (text.empty() || text[0] != '{') return Damaged("the header does not start with '{'");
  if (file_size < 8 || text.size() > file_size - 8) return Damaged("the header is longer than the file");
  // The JSON parser takes NUL for the end of its input, and any white space at the end; the format allows only spaces.
  if (text.find('\0') != text.npos) return Damaged("NUL byte in the header");
  const size_t last = text.find_last_not_of(' ');
  if (text[last] != '}') return Damaged("the header does not end with '}'");
  HeaderSax sax;
  if (!json::sax_parse(text.begin(), text.end(), &sax)) return Damaged(sax.error());

  SafetensorsIndex index;
  index.metadata = std::move(sax.metadata);
  index.entries = std::move(sax.entries);
  index.data_begin = 8 + text.size();
  const uint64_t data_size = file_size - index.data_begin;
  for (const SafetensorsEntry& entry : index.entries) {
    uint64_t size = 0;
    if (!ByteSize(entry.shape, SafetensorsDtypeSize(entry.dtype), &size)) {
      return Damaged(StrCat("the size of tensor ", Quoted(entry.name), " overflows"));
    }
    if (entry.end < entry.begin || entry.end > data_size) {
      return Damaged(StrCat("tensor ", Quoted(entry.name), " lies outside the file"));
    }
    if (entry.end - entry.begin != size) {
      return Damaged(StrCat("tensor ", Quoted(entry.name), " has ", entry.end - entry.begin,
                            " bytes; its shape and dtype need ", size));
    }
  }
  // Files exist whose keys are not in the order of their data, so the order is made here and then checked for holes.
  std::stable_sort(index.entries.begin(), index.entries.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t position = 0;
  for (const SafetensorsEntry& entry : index.entries) {
    if (entry.begin != position) {
      return Damaged(StrCat(entry.begin < position ? "overlap" : "hole", " before tensor ", Quoted(entry.name)));
    }
    position = entry.end;
  }
  if (position != data_size) return Damaged("bytes after the last tensor, or missing ones");
  return index;
}

absl::StatusOr<SafetensorsIndex> ParseSafetensors(std::string_view file) {
  STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t length, ParseSafetensorsHeaderLength(file.substr(0, 8), file.size()));
  return ParseSafetensorsHeader(file.substr(8, length), file.size());
}

absl::StatusOr<SafetensorsLayout> LayOutSafetensors(const std::vector<std::pair<std::string, std::string>>& metadata,
                                                    std::vector<SafetensorsEntry> entries, uint64_t alignment) {
  std::string text = "{";
  uint64_t position = 0;
  // Only text that is not UTF-8 makes dump() throw.
  try {
    if (!metadata.empty()) {
      absl::StrAppend(&text, "\"__metadata__\":{");
      for (const auto& [key, value] : metadata) {
        absl::StrAppend(&text, text.back() == '{' ? "" : ",", json(key).dump(), ":", json(value).dump());
      }
      text.push_back('}');
    }
    for (SafetensorsEntry& entry : entries) {
      const size_t element = SafetensorsDtypeSize(entry.dtype);
      uint64_t size = 0;
      if (element == 0) return absl::InvalidArgumentError(StrCat("unknown dtype ", Quoted(entry.dtype)));
      if (entry.shape.size() > kMaxSafetensorsDims) return absl::InvalidArgumentError("too many dimensions");
      entry.begin = position;
      if (!ByteSize(entry.shape, element, &size) || __builtin_add_overflow(position, size, &position)) {
        return absl::InvalidArgumentError(StrCat("the size of tensor ", Quoted(entry.name), " overflows"));
      }
      entry.end = position;
      absl::StrAppend(&text, text.size() == 1 ? "" : ",", json(entry.name).dump(), ":{\"dtype\":\"", entry.dtype,
                      "\",\"shape\":", json(entry.shape).dump(), ",\"data_offsets\":[", entry.begin, ",", entry.end,
                      "]}");
    }
  } catch (const json::exception&) {
    return absl::InvalidArgumentError("a name or metadata value is not valid UTF-8");
  }
  text.push_back('}');
  if (alignment > 1) text.resize((8 + text.size() + alignment - 1) / alignment * alignment - 8, ' ');
  if (text.size() > kMaxSafetensorsHeader) return absl::InvalidArgumentError("the header would be over the limit");

  SafetensorsLayout layout;
  for (int i = 0; i < 8; ++i) layout.header.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * i)));
  layout.header += text;
  layout.entries = std::move(entries);
  if (__builtin_add_overflow(uint64_t{layout.header.size()}, position, &layout.file_size)) {
    return absl::InvalidArgumentError("the file would be too large");
  }
  return layout;
}

}  // namespace stillhouse
