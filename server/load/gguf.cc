#include "server/load/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 1024;
constexpr uint64_t kMinAlignment = 8;  // of the format; every element type is read at its natural alignment
constexpr uint64_t kMaxAlignment = 1 << 20;
// The least that an entry or a tensor info can take: its lengths and types, and one byte of name.
constexpr uint64_t kMinEntryBytes = 8 + 1 + 4 + 1;
constexpr uint64_t kMinTensorInfoBytes = 8 + 1 + 4 + 8 + 4 + 8;

std::string Quoted(std::string_view text) {
  return StrCat("'", absl::CHexEscape(ToAbsl(text.substr(0, 64))), text.size() > 64 ? "…'" : "'");
}

absl::Status Invalid(std::string message) { return absl::InvalidArgumentError(std::move(message)); }

// Bytes of one value of a fixed size; 0 for strings, arrays and unknown types.
uint64_t FixedSize(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16:
      return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32:
      return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

template <typename T>
T LoadAs(const uint8_t* bytes) {
  static_assert(std::endian::native == std::endian::little, "GGUF is little-endian");
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// No value unless `type` is an integer.
absl::StatusOr<int64_t> IntegerAt(GgufValueType type, const uint8_t* bytes) {
  switch (type) {
    case GgufValueType::kU8:
      return LoadAs<uint8_t>(bytes);
    case GgufValueType::kI8:
      return LoadAs<int8_t>(bytes);
    case GgufValueType::kU16:
      return LoadAs<uint16_t>(bytes);
    case GgufValueType::kI16:
      return LoadAs<int16_t>(bytes);
    case GgufValueType::kU32:
      return LoadAs<uint32_t>(bytes);
    case GgufValueType::kI32:
      return LoadAs<int32_t>(bytes);
    case GgufValueType::kI64:
      return LoadAs<int64_t>(bytes);
    case GgufValueType::kU64: {
      const auto value = LoadAs<uint64_t>(bytes);
      if (value > INT64_MAX) return Invalid("is above the range of 64-bit signed integers");
      return static_cast<int64_t>(value);
    }
    default:
      return Invalid("is not an integer");
  }
}

}  // namespace

// A cursor that never leaves the bytes. Its errors say what was being read.
class GgufFile::Reader {
 public:
  explicit Reader(absl::Span<const uint8_t> bytes) : bytes_(bytes) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return bytes_.size() - position_; }

  template <typename T>
  absl::StatusOr<T> Number(std::string_view what) {
    STILLHOUSE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes, Bytes(sizeof(T), what));
    return LoadAs<T>(bytes.data());
  }

  absl::StatusOr<absl::Span<const uint8_t>> Bytes(uint64_t count, std::string_view what) {
    if (count > remaining()) return Invalid(StrCat("the file ends inside ", what));
    const auto bytes = bytes_.subspan(position_, count);
    position_ += count;
    return bytes;
  }

  absl::StatusOr<std::string_view> String(std::string_view what, uint64_t limit = UINT64_MAX) {
    STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t length, Number<uint64_t>(what));
    if (length > limit) return Invalid(StrCat(what, " is ", length, " bytes long; at most ", limit));
    STILLHOUSE_ASSIGN_OR_RETURN(const absl::Span<const uint8_t> bytes, Bytes(length, what));
    return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

 private:
  absl::Span<const uint8_t> bytes_;
  uint64_t position_ = 0;
};

absl::StatusOr<std::shared_ptr<const GgufFile>> GgufFile::Open(const std::string& path) {
  const std::string name = Quoted(path.substr(path.find_last_of('/') + 1));
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const int error = errno;
    const std::string message = StrCat("cannot open the model file ", path, ": ", strerror(error));
    if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
    if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
    return absl::InternalError(message);
  }
  struct stat info = {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return Invalid(StrCat(name, " is not a regular file"));
  }
  std::shared_ptr<GgufFile> file(new GgufFile());
  file->mapping_bytes_ = static_cast<size_t>(info.st_size);
  if (info.st_size > 0) {
    void* mapping = mmap(nullptr, file->mapping_bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    if (mapping != MAP_FAILED) file->mapping_ = mapping;
    if (mapping == MAP_FAILED) {
      close(fd);
      return absl::ResourceExhaustedError(StrCat("cannot map the model file ", path, ": ", strerror(error)));
    }
  }
  close(fd);
  const auto* bytes = static_cast<const uint8_t*>(file->mapping_);
  const absl::Status status = file->ParseAll(absl::MakeConstSpan(bytes, file->mapping_bytes_));
  if (!status.ok()) return absl::Status(status.code(), StrCat(name, " cannot be used: ", ToStd(status.message())));
  return file;
}

