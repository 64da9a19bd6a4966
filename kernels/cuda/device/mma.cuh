// Tensor-core products of one warp: bf16 operands, fp32 sums (mma.sync m16n8k16), and the loads that feed them.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// Four 8×8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of each matrix,
// the elements 2·(l % 4) and 2·(l % 4) + 1 of row l / 4.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], uint32_t shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_row)
               : "memory");
}
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* shared_row) {
  LoadMatrices(to, SharedAddress(shared_row));
}

// The same of the transposed matrices.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&to)[4], uint32_t shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_row)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&to)[4], const void* shared_row) {
  LoadMatricesTransposed(to, SharedAddress(shared_row));
}

// An 8×8 matrix of 16-bit elements, a pair to a lane as LoadMatrices gives them, transposed.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t pair) {
  uint32_t to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(to) : "r"(pair));
  return to;
}

// sum[16×8] += a[16×16] · b[16×8]. With g = lane / 4 and t = lane % 4: a holds the pairs (g, 2t), (g + 8, 2t),
// (g, 2t + 8), (g + 8, 2t + 8); b the pairs of rows 2t and 2t + 8 of column g; sum (g, 2t), (g, 2t + 1), (g + 8, …).
__device__ __forceinline__ void MultiplyAdd(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as a pair of bf16, the first in the lower half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 2^x to about 2 ulp; 0 for −inf.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_CUH_
