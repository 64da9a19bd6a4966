// Products of few rows. The weight's rows are the tensor cores' left operand, 64 at a time, and rows of x the right
// one, so that a product of 8 rows costs no more than it must; both come through a ring of stages that the copy engine
// fills. Each block takes an equal part of the weight; parts end within tiles, and the block that has a tile's
// beginning adds up what the others found, in their order. When a block has asked for nearly all of its weights the
// next kernel may start: its first weights come while this one's sums are added up.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/exchange.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/skinny_finish.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/device/wgmma_narrow.cuh"
#include "kernels/cuda/skinny_launch.h"
#include "kernels/cuda/tensor_map.h"

namespace stillhouse::cuda {
namespace {

using skinny::Before;
using skinny::LoadBefore;
using skinny::LoadTurning;
using skinny::Place;
using skinny::RowOf;
using skinny::StorePairs;
using skinny::StoreSums;
using skinny::StoreTurnedNeighbours;
using skinny::Turning;
using skinny::WorkersBarrier;

constexpr int kDepth = 64;    // of K: a block of a stage
constexpr int kBoxRows = 32;  // of the weight, in a copy
constexpr int kMostStages = 12;
constexpr int kAlign = 1024;  // of what the tensor cores read
// Two blocks fit a multiprocessor, so that a kernel's first weights come while the one before it ends. But not two of
// one launch: where some multiprocessors held two and others none, the former would finish last by far. So a launch
// that adds to its output has more than half the registers (of idle warps), any other more than half the shared memory:
// in a layer they take turns.
constexpr int kSharedOfTwo = 110 * 1024, kSharedOfOne = 208 * 1024;
constexpr int kMoreThanHalfShared = 113 * 1024;
constexpr int kRegisters = 64 * 1024;  // of a multiprocessor
constexpr int kMostThreads = 640;
// So many stages before its last one a block lets the next kernel start.
constexpr int kEarlier = 2;
// A tile of at most so many bytes is one block's: adding parts up would take longer than reading the rest of it.
constexpr int64_t kWholeTile = 128 * 1024;
constexpr int kLeastPart = 3;  // stages of a block

// A tile has kRows rows of the weight; a stage is kBlocks blocks of 64 of K, of the tile and of x.
template <int kBatch>
struct Tile {
  static constexpr int kRows = 64, kBlocks = 2;
  static constexpr int kWeightBytes = kRows * kDepth * 2, kXBytes = kBatch * kDepth * 2;
  static constexpr int kStageBytes = kBlocks * (kWeightBytes + kXBytes);
  static constexpr int kWorkers = 4 * kWarp, kThreads = kWorkers + kWarp;  // a warp fetches for the others
};

struct KernelParams {
  CUtensorMap weight, x;
  int k, per_tile, stages;
  bool whole;
  const float* squares;
  int parts;
  float eps;
  float4* partials;
  SkinnyFinish finish;
};

// Where a block's part begins, in stages of all tiles; and whose part a stage is.
__device__ __forceinline__ int PartBegin(const KernelParams& p, int block) {
  const int64_t units = p.whole ? p.finish.tiles : static_cast<int64_t>(p.finish.tiles) * p.per_tile;
  return static_cast<int>(block * units / gridDim.x) * (p.whole ? p.per_tile : 1);
}
__device__ __forceinline__ int BlockOf(const KernelParams& p, int64_t stage) {
  return static_cast<int>(((stage + 1) * gridDim.x - 1) / (static_cast<int64_t>(p.finish.tiles) * p.per_tile));
}

template <int kBatch>
__device__ __forceinline__ void Fetch(const KernelParams& p, char* stages, uint64_t* full, uint64_t* empty) {
  using T = Tile<kBatch>;
  const int begin = PartBegin(p, static_cast<int>(blockIdx.x)), end = PartBegin(p, static_cast<int>(blockIdx.x) + 1);
  const uint64_t once = CachePolicy(true);  // what all blocks read, and the kernels themselves, stay in the L2 cache
  const auto ask_weights = [&](int stage, int slot) {
    const int tile = stage / p.per_tile, k0 = (stage - tile * p.per_tile) * T::kBlocks * kDepth;
    const int row = static_cast<int>(RowOf(tile * kBoxRows, p.finish.half));
    ArriveAndExpect(&full[slot], T::kStageBytes);
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {  // zeros come from beyond the end
        CopyBox(stages + slot * T::kStageBytes + b * T::kWeightBytes + second * (T::kWeightBytes / 2), &p.weight,
                row + second * p.finish.half, k0 + b * kDepth, &full[slot], once);
      }
    }
  };
  const auto ask_x = [&](int stage, int slot) {
    const int k0 = stage % p.per_tile * T::kBlocks * kDepth;
    char* const to = stages + slot * T::kStageBytes + T::kBlocks * T::kWeightBytes;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      CopyBox(to + b * T::kXBytes, &p.x, 0, k0 + b * kDepth, &full[slot]);
    }
  };
  const int first = min(end, begin + p.stages);
  for (int stage = begin; stage < first; ++stage) ask_weights(stage, stage - begin);
  if (end - first <= kEarlier) LetNextKernelStart();
  WaitForPreviousKernel();
  for (int stage = begin; stage < first; ++stage) ask_x(stage, stage - begin);
  int slot = 0, phase = 0;
  for (int stage = first; stage < end; ++stage) {
    WaitPhase(&empty[slot], phase);
    ask_weights(stage, slot);
    ask_x(stage, slot);
    if (end - 1 - stage == kEarlier) LetNextKernelStart();
    if (++slot == p.stages) {
      slot = 0;
      phase ^= 1;
    }
  }
}

