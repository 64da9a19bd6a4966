// Products of few rows. The weight's rows are the tensor cores' left operand, 64 at a time, and rows of x the right
// one, so that a product of 8 rows costs no more than it must; both come through a ring of stages that the copy engine
// fills. Each block takes an equal part of the weight; parts end within tiles, and the block that has a tile's
// beginning adds up what the others found, in their order. When a block has asked for the last of its weights the next
// kernel may start: its first weights come while this one's sums are added up.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
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

using namespace skinny;  // NOLINT(build/namespaces): the end of the kernel

constexpr int kWarpgroup = 4 * kWarp;
constexpr int kDepth = 64;    // of K: a block of a stage
constexpr int kBoxRows = 32;  // of the weight, in a copy
constexpr int kMostStages = 12;
constexpr int kAlign = 1024;  // of what the tensor cores read
// Two blocks fit a multiprocessor, so that a kernel's first weights come while the one before it ends.
constexpr int kSharedOfTwo = 100 * 1024, kSharedOfOne = 208 * 1024;
// A tile of at most so many bytes is one block's: adding parts up would take longer than reading the rest of it.
constexpr int64_t kWholeTile = 128 * 1024;
constexpr int kLeastPart = 3;  // stages of a block

// A tile has kRows rows of the weight; a stage is kBlocks blocks of 64 of K, of the tile and of x. Where x is large,
// two blocks work side by side on neighbouring tiles, and each fetches half of x for both.
template <int kBatch>
struct Tile {
  static constexpr int kCluster = kBatch <= 16 ? 1 : 2;
  static constexpr int kRows = kBatch <= 16 ? 64 : 128, kGroups = kRows / 64, kBlocks = 128 / kRows;
  static constexpr int kWeightBytes = kRows * kDepth * 2, kXBytes = kBatch * kDepth * 2;
  static constexpr int kStageBytes = kBlocks * (kWeightBytes + kXBytes);
  static constexpr int kWorkers = kGroups * kWarpgroup, kThreads = kWorkers + kWarp;  // a warp fetches for the others
};

struct KernelParams {
  CUtensorMap weight, x;
  int k, per_tile, stages, groups;  // groups: of a cluster's tiles
  bool whole;
  const float* squares;
  int parts;
  float eps;
  float4* partials;
  SkinnyFinish finish;
};

// Parts are the clusters', or the blocks'. Where one begins, in stages of all groups of tiles; and whose a stage is.
template <int kBatch>
__device__ __forceinline__ int Part() {
  return static_cast<int>(blockIdx.x) / Tile<kBatch>::kCluster;
}
template <int kBatch>
__device__ __forceinline__ int Rank() {
  return static_cast<int>(blockIdx.x) % Tile<kBatch>::kCluster;
}
template <int kBatch>
__device__ __forceinline__ int PartBegin(const KernelParams& p, int part) {
  const int64_t units = p.whole ? p.groups : static_cast<int64_t>(p.groups) * p.per_tile;
  const unsigned parts = gridDim.x / Tile<kBatch>::kCluster;
  return static_cast<int>(part * units / parts) * (p.whole ? p.per_tile : 1);
}
template <int kBatch>
__device__ __forceinline__ int PartOf(const KernelParams& p, int64_t stage) {
  const unsigned parts = gridDim.x / Tile<kBatch>::kCluster;
  return static_cast<int>(((stage + 1) * parts - 1) / (static_cast<int64_t>(p.groups) * p.per_tile));
}

