// How much room selecting the k best of a row takes.
#ifndef STILLHOUSE_KERNELS_CUDA_SELECT_ROOM_H_
#define STILLHOUSE_KERNELS_CUDA_SELECT_ROOM_H_

#include <cstdint>

#ifdef __CUDACC__
#define STILLHOUSE_SELECT_INLINE __host__ __device__ inline
#else
#define STILLHOUSE_SELECT_INLINE inline
#endif

namespace stillhouse::cuda {

// Entries (8 bytes each) that a block keeps in shared memory: 32 KiB.
inline constexpr int64_t kSelectRoom = 4096;

STILLHOUSE_SELECT_INLINE int64_t PowerOfTwoAtLeast(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Entries of global scratch that a row needs beside it.
STILLHOUSE_SELECT_INLINE int64_t SelectListRoom(int64_t k) { return k <= kSelectRoom ? 0 : PowerOfTwoAtLeast(k); }

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SELECT_ROOM_H_
