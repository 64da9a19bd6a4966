// Every storage type's value of one element, in fp64, written from the definitions of the formats element by element;
// and rows of random blocks.
#ifndef STILLHOUSE_TESTS_KERNELS_QUANT_REFERENCE_H_
#define STILLHOUSE_TESTS_KERNELS_QUANT_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/tensor/dtype.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {

inline constexpr DType kStorageTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0, DType::kQ4_1,
                                          DType::kQ5_0, DType::kQ5_1, DType::kQ8_0, DType::kQ2_K, DType::kQ3_K,
                                          DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

// IEEE binary16 by its definition.
inline double HalfValue(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

inline double HalfAt(const uint8_t* p) { return HalfValue(static_cast<uint16_t>(p[0] | p[1] << 8)); }
inline int BitOf(const uint8_t* p, int bit) { return p[bit / 8] >> (bit % 8) & 1; }

// The six-bit (scale, min) pair j of Q4_K and Q5_K.
inline int KScaleOf(const uint8_t* s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4; }
inline int KMinOf(const uint8_t* s, int j) { return j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4; }

// Element e of one block.
inline double BlockValue(DType dtype, const uint8_t* b, int e) {
  // 32-element blocks: byte j holds element j low, j + 16 high.
  const auto nibble = [e](const uint8_t* q) { return e < 16 ? q[e] & 15 : q[e - 16] >> 4; };
  // 256-element blocks.
  const int half = e / 128, group = e % 128 / 32, l = e % 32, sixteenth = e / 16;
  switch (dtype) {
    case DType::kF32: {
      float f;
      std::memcpy(&f, b, 4);
      return f;
    }
    case DType::kF16:
      return HalfAt(b);
    case DType::kBF16: {
      const uint32_t bits = static_cast<uint32_t>(b[0] | b[1] << 8) << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    }
    case DType::kQ4_0:
      return HalfAt(b) * (nibble(b + 2) - 8);
    case DType::kQ4_1:
      return HalfAt(b) * nibble(b + 4) + HalfAt(b + 2);
    case DType::kQ5_0:
      return HalfAt(b) * (nibble(b + 6) + 16 * BitOf(b + 2, e) - 16);
    case DType::kQ5_1:
      return HalfAt(b) * (nibble(b + 8) + 16 * BitOf(b + 4, e)) + HalfAt(b + 2);
    case DType::kQ8_0:
      return HalfAt(b) * static_cast<int8_t>(b[2 + e]);
    case DType::kQ2_K: {
      const int q = b[16 + 32 * half + l] >> (2 * group) & 3;
      return HalfAt(b + 80) * (b[sixteenth] & 15) * q - HalfAt(b + 82) * (b[sixteenth] >> 4);
    }
    case DType::kQ3_K: {
      const uint8_t* s = b + 96;
      const int low = sixteenth < 8 ? s[sixteenth] & 15 : s[sixteenth - 8] >> 4;
      const int scale = low + 16 * (s[8 + sixteenth % 4] >> (2 * (sixteenth / 4)) & 3);
      const int q = b[32 + 32 * half + l] >> (2 * group) & 3;
      const int h = b[l] >> (e / 32) & 1;
      return HalfAt(b + 108) * (scale - 32) * (q - (h ? 0 : 4));
    }
    case DType::kQ4_K:
    case DType::kQ5_K: {
      const bool five = dtype == DType::kQ5_K;
      const int j = e / 32;
      const uint8_t* qs = b + (five ? 48 : 16) + 32 * (e / 64);
      int q = j % 2 ? qs[l] >> 4 : qs[l] & 15;
      if (five) q += 16 * (b[16 + l] >> j & 1);
      return HalfAt(b) * KScaleOf(b + 4, j) * q - HalfAt(b + 2) * KMinOf(b + 4, j);
    }
    case DType::kQ6_K: {
      const uint8_t* ql = b + 64 * half + (group % 2) * 32;
      const int low = group < 2 ? ql[l] & 15 : ql[l] >> 4;
      const int high = b[128 + 32 * half + l] >> (2 * group) & 3;
      return HalfAt(b + 208) * static_cast<int8_t>(b[192 + sixteenth]) * (low + 16 * high - 32);
    }
    default:
      return std::nan("");
  }
}

// Offsets of the fp16 scales in a block.
inline std::vector<int> HalfOffsets(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kQ4_0:
    case DType::kQ5_0:
    case DType::kQ8_0:
      return {0};
    case DType::kQ4_1:
    case DType::kQ5_1:
    case DType::kQ4_K:
    case DType::kQ5_K:
      return {0, 2};
    case DType::kQ2_K:
      return {80, 82};
    case DType::kQ3_K:
      return {108};
    case DType::kQ6_K:
      return {208};
    default:
      return {};
  }
}

// `elements` of random storage: all bits random, except that scales are halves of either sign within [2^-10, 2^-4), and
// floats are normal numbers.
inline std::vector<uint8_t> RandomStorage(std::mt19937& rng, DType dtype, int64_t elements) {
  std::vector<uint8_t> bytes(static_cast<size_t>(RowBytes(dtype, elements)));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  const int64_t step = BlockBytes(dtype);
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(step)) {
    for (int offset : HalfOffsets(dtype)) {
      const uint32_t r = rng();
      const uint16_t half = static_cast<uint16_t>((r & 0x83ff) | (5 + (r >> 16) % 6) << 10);
      std::memcpy(&bytes[at + static_cast<size_t>(offset)], &half, 2);
    }
    if (dtype == DType::kF32 || dtype == DType::kBF16) {
      const float f = std::normal_distribution<float>()(rng);
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      if (dtype == DType::kBF16) bits >>= 16;
      std::memcpy(&bytes[at], &bits, static_cast<size_t>(step));
    }
  }
  return bytes;
}

inline Doubles StorageValues(DType dtype, const std::vector<uint8_t>& bytes, int64_t elements) {
  Doubles values(static_cast<size_t>(elements));
  const int64_t block = BlockElements(dtype);
  for (int64_t i = 0; i < elements; ++i) {
    values[static_cast<size_t>(i)] =
        BlockValue(dtype, &bytes[static_cast<size_t>(i / block * BlockBytes(dtype))], static_cast<int>(i % block));
  }
  return values;
}

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_KERNELS_QUANT_REFERENCE_H_
