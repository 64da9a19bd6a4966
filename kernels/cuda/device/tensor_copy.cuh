// Boxes of matrices copied to shared memory by the copy engine (TMA), counted by a barrier there.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// The map's box whose first element is (row, column); elements outside the matrix are zeros.
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap* map, int row, int column, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];\n" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same to the same place in the first two blocks of the cluster, counted by the barrier of each.
__device__ __forceinline__ void CopyBoxToBoth(void* shared, const CUtensorMap* map, int row, int column,
                                              uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;\n" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Arrives at a block's barrier at the same place as this one.
__device__ __forceinline__ void ArriveAt(uint64_t* barrier, int block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(SharedAddress(barrier)),
      "r"(block)
      : "memory");
}

__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_TENSOR_COPY_CUH_
