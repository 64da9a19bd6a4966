// Tensor-core products of a warpgroup with few columns (device/wgmma.cuh has the rest).
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_NARROW_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_NARROW_CUH_

#include <cstdint>

namespace stillhouse::cuda {

// sum[64×8·kN] += a[64×16] · bᵀ[8·kN×16], both in shared memory with the summed dimension along their rows. sum[n] is
// columns 8·n … as WarpgroupDot has them.
__device__ __forceinline__ void WarpgroupDotNarrow(float (&sum)[1][4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
               : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3])
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void WarpgroupDotNarrow(float (&sum)[2][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;\n"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]), "+f"(sum[1][1]),
        "+f"(sum[1][2]), "+f"(sum[1][3])
      : "l"(a), "l"(b));
}

// sum[64×64] (+)= a[64×16] · b[16×64], a with the summed dimension along its rows, b with it down its rows (kDown), or
// as bᵀ with it along them.
template <bool kDown>
__device__ __forceinline__ void WarpgroupMultiplyAdd(float (&sum)[8][4], uint64_t a, uint64_t b, bool add = true) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %35, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, "
      "1, 0, %34;\n}\n"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]), "+f"(sum[1][1]),
        "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),
        "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]),
        "+f"(sum[4][2]), "+f"(sum[4][3]), "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),
        "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]),
        "+f"(sum[7][2]), "+f"(sum[7][3])
      : "l"(a), "l"(b), "n"(kDown ? 1 : 0), "r"(static_cast<int>(add)));
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_NARROW_CUH_
