// Warpgroup products (wgmma) of 128 rows and 128 gates with their 128 ups: a thread's sums are gates and the ups that
// they go with. A warpgroup copies ahead of two that compute, 64 rows each; the two blocks of a cluster have the same
// gates, of which each copies half to both.
#include <cuda.h>

#include <algorithm>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/glu_product_launch.h"
#include "kernels/cuda/tensor_map.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kRows = 128, kGates = 128;  // of a tile
constexpr int kDepth = 64;                // of a step
constexpr int kStages = 4;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kBlocks = 2;   // of a cluster
constexpr int kRowBytes = 2 * kDepth;
constexpr int kHalf = kGates / kBlocks;  // gates, or ups, that a block copies
// Clusters go through so many of their rows before they go on to other gates: the rows stay in the cache.
constexpr int kBand = 8;

struct Shared {
  alignas(1024) char x[kStages][kRows * kRowBytes];
  alignas(1024) char weight[kStages][2 * kGates * kRowBytes];  // gates, then ups
  alignas(1024) char out[kRows * kGates * 2];                  // a part for each warp
  uint64_t full[kStages], empty[kStages];
};
constexpr int kBytes = static_cast<int>(sizeof(Shared)) + 1024;  // room to begin at a multiple of 1024
constexpr int kStepBytes = (kRows + 2 * kGates) * kRowBytes;

using Place = RingPlace<kStages>;

// The tiles of a cluster: rows [row, row + kRows) of the block, gates [gate, gate + kGates).
class Tiles {
 public:
  __device__ Tiles(int64_t rows, int64_t width)
      : row_tiles_(static_cast<int>((rows + kBlocks * kRows - 1) / (kBlocks * kRows))),
        gate_tiles_(static_cast<int>(width / kGates)),
        at_(static_cast<int>(blockIdx.x) / kBlocks - static_cast<int>(gridDim.x) / kBlocks) {}
  __device__ bool Next() {
    at_ += static_cast<int>(gridDim.x) / kBlocks;
    if (at_ >= row_tiles_ * gate_tiles_) return false;
    const int band = at_ / (kBand * gate_tiles_), within = at_ - band * kBand * gate_tiles_;
    const int height = min(kBand, row_tiles_ - band * kBand);
    row_ = ((band * kBand + within % height) * kBlocks + ClusterRank()) * kRows;
    gate_ = within / height * kGates;
    return true;
  }
  __device__ int row() const { return row_; }
  __device__ int gate() const { return gate_; }

 private:
  const int row_tiles_, gate_tiles_;
  int at_, row_ = 0, gate_ = 0;
};

__device__ __forceinline__ void Produce(Shared& shared, const CUtensorMap& x, const CUtensorMap& weight, int width,
                                        int steps, Tiles tiles) {
  const int rank = ClusterRank(), half = rank * kHalf;
  WaitForPreviousKernel();
  for (Place place; tiles.Next();) {
    for (int step = 0; step < steps; ++step, place.Next()) {
      uint64_t* const full = &shared.full[place.stage];
      WaitPhase(&shared.empty[place.stage], place.parity ^ 1);
      ArriveAndExpect(full, kStepBytes);
      CopyBox(shared.x[place.stage], &x, tiles.row(), step * kDepth, full);
      char* const to = shared.weight[place.stage] + half * kRowBytes;
      CopyBoxToBlocks(to, &weight, tiles.gate() + half, step * kDepth, full, (1 << kBlocks) - 1);
      CopyBoxToBlocks(to + kGates * kRowBytes, &weight, width + tiles.gate() + half, step * kDepth, full,
                      (1 << kBlocks) - 1);
    }
  }
}

// A warp's 16 rows: rounded to its part of shared memory, and from there to `out` as rows.
__device__ __forceinline__ void Store(const float (&gates)[16][4], const float (&ups)[16][4], char* part, Bf16* out,
                                      int64_t width, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, t = lane % 4;
  const auto at = [](int row, int chunk) { return row * 2 * kGates + ((chunk ^ (row & 7)) << 4); };
  const auto gated = [&](int n, int e) { return __fdividef(gates[n][e], 1.0f + __expf(-gates[n][e])) * ups[n][e]; };
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    *reinterpret_cast<uint32_t*>(part + at(g, n) + 4 * t) = PackBf16(gated(n, 0), gated(n, 1));
    *reinterpret_cast<uint32_t*>(part + at(g + 8, n) + 4 * t) = PackBf16(gated(n, 2), gated(n, 3));
  }
  __syncwarp();
  const int chunk = lane % 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 2 * i + lane / 16;
    if (row >= rows) continue;
    *reinterpret_cast<uint4*>(out + row * width + 8 * chunk) = *reinterpret_cast<const uint4*>(part + at(row, chunk));
  }
  __syncwarp();  // the part may be written again
}

