#include "kernels/ops/quant.h"

#include <stdint.h>
#include <string.h>

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

float HalfToFloat(uint16_t half) {
  // Exponent and mantissa moved into place and rescaled by 2^112: exact, denormals included; then infinities and NaNs.
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float f;
  memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  memcpy(&bits, &f, 4);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t FloatToHalf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x1ff));  // NaN, quiet
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);                        // rounds to infinity
  if (bits < 0x38800000) {
    // Below 2^-14 a half counts in steps of 2^-24: adding 0.5 leaves that count, rounded to even, in the low bits.
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

float Bf16ToFloat(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t FloatToBf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN, quiet
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace {

inline float DecodeHalf(uint16_t half) { return HalfToFloat(half); }
#include "kernels/ops/quant_blocks.inc"

}  // namespace

void DequantizeRow(DType dtype, const void* row, int64_t elements, float* out) {
  STILLHOUSE_CHECK_EQ(elements % BlockElements(dtype), 0);
  STILLHOUSE_CHECK(DecodeRow(dtype, row, elements, out)) << DTypeName(dtype) << " does not hold floats";
}

Tensor Dequantize(const Context& ctx, const Tensor& in) {
  Tensor out = ctx.EmptyF32(in.shape());
  ctx.kernels().Dequantize(*ctx.backend, {in, out});
  return out;
}

}  // namespace stillhouse