template <int kBatch>
__device__ __forceinline__ void Fetch(const KernelParams& p, char* stages, uint64_t* full, uint64_t* empty) {
  using T = Tile<kBatch>;
  const int begin = PartBegin<kBatch>(p, Part<kBatch>()), end = PartBegin<kBatch>(p, Part<kBatch>() + 1);
  const auto ask_weights = [&](int stage, int slot) {
    const int group = stage / p.per_tile, k0 = (stage - group * p.per_tile) * T::kBlocks * kDepth;
    const int tile = group * T::kCluster + Rank<kBatch>();
    ArriveAndExpect(&full[slot], T::kStageBytes);
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < T::kRows / 2 / kBoxRows; ++i) {
        const int row = static_cast<int>(RowOf(tile * (T::kRows / 2) + i * kBoxRows, p.finish.half));
        char* const to = stages + slot * T::kStageBytes + b * T::kWeightBytes + i * kBoxRows * kDepth * 2;
        CopyBox(to, &p.weight, row, k0 + b * kDepth, &full[slot]);  // zeros come from beyond the end
        CopyBox(to + T::kWeightBytes / 2, &p.weight, row + p.finish.half, k0 + b * kDepth, &full[slot]);
      }
    }
  };
  const auto ask_x = [&](int stage, int slot) {
    const int k0 = stage % p.per_tile * T::kBlocks * kDepth;
    char* const to = stages + slot * T::kStageBytes + T::kBlocks * T::kWeightBytes;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      if constexpr (T::kCluster == 1) {
        CopyBox(to + b * T::kXBytes, &p.x, 0, k0 + b * kDepth, &full[slot]);
      } else {
        constexpr int kHalf = kBatch / 2;
        CopyBoxToBoth(to + b * T::kXBytes + Rank<kBatch>() * (T::kXBytes / 2), &p.x, Rank<kBatch>() * kHalf,
                      k0 + b * kDepth, &full[slot]);
      }
    }
  };
  const int first = min(end, begin + p.stages);
  for (int stage = begin; stage < first; ++stage) ask_weights(stage, stage - begin);
  if (first == end) LetNextKernelStart();
  WaitForPreviousKernel();
  for (int stage = begin; stage < first; ++stage) ask_x(stage, stage - begin);
  int slot = 0, phase = 0;
  for (int stage = first; stage < end; ++stage) {
    WaitPhase(&empty[slot], phase);
    ask_weights(stage, slot);
    ask_x(stage, slot);
    if (++slot == p.stages) {
      slot = 0;
      phase ^= 1;
    }
  }
  LetNextKernelStart();
}

// Sums that go from block to block: each float says itself that it has come, by not being kAbsent, a NaN that no sum
// has (the device's own is another). A block has one place, for the tile whose beginning is another's.
constexpr uint32_t kAbsent = 0xffffffffu;

template <int kBatch>
__device__ __forceinline__ float4* PartialsOf(const KernelParams& p, int block) {
  return p.partials + static_cast<int64_t>(block) * (Tile<kBatch>::kWorkers * kBatch / 8) + threadIdx.x;
}
__device__ __forceinline__ float Present(float x) {
  return __float_as_uint(x) == kAbsent ? __uint_as_float(0x7fffffffu) : x;
}
// Anew each time: a load that the assembler may take for constant would be waited for once or forever.
__device__ __forceinline__ float4 LoadPartial(const float4* from) {
  float4 value;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ bool Absent(float x) { return __float_as_uint(x) == kAbsent; }

template <int kBatch>
__device__ __forceinline__ void GiveSums(const KernelParams& p, const float (&sum)[kBatch / 8][4]) {
  float4* const to = PartialsOf<kBatch>(p, static_cast<int>(blockIdx.x));
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
    __stcg(to + j * Tile<kBatch>::kWorkers,
           make_float4(Present(sum[j][0]), Present(sum[j][1]), Present(sum[j][2]), Present(sum[j][3])));
  }
}

// Adds the sums of the parts after this one that have some of the tiles; their places are empty again.
template <int kBatch>
__device__ __forceinline__ void TakeSums(const KernelParams& p, int group, float (&sum)[kBatch / 8][4]) {
  constexpr int kAtOnce = kBatch / 8 < 4 ? kBatch / 8 : 4;
  const int last = PartOf<kBatch>(p, static_cast<int64_t>(group + 1) * p.per_tile - 1);
  const float absent = __uint_as_float(kAbsent);
  for (int part = Part<kBatch>() + 1; part <= last; ++part) {
    float4* const from = PartialsOf<kBatch>(p, part * Tile<kBatch>::kCluster + Rank<kBatch>());
#pragma unroll
    for (int first = 0; first < kBatch / 8; first += kAtOnce) {
      float4 value[kAtOnce];
      bool come = false;
      while (!come) {
        come = true;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          value[j] = LoadPartial(from + (first + j) * Tile<kBatch>::kWorkers);
          come = come && !Absent(value[j].x) && !Absent(value[j].y) && !Absent(value[j].z) && !Absent(value[j].w);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        __stcg(from + (first + j) * Tile<kBatch>::kWorkers, make_float4(absent, absent, absent, absent));
        sum[first + j][0] += value[j].x;
        sum[first + j][1] += value[j].y;
        sum[first + j][2] += value[j].z;
        sum[first + j][3] += value[j].w;
      }
    }
  }
  __syncwarp();
}

