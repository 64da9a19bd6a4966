// Tensor-core products of a warpgroup (wgmma, sm_90a), the barriers that feed them, and registers handed between
// warpgroups.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_CUH_

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// A matrix of bf16 in shared memory in blocks of 64 columns: rows of 128 bytes, whose 16-byte chunks are rotated by the
// row (chunk ^ row % 8); blocks begin at multiples of 1024 bytes, `block_bytes` apart. Matters where the columns are
// the dimension that is not summed over; otherwise a product reads within one block.
__device__ __forceinline__ uint64_t MatrixDescriptor(const void* shared, int block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (static_cast<uint64_t>(block_bytes >> 4) << 16) |
         ((SharedAddress(shared) & 0x3ffff) >> 4);
}

// That of what lies so many bytes on.
__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// The 64 sums of a thread as operands of a product: their places in its text, and their registers.
#define STILLHOUSE_WGMMA_SUMS                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define STILLHOUSE_WGMMA_MORE_SUMS                                                       \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "               \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "               \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "         \
  "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define STILLHOUSE_WGMMA_REGISTERS(sum)                                                                           \
  "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]), "+f"(sum[1][1]),           \
      "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]),       \
      "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]),       \
      "+f"(sum[4][2]), "+f"(sum[4][3]), "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]),       \
      "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]),       \
      "+f"(sum[7][2]), "+f"(sum[7][3]), "+f"(sum[8][0]), "+f"(sum[8][1]), "+f"(sum[8][2]), "+f"(sum[8][3]),       \
      "+f"(sum[9][0]), "+f"(sum[9][1]), "+f"(sum[9][2]), "+f"(sum[9][3]), "+f"(sum[10][0]), "+f"(sum[10][1]),     \
      "+f"(sum[10][2]), "+f"(sum[10][3]), "+f"(sum[11][0]), "+f"(sum[11][1]), "+f"(sum[11][2]), "+f"(sum[11][3]), \
      "+f"(sum[12][0]), "+f"(sum[12][1]), "+f"(sum[12][2]), "+f"(sum[12][3]), "+f"(sum[13][0]), "+f"(sum[13][1]), \
      "+f"(sum[13][2]), "+f"(sum[13][3]), "+f"(sum[14][0]), "+f"(sum[14][1]), "+f"(sum[14][2]), "+f"(sum[14][3]), \
      "+f"(sum[15][0]), "+f"(sum[15][1]), "+f"(sum[15][2]), "+f"(sum[15][3])

// sum[64×128] (+)= a[64×16] · bᵀ[128×16]: both with the summed dimension along their rows. Warp w of the warpgroup
// holds rows 16·w …; sum[n] are columns 8·n … as MultiplyAdd has them (device/mma.cuh).
__device__ __forceinline__ void WarpgroupDot(float (&sum)[16][4], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" STILLHOUSE_WGMMA_SUMS "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : STILLHOUSE_WGMMA_REGISTERS(sum)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// sum[64×128] += a[64×16] · b[16×128], a in registers (as MultiplyAdd's), b with the summed dimension down its rows.
__device__ __forceinline__ void WarpgroupAccumulate(float (&sum)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" STILLHOUSE_WGMMA_SUMS
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : STILLHOUSE_WGMMA_REGISTERS(sum)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// WarpgroupDot with 256 rows of b: the sums of the first 128, and of the others.
__device__ __forceinline__ void WarpgroupDotPair(float (&first)[16][4], float (&second)[16][4], uint64_t a, uint64_t b,
                                                 bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" STILLHOUSE_WGMMA_SUMS ", " STILLHOUSE_WGMMA_MORE_SUMS
      "}, %128, %129, p, 1, 1, 0, 0;\n}\n"
      : STILLHOUSE_WGMMA_REGISTERS(first), STILLHOUSE_WGMMA_REGISTERS(second)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
#undef STILLHOUSE_WGMMA_SUMS
#undef STILLHOUSE_WGMMA_MORE_SUMS
#undef STILLHOUSE_WGMMA_REGISTERS

// Before the first product after registers of its sums were written; after the last product of a group; and until at
// most the last kPending groups are under way.
__device__ __forceinline__ void WarpgroupBegin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void WarpgroupCommit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WarpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Sums may be read only after the wait: keeps the compiler from moving reads up.
template <int kN>
__device__ __forceinline__ void HoldSums(float (&sum)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sum[n][e])::"memory");
  }
}

// What was written to shared memory by ordinary stores or copies is seen by the tensor cores.
__device__ __forceinline__ void FenceForTensorCores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// A barrier of a warpgroup: ids from 1.
__device__ __forceinline__ void WarpgroupBarrier(int id) { asm volatile("bar.sync %0, 128;\n" ::"r"(id) : "memory"); }

// A barrier between warps: kThreads of them wait, or arrive and go on.
template <int kThreads>
__device__ __forceinline__ void NamedBarrierWait(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void NamedBarrierArrive(int id) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "n"(kThreads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Barriers in shared memory (mbarrier): a phase ends when `count` arrivals have come.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(SharedAddress(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(SharedAddress(barrier)) : "memory");
}
// Arrives when all copies that this thread has asked for are done.
__device__ __forceinline__ void ArriveAfterCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(SharedAddress(barrier)) : "memory");
}
// The same at the barrier of block `rank` of the cluster that lies where `barrier` lies in this one. What was read
// before may be overwritten then; what the thread wrote, another block need not see.
__device__ __forceinline__ void ArriveAtBlock(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first; 1 passes at once on a fresh barrier.
__device__ __forceinline__ void WaitPhase(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni passed;\nbra.uni again;\npassed:\n}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Places in a ring of stages, one after the other, and the parity of the round: what WaitPhase takes.
template <int kStages>
struct RingPlace {
  int stage = 0, parity = 0;
  __device__ void Next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_WGMMA_CUH_
