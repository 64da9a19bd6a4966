#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/skinny_launch.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kWarps = 8, kWorkers = kWarps * kWarp, kThreads = kWorkers + kWarp;  // a warp fetches for the others
constexpr int kTile = kSkinnyTile, kChunk = kSkinnyChunk;
// A stage is kStageK elements of each weight row of a tile: a chunk for each warp. Rows begin 64 bytes off the banks of
// the row before, so that the two rows which eight lanes read do not meet.
constexpr int kStageK = kWarps * kChunk, kRowBytes = kStageK * 2 + 64;
constexpr int64_t kMostNormed = 48 * 1024;  // bytes of normalised rows

enum class Source { kBf16, kF32, kNormed };

// `bytes` (a multiple of 16) from global to shared memory, counted by the barrier.
__device__ __forceinline__ void CopyBulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   SharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}
// A barrier of the working warps.
__device__ __forceinline__ void WorkersBarrier() { asm volatile("bar.sync 1, %0;\n" ::"n"(kWorkers) : "memory"); }

__device__ __forceinline__ uint4 PackEight(const float* from) {
  const Vec16<float> a = LoadVec16(from), b = LoadVec16(from + 4);
  return make_uint4(PackBf16(a.at[0], a.at[1]), PackBf16(a.at[2], a.at[3]), PackBf16(b.at[0], b.at[1]),
                    PackBf16(b.at[2], b.at[3]));
}

__device__ __forceinline__ float SiluOf(float x) { return x / (1.0f + __expf(-x)); }

template <int kParts>
struct Stages {
  static constexpr int kRows = kTile * kParts, kBytes = kRows * kRowBytes, kCount = kParts == 1 ? 8 : 4;
};

// Tiles of kTile outputs (kParts = 2: kTile gates and their partners) of all rows, one after the other in each block.
// One warp fetches weights ahead into a ring of stages, from before the kernel that makes x has ended; the others share
// K chunk by chunk: 16 weight rows are the left operand of the tensor cores, rows of x the right one. The order of K
// within 32 elements is the operands' own: both sides use the same.
template <int kColumns, int kParts, Source kSource>
__global__ void __launch_bounds__(kThreads, 1) SkinnyKernel(const SkinnyParams p) {
  using S = Stages<kParts>;
  constexpr int kOutputs = 8 * kColumns;  // rows of x, rounded up
  extern __shared__ uint4 skinny_shared[];
  __shared__ float partial[2][kWarps][kParts][kOutputs][kTile + 1];  // of two tiles: one barrier each is enough
  __shared__ float row_sums[kWarps][kSkinnyNormRows];
  __shared__ uint64_t full[S::kCount], empty[S::kCount];
  char* const stages = reinterpret_cast<char*>(skinny_shared);
  uint4* const normed = reinterpret_cast<uint4*>(stages + S::kCount * S::kBytes);

  LetNextKernelStart();
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int tiles = static_cast<int>(p.n / kParts) / kTile, k = static_cast<int>(p.k);
  const int64_t half = p.n / 2;
  if (tid == 0) {
    for (int s = 0; s < S::kCount; ++s) {
      InitBarrier(&full[s], 1);
      InitBarrier(&empty[s], kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();

  if (warp == kWarps) {
    int i = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
      const int64_t row = static_cast<int64_t>(tile) * kTile + lane % kTile + lane / kTile * half;
      const Bf16* const from = static_cast<const Bf16*>(p.weight) + row * p.k;
      for (int begin = 0; begin < k; begin += kStageK, ++i) {
        const int slot = i % S::kCount, bytes = min(kStageK, k - begin) * 2;
        if (i >= S::kCount) WaitPhase(&empty[slot], (i / S::kCount - 1) & 1);
        if (lane == 0) ArriveExpecting(&full[slot], S::kRows * bytes);
        __syncwarp();
        if (lane < S::kRows) CopyBulk(stages + slot * S::kBytes + lane * kRowBytes, from + begin, bytes, &full[slot]);
      }
    }
    return;
  }

  WaitForPreviousKernel();
  const int64_t row_vectors = p.k / 8;
  float rstd[kSkinnyNormRows];
  if constexpr (kSource == Source::kNormed) {
    uint2* const staged = reinterpret_cast<uint2*>(normed);
#pragma unroll
    for (int r = 0; r < kSkinnyNormRows; ++r) {
      if (r >= p.m) break;
      const float* const x = static_cast<const float*>(p.x) + r * p.x_stride;
      float sum = 0.0f;
      for (int64_t i = tid; i < p.k / 4; i += kWorkers) {
        const Vec16<float> v = LoadVec16(x + 4 * i), w = LoadVec16(p.norm + 4 * i);
        sum += v.at[0] * v.at[0] + v.at[1] * v.at[1] + (v.at[2] * v.at[2] + v.at[3] * v.at[3]);
        staged[r * (p.k / 4) + i] =
            make_uint2(PackBf16(v.at[0] * w.at[0], v.at[1] * w.at[1]), PackBf16(v.at[2] * w.at[2], v.at[3] * w.at[3]));
      }
      sum = WarpSum(sum);
      if (lane == 0) row_sums[warp][r] = sum;
    }
    WorkersBarrier();
#pragma unroll
    for (int r = 0; r < kSkinnyNormRows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += row_sums[w][r];
      rstd[r] = 1.0f / sqrtf(sum / static_cast<float>(p.k) + p.eps);
    }
  }

  const int g = lane / 4, t = lane % 4;
  int i = 0, side = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x), side ^= 1) {
    float sum[kParts][kColumns][4] = {};
    for (int begin = 0; begin < k; begin += kStageK, ++i) {
      const int slot = i % S::kCount, at = begin + warp * kChunk;
      uint4 x[kColumns][2];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int r = 8 * c + g;
        x[c][0] = x[c][1] = make_uint4(0, 0, 0, 0);
        if (r >= p.m || at >= k) continue;
        if constexpr (kSource == Source::kNormed) {
          const uint4* const from = normed + r * row_vectors + at / 8 + t;
          x[c][0] = from[0];
          x[c][1] = from[4];
        } else if constexpr (kSource == Source::kBf16) {
          const uint4* const from =
              reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.x) + r * p.x_stride + at) + t;
          x[c][0] = from[0];
          x[c][1] = from[4];
        } else {
          const float* const from = static_cast<const float*>(p.x) + r * p.x_stride + at + 8 * t;
          x[c][0] = PackEight(from);
          x[c][1] = PackEight(from + 32);
        }
      }
      WaitPhase(&full[slot], (i / S::kCount) & 1);
      if (at < k) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const char* const row =
              stages + slot * S::kBytes + (part * kTile + g) * kRowBytes + (warp * kChunk + 8 * t) * 2;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4 low = *reinterpret_cast<const uint4*>(row + 64 * h);
            const uint4 high = *reinterpret_cast<const uint4*>(row + 8 * kRowBytes + 64 * h);
            const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              MultiplyAdd(sum[part][c], first, x[c][h].x, x[c][h].y);
              MultiplyAdd(sum[part][c], second, x[c][h].z, x[c][h].w);
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) Arrive(&empty[slot]);
    }
    // The tile's sums, folded over the warps in order.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) partial[side][warp][part][8 * c + 2 * t + e % 2][g + e / 2 * 8] = sum[part][c][e];
      }
    }
    WorkersBarrier();
    for (int j = tid; j < kOutputs * kTile; j += kWorkers) {
      const int r = j / kTile, n = j % kTile;
      if (r >= p.m) break;
      float total[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        total[part] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total[part] += partial[side][w][part][r][n];
        if constexpr (kSource == Source::kNormed) total[part] *= r == 0 ? rstd[0] : rstd[1];
      }
      const int64_t column = static_cast<int64_t>(tile) * kTile + n;
      if constexpr (kParts == 2) {
        static_cast<Bf16*>(p.glu)[r * half + column] = FromFloat<Bf16>(SiluOf(total[0]) * total[1]);
      } else {
        float* const out = p.out + r * p.out_stride + column;
        *out = p.add ? *out + total[0] : total[0];
      }
    }
  }
}