// A warp has read a slot: for the blocks that fill it.
template <int kBatch>
__device__ __forceinline__ void Release(uint64_t* empty, int lane) {
  if constexpr (Tile<kBatch>::kCluster == 1) {
    if (lane == 0) Arrive(empty);
  } else {
    if (lane < Tile<kBatch>::kCluster) ArriveAt(empty, lane);
  }
}

template <int kBatch>
__global__ void __launch_bounds__(Tile<kBatch>::kThreads, 2) SkinnyKernel(const __grid_constant__ KernelParams p) {
  using T = Tile<kBatch>;
  extern __shared__ unsigned char skinny_shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages];
  __shared__ union {
    float squares[T::kWorkers / kWarp][kBatch];
    float seconds[(kBatch < kExchanged ? kBatch : kExchanged) / 2][T::kWorkers / 2];
  } shared;
  __shared__ float scale[kBatch];
  char* const stages = reinterpret_cast<char*>(skinny_shared) + (-SharedAddress(skinny_shared) & (kAlign - 1));

  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  if (thread == T::kWorkers) {
    for (int s = 0; s < p.stages; ++s) {
      InitBarrier(&full[s], 1);
      InitBarrier(&empty[s], T::kCluster * T::kWorkers / kWarp);
    }
    FenceBarrierInit();
    PrefetchMap(&p.weight);
    PrefetchMap(&p.x);
  }
  if constexpr (T::kCluster > 1) {
    ArriveAtCluster();
    WaitForCluster();
  } else {
    __syncthreads();
  }
  if (warp == T::kWorkers / kWarp) {
    if (lane == 0) Fetch<kBatch>(p, stages, full, empty);
    return;
  }

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

  const int warpgroup = warp / 4;
  Place at;
  at.t = lane % 4;
  const int local = warpgroup * 64 + warp % 4 * 16 + lane / 4;  // of the tile's rows
  at.second = local >= T::kRows / 2;
  const int begin = PartBegin<kBatch>(p, Part<kBatch>()), end = PartBegin<kBatch>(p, Part<kBatch>() + 1);
  int slot = 0, phase = 0;
  for (int stage = begin; stage < end;) {
    const int group = stage / p.per_tile;
    at.tile = group * T::kCluster + Rank<kBatch>();
    at.pair = at.tile * (T::kRows / 2) + local % (T::kRows / 2);
    const int from = stage - group * p.per_tile, to = min(p.per_tile, from + end - stage);
    // Of many rows there is too much to hold meanwhile.
    constexpr bool kEarly = kBatch <= 16;
    const bool pairs = p.finish.glu || p.finish.turn;
    Before<kBatch> before;
    if (kEarly && !pairs && from == 0) LoadBefore<kBatch>(p.finish, at, before);
    float sum[kBatch / 8][4] = {};
    int read = -1;  // the slot that the products under way read
    for (int s = from; s < to; ++s) {
      WaitPhase(&full[slot], phase);
      const char* const weights = stages + slot * T::kStageBytes + warpgroup * 64 * kDepth * 2;
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
        Release<kBatch>(&empty[read], lane);
      }
      read = slot;
      if (++slot == p.stages) {
        slot = 0;
        phase ^= 1;
      }
    }
    WarpgroupWait<0>();
    HoldNarrowSums(sum);
    Release<kBatch>(&empty[read], lane);
    stage += to - from;
    if (from > 0) {
      GiveSums<kBatch>(p, sum);
      continue;
    }
    if (!kEarly && !pairs) LoadBefore<kBatch>(p.finish, at, before);
    if (to < p.per_tile) TakeSums<kBatch>(p, group, sum);
    if (p.squares) {
#pragma unroll
      for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] *= scale[at.RowIn(j, e)];
      }
    }
    if (pairs) {
      StorePairs<kBatch, T::kWorkers>(p.finish, at, sum, shared.seconds);
    } else {
      StoreSums<kBatch, T::kWorkers>(p.finish, at, sum, before, shared.squares);
    }
  }
  if constexpr (T::kCluster > 1) {  // the other block may still arrive at this one's barriers
    __syncwarp();
    ArriveAtCluster();
    WaitForCluster();
  }
}