absl::StatusOr<std::shared_ptr<const GgufFile>> GgufFile::Parse(absl::Span<const uint8_t> bytes) {
  std::shared_ptr<GgufFile> file(new GgufFile());
  STILLHOUSE_RETURN_IF_ERROR(file->ParseAll(bytes));
  return file;
}

GgufFile::~GgufFile() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

absl::Status GgufFile::ParseAll(absl::Span<const uint8_t> bytes) {
  bytes_ = bytes;
  Reader reader(bytes);
  const absl::StatusOr<absl::Span<const uint8_t>> magic = reader.Bytes(4, "the magic number");
  if (!magic.ok() || std::memcmp(magic->data(), "GGUF", 4) != 0) return Invalid("it is not a GGUF file");
  STILLHOUSE_ASSIGN_OR_RETURN(const auto version, reader.Number<uint32_t>("the header"));
  if (version != 2 && version != 3) {
    return Invalid(StrCat("it has GGUF version ", version, "; only 2 and 3 in little-endian order are supported"));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const auto tensor_count, reader.Number<uint64_t>("the header"));
  STILLHOUSE_ASSIGN_OR_RETURN(const auto entry_count, reader.Number<uint64_t>("the header"));
  STILLHOUSE_RETURN_IF_ERROR(ReadKeyValues(&reader, entry_count));
  return ReadTensors(&reader, tensor_count);
}

absl::Status GgufFile::ReadKeyValues(Reader* reader, uint64_t count) {
  if (count > reader->remaining() / kMinEntryBytes) {
    return Invalid(StrCat("it claims ", count, " key/value entries, more than its ", bytes_.size(), " bytes can hold"));
  }
  values_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view key,
                                reader->String(StrCat("the key of entry ", i), kMaxKeyBytes));
    if (key.empty()) return Invalid(StrCat("the key of entry ", i, " is empty"));
    const std::string what = StrCat("the value of ", Quoted(key));
    STILLHOUSE_ASSIGN_OR_RETURN(const auto type, reader->Number<uint32_t>(what));
    Value value = {static_cast<GgufValueType>(type), static_cast<GgufValueType>(type), 1, {}};
    if (type > static_cast<uint32_t>(GgufValueType::kF64)) return Invalid(StrCat(what, " has the unknown type ", type));
    if (value.type == GgufValueType::kArray) {
      STILLHOUSE_ASSIGN_OR_RETURN(const auto element, reader->Number<uint32_t>(what));
      if (element > static_cast<uint32_t>(GgufValueType::kF64)) {
        return Invalid(StrCat(what, " is an array of the unknown type ", element));
      }
      value.element = static_cast<GgufValueType>(element);
      if (value.element == GgufValueType::kArray) return Invalid(StrCat(what, " is an array of arrays"));
      STILLHOUSE_ASSIGN_OR_RETURN(value.count, reader->Number<uint64_t>(what));
    }
    if (value.element == GgufValueType::kString) {
      const uint64_t begin = reader->position();
      if (value.type == GgufValueType::kString) {
        STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view text, reader->String(what));
        value.bytes = bytes_.subspan(reader->position() - text.size(), text.size());
      } else {
        if (value.count > reader->remaining() / sizeof(uint64_t)) return Invalid(StrCat("the file ends inside ", what));
        for (uint64_t k = 0; k < value.count; ++k) STILLHOUSE_RETURN_IF_ERROR(reader->String(what).status());
        value.bytes = bytes_.subspan(begin, reader->position() - begin);
      }
    } else {
      const uint64_t size = FixedSize(value.element);
      if (value.count > reader->remaining() / size) return Invalid(StrCat("the file ends inside ", what));
      STILLHOUSE_ASSIGN_OR_RETURN(value.bytes, reader->Bytes(value.count * size, what));
      if (value.element == GgufValueType::kBool &&
          std::any_of(value.bytes.begin(), value.bytes.end(), [](uint8_t b) { return b > 1; })) {
        return Invalid(StrCat(what, " is a boolean that is neither 0 nor 1"));
      }
    }
    if (!values_.try_emplace(key, value).second) return Invalid(StrCat("the key ", Quoted(key), " occurs twice"));
  }
  if (Has("general.alignment")) {
    const auto it = values_.find("general.alignment");
    if (it->second.type != GgufValueType::kU32) return Invalid("general.alignment is not an unsigned 32-bit number");
    alignment_ = LoadAs<uint32_t>(it->second.bytes.data());
    if (!std::has_single_bit(alignment_) || alignment_ < kMinAlignment || alignment_ > kMaxAlignment) {
      return Invalid(StrCat("general.alignment is ", alignment_, ", not a power of two from ", kMinAlignment, " to ",
                            kMaxAlignment));
    }
  }
  return absl::OkStatus();
}

