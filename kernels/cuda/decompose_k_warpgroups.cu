// Products over slices of K by warpgroups (wgmma): a slice's operands lie in shared memory all at once, in stages of 64
// of K that the copy engine brings, and are multiplied as they come. The slices' sums meet in memory, where a second
// kernel adds them up.
#include <algorithm>

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/decompose_k_finish.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/device/wgmma_narrow.cuh"
#include "kernels/cuda/tensor_map.h"

namespace stillhouse::cuda {
namespace {

constexpr int kDepth = 64;                    // of K, in a stage
constexpr int kColumns = 64;                  // of a tile
constexpr int kBlockBytes = 64 * kDepth * 2;  // of 64 rows of A in a stage, and of B
constexpr int kAlign = 1024;                  // of stages
constexpr int kSumStride = kColumns + 8;      // floats: the eight rows of a fragment meet no bank twice
constexpr int kMostShared = 226 * 1024;
// A multiprocessor has one block, however small: two of a launch would take longer than the others. A launch of half
// as many blocks as there are multiprocessors begins beside the one before it.
constexpr int kMoreThanHalf = 115 * 1024;
static_assert(128 * kSumStride * 4 <= kMoreThanHalf, "the sums of a tile");

// Tiles of so many rows: a warpgroup has 64.
template <int kRows>
struct Tile {
  static constexpr int kThreads = kRows / 64 * 128;
  static constexpr int kStageBytes = (kRows / 64 + 1) * kBlockBytes;
  static constexpr int kMostStages = (kMostShared - kAlign) / kStageBytes;
};

struct KernelParams {
  CUtensorMap a, b;
  DecomposeKShape shape;
  float* partials;     // [splits, m, n]; null: the one slice finishes elements
  int stages, splits;  // all of K's
};

template <int kRows, bool kAcross>
__global__ void __launch_bounds__(Tile<kRows>::kThreads) WarpgroupKernel(const __grid_constant__ KernelParams p) {
  using T = Tile<kRows>;
  extern __shared__ unsigned char shared[];
  __shared__ uint64_t full[T::kMostStages];
  unsigned char* const stages = shared + (-SharedAddress(shared) & (kAlign - 1));
  const DecomposeKShape& s = p.shape;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int column0 = static_cast<int>(blockIdx.x) * kColumns, row0 = static_cast<int>(blockIdx.y) * kRows;
  const int slice = static_cast<int>(blockIdx.z);
  const int begin = p.stages * slice / p.splits, count = p.stages * (slice + 1) / p.splits - begin;

  const auto ask_a = [&](int stage) {
    CopyBox(stages + stage * T::kStageBytes + kBlockBytes, &p.a, row0, (begin + stage) * kDepth, &full[stage]);
  };
  const auto ask_b = [&](int stage) {
    const int k = (begin + stage) * kDepth;
    CopyBox(stages + stage * T::kStageBytes, &p.b, kAcross ? k : column0, kAcross ? column0 : k, &full[stage]);
  };
  if (thread == 0) {
    PrefetchMap(&p.a);
    PrefetchMap(&p.b);
    for (int stage = 0; stage < count; ++stage) {
      InitBarrier(&full[stage], 1);
      ArriveAndExpect(&full[stage], T::kStageBytes);
    }
    FenceBarrierInit();
    if (s.constant_b) {
      for (int stage = 0; stage < count; ++stage) ask_b(stage);
    }
  }
  __syncthreads();
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (thread == 0) {
    for (int stage = 0; stage < count; ++stage) {
      ask_a(stage);
      if (!s.constant_b) ask_b(stage);
    }
  }

  float sum[kColumns / 8][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < count; ++stage) {
    const unsigned char* const b = stages + stage * T::kStageBytes;
    const unsigned char* const a = b + (1 + warp / 4) * kBlockBytes;
    WaitPhase(&full[stage], 0);
    WarpgroupBegin();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      WarpgroupMultiplyAdd<kAcross>(sum, MatrixDescriptor(a + i * 32, kBlockBytes),
                                    MatrixDescriptor(b + i * (kAcross ? 16 * 128 : 32), kBlockBytes));
    }
    WarpgroupCommit();
  }
  WarpgroupWait<0>();
  HoldSums(sum);

