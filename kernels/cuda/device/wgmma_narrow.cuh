// Tensor-core products of a warpgroup with few columns (device/wgmma.cuh has the rest).
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_NARROW_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_NARROW_CUH_

#include <cstdint>

namespace stillhouse::cuda {

// The sums of a thread for so many columns as operands of a product: their places in its text, and their registers.
#define STILLHOUSE_WGMMA_SUMS_8 "%0, %1, %2, %3"
#define STILLHOUSE_WGMMA_SUMS_16 STILLHOUSE_WGMMA_SUMS_8 ", %4, %5, %6, %7"
#define STILLHOUSE_WGMMA_SUMS_32 STILLHOUSE_WGMMA_SUMS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define STILLHOUSE_WGMMA_SUMS_48 STILLHOUSE_WGMMA_SUMS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define STILLHOUSE_WGMMA_SUMS_64 STILLHOUSE_WGMMA_SUMS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define STILLHOUSE_WGMMA_SUMS_80 STILLHOUSE_WGMMA_SUMS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define STILLHOUSE_WGMMA_SUMS_96 STILLHOUSE_WGMMA_SUMS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define STILLHOUSE_WGMMA_SUMS_112 STILLHOUSE_WGMMA_SUMS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define STILLHOUSE_WGMMA_SUMS_128 STILLHOUSE_WGMMA_SUMS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define STILLHOUSE_WGMMA_OF(sum, j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define STILLHOUSE_WGMMA_OF_8(sum) STILLHOUSE_WGMMA_OF(sum, 0)
#define STILLHOUSE_WGMMA_OF_16(sum) STILLHOUSE_WGMMA_OF_8(sum), STILLHOUSE_WGMMA_OF(sum, 1)
#define STILLHOUSE_WGMMA_OF_32(sum) \
  STILLHOUSE_WGMMA_OF_16(sum), STILLHOUSE_WGMMA_OF(sum, 2), STILLHOUSE_WGMMA_OF(sum, 3)
#define STILLHOUSE_WGMMA_OF_48(sum) \
  STILLHOUSE_WGMMA_OF_32(sum), STILLHOUSE_WGMMA_OF(sum, 4), STILLHOUSE_WGMMA_OF(sum, 5)
#define STILLHOUSE_WGMMA_OF_64(sum) \
  STILLHOUSE_WGMMA_OF_48(sum), STILLHOUSE_WGMMA_OF(sum, 6), STILLHOUSE_WGMMA_OF(sum, 7)
#define STILLHOUSE_WGMMA_OF_80(sum) \
  STILLHOUSE_WGMMA_OF_64(sum), STILLHOUSE_WGMMA_OF(sum, 8), STILLHOUSE_WGMMA_OF(sum, 9)
#define STILLHOUSE_WGMMA_OF_96(sum) \
  STILLHOUSE_WGMMA_OF_80(sum), STILLHOUSE_WGMMA_OF(sum, 10), STILLHOUSE_WGMMA_OF(sum, 11)
#define STILLHOUSE_WGMMA_OF_112(sum) \
  STILLHOUSE_WGMMA_OF_96(sum), STILLHOUSE_WGMMA_OF(sum, 12), STILLHOUSE_WGMMA_OF(sum, 13)
#define STILLHOUSE_WGMMA_OF_128(sum) \
  STILLHOUSE_WGMMA_OF_112(sum), STILLHOUSE_WGMMA_OF(sum, 14), STILLHOUSE_WGMMA_OF(sum, 15)

// sum[64×8·kN] += a[64×16] · bᵀ[8·kN×16], both in shared memory with the summed dimension along their rows. sum[n] is
// columns 8·n … as WarpgroupDot has them. a and b have the places after the sums.
#define STILLHOUSE_WGMMA_DOT(columns, a_place, b_place)                                                             \
  __device__ __forceinline__ void WarpgroupDotNarrow(float(&sum)[columns / 8][4], uint64_t a, uint64_t b) {         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" STILLHOUSE_WGMMA_SUMS_##columns \
                 "}, " a_place ", " b_place ", 1, 1, 1, 0, 0;\n"                                                    \
                 : STILLHOUSE_WGMMA_OF_##columns(sum)                                                               \
                 : "l"(a), "l"(b));                                                                                 \
  }
STILLHOUSE_WGMMA_DOT(8, "%4", "%5")
STILLHOUSE_WGMMA_DOT(16, "%8", "%9")
STILLHOUSE_WGMMA_DOT(32, "%16", "%17")
STILLHOUSE_WGMMA_DOT(48, "%24", "%25")
STILLHOUSE_WGMMA_DOT(64, "%32", "%33")
STILLHOUSE_WGMMA_DOT(80, "%40", "%41")
STILLHOUSE_WGMMA_DOT(96, "%48", "%49")
STILLHOUSE_WGMMA_DOT(112, "%56", "%57")
STILLHOUSE_WGMMA_DOT(128, "%64", "%65")
#undef STILLHOUSE_WGMMA_DOT
#undef STILLHOUSE_WGMMA_OF
#undef STILLHOUSE_WGMMA_SUMS_8
#undef STILLHOUSE_WGMMA_SUMS_16
#undef STILLHOUSE_WGMMA_SUMS_32
#undef STILLHOUSE_WGMMA_SUMS_48
#undef STILLHOUSE_WGMMA_SUMS_64
#undef STILLHOUSE_WGMMA_SUMS_80
#undef STILLHOUSE_WGMMA_SUMS_96
#undef STILLHOUSE_WGMMA_SUMS_112
#undef STILLHOUSE_WGMMA_SUMS_128
#undef STILLHOUSE_WGMMA_OF_8
#undef STILLHOUSE_WGMMA_OF_16
#undef STILLHOUSE_WGMMA_OF_32
#undef STILLHOUSE_WGMMA_OF_48
#undef STILLHOUSE_WGMMA_OF_64
#undef STILLHOUSE_WGMMA_OF_80
#undef STILLHOUSE_WGMMA_OF_96
#undef STILLHOUSE_WGMMA_OF_112
#undef STILLHOUSE_WGMMA_OF_128

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
