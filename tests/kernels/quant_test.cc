#include "kernels/ops/quant.h"

#include <gtest/gtest.h>

#include "tests/kernels/quant_reference.h"

namespace stillhouse::testing {
namespace {

// One rounding to fp32 is left in a decoded value (d·q + m; everything else is exact).
void ExpectExact(const float* got, const Doubles& want, DType dtype) {
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got[i], static_cast<float>(want[i])) << DTypeName(dtype) << " element " << i;
  }
}

TEST(Dequantize, MatchesDefinitions) {
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  for (DType dtype : kStorageTypes) {
    for (const auto& [rows, blocks] : {std::pair<int64_t, int64_t>{1, 1}, {3, 2}, {7, 5}, {61, 3}, {0, 1}}) {
      const int64_t width = blocks * BlockElements(dtype);
      const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, rows * width);
      const Tensor in = StorageTensor(ctx, bytes, dtype, {rows, width});
      PoisonNext(ctx, {rows, width});
      const std::vector<float> out = ctx.ToFloats(Dequantize(ctx, in));
      ExpectExact(out.data(), StorageValues(dtype, bytes, rows * width), dtype);
    }
  }
}

TEST(DequantizeRow, MatchesDefinitions) {
  std::mt19937 rng = TestRng(2);
  for (DType dtype : kStorageTypes) {
    const int64_t width = 3 * BlockElements(dtype);
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, width);
    std::vector<float> out(static_cast<size_t>(width), NAN);
    DequantizeRow(dtype, bytes.data(), width, out.data());
    ExpectExact(out.data(), StorageValues(dtype, bytes, width), dtype);
  }
}

// Values worked out by hand, so that a mistake shared by the decoder and the definitions above would show.
TEST(DequantizeRow, HandMadeBlocks) {
  std::vector<uint8_t> q4_1 = {0x00, 0x38, 0x00, 0xbc};  // d = 0.5, m = −1
  for (int j = 0; j < 16; ++j) q4_1.push_back(static_cast<uint8_t>(j | (15 - j) << 4));
  std::vector<float> out(32);
  DequantizeRow(DType::kQ4_1, q4_1.data(), 32, out.data());
  for (int j = 0; j < 16; ++j) {
    EXPECT_EQ(out[j], 0.5f * j - 1.0f);
    EXPECT_EQ(out[j + 16], 0.5f * (15 - j) - 1.0f);
  }
  std::vector<uint8_t> q8_0 = {0x00, 0xc0};  // d = −2
  for (int j = 0; j < 32; ++j) q8_0.push_back(static_cast<uint8_t>(j - 16));
  DequantizeRow(DType::kQ8_0, q8_0.data(), 32, out.data());
  for (int j = 0; j < 32; ++j) EXPECT_EQ(out[j], -2.0f * (j - 16));
}

TEST(HalfToFloat, AllValues) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const double want = HalfValue(static_cast<uint16_t>(h));
    const float got = HalfToFloat(static_cast<uint16_t>(h));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << h;
    } else {
      EXPECT_EQ(got, static_cast<float>(want)) << h;
      EXPECT_EQ(std::signbit(got), (h & 0x8000) != 0) << h;
      EXPECT_EQ(FloatToHalf(got), h);
    }
  }
  EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(NAN))));
}

TEST(FloatToHalf, RoundsToNearestEven) {
  // Halfway points between neighbours, and just beside them.
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const double low = HalfValue(static_cast<uint16_t>(h));
    const double high = h + 1 == 0x7c00 ? 65536.0 : HalfValue(static_cast<uint16_t>(h + 1));
    const float middle = static_cast<float>((low + high) / 2);
    const uint16_t even = static_cast<uint16_t>(h % 2 ? h + 1 : h);
    EXPECT_EQ(FloatToHalf(middle), even) << h;
    EXPECT_EQ(FloatToHalf(-middle), even | 0x8000) << h;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), h) << h;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, INFINITY)), h + 1) << h;
  }
  EXPECT_EQ(FloatToHalf(1e30f), 0x7c00);
  EXPECT_EQ(FloatToHalf(-INFINITY), 0xfc00);
}

TEST(FloatToBf16, RoundsToNearestEven) {
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    const float low = Bf16ToFloat(static_cast<uint16_t>(b));
    uint32_t bits = b << 16 | 0x8000;
    float middle;
    std::memcpy(&middle, &bits, 4);
    EXPECT_EQ(FloatToBf16(low), b);
    EXPECT_EQ(FloatToBf16(middle), b % 2 ? b + 1 : b);
    EXPECT_EQ(FloatToBf16(std::nextafter(middle, INFINITY)), b + 1);
    EXPECT_EQ(FloatToBf16(std::nextafter(middle, 0.0f)), b);
  }
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(NAN))));
}

TEST(DequantizeDeathTest, RefusesIntegers) {
  const int32_t row[1] = {1};
  float out[1];
  EXPECT_DEATH(DequantizeRow(DType::kI32, row, 1, out), "does not hold floats");
}

}  // namespace
}  // namespace stillhouse::testing