  // Through shared memory to whole rows; a warp has its own sixteen.
  __syncthreads();  // stages are read
  float* const sums = reinterpret_cast<float*>(stages) + warp * 16 * kSumStride;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float* const to = sums + lane / 4 * kSumStride + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(sum[j][0], sum[j][1]);
    *reinterpret_cast<float2*>(to + 8 * kSumStride) = make_float2(sum[j][2], sum[j][3]);
  }
  __syncwarp();
  const int m = static_cast<int>(s.m), n = static_cast<int>(s.n), first = row0 + warp * 16;
  float* const partials = p.partials + static_cast<int64_t>(slice) * m * n;
  if (p.partials && n % 4 == 0) {
    const int column = lane % 16 * 4;
    float* const to = partials + static_cast<int64_t>(first) * n + column0 + column;
#pragma unroll
    for (int r = lane / 16; r < 16; r += 2) {
      if (first + r >= m || column0 + column >= n) break;
      *reinterpret_cast<float4*>(to + static_cast<int64_t>(r) * n) =
          *reinterpret_cast<const float4*>(sums + r * kSumStride + column);
    }
    return;
  }
#pragma unroll 1
  for (int i = lane; i < 16 * kColumns; i += kWarp) {
    const int row = first + i / kColumns, column = column0 + i % kColumns;
    if (row >= m || column >= n) continue;
    const float total = sums[i / kColumns * kSumStride + i % kColumns];
    if (p.partials) {
      partials[static_cast<int64_t>(row) * n + column] = total;
    } else {
      Store(s, row, column, total, Before(s, row, column));
    }
  }
}

// Of a matrix: its rows do not overlap, and lie no further apart than a map can say.
bool CanMap(int64_t rows, int64_t columns, int64_t stride) {
  return rows == 1 || (stride >= columns && stride < int64_t{1} << 39);
}

CUtensorMap MapOf(const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  return MatrixMap(data, rows, columns, 2 * (rows == 1 ? CeilDiv(columns, 8) * 8 : stride), box_rows);
}

template <int kRows, bool kAcross>
void Launch(const DecomposeKShape& s, int splits, float* partials, cudaStream_t stream) {
  using T = Tile<kRows>;
  KernelParams p;
  p.a = MapOf(s.a.data, s.m, s.k, s.a.stride_outer, kRows);
  p.b =
      kAcross ? MapOf(s.b.data, s.k, s.n, s.b.stride_k, kDepth) : MapOf(s.b.data, s.n, s.k, s.b.stride_outer, kColumns);
  p.shape = s;
  p.partials = partials;
  p.stages = static_cast<int>(CeilDiv(s.k, kDepth));
  p.splits = splits;
  const dim3 grid(static_cast<unsigned>(CeilDiv(s.n, kColumns)), static_cast<unsigned>(CeilDiv(s.m, kRows)),
                  static_cast<unsigned>(splits));
  const int bytes = static_cast<int>(CeilDiv(p.stages, splits)) * T::kStageBytes;
  const int shared = kAlign + std::max(bytes, kMoreThanHalf);
  LaunchKernelEarly(WarpgroupKernel<kRows, kAcross>, grid, T::kThreads, shared, stream, p);
}

}  // namespace

bool CanWarpgroups(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  const int64_t stages = CeilDiv(s.k, kDepth);
  if (!CanSlice(s) || plan.tile_n != kColumns) return false;
  if (plan.splits < 1 || plan.splits > stages || plan.splits > kMostSlices) return false;
  const bool mapped = CanMap(s.m, s.k, s.a.stride_outer) &&
                      (AcrossN(s) ? CanMap(s.k, s.n, s.b.stride_k) : CanMap(s.n, s.k, s.b.stride_outer));
  const int64_t each = CeilDiv(stages, plan.splits);
  return mapped && ((plan.tile_m == 64 && each <= Tile<64>::kMostStages) ||
                    (plan.tile_m == 128 && each <= Tile<128>::kMostStages));
}

void LaunchWarpgroups(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  const auto launch = plan.tile_m == 64 ? (AcrossN(s) ? Launch<64, true> : Launch<64, false>)
                                        : (AcrossN(s) ? Launch<128, true> : Launch<128, false>);
  launch(s, plan.splits, partials, stream);
}

}  // namespace stillhouse::cuda
