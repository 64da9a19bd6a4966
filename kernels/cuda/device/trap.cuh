// Bad data that only the device sees: a line on standard output, and the kernel stops. The error is sticky, so the next
// checked call ends the process.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_TRAP_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_TRAP_CUH_

#include <cstdint>
#include <cstdio>

namespace stillhouse::cuda {

__device__ __noinline__ inline void IndexTrap(int64_t index, int64_t limit) {
  printf("check failed: index %lld of %lld in a CUDA kernel\n", static_cast<long long>(index),
         static_cast<long long>(limit));
  __trap();
}

// `index` itself, if it lies in [0, limit).
__device__ __forceinline__ int64_t CheckedIndex(int64_t index, int64_t limit) {
  if (index < 0 || index >= limit) IndexTrap(index, limit);
  return index;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_TRAP_CUH_
