// Products of tens of rows with a weight. The rows are the tensor cores' left operand, 64 to a warpgroup, and a tile of
// the weight's rows the right one, as wide as makes the work of all multiprocessors equal. Both come through a ring of
// stages that the copy engine fills; the weight's part of the first ones before the kernel that makes the rows has
// ended.
#include <cuda.h>

#include <algorithm>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/decompose_k_finish.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/device/wgmma_narrow.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wide_product_launch.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kDepth = 64;  // of K, in a stage
constexpr int kRowBytes = 2 * kDepth;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kAlign = 1024;
// A block a multiprocessor, and small kernels beside it.
constexpr int kMostShared = 208 * 1024;

// kRows rows of x, and two boxes of kHalf rows of the weight: neighbours, or gates and what they multiply.
template <int kRows, int kHalf>
struct Tile {
  static constexpr int kWorkers = kRows / 64 * kGroup, kThreads = kWorkers + kWarp;  // a warp fetches for the others
  static constexpr int kXBytes = kRows * kRowBytes, kHalfBytes = kHalf * kRowBytes;
  static constexpr int kStageBytes = kXBytes + 2 * kHalfBytes;
  static constexpr int kStages = (kMostShared - kAlign) / kStageBytes;
  static constexpr int kShared = kStages * kStageBytes + kAlign;
};

struct KernelParams {
  CUtensorMap weight, x;
  DecomposeKShape shape;
  // Where sums go as they are, two at a time: slices of [m, n], to_stride from row to row. Null: single elements go to
  // `partials`, or, finished, to the shape's output.
  float* to;
  int64_t to_stride;
  float* partials;     // [splits, m, n]; or null
  Bf16* gates;         // [m, n / 2]; or null
  int stages, splits;  // all of K's
  int tiles;
};

// What a block does: slices of tiles, one after the other, and the stages of each.
template <int kHalf>
class Work {
 public:
  __device__ explicit Work(const KernelParams& p) : p_(p), at_(static_cast<int>(blockIdx.x)) { Enter(); }
  __device__ bool Ended() const { return at_ >= p_.tiles * p_.splits; }
  __device__ void NextStage() {
    if (++stage_ == end_) NextSlice();
  }
  __device__ void NextSlice() {
    at_ += static_cast<int>(gridDim.x);
    Enter();
  }
  __device__ int slice() const { return at_ / p_.tiles; }
  __device__ int stages() const { return end_ - stage_; }  // that are left
  __device__ int k() const { return stage_ * kDepth; }
  // The first of the weight's rows in each half.
  __device__ int first() const { return (at_ - slice() * p_.tiles) * (p_.gates ? kHalf : 2 * kHalf); }
  __device__ int second() const { return first() + (p_.gates ? static_cast<int>(p_.shape.n / 2) : kHalf); }

 private:
  __device__ void Enter() {
    stage_ = p_.stages * slice() / p_.splits;
    end_ = p_.stages * (slice() + 1) / p_.splits;
  }

  const KernelParams& p_;
  int at_, stage_ = 0, end_ = 0;
};

template <int kRows, int kHalf>
__device__ __forceinline__ void Fetch(const KernelParams& p, unsigned char* stages, uint64_t* full, uint64_t* empty) {
  using T = Tile<kRows, kHalf>;
  const uint64_t once = CachePolicy(true);
  const auto ask_weight = [&](const Work<kHalf>& work, int stage) {
    unsigned char* const to = stages + stage * T::kStageBytes + T::kXBytes;
    ArriveAndExpect(&full[stage], T::kStageBytes);
    CopyBox(to, &p.weight, work.first(), work.k(), &full[stage], once);
    CopyBox(to + T::kHalfBytes, &p.weight, work.second(), work.k(), &full[stage], once);
  };
  const auto ask_x = [&](const Work<kHalf>& work, int stage) {
    CopyBox(stages + stage * T::kStageBytes, &p.x, 0, work.k(), &full[stage]);
  };
  Work<kHalf> ahead(p), work(p);
  int early = 0;
  for (; early < T::kStages && !ahead.Ended(); ++early, ahead.NextStage()) ask_weight(ahead, early);
  WaitForPreviousKernel();
  RingPlace<T::kStages> place;
  for (; !work.Ended(); work.NextStage(), place.Next()) {
    if (early > 0) {
      --early;
    } else {
      WaitPhase(&empty[place.stage], place.parity ^ 1);
      ask_weight(work, place.stage);
    }
    ask_x(work, place.stage);
  }
  LetNextKernelStart();  // a launch takes as long as what is under way
}