__device__ __forceinline__ void Consume(Shared& shared, Bf16* out, int64_t rows, int64_t width, int steps, int group,
                                        Tiles tiles) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp - kGroup / kWarp;
  const auto free = [&](int stage) {
    __syncwarp();
    if (lane < kBlocks) ArriveAtBlock(&shared.empty[stage], lane);
  };
  for (Place place; tiles.Next();) {
    float gates[16][4], ups[16][4];
    int before = 0;
    for (int step = 0; step < steps; ++step, place.Next()) {
      WaitPhase(&shared.full[place.stage], place.parity);
      const uint64_t x = MatrixDescriptor(shared.x[place.stage] + group * (kRows / 2) * kRowBytes, 0);
      const uint64_t weight = MatrixDescriptor(shared.weight[place.stage], 0);
      WarpgroupBegin();
#pragma unroll
      for (int d = 0; d < kDepth; d += 16) {
        WarpgroupDotPair(gates, ups, Advance(x, 2 * d), Advance(weight, 2 * d), step + d > 0);
      }
      WarpgroupCommit();
      if (step > 0) {
        WarpgroupWait<1>();
        free(before);
      }
      before = place.stage;
    }
    WarpgroupWait<0>();
    HoldSums(gates);
    HoldSums(ups);
    free(before);
    const int row = tiles.row() + 16 * warp;
    Store(gates, ups, shared.out + warp * 16 * 2 * kGates, out + row * width + tiles.gate(), width,
          static_cast<int>(rows - row));
  }
}

__global__ void __launch_bounds__(3 * kGroup, 1)
    GluProductKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight, Bf16* out,
                     int64_t rows, int64_t width, int steps) {
  extern __shared__ char glu_shared[];
  LetNextKernelStart();
  Shared& shared = *reinterpret_cast<Shared*>(glu_shared + (-SharedAddress(glu_shared) & 1023));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(&shared.full[s], 1);
      InitBarrier(&shared.empty[s], kBlocks * 2 * kGroup / kWarp);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  ClusterArrive();
  ClusterWait();
  const Tiles tiles(rows, width);
  if (threadIdx.x < kGroup) {
    GiveRegisters<40>();
    if (threadIdx.x == 0) Produce(shared, x, weight, static_cast<int>(width), steps, tiles);
  } else {
    TakeRegisters<232>();
    const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroup - 1, 0);
    Consume(shared, out, rows, width, steps, group, tiles);
  }
  // The other block may still copy to this one, and arrive here.
  __syncwarp();
  ClusterArrive();
  ClusterWait();
}

}  // namespace

bool CanGluProduct(const GluProductParams& p) {
  return p.k > 0 && p.k % kDepth == 0 && p.width % kGates == 0 && Aligned16(p.x) && Aligned16(p.weight) &&
         Aligned16(p.out) && p.rows < (int64_t{1} << 30) && 2 * p.width < (int64_t{1} << 30);
}

void LaunchGluProduct(const GluProductParams& p, int multiprocessors, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return;
  const CUtensorMap x = MatrixMap(p.x, p.rows, p.k, 2 * p.k, kRows);
  const CUtensorMap weight = MatrixMap(p.weight, 2 * p.width, p.k, 2 * p.k, kHalf);
  const int64_t tiles = CeilDiv(p.rows, kBlocks * kRows) * (p.width / kGates);
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors / kBlocks));
  LaunchClustersEarly(GluProductKernel, kBlocks * clusters, dim3(kBlocks), 3 * kGroup, kBytes, stream, x, weight,
                      static_cast<Bf16*>(p.out), p.rows, p.width, static_cast<int>(p.k / kDepth));
}

}  // namespace stillhouse::cuda
