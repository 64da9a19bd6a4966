// Small products of few rows, which take as long as their latencies: a block has 32 rows of the weight in its shared
// memory before the kernel that makes x has ended, takes x straight into registers, and its warps share K.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/skinny_finish.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/skinny_launch.h"
#include "kernels/cuda/tensor_map.h"

namespace stillhouse::cuda {
namespace {

using skinny::Before;
using skinny::Bf16;
using skinny::LoadBefore;
using skinny::LoadTurning;
using skinny::Place;
using skinny::RowOf;
using skinny::StorePairs;
using skinny::StoreSums;
using skinny::StoreTurnedNeighbours;
using skinny::Turning;

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kRows = kSmallSkinnyRows, kTiles = kRows / 16;  // the tensor cores' tiles of rows: a warp each finishes
constexpr int kWorkers = kTiles * kWarp;
constexpr int kDepth = 64, kBlockBytes = kRows * kDepth * 2;  // of K: a block of the weight
constexpr int kMostBlocks = 3;                                // of a warp

struct KernelParams {
  CUtensorMap weight;
  const Bf16* x;
  int64_t x_stride;
  int k;
  const float* squares;
  int parts;
  float eps;
  SkinnyFinish finish;
};

template <int kBatch>
__global__ void __launch_bounds__(kThreads, 1) SmallSkinnyKernel(const __grid_constant__ KernelParams p) {
  constexpr int kColumns = kBatch / 8;
  extern __shared__ unsigned char skinny_shared[];
  __shared__ float4 partial[kWarps][kTiles][kColumns][kWarp];
  __shared__ union {
    float squares[kWorkers / kWarp][kBatch];
    float seconds[kBatch / 2][kWorkers / 2];
  } shared;
  __shared__ float scale[kBatch];
  __shared__ uint64_t full;
  char* const weights = reinterpret_cast<char*>(skinny_shared) + (-SharedAddress(skinny_shared) & 1023);

  LetNextKernelStart();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int tile = static_cast<int>(blockIdx.x), blocks = (p.k + kDepth - 1) / kDepth;
  if (thread == 0) {
    InitBarrier(&full, 1);
    FenceBarrierInit();
    ArriveAndExpect(&full, blocks * kBlockBytes);
    const int row = static_cast<int>(RowOf(tile * (kRows / 2), p.finish.half));
    const uint64_t once = CachePolicy(true);
    for (int b = 0; b < blocks; ++b) {
      CopyBox(weights + b * kBlockBytes, &p.weight, row, b * kDepth, &full, once);
      CopyBox(weights + b * kBlockBytes + kBlockBytes / 2, &p.weight, row + p.finish.half, b * kDepth, &full, once);
    }
  }
  __syncthreads();
  WaitForPreviousKernel();

  // The order of K within 64 elements is the operands' own: both sides use the same.
  const int g = lane / 4, t = lane % 4;
  uint4 x[kMostBlocks][kColumns][2];
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = 8 * c + g, k = (i * kWarps + warp) * kDepth + 32 * h + 8 * t;
        x[i][c][h] = r < p.finish.m && k < p.k ? *reinterpret_cast<const uint4*>(p.x + r * p.x_stride + k)
                                               : make_uint4(0, 0, 0, 0);
      }
    }
  }
  Place at;
  at.tile = tile;
  at.t = t;
  at.second = warp >= kTiles / 2;
  at.pair = tile * (kRows / 2) + warp % (kTiles / 2) * 16 + g;
  Before<kBatch> before;
  Turning<kBatch> turning;
  if (warp < kTiles && !p.finish.turn && !p.finish.pairs) LoadBefore<kBatch>(p.finish, at, before);
  if (warp < (p.finish.pairs ? kTiles / 2 : kTiles) && p.finish.turn) LoadTurning<kBatch>(p.finish, at, turning);
  if (p.squares) {
    for (int r = warp; r < kBatch; r += kWarps) {
      float sum = 0.0f;
      for (int i = lane; r < p.finish.m && i < p.parts; i += kWarp) sum += p.squares[r * p.parts + i];
      sum = WarpSum(sum);
      if (lane == 0) scale[r] = 1.0f / sqrtf(sum / static_cast<float>(p.k) + p.eps);
    }
  }

  WaitPhase(&full, 0);
  float sum[kTiles][kColumns][4] = {};
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    const int b = i * kWarps + warp;
    if (b >= blocks) break;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const char* const row = weights + b * kBlockBytes + (16 * u + g) * kDepth * 2 + (((4 * h + t) ^ g) << 4);
        const uint4 low = *reinterpret_cast<const uint4*>(row);
        const uint4 high = *reinterpret_cast<const uint4*>(row + 8 * kDepth * 2);
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          MultiplyAdd(sum[u][c], first, x[i][c][h].x, x[i][c][h].y);
          MultiplyAdd(sum[u][c], second, x[i][c][h].z, x[i][c][h].w);
        }
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kTiles; ++u) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      partial[warp][u][c][lane] = make_float4(sum[u][c][0], sum[u][c][1], sum[u][c][2], sum[u][c][3]);
    }
  }
  __syncthreads();
  if (warp >= kTiles) return;
  float total[kColumns][4] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float4 part = partial[w][warp][c][lane];
      total[c][0] += part.x;
      total[c][1] += part.y;
      total[c][2] += part.z;
      total[c][3] += part.w;
    }
  }
  if (p.squares) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) total[c][e] *= scale[at.RowIn(c, e)];
    }
  }
  if (p.finish.pairs) {
    StorePairs<kBatch, kWorkers>(p.finish, at, total, shared.seconds, turning);
  } else if (p.finish.turn) {
    StoreTurnedNeighbours<kBatch>(p.finish, at, total, turning);
  } else {
    StoreSums<kBatch, kWorkers>(p.finish, at, total, before, shared.squares);
  }
}

template <int kBatch>
void Launch(const SkinnyParams& p, cudaStream_t stream) {
  KernelParams kernel;
  kernel.weight = MatrixMap(p.weight, p.n, p.k, p.k * 2, kRows / 2);
  kernel.x = static_cast<const Bf16*>(p.x);
  kernel.x_stride = p.x_stride;
  kernel.k = static_cast<int>(p.k);
  kernel.squares = p.squares;
  kernel.parts = p.parts;
  kernel.eps = p.eps;
  kernel.finish = FinishOf(p, kRows);
  const int blocks = static_cast<int>(CeilDiv(p.k, kDepth));
  PreferShared(SmallSkinnyKernel<kBatch>);
  LaunchKernelEarly(SmallSkinnyKernel<kBatch>, static_cast<unsigned>(kernel.finish.tiles), kThreads,
                    blocks * kBlockBytes + 1024, stream, kernel);
}

}  // namespace

bool CanSmallSkinny(const SkinnyParams& p) { return p.k <= kMostBlocks * kWarps * kDepth; }

void LaunchSmallSkinny(const SkinnyParams& p, cudaStream_t stream) {
  p.m <= 8 ? Launch<8>(p, stream) : Launch<16>(p, stream);
}

}  // namespace stillhouse::cuda
