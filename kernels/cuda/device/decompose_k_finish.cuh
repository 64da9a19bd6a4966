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

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_DECOMPOSE_K_FINISH_CUH_