absl::Status GgufFile::ReadTensors(Reader* reader, uint64_t count) {
  if (count > reader->remaining() / kMinTensorInfoBytes) {
    return Invalid(StrCat("it claims ", count, " tensors, more than its ", bytes_.size(), " bytes can hold"));
  }
  struct Place {
    uint64_t offset, size;
  };
  std::vector<Place> places(count);
  tensors_.resize(count);
  tensor_index_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    GgufTensor& tensor = tensors_[i];
    STILLHOUSE_ASSIGN_OR_RETURN(tensor.name, reader->String(StrCat("the name of tensor ", i), kMaxTensorNameBytes));
    if (tensor.name.empty()) return Invalid(StrCat("the name of tensor ", i, " is empty"));
    const std::string what = StrCat("the tensor ", Quoted(tensor.name));
    if (!tensor_index_.try_emplace(tensor.name, i).second) return Invalid(StrCat(what, " occurs twice"));
    STILLHOUSE_ASSIGN_OR_RETURN(const auto rank, reader->Number<uint32_t>(what));
    if (rank < 1 || rank > 4) return Invalid(StrCat(what, " has ", rank, " dimensions, not 1 to 4"));
    tensor.rank = static_cast<int>(rank);
    uint64_t elements = 1;
    for (uint32_t d = 0; d < rank; ++d) {
      STILLHOUSE_ASSIGN_OR_RETURN(tensor.dims[d], reader->Number<uint64_t>(what));
      if (tensor.dims[d] == 0) return Invalid(StrCat(what, " has a dimension of zero"));
      if (__builtin_mul_overflow(elements, tensor.dims[d], &elements) || elements > INT64_MAX) {
        return Invalid(StrCat(what, " has more elements than can be counted"));
      }
    }
    STILLHOUSE_ASSIGN_OR_RETURN(const auto type, reader->Number<uint32_t>(what));
    const std::optional<GgufTypeTraits> traits = FindGgufType(type);
    if (!traits.has_value()) {
      return Invalid(StrCat(what, " has the type ", type,
                            ", which is not supported; use F32, F16, BF16, Q4_0, Q4_1, Q5_0, "
                            "Q5_1, Q8_0 or Q2_K to Q6_K"));
    }
    tensor.type = static_cast<GgufType>(type);
    if (tensor.dims[0] % traits->block_elements != 0) {
      return Invalid(StrCat(what, " has rows of ", tensor.dims[0], " elements, not a multiple of the ", traits->name,
                            " block of ", traits->block_elements));
    }
    uint64_t size = 0;
    if (__builtin_mul_overflow(elements / traits->block_elements, uint64_t{traits->block_bytes}, &size)) {
      return Invalid(StrCat(what, " has more bytes than can be counted"));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(const auto offset, reader->Number<uint64_t>(what));
    if (offset % alignment_ != 0) {
      return Invalid(StrCat(what, " begins at ", offset, ", not a multiple of the alignment ", alignment_));
    }
    places[i] = {offset, size};
  }
  if (count == 0) return absl::OkStatus();

  const uint64_t padding = (alignment_ - reader->position() % alignment_) % alignment_;
  if (padding > reader->remaining()) return Invalid("the file ends before its tensor data");
  const uint64_t start = reader->position() + padding;
  const uint64_t available = bytes_.size() - start;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t end = 0;
    if (__builtin_add_overflow(places[i].offset, places[i].size, &end) || end > available) {
      return Invalid(StrCat("the data of the tensor ", Quoted(tensors_[i].name),
                            " lies beyond the end of the file, which may be an unfinished download"));
    }
    tensors_[i].data = bytes_.subspan(start + places[i].offset, places[i].size);
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.offset < b.offset; });
  for (uint64_t i = 0; i + 1 < count; ++i) {
    if (places[i].offset + places[i].size > places[i + 1].offset) return Invalid("the data of two tensors overlaps");
  }
  return absl::OkStatus();
}

