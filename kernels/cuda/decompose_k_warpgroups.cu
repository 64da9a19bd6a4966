// Products over slices of K by warpgroups (wgmma): a slice's operands lie in shared memory all at once, in stages of 64
// of K that the copy engine brings, and are multiplied as they come. Blocks whose tiles lie beside each other may be a
// cluster, for which each operand is read once. The slices' sums meet in memory, where a second kernel adds them up. A
// block runs through its instructions once, so that they cost as much as they do: loops are not unrolled.
#include <algorithm>

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
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
  int across, down;    // blocks of a cluster along N and M: powers of two
};

template <int kRows, bool kAcross, bool kCluster>
__global__ void __launch_bounds__(Tile<kRows>::kThreads) WarpgroupKernel(const __grid_constant__ KernelParams p) {
  using T = Tile<kRows>;
  extern __shared__ unsigned char shared[];
  __shared__ uint64_t full[T::kMostStages];
  unsigned char* const stages = shared + (-SharedAddress(shared) & (kAlign - 1));
  const DecomposeKShape& s = p.shape;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int warp = __shfl_sync(kFullWarp, thread / kWarp, 0);  // known to be the same in all its threads
  const int column0 = static_cast<int>(blockIdx.x) * kColumns, row0 = static_cast<int>(blockIdx.y) * kRows;
  const int slice = static_cast<int>(blockIdx.z);
  const int begin = p.stages * slice / p.splits, count = p.stages * (slice + 1) / p.splits - begin;

  // Blocks of a cluster ask in turn, for all that have the same rows, or the same columns.
  const int x = static_cast<int>(blockIdx.x) & (p.across - 1), y = static_cast<int>(blockIdx.y) & (p.down - 1);
  const auto row_blocks = static_cast<uint16_t>(((1 << p.across) - 1) << (y * p.across));
  const auto column_blocks = static_cast<uint16_t>((1 | (p.down - 1) << p.across) << x);
  const auto copy = [&](unsigned char* to, const CUtensorMap* map, int row, int column, int stage, int turn,
                        uint16_t blocks) {
    if constexpr (!kCluster) {
      CopyBox(to, map, row, column, &full[stage]);
    } else if (turn == 0) {
      CopyBoxToBlocks(to, map, row, column, &full[stage], blocks);
    }
  };
  const auto ask_a = [&](int stage) {
    copy(stages + stage * T::kStageBytes + kBlockBytes, &p.a, row0, (begin + stage) * kDepth, stage,
         (stage - x) & (p.across - 1), row_blocks);
  };
  const auto ask_b = [&](int stage) {
    const int k = (begin + stage) * kDepth;
    copy(stages + stage * T::kStageBytes, &p.b, kAcross ? k : column0, kAcross ? column0 : k, stage,
         (stage - y) & (p.down - 1), column_blocks);
  };
  const bool asks = warp == 0 && OneOfWarp();
  if (asks) {
    PrefetchMap(&p.a);
    PrefetchMap(&p.b);
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      InitBarrier(&full[stage], 1);
      ArriveAndExpect(&full[stage], T::kStageBytes);
    }
    FenceBarrierInit();
  }
  if constexpr (kCluster) {
    ClusterArriveRelaxed();
    ClusterWait();
  } else {
    __syncthreads();
  }
  if (asks && s.constant_b) {
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) ask_b(stage);
  }
  // Where the thread's sums go.
  const int m = static_cast<int>(s.m), n = static_cast<int>(s.n);
  const int row = row0 + warp * 16 + lane / 4, column = column0 + lane % 2 * 8 + lane % 4 / 2 * 4;
  float* to = p.partials + (static_cast<int64_t>(slice) * m + row) * n + column;
  Hold(to);
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (asks) {
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      ask_a(stage);
      if (!s.constant_b) ask_b(stage);
    }
  }
  __syncwarp();

  float sum[kColumns / 8][4] = {};
  uint64_t a = MatrixDescriptor(stages + (1 + warp / 4) * kBlockBytes, kBlockBytes);
  uint64_t b = MatrixDescriptor(stages, kBlockBytes);
