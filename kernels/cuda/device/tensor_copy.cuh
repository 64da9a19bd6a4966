// Boxes of matrices copied to shared memory by the copy engine (TMA), counted by a barrier there.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// The map's box whose first element is (row, column); elements outside the matrix are zeros. `policy`: what the L2
// cache keeps of it (CachePolicy, device/bulk_copy.cuh).
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap* map, int row, int column, uint64_t* barrier,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4}], [%2], %5;\n" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap* map, int row, int column, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];\n" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row)
      : "memory");
}

// To the blocks of the cluster in `blocks` (a bit each), where `shared` and `barrier` lie in each of them.
__device__ __forceinline__ void CopyBoxToBlocks(void* shared, const CUtensorMap* map, int row, int column,
                                                uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;\n" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_