// A warp's sixteen rows of a tile. What runs once a launch is new to the instruction cache: there is as little of it as
// can be.
template <int kHalf>
__device__ __forceinline__ void Leave(const KernelParams& p, const Work<kHalf>& work, int warp,
                                      const float (&first)[kHalf / 8][4], const float (&second)[kHalf / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row0 = 16 * warp + lane / 4, column0 = lane % 4 * 2;
  const DecomposeKShape& s = p.shape;
  const int m = static_cast<int>(s.m), n = static_cast<int>(s.n), begin = work.first() + column0;
  if (p.gates) {
    const int width = n / 2;
    Bf16* const to = p.gates + static_cast<int64_t>(row0) * width + begin;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      if (row0 + 4 * e >= m) break;
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        const auto gated = [&](int i) { return __fdividef(first[j][i], 1.0f + __expf(-first[j][i])) * second[j][i]; };
        const uint32_t pair = PackBf16(gated(e), gated(e + 1));
        if (8 * j < width - begin) *reinterpret_cast<uint32_t*>(to + 4 * e * width + 8 * j) = pair;
      }
    }
    return;
  }
  if (p.to) {
    float* const to = p.to + (static_cast<int64_t>(work.slice()) * m + row0) * p.to_stride + begin;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      if (row0 + 4 * e >= m) break;
      float* const row = to + 4 * e * p.to_stride;
      const auto store = [&](int column, const float(&sum)[4]) {
        if (column < n - begin) *reinterpret_cast<float2*>(row + column) = make_float2(sum[e], sum[e + 1]);
      };
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        store(8 * j, first[j]);
        store(kHalf + 8 * j, second[j]);
      }
    }
    return;
  }
  const auto finish = [&](int column, int e, float sum) {
    const int row = row0 + e / 2 * 8;
    column += begin + e % 2;
    if (row >= m || column >= n) return;
    if (p.partials) {
      p.partials[(static_cast<int64_t>(work.slice()) * m + row) * n + column] = sum;
    } else {
      Store(s, row, column, sum, Before(s, row, column));
    }
  };
#pragma unroll
  for (int j = 0; j < kHalf / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      finish(8 * j, e, first[j][e]);
      finish(kHalf + 8 * j, e, second[j][e]);
    }
  }
}

template <int kRows, int kHalf>
__device__ __forceinline__ void Multiply(const KernelParams& p, const unsigned char* stages, uint64_t* full,
                                         uint64_t* empty, int warp) {
  using T = Tile<kRows, kHalf>;
  const auto free = [&](int stage) {
    if (threadIdx.x % kWarp == 0) Arrive(&empty[stage]);
  };
  WaitForPreviousKernel();
  RingPlace<T::kStages> place;
  for (Work<kHalf> work(p); !work.Ended(); work.NextSlice()) {
    float first[kHalf / 8][4] = {}, second[kHalf / 8][4] = {};
    int before = -1;
    for (int i = work.stages(); i > 0; --i, place.Next()) {
      const unsigned char* const stage = stages + place.stage * T::kStageBytes;
      const uint64_t x = MatrixDescriptor(stage + warp / 4 * 64 * kRowBytes, 0);
      const uint64_t weight = MatrixDescriptor(stage + T::kXBytes, 0);
      WaitPhase(&full[place.stage], place.parity);
      WarpgroupBegin();
#pragma unroll
      for (int d = 0; d < kRowBytes; d += 32) {
        WarpgroupDotNarrow(first, Advance(x, d), Advance(weight, d));
        WarpgroupDotNarrow(second, Advance(x, d), Advance(weight, T::kHalfBytes + d));
      }
      WarpgroupCommit();
      if (before >= 0) {
        WarpgroupWait<1>();
        free(before);
      }
      before = place.stage;
    }
    WarpgroupWait<0>();
    HoldSums(first);
    HoldSums(second);
    free(before);
    Leave<kHalf>(p, work, warp, first, second);
  }
}

