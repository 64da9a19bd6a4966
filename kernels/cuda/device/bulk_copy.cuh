// Copies of whole stretches of memory by the bulk copy engine (cp.async.bulk), which end on a barrier in shared memory.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_BULK_COPY_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_BULK_COPY_CUH_

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// How long the L2 cache should keep what is read: as it does by itself, or not at all.
__device__ __forceinline__ uint64_t CachePolicy(bool once) {
  uint64_t policy;
  if (once) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  }
  return policy;
}

// Arrives at a barrier (device/wgmma.cuh), whose phase also waits for so many bytes of copies.
__device__ __forceinline__ void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

// The barrier's phase waits for so many bytes more.
__device__ __forceinline__ void Expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

// By one thread. Both addresses and the size are multiples of 16; whoever waits for the barrier may read.
__device__ __forceinline__ void BulkCopy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_BULK_COPY_CUH_
