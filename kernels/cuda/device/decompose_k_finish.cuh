// What becomes of an element of a product that is complete.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_DECOMPOSE_K_FINISH_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_DECOMPOSE_K_FINISH_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/cuda/decompose_k_launch.h"

namespace stillhouse::cuda {

__device__ __forceinline__ float Finish(const DecomposeKShape& s, int64_t n, float c) {
  switch (s.op) {
    case ElementOp::kNone:
      return c;
    case ElementOp::kRelu:
      return c > 0.0f ? c : c != c ? c : 0.0f;
    case ElementOp::kSilu:
      return c / (1.0f + std::exp(-c));
    case ElementOp::kSigmoid:
      return 1.0f / (1.0f + std::exp(-c));
    case ElementOp::kScaleBias:
      return s.scale * c + (s.bias ? s.bias[n] : 0.0f);
  }
  return c;
}

// Where an element goes, and what it is added to: asked for before its sum is known.
__device__ __forceinline__ float* PlaceOf(const DecomposeKShape& s, int64_t row, int64_t n) {
  return s.out + row * s.out_stride + n;
}
__device__ __forceinline__ float Before(const DecomposeKShape& s, int64_t row, int64_t n) {
  return s.add ? *PlaceOf(s, row, n) : 0.0f;
}
__device__ __forceinline__ void Store(const DecomposeKShape& s, int64_t row, int64_t n, float c, float before) {
  *PlaceOf(s, row, n) = Finish(s, n, c) + before;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_DECOMPOSE_K_FINISH_CUH_