template <int kRows, int kHalf>
__global__ void __launch_bounds__(Tile<kRows, kHalf>::kThreads, 1) WideKernel(const __grid_constant__ KernelParams p) {
  using T = Tile<kRows, kHalf>;
  extern __shared__ unsigned char wide_shared[];
  __shared__ uint64_t full[T::kStages], empty[T::kStages];
  unsigned char* const stages = wide_shared + (-SharedAddress(wide_shared) & (kAlign - 1));
  const int thread = static_cast<int>(threadIdx.x), warp = __shfl_sync(kFullWarp, thread / kWarp, 0);
  if (thread == T::kWorkers) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], T::kWorkers / kWarp);
    }
    FenceBarrierInit();
    PrefetchMap(&p.weight);
    PrefetchMap(&p.x);
  }
  __syncthreads();
  if (warp < T::kWorkers / kWarp) {
    Multiply<kRows, kHalf>(p, stages, full, empty, warp);
  } else if (thread == T::kWorkers) {
    Fetch<kRows, kHalf>(p, stages, full, empty);
  }
}

template <int kRows, int kHalf>
void Launch(KernelParams& p, cudaStream_t stream) {
  using T = Tile<kRows, kHalf>;
  const auto kernel = WideKernel<kRows, kHalf>;
  PreferShared(kernel);
  static const int at_once = BlocksAtOnce(kernel, T::kThreads, T::kShared, 1);
  const DecomposeKShape& s = p.shape;
  p.x = MatrixMap(s.a.data, s.m, s.k, 2 * (s.m == 1 ? CeilDiv(s.k, 8) * 8 : s.a.stride_outer), kRows);
  p.weight = MatrixMap(s.b.data, s.n, s.k, 2 * s.b.stride_outer, kHalf);
  p.tiles = static_cast<int>(CeilDiv(s.n, 2 * kHalf));
  LaunchKernelEarly(kernel, static_cast<unsigned>(std::min(p.tiles * p.splits, at_once)), T::kThreads, T::kShared,
                    stream, p);
}

template <int kHalf>
void LaunchTile(KernelParams& p, cudaStream_t stream) {
  p.shape.m <= 64 ? Launch<64, kHalf>(p, stream) : Launch<128, kHalf>(p, stream);
}

void Run(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, void* gates, cudaStream_t stream) {
  KernelParams p;
  p.shape = s;
  p.to = partials;
  p.to_stride = s.n;
  if (!partials && s.op == ElementOp::kNone && !s.add) {
    p.to = s.out;
    p.to_stride = s.out_stride;
  }
  if (s.n % 2 != 0 || p.to_stride % 2 != 0 || reinterpret_cast<uintptr_t>(p.to) % 8 != 0) p.to = nullptr;
  p.partials = partials;
  p.gates = static_cast<Bf16*>(gates);
  p.stages = static_cast<int>(CeilDiv(s.k, kDepth));
  p.splits = plan.splits;
  switch (plan.tile_n) {
    case 64:
      return LaunchTile<32>(p, stream);
    case 96:
      return LaunchTile<48>(p, stream);
    case 128:
      return LaunchTile<64>(p, stream);
    case 160:
      return LaunchTile<80>(p, stream);
    case 192:
      return LaunchTile<96>(p, stream);
    case 224:
      return LaunchTile<112>(p, stream);
    case 256:
      return LaunchTile<128>(p, stream);
  }
}

bool HasWideTile(int tile_m, int tile_n) {
  return tile_m == 64 && tile_n >= kLeastWideTile && tile_n <= kMostWideTile && tile_n % kWideTileStep == 0;
}

}  // namespace

bool CanWide(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  constexpr int64_t kMost = int64_t{1} << 24;
  // One row of x may carry any stride.
  const auto lies = [&](const Operand& operand, bool one_row) {
    return operand.bf16 && operand.stride_k == 1 && (one_row || operand.stride_outer >= s.k) &&
           Aligned16(operand.data, one_row ? 0 : 2 * operand.stride_outer);
  };
  return s.constant_b && lies(s.a, s.m == 1) && lies(s.b, false) && s.m > 0 && s.m <= kWideRows && s.n < kMost &&
         s.k > 0 && s.k < kMost && HasWideTile(plan.tile_m, plan.tile_n) && plan.splits >= 1 &&
         plan.splits <= kMostSlices && plan.splits <= CeilDiv(s.k, kDepth);
}

void LaunchWide(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  Run(s, plan, partials, nullptr, stream);
}

void LaunchWideGates(const DecomposeKShape& s, const DecomposeKPlan& plan, void* out, cudaStream_t stream) {
  Run(s, plan, nullptr, out, stream);
}

}  // namespace stillhouse::cuda
