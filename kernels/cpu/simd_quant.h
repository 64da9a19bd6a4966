// Decoders of one instruction set (see lanes.h). Included only by isa_*.cc.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_QUANT_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_QUANT_H_

#include "kernels/cpu/lanes.h"
#include "kernels/tensor/dtype.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

STILLHOUSE_INLINE float DecodeHalf(uint16_t half) { return HalfToFloat1(half); }
#include "kernels/ops/quant_blocks.inc"

static void Dequantize(DType dtype, const void* row, int64_t n, float* out) {
  if (dtype == DType::kF16) {
    const uint16_t* in = (const uint16_t*)row;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Store(out + i, LoadHalf(in + i));
    for (; i < n; ++i) out[i] = HalfToFloat1(in[i]);
    return;
  }
  if (!DecodeRow(dtype, row, n, out)) __builtin_trap();
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_QUANT_H_
