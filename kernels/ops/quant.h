// Quantised storage to floats: the GGUF block formats, and half-precision.
#ifndef STILLHOUSE_KERNELS_OPS_QUANT_H_
#define STILLHOUSE_KERNELS_OPS_QUANT_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// out[i, :] = decoded in[i, :]; in [N, K] or [N] of any dtype, contiguous; out f32 of the same shape. Exact: every
// format's value is a product of an fp16 scale and small integers, evaluated in fp32.
struct DequantizeArgs {
  Tensor in, out;
};
Tensor Dequantize(const Context& ctx, const Tensor& in);

// One row on the host (any dtype): `elements` is a multiple of the block.
void DequantizeRow(DType dtype, const void* row, int64_t elements, float* out);

float HalfToFloat(uint16_t half);
uint16_t FloatToHalf(float value);  // round to nearest even
float Bf16ToFloat(uint16_t value);
uint16_t FloatToBf16(float value);  // round to nearest even

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_QUANT_H_