template <int kColumns, int kParts, Source kSource>
void Launch(const SkinnyParams& p, cudaStream_t stream) {
  const int shared = Stages<kParts>::kCount * Stages<kParts>::kBytes +
                     (kSource == Source::kNormed ? p.m * static_cast<int>(p.k) * 2 : 0);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(p.n / kParts / kTile, p.multiprocessors));
  LaunchKernelEarly(SkinnyKernel<kColumns, kParts, kSource>, blocks, kThreads, shared, stream, p);
}

template <int kParts, Source kSource>
void LaunchRows(const SkinnyParams& p, cudaStream_t stream) {
  p.m <= 8 ? Launch<1, kParts, kSource>(p, stream) : Launch<2, kParts, kSource>(p, stream);
}

template <int kParts>
void LaunchSource(const SkinnyParams& p, cudaStream_t stream) {
  if (p.norm) {
    Launch<1, kParts, Source::kNormed>(p, stream);
  } else if (p.x_bf16) {
    LaunchRows<kParts, Source::kBf16>(p, stream);
  } else {
    LaunchRows<kParts, Source::kF32>(p, stream);
  }
}

}  // namespace

bool CanSkinny(const SkinnyParams& p) {
  const int64_t parts = p.glu ? 2 : 1;
  const int64_t x_bytes = p.x_stride * (p.x_bf16 ? 2 : 4);
  return p.m > 0 && p.m <= (p.norm ? kSkinnyNormRows : kSkinnyRows) && p.n > 0 && p.n % (parts * kTile) == 0 &&
         p.k > 0 && p.k % kChunk == 0 && p.k <= int64_t{1} << 24 &&
         (!p.norm || (!p.x_bf16 && p.m * p.k * 2 <= kMostNormed)) && Aligned16(p.weight) &&
         Aligned16(p.x, p.m > 1 ? x_bytes : 0) && (!p.norm || Aligned16(p.norm));
}

void LaunchSkinny(const SkinnyParams& p, cudaStream_t stream) {
  p.glu ? LaunchSource<2>(p, stream) : LaunchSource<1>(p, stream);
}

}  // namespace stillhouse::cuda