#pragma unroll 1
  for (int stage = 0; stage < count; ++stage) {
    WaitPhase(&full[stage], 0);
    WarpgroupBegin();
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      WarpgroupMultiplyAdd<kAcross>(sum, a + i * 32 / 16, b + i * (kAcross ? 16 * 128 : 32) / 16);
    }
    WarpgroupCommit();
    a += T::kStageBytes / 16;
    b += T::kStageBytes / 16;
  }
  WarpgroupWait<0>();
  HoldSums(sum);

  if (p.partials && n % 4 == 0) {
    // A pair of threads has four columns of each group of eight: of two groups, each takes those of one.
    const bool odd = lane % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half, to += 8 * n) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const float(&mine)[4] = sum[j], (&next)[4] = sum[j + 1];
        const int e = 2 * half;
        const float got0 = __shfl_xor_sync(kFullWarp, odd ? mine[e] : next[e], 1);
        const float got1 = __shfl_xor_sync(kFullWarp, odd ? mine[e + 1] : next[e + 1], 1);
        if (row + 8 * half >= m || column + 8 * j >= n) continue;
        *reinterpret_cast<float4*>(to + 8 * j) =
            odd ? make_float4(got0, got1, next[e], next[e + 1]) : make_float4(mine[e], mine[e + 1], got0, got1);
      }
    }
    return;
  }
  // Through shared memory, an element at a time; a warp has its own sixteen rows.
  __syncthreads();  // stages are read
  float* const sums = reinterpret_cast<float*>(stages) + warp * 16 * kSumStride;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float* const at = sums + lane / 4 * kSumStride + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(sum[j][0], sum[j][1]);
    *reinterpret_cast<float2*>(at + 8 * kSumStride) = make_float2(sum[j][2], sum[j][3]);
  }
  __syncwarp();
  float* const partials = p.partials + static_cast<int64_t>(slice) * m * n;
#pragma unroll 1
  for (int i = lane; i < 16 * kColumns; i += kWarp) {
    const int r = row0 + warp * 16 + i / kColumns, c = column0 + i % kColumns;
    if (r >= m || c >= n) continue;
    const float total = sums[i / kColumns * kSumStride + i % kColumns];
    if (p.partials) {
      partials[static_cast<int64_t>(r) * n + c] = total;
    } else {
      Store(s, r, c, total, Before(s, r, c));
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

int RowsOfBlock(const DecomposeKPlan& plan) { return plan.tile_m == 64 ? 64 : 128; }

template <int kRows, bool kAcross>
void Launch(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  using T = Tile<kRows>;
  KernelParams p;
  p.a = MapOf(s.a.data, s.m, s.k, s.a.stride_outer, kRows);
  p.b =
      kAcross ? MapOf(s.b.data, s.k, s.n, s.b.stride_k, kDepth) : MapOf(s.b.data, s.n, s.k, s.b.stride_outer, kColumns);
  p.shape = s;
  p.partials = partials;
  p.stages = static_cast<int>(CeilDiv(s.k, kDepth));
  p.splits = plan.splits;
  p.across = plan.tile_n / kColumns;
  p.down = plan.tile_m / kRows;
  const dim3 cluster(static_cast<unsigned>(p.across), static_cast<unsigned>(p.down));
  const dim3 grid(static_cast<unsigned>(CeilDiv(s.n, plan.tile_n)) * cluster.x,
                  static_cast<unsigned>(CeilDiv(s.m, plan.tile_m)) * cluster.y, static_cast<unsigned>(plan.splits));
  const int bytes = static_cast<int>(CeilDiv(p.stages, plan.splits)) * T::kStageBytes;
  const int shared = kAlign + std::max(bytes, kMoreThanHalf);
  const auto launch = [&](auto* kernel) {
    PreferShared(kernel);  // a reducer lies beside the longest slices
    LaunchClustersEarly(kernel, grid, cluster, T::kThreads, shared, stream, p);
  };
  launch(p.across * p.down > 1 ? WarpgroupKernel<kRows, kAcross, true> : WarpgroupKernel<kRows, kAcross, false>);
}

}  // namespace

int WarpgroupBlocks(const DecomposeKPlan& plan) { return plan.tile_n / kColumns * (plan.tile_m / RowsOfBlock(plan)); }

bool CanWarpgroups(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  const auto is_side = [](int side) { return side == 64 || side == 128 || side == 256; };
  const int64_t stages = CeilDiv(s.k, kDepth);
  if (!CanSlice(s) || !is_side(plan.tile_m) || !is_side(plan.tile_n)) return false;
  if (plan.splits < 1 || plan.splits > stages || plan.splits > kMostSlices) return false;
  const bool mapped = CanMap(s.m, s.k, s.a.stride_outer) &&
                      (AcrossN(s) ? CanMap(s.k, s.n, s.b.stride_k) : CanMap(s.n, s.k, s.b.stride_outer));
  const int most = RowsOfBlock(plan) == 64 ? Tile<64>::kMostStages : Tile<128>::kMostStages;
  return mapped && CeilDiv(stages, plan.splits) <= most;
}

void LaunchWarpgroups(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  const auto launch = RowsOfBlock(plan) == 64 ? (AcrossN(s) ? Launch<64, true> : Launch<64, false>)
                                              : (AcrossN(s) ? Launch<128, true> : Launch<128, false>);
  launch(s, plan, partials, stream);
}

}  // namespace stillhouse::cuda