// A block has one place for sums that go to another, for the tile whose beginning is that one's.
template <int kBatch>
__device__ __forceinline__ float4* PartialsOf(const KernelParams& p, int block) {
  return p.partials + static_cast<int64_t>(block) * (Tile<kBatch>::kWorkers * kBatch / 8) + threadIdx.x;
}

template <int kBatch>
__device__ __forceinline__ void GivePart(const KernelParams& p, const float (&sum)[kBatch / 8][4]) {
  float4* const to = PartialsOf<kBatch>(p, static_cast<int>(blockIdx.x));
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
    GiveSums(to + j * Tile<kBatch>::kWorkers, make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]));
  }
}

// Adds the sums of the blocks after this one that have a part of the tile; their places are empty again.
template <int kBatch>
__device__ __forceinline__ void TakeParts(const KernelParams& p, int tile, float (&sum)[kBatch / 8][4]) {
  const int last = BlockOf(p, static_cast<int64_t>(tile + 1) * p.per_tile - 1);
  for (int block = static_cast<int>(blockIdx.x) + 1; block <= last; ++block) {
    float4* const from = PartialsOf<kBatch>(p, block);
    float4 value[kBatch / 8];
    bool come = false;
    while (!come) {
      come = true;
#pragma unroll
      for (int j = 0; j < kBatch / 8; ++j) {
        value[j] = LookForSums(from + j * Tile<kBatch>::kWorkers);
        come = come && !Absent(value[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch / 8; ++j) {
      EmptyPlace(from + j * Tile<kBatch>::kWorkers);
      sum[j][0] += value[j].x;
      sum[j][1] += value[j].y;
      sum[j][2] += value[j].z;
      sum[j][3] += value[j].w;
    }
  }
  __syncwarp();
}

template <int kBatch>
__global__ void __launch_bounds__(kMostThreads, 1) SkinnyKernel(const __grid_constant__ KernelParams p) {
  using T = Tile<kBatch>;
  extern __shared__ unsigned char skinny_shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  __shared__ union {
    float squares[T::kWorkers / kWarp][kBatch];
    float seconds[kBatch / 2][T::kWorkers / 2];
  } shared;
  __shared__ float scale[kBatch];
  char* const stages = reinterpret_cast<char*>(skinny_shared) + (-SharedAddress(skinny_shared) & (kAlign - 1));

  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == T::kWorkers) {
    for (int s = 0; s < p.stages; ++s) {
      InitBarrier(&full[s], 1);
      InitBarrier(&empty[s], T::kWorkers / kWarp);
    }
    FenceBarrierInit();
    PrefetchMap(&p.weight);
    PrefetchMap(&p.x);
  }
  __syncthreads();
  if (warp == T::kWorkers / kWarp) {
    if (lane == 0) Fetch<kBatch>(p, stages, full, empty);
    return;
  }
  if (thread > T::kWorkers) return;

  WaitForPreviousKernel();
  if (p.squares) {
    constexpr int kShare = T::kWorkers / kBatch;  // threads of a row
    const int r = thread / kShare;
    float sum = 0.0f;
    for (int i = thread % kShare; r < p.finish.m && i < p.parts; i += kShare) sum += p.squares[r * p.parts + i];
#pragma unroll
    for (int other = 1; other < kShare; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (thread % kShare == 0) scale[r] = 1.0f / sqrtf(sum / static_cast<float>(p.k) + p.eps);
    WorkersBarrier<T::kWorkers>();
  }

  Place at;
  at.t = lane % 4;
  const int local = warp * 16 + lane / 4;  // of the tile's rows
  at.second = local >= T::kRows / 2;
  const int begin = PartBegin(p, static_cast<int>(blockIdx.x)), end = PartBegin(p, static_cast<int>(blockIdx.x) + 1);
  int slot = 0, phase = 0;
  for (int stage = begin; stage < end;) {
    at.tile = stage / p.per_tile;
    at.pair = at.tile * (T::kRows / 2) + local % (T::kRows / 2);
    const int from = stage - at.tile * p.per_tile, to = min(p.per_tile, from + end - stage);
    Before<kBatch> before;
    Turning<kBatch> turning;
    if (p.finish.turn && from == 0 && !(p.finish.pairs && at.second)) LoadTurning<kBatch>(p.finish, at, turning);
    if (!p.finish.turn && !p.finish.pairs && from == 0) LoadBefore<kBatch>(p.finish, at, before);
    float sum[kBatch / 8][4] = {};
    int read = -1;  // the slot that the products under way read
    for (int s = from; s < to; ++s) {
      WaitPhase(&full[slot], phase);
      const char* const weights = stages + slot * T::kStageBytes;
      const char* const x = stages + slot * T::kStageBytes + T::kBlocks * T::kWeightBytes;
      WarpgroupBegin();
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) {
          WarpgroupDotNarrow(sum, MatrixDescriptor(weights + b * T::kWeightBytes + i * 32, T::kWeightBytes),
                             MatrixDescriptor(x + b * T::kXBytes + i * 32, T::kXBytes));
        }
      }
      WarpgroupCommit();
      if (read >= 0) {
        WarpgroupWait<1>();
        if (lane == 0) Arrive(&empty[read]);
      }
      read = slot;
      if (++slot == p.stages) {
        slot = 0;
        phase ^= 1;
      }
    }
    WarpgroupWait<0>();
    HoldSums(sum);
    if (lane == 0) Arrive(&empty[read]);
    stage += to - from;
    if (from > 0) {
      GivePart<kBatch>(p, sum);
      continue;
    }
    if (to < p.per_tile) TakeParts<kBatch>(p, at.tile, sum);
    if (p.squares) {
#pragma unroll
      for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] *= scale[at.RowIn(j, e)];
      }
    }
    if (p.finish.pairs) {
      StorePairs<kBatch, T::kWorkers>(p.finish, at, sum, shared.seconds, turning);
    } else if (p.finish.turn) {
      StoreTurnedNeighbours<kBatch>(p.finish, at, sum, turning);
    } else {
      StoreSums<kBatch, T::kWorkers>(p.finish, at, sum, before, shared.squares);
    }
  }
}

