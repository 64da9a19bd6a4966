// Sizes of launches.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_GRID_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_GRID_CUH_

#include <cstdint>

namespace stillhouse::cuda {

__host__ __device__ constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of a one-dimensional grid over `items`, `per_block` each; 0 items need no launch, so callers return before.
// Kernels walk with a grid stride, so the cap (a few waves of the largest GPU) only bounds the launch.
inline unsigned GridFor(int64_t items, int64_t per_block, int64_t cap = 65536) {
  const int64_t blocks = CeilDiv(items, per_block);
  return static_cast<unsigned>(blocks < cap ? blocks : cap);
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_GRID_CUH_