bool GgufFile::Has(std::string_view key) const { return values_.contains(key); }

absl::StatusOr<const GgufFile::Value*> GgufFile::Find(std::string_view key) const {
  const auto it = values_.find(key);
  if (it == values_.end()) return absl::NotFoundError(StrCat("the file has no key ", Quoted(key)));
  return &it->second;
}

absl::StatusOr<uint64_t> GgufFile::GetUnsigned(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  const absl::StatusOr<int64_t> integer = IntegerAt(value->type, value->bytes.data());
  if (!integer.ok()) return Invalid(StrCat("the value of ", Quoted(key), " ", ToStd(integer.status().message())));
  if (*integer < 0) return Invalid(StrCat("the value of ", Quoted(key), " is negative"));
  return static_cast<uint64_t>(*integer);
}

absl::StatusOr<double> GgufFile::GetFloat(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type == GgufValueType::kF32) return LoadAs<float>(value->bytes.data());
  if (value->type == GgufValueType::kF64) return LoadAs<double>(value->bytes.data());
  return Invalid(StrCat("the value of ", Quoted(key), " is not a floating-point number"));
}

absl::StatusOr<bool> GgufFile::GetBool(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufValueType::kBool) return Invalid(StrCat("the value of ", Quoted(key), " is not a boolean"));
  return value->bytes[0] == 1;
}

absl::StatusOr<std::string_view> GgufFile::GetString(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufValueType::kString) return Invalid(StrCat("the value of ", Quoted(key), " is not a string"));
  return std::string_view(reinterpret_cast<const char*>(value->bytes.data()), value->bytes.size());
}

absl::StatusOr<std::vector<std::string_view>> GgufFile::GetStrings(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  if (value->type != GgufValueType::kArray || value->element != GgufValueType::kString) {
    return Invalid(StrCat("the value of ", Quoted(key), " is not an array of strings"));
  }
  std::vector<std::string_view> strings;
  strings.reserve(value->count);
  Reader reader(value->bytes);
  for (uint64_t i = 0; i < value->count; ++i) {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view text, reader.String(key));
    strings.push_back(text);
  }
  return strings;
}

absl::StatusOr<std::vector<int64_t>> GgufFile::GetIntegers(std::string_view key) const {
  STILLHOUSE_ASSIGN_OR_RETURN(const Value* value, Find(key));
  const uint64_t size = FixedSize(value->element);
  if (value->type != GgufValueType::kArray || size == 0) {
    return Invalid(StrCat("the value of ", Quoted(key), " is not an array of integers"));
  }
  std::vector<int64_t> integers;
  integers.reserve(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    const absl::StatusOr<int64_t> integer = IntegerAt(value->element, value->bytes.data() + i * size);
    if (!integer.ok()) {
      return Invalid(StrCat("element ", i, " of ", Quoted(key), " ", ToStd(integer.status().message())));
    }
    integers.push_back(*integer);
  }
  return integers;
}

const GgufTensor* GgufFile::FindTensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

std::string GgufFile::Sha256() const {
  class Sha256 sha;
  sha.Update(std::string_view(reinterpret_cast<const char*>(bytes_.data()), bytes_.size()));
  return sha.FinishHex();
}

}  // namespace stillhouse
