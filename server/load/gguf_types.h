#ifndef STILLHOUSE_SERVER_LOAD_GGUF_TYPES_H_
#define STILLHOUSE_SERVER_LOAD_GGUF_TYPES_H_

#include <cstdint>
#include <optional>
#include <string_view>

namespace stillhouse {

// Tensor types of a GGUF file that this server reads, with the ids of the format.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBf16 = 30,
};

struct GgufTypeTraits {
  std::string_view name;
  uint32_t block_elements;  // a row holds a whole number of blocks
  uint32_t block_bytes;
};

// No value for an id that is not a GgufType.
constexpr std::optional<GgufTypeTraits> FindGgufType(uint32_t id) {
  switch (static_cast<GgufType>(id)) {
    case GgufType::kF32:
      return GgufTypeTraits{"F32", 1, 4};
    case GgufType::kF16:
      return GgufTypeTraits{"F16", 1, 2};
    case GgufType::kBf16:
      return GgufTypeTraits{"BF16", 1, 2};
    case GgufType::kQ4_0:
      return GgufTypeTraits{"Q4_0", 32, 18};
    case GgufType::kQ4_1:
      return GgufTypeTraits{"Q4_1", 32, 20};
    case GgufType::kQ5_0:
      return GgufTypeTraits{"Q5_0", 32, 22};
    case GgufType::kQ5_1:
      return GgufTypeTraits{"Q5_1", 32, 24};
    case GgufType::kQ8_0:
      return GgufTypeTraits{"Q8_0", 32, 34};
    case GgufType::kQ2_K:
      return GgufTypeTraits{"Q2_K", 256, 84};
    case GgufType::kQ3_K:
      return GgufTypeTraits{"Q3_K", 256, 110};
    case GgufType::kQ4_K:
      return GgufTypeTraits{"Q4_K", 256, 144};
    case GgufType::kQ5_K:
      return GgufTypeTraits{"Q5_K", 256, 176};
    case GgufType::kQ6_K:
      return GgufTypeTraits{"Q6_K", 256, 210};
  }
  return std::nullopt;
}

constexpr GgufTypeTraits TraitsOf(GgufType type) { return *FindGgufType(static_cast<uint32_t>(type)); }

// Types of key/value entries.
enum class GgufValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_LOAD_GGUF_TYPES_H_