template <typename Body>
auto WithTile(int m, const Body& body) {
  if (m <= 8) return body(Tile<8>());
  if (m <= 16) return body(Tile<16>());
  if (m <= 32) return body(Tile<32>());
  return body(Tile<64>());
}

template <int kBatch>
void Launch(Tile<kBatch>, const SkinnyParams& p, const SkinnySchedule& schedule, cudaStream_t stream) {
  using T = Tile<kBatch>;
  KernelParams kernel;
  kernel.weight = MatrixMap(p.weight, p.n, p.k, p.k * 2, kBoxRows);
  kernel.x = MatrixMap(p.x, p.m, p.k, p.m > 1 ? p.x_stride * 2 : p.k * 2, kBatch / T::kCluster);
  kernel.k = static_cast<int>(p.k);
  kernel.per_tile = static_cast<int>(CeilDiv(p.k, T::kBlocks * kDepth));
  kernel.stages = schedule.stages;
  kernel.groups = static_cast<int>(CeilDiv(schedule.tiles, T::kCluster));
  kernel.whole = schedule.whole;
  kernel.squares = p.squares;
  kernel.parts = p.parts;
  kernel.eps = p.eps;
  kernel.finish = FinishOf(p, T::kRows);
  kernel.partials = static_cast<float4*>(p.partials);
  LaunchClustersEarly(SkinnyKernel<kBatch>, static_cast<unsigned>(schedule.blocks), T::kCluster, T::kThreads,
                      schedule.stages * T::kStageBytes + kAlign, stream, kernel);
}

}  // namespace

bool CanSkinny(const SkinnyParams& p) {
  return p.m > 0 && p.m <= kSkinnyRows && p.n > 0 && p.n < int64_t{1} << 30 && p.k > 0 && p.k % 8 == 0 &&
         p.k < int64_t{1} << 24 && (!p.glu || p.n % 2 == 0) && Aligned16(p.weight) &&
         Aligned16(p.x, p.m > 1 ? p.x_stride * 2 : 0);
}

bool CanTurn(const QkvRopeParams& p) {
  return !p.q_norm && !p.k_norm && !p.interleaved && 2 * p.pairs == p.width && p.pairs % kBoxRows == 0;
}

SkinnySchedule ScheduleSkinny(const SkinnyParams& p) {
  SkinnySchedule small;
  small.tiles = small.blocks = static_cast<int>(CeilDiv(p.n, kSmallSkinnyRows));
  small.small = true;
  if (CanSmallSkinny(p) && small.blocks <= p.multiprocessors) return small;
  return WithTile(p.m, [&](auto tile) {
    using T = decltype(tile);
    const int64_t tiles = CeilDiv(p.n, T::kRows), per_tile = CeilDiv(p.k, T::kBlocks * kDepth);
    const int64_t groups = CeilDiv(tiles, T::kCluster);
    SkinnySchedule s;
    s.tiles = static_cast<int>(tiles);
    s.whole = T::kRows * p.k * 2 <= kWholeTile;
    const int64_t parts = std::min<int64_t>(p.multiprocessors / T::kCluster,
                                            s.whole ? groups : std::max<int64_t>(1, groups * per_tile / kLeastPart));
    s.blocks = static_cast<int>(parts) * T::kCluster;
    const int64_t most = s.whole ? CeilDiv(groups, parts) * per_tile : CeilDiv(groups * per_tile, parts);
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
