#include "tests/support/gguf_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "kernels/base/logging.h"

namespace stillhouse::testing {
namespace {

template <typename T>
void Append(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendString(std::string* out, std::string_view text) {
  Append<uint64_t>(out, text.size());
  out->append(text);
}

void AppendQ8_0(std::string* out, const float* x) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[i]));
  const uint16_t d = FloatToHalf(largest / 127);
  const float scale = HalfToFloat(d);
  Append(out, d);
  for (int i = 0; i < 32; ++i) {
    const float q = scale == 0 ? 0 : std::round(x[i] / scale);
    Append(out, static_cast<int8_t>(std::clamp(q, -127.0f, 127.0f)));
  }
}

void AppendQ4_1(std::string* out, const float* x) {
  const auto [low, high] = std::minmax_element(x, x + 32);
  const uint16_t d = FloatToHalf((*high - *low) / 15);
  const uint16_t m = FloatToHalf(*low);
  const float scale = HalfToFloat(d);
  const float offset = HalfToFloat(m);
  const auto quantize = [&](float v) {
    return scale == 0 ? 0 : static_cast<int>(std::clamp(std::round((v - offset) / scale), 0.0f, 15.0f));
  };
  Append(out, d);
  Append(out, m);
  for (int j = 0; j < 16; ++j) Append(out, static_cast<uint8_t>(quantize(x[j]) | quantize(x[j + 16]) << 4));
}

}  // namespace

uint16_t FloatToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0f)) return sign | (std::isnan(value) ? 0x7E00 : 0x7C00);
  if (magnitude < std::ldexp(1.0f, -14)) {
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));  // subnormal
  }
  int exponent = 0;
  const float fraction = std::frexp(magnitude, &exponent);                          // in [0.5, 1)
  auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(fraction, 11)));  // 1024..2048
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + (mantissa - 1024));
}

float HalfToFloat(uint16_t half) {
  const float sign = (half & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (half >> 10) & 31;
  const int mantissa = half & 1023;
  if (exponent == 31) return mantissa != 0 ? std::nanf("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

void GgufWriter::AddRaw(std::string_view key, uint32_t type, std::string_view value_bytes) {
  entries_.push_back({std::string(key), type, std::string(value_bytes)});
}

void GgufWriter::SetRaw(std::string_view key, uint32_t type, std::string_view value_bytes) {
  for (Entry& entry : entries_) {
    if (entry.key != key) continue;
    entry.type = type;
    entry.value = value_bytes;
    return;
  }
  AddRaw(key, type, value_bytes);
}

void GgufWriter::SetString(std::string_view key, std::string_view value) {
  std::string bytes;
  AppendString(&bytes, value);
  SetRaw(key, static_cast<uint32_t>(GgufValueType::kString), bytes);
}

void GgufWriter::RenameKeys(std::string_view prefix, std::string_view replacement) {
  for (Entry& entry : entries_) {
    if (entry.key.starts_with(prefix)) entry.key = std::string(replacement) + entry.key.substr(prefix.size());
  }
}

void GgufWriter::RemoveTensor(std::string_view name) {
  std::erase_if(tensors_, [&](const TensorEntry& tensor) { return tensor.name == name; });
}

void GgufWriter::AddU32(std::string_view key, uint32_t value) {
  std::string bytes;
  Append(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kU32), bytes);
}

void GgufWriter::AddU64(std::string_view key, uint64_t value) {
  std::string bytes;
  Append(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kU64), bytes);
}

void GgufWriter::AddI32(std::string_view key, int32_t value) {
  std::string bytes;
  Append(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kI32), bytes);
}

void GgufWriter::AddF32(std::string_view key, float value) {
  std::string bytes;
  Append(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kF32), bytes);
}

void GgufWriter::AddBool(std::string_view key, bool value) {
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kBool), std::string(1, value ? '\1' : '\0'));
}

void GgufWriter::AddString(std::string_view key, std::string_view value) {
  std::string bytes;
  AppendString(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kString), bytes);
}

void GgufWriter::AddStrings(std::string_view key, const std::vector<std::string>& values) {
  std::string bytes;
  Append(&bytes, static_cast<uint32_t>(GgufValueType::kString));
  Append<uint64_t>(&bytes, values.size());
  for (const std::string& value : values) AppendString(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kArray), bytes);
}

void GgufWriter::AddI32s(std::string_view key, const std::vector<int32_t>& values) {
  std::string bytes;
  Append(&bytes, static_cast<uint32_t>(GgufValueType::kI32));
  Append<uint64_t>(&bytes, values.size());
  for (const int32_t value : values) Append(&bytes, value);
  AddRaw(key, static_cast<uint32_t>(GgufValueType::kArray), bytes);
}

void GgufWriter::AddRawTensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, std::string data) {
  tensors_.push_back({std::string(name), std::move(dims), type, std::move(data)});
}

void GgufWriter::AddTensor(std::string_view name, std::vector<uint64_t> dims, GgufType type,
                           const std::vector<float>& values) {
  std::string data;
  const GgufTypeTraits traits = TraitsOf(type);
  STILLHOUSE_CHECK(values.size() % traits.block_elements == 0) << name;
  for (size_t i = 0; i < values.size(); i += traits.block_elements) {
    switch (type) {
      case GgufType::kF32:
        Append(&data, values[i]);
        break;
      case GgufType::kF16:
        Append(&data, FloatToHalf(values[i]));
        break;
      case GgufType::kQ8_0:
        AppendQ8_0(&data, &values[i]);
        break;
      case GgufType::kQ4_1:
        AppendQ4_1(&data, &values[i]);
        break;
      default:
        STILLHOUSE_CHECK(false) << "the writer does not quantise to " << traits.name;
    }
  }
  AddRawTensor(name, std::move(dims), static_cast<uint32_t>(type), std::move(data));
}

std::string GgufWriter::Serialize() const {
  std::string out = "GGUF";
  Append<uint32_t>(&out, version_);
  Append<uint64_t>(&out, tensors_.size());
  Append<uint64_t>(&out, entries_.size());
  for (const Entry& entry : entries_) {
    AppendString(&out, entry.key);
    Append(&out, entry.type);
    out += entry.value;
  }
  const auto align = [this](size_t n) { return (n + alignment_ - 1) / alignment_ * alignment_; };
  size_t offset = 0;
  for (const TensorEntry& tensor : tensors_) {
    AppendString(&out, tensor.name);
    Append(&out, static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) Append(&out, dim);
    Append(&out, tensor.type);
    Append<uint64_t>(&out, offset);
    offset = align(offset + tensor.data.size());
  }
  for (const TensorEntry& tensor : tensors_) {
    out.resize(align(out.size()));
    out += tensor.data;
  }
  return out;
}

absl::Status GgufWriter::WriteFile(const std::string& path) const {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::string bytes = Serialize();
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) return absl::InternalError("cannot write " + path);
  return absl::OkStatus();
}

}  // namespace stillhouse::testing
