// Sums and maxima over a warp and over a block, in a fixed order: the same inputs give the same bits.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_REDUCE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_REDUCE_CUH_

#include <cstdint>

namespace stillhouse::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

struct SumOf {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct MaxOf {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Every lane of the full warp takes part and gets the result. kLanes (a power of two) folds groups of that many lanes.
template <int kLanes = kWarp, typename T, typename Fold>
__device__ __forceinline__ T WarpFold(T value, Fold fold) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fold(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}
template <int kLanes = kWarp, typename T>
__device__ __forceinline__ T WarpSum(T value) {
  return WarpFold<kLanes>(value, SumOf());
}
template <int kLanes = kWarp, typename T>
__device__ __forceinline__ T WarpMax(T value) {
  return WarpFold<kLanes>(value, MaxOf());
}

// Every thread of a one-dimensional block of kThreads (a multiple of 32, at most 1024) takes part and gets the result.
// Ends with a barrier, so that calls may follow one another.
template <int kThreads, typename T, typename Fold>
__device__ __forceinline__ T BlockFold(T value, T neutral, Fold fold) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / kWarp;
  value = WarpFold(value, fold);
  if constexpr (kWarps == 1) return value;
  __shared__ T partial[kWarps];
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = threadIdx.x % kWarp < kWarps ? partial[threadIdx.x % kWarp] : neutral;
  value = WarpFold(value, fold);
  __syncthreads();
  return value;
}
template <int kThreads, typename T>
__device__ __forceinline__ T BlockSum(T value) {
  return BlockFold<kThreads>(value, T(0), SumOf());
}
// `neutral` is at most every value: −inf for logits.
template <int kThreads, typename T>
__device__ __forceinline__ T BlockMax(T value, T neutral) {
  return BlockFold<kThreads>(value, neutral, MaxOf());
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_REDUCE_CUH_