template <typename Body>
auto WithTile(int m, const Body& body) {
  if (m <= 8) return body(Tile<8>());
  return body(Tile<16>());
}

// Threads of a block that has more than half the registers of a multiprocessor.
template <int kBatch>
int MoreThanHalfThreads() {
  static const int threads = [] {
    cudaFuncAttributes attributes;
    STILLHOUSE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(SkinnyKernel<kBatch>)));
    const int of_warp = static_cast<int>(CeilDiv(attributes.numRegs, 8)) * 8 * kWarp;
    return std::max((kRegisters / 2 / of_warp + 1) * kWarp, Tile<kBatch>::kThreads);
  }();
  return threads;
}

template <int kBatch>
void Launch(Tile<kBatch>, const SkinnyParams& p, const SkinnySchedule& schedule, cudaStream_t stream) {
  using T = Tile<kBatch>;
  KernelParams kernel;
  kernel.weight = MatrixMap(p.weight, p.n, p.k, p.k * 2, kBoxRows);
  kernel.x = MatrixMap(p.x, p.m, p.k, p.m > 1 ? p.x_stride * 2 : p.k * 2, kBatch);
  kernel.k = static_cast<int>(p.k);
  kernel.per_tile = static_cast<int>(CeilDiv(p.k, T::kBlocks * kDepth));
  kernel.stages = schedule.stages;
  kernel.whole = schedule.whole;
  kernel.squares = p.squares;
  kernel.parts = p.parts;
  kernel.eps = p.eps;
  kernel.finish = FinishOf(p, T::kRows);
  kernel.partials = static_cast<float4*>(p.partials);
  PreferShared(SkinnyKernel<kBatch>);
  int threads = T::kThreads, shared = schedule.stages * T::kStageBytes + kAlign;
  if (2 * schedule.blocks > p.multiprocessors) {
    if (p.add) {
      threads = MoreThanHalfThreads<kBatch>();
    } else {
      shared = std::max(shared, kMoreThanHalfShared);
    }
  }
  LaunchKernelEarly(SkinnyKernel<kBatch>, static_cast<unsigned>(schedule.blocks), threads, shared, stream, kernel);
}

}  // namespace

