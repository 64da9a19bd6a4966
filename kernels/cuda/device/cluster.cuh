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
// Of the grid's clusters along its first dimension; the block's index without clusters.
__device__ __forceinline__ int ClusterIndex() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return static_cast<int>(index);
}

// A barrier of all threads of the cluster that have not ended: what they wrote to shared memory before they arrived
// may be read after the wait.
__device__ __forceinline__ void ClusterArrive() { asm volatile("barrier.cluster.arrive.release;\n" ::: "memory"); }
// The same for threads that wrote nothing that others read, but for barriers in shared memory (FenceBarrierInit).
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
}
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

// The same as an address in the cluster's shared memory.
__device__ __forceinline__ uint32_t AddressInBlock(const void* shared, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(SharedAddress(shared)), "r"(rank));
  return there;
}

// Writes to another block's shared memory, and counts the bytes at a barrier of that block: whoever waits there, with
// WaitPhase (device/wgmma.cuh), may read them. Neither block waits for the other.
__device__ __forceinline__ void PushToBlock(uint32_t to, uint32_t barrier, const float4& value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(to),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void PushToBlock(uint32_t to, uint32_t barrier, const float2& value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n" ::"r"(to),
               "f"(value.x), "f"(value.y), "r"(barrier)
               : "memory");
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_CLUSTER_CUH_
