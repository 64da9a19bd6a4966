// Blocks of a cluster, which run at once on neighbouring multiprocessors and read each other's shared memory.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_CLUSTER_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_CLUSTER_CUH_

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// One without a cluster.
__device__ __forceinline__ int ClusterBlocks() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(blocks));
  return static_cast<int>(blocks);
}
__device__ __forceinline__ int ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}

// A barrier of all threads of the cluster that have not ended: what they wrote to shared memory before they arrived
// may be read after the wait.
__device__ __forceinline__ void ClusterArrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
__device__ __forceinline__ void ClusterWait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }

// Where what lies at `shared` in this block lies in block `rank`.
template <typename T>
__device__ __forceinline__ const T* OfBlock(const T* shared, int rank) {
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;\n" : "=l"(there) : "l"(shared), "r"(rank));
  return reinterpret_cast<const T*>(there);
}

// What block `rank` has where `shared` lies in this one.
__device__ __forceinline__ float4 LoadOfBlock(const float* shared, int rank) {
  float4 value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}\n"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(SharedAddress(shared)), "r"(rank)
      : "memory");
  return value;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_CLUSTER_CUH_