bool CanSkinny(const SkinnyParams& p) {
  return p.m > 0 && p.m <= kSkinnyRows && p.n > 0 && p.n < int64_t{1} << 30 && p.k > 0 && p.k % 8 == 0 &&
         p.k < int64_t{1} << 24 && (!p.glu || p.n % 2 == 0) && Aligned16(p.weight) &&
         Aligned16(p.x, p.m > 1 ? p.x_stride * 2 : 0);
}

bool CanTurn(const QkvRopeParams& p) {
  return !p.q_norm && !p.k_norm && 2 * p.pairs == p.width && (p.interleaved ? p.width % 16 : p.pairs % kBoxRows) == 0;
}

SkinnySchedule ScheduleSkinny(const SkinnyParams& p) {
  SkinnySchedule small;
  small.tiles = small.blocks = static_cast<int>(CeilDiv(p.n, kSmallSkinnyRows));
  small.small = true;
  if (CanSmallSkinny(p) && small.blocks <= p.multiprocessors) return small;
  return WithTile(p.m, [&](auto tile) {
    using T = decltype(tile);
    const int64_t tiles = CeilDiv(p.n, T::kRows), per_tile = CeilDiv(p.k, T::kBlocks * kDepth);
    SkinnySchedule s;
    s.tiles = static_cast<int>(tiles);
    s.whole = T::kRows * p.k * 2 <= kWholeTile;
    s.blocks = static_cast<int>(
        std::min<int64_t>(p.multiprocessors, s.whole ? tiles : std::max<int64_t>(1, tiles * per_tile / kLeastPart)));
    const int64_t most = s.whole ? CeilDiv(tiles, s.blocks) * per_tile : CeilDiv(tiles * per_tile, s.blocks);
    const int shared = 2 * s.blocks > p.multiprocessors ? kSharedOfTwo : kSharedOfOne;
    s.stages = static_cast<int>(std::min<int64_t>({kMostStages, shared / T::kStageBytes, most}));
    return s;
  });
}

void LaunchSkinny(const SkinnyParams& p, const SkinnySchedule& schedule, cudaStream_t stream) {
  if (schedule.small) return LaunchSmallSkinny(p, stream);
  WithTile(p.m, [&](auto tile) { Launch(tile, p, schedule, stream); });
}

}  // namespace stillhouse::cuda
