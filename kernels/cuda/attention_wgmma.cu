// Attention forward on bf16 keys and values for long sequences: warpgroup products (wgmma), one warpgroup copying keys
// and values ahead of two that compute (Shah et al. 2024). Heads 128 wide.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_landing.cuh"
#include "kernels/cuda/device/attention_stages.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/device/wgmma_narrow.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {
namespace tall {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Weights may grow to 2^kSlack before the maximum follows and earlier sums shrink.
constexpr float kSlack = 8.0f;
// Slots of a share up to which it is taken by half steps. In a longer one a last step that is not full matters less
// than how often half steps wait for one another.
constexpr int kBrief = 4 * kSlots;

// Queries of the tile, every kStride-th from `first` on, each as a row of the step and a head; `there`: the tile has so
// many. One division for all.
template <int kStride>
class Queries {
 public:
  __device__ Queries(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows, int kv, int first)
      : item_(item),
        rows_(rows),
        first_head_(kv * (t.heads / t.kv_heads) + item.head_begin),
        row_step_(kStride / item.head_count),
        head_step_(kStride % item.head_count),
        i_(first / item.head_count),
        head_(first % item.head_count) {}
  __device__ void Next() {
    i_ += row_step_;
    head_ += head_step_;
    if (head_ >= item_.head_count) {
      head_ -= item_.head_count;
      ++i_;
    }
  }
  __device__ bool there() const { return i_ < item_.row_count; }
  __device__ int i() const { return i_; }  // row of the tile
  __device__ int64_t row() const { return there() ? RowOf(rows_, item_.rows, i_) : 0; }
  __device__ int64_t head() const { return first_head_ + head_; }

 private:
  const AttentionItem& item_;
  const int32_t* const rows_;
  const int first_head_, row_step_, head_step_;
  int i_, head_;
};

// A warp's 16 queries of the tile, from `first` on, to its rows of q. `ask()`: before they are read; `asked()`: when
// all are on their way.
template <typename Ask, typename Asked>
__device__ __forceinline__ void LoadQueries(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                                            int kv, int first, char* q, const Ask& ask, const Asked& asked) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, c = lane % 16;
  // Where the query of a lane begins, which the others ask for. −1: it is not there.
  const Queries<1> of_lane(t, item, rows, kv, first + c);
  const int64_t at = of_lane.there() ? of_lane.row() * t.q_row + of_lane.head() * t.q_head : -1;
  ask();
  // All are on their way before the first is used.
  if (t.q_bf16) {
    uint4 value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t from = __shfl_sync(kFullWarp, at, 2 * i + lane / 16);
      value[i] = make_uint4(0, 0, 0, 0);
      if (from >= 0) value[i] = *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(t.q) + from + 8 * c);
    }
    asked();
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<uint4*>(q + TileByte(first + 2 * i + lane / 16, c)) = value[i];
  } else {
    float4 value[8][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t from = __shfl_sync(kFullWarp, at, 2 * i + lane / 16);
      value[i][0] = value[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (from < 0) continue;
      const float4* const columns = reinterpret_cast<const float4*>(static_cast<const float*>(t.q) + from + 8 * c);
      value[i][0] = columns[0];
      value[i][1] = columns[1];
    }
    asked();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 a = value[i][0], b = value[i][1];
      *reinterpret_cast<uint4*>(q + TileByte(first + 2 * i + lane / 16, c)) =
          make_uint4(PackBf16(a.x, a.y), PackBf16(a.z, a.w), PackBf16(b.x, b.y), PackBf16(b.z, b.w));
    }
  }
}

// The running softmax of rows g and g + 8 of a warp, in base 2. ℓ are of the lane's own columns until the end.
struct Running {
  float m[2] = {-INFINITY, -INFINITY};
  float memory[2] = {}, rest[2] = {};
};

// Turns products into weights (in place), of a step or of a half of it, from `first` on; true where earlier sums
// shrink, by `factor`: where a maximum grew by more than kSlack. `scale` is that of the products in base 2, and
// positive. The warp's lanes agree.
template <int kN>
__device__ __forceinline__ bool Weigh(float (&s)[kN][4], Running& running, const Step& step, int first, int flags,
                                      const float* beta, float scale, const int (&tile_row)[2], int two,
                                      float (&factor)[2]) {
  float factor_of = scale;
  if (flags & 3 * kBiased) {
    factor_of = 1.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const bool biased = flags & kBiased << (first + n / 8);
      const float2 bias =
          biased ? *reinterpret_cast<const float2*>(beta + kHalf * first + 8 * n + two) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(s[n][e], scale, (e % 2 ? bias.y : bias.x) * kLog2E);
    }
  }
  if (flags & kMasked) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int seen = min(step.slots[first + n / 8], step.limit[first + n / 8] + tile_row[e / 2]);
        if (n % 8 * 8 + two + e % 2 >= seen) s[n][e] = -INFINITY;
      }
    }
  }
  // Several of each, so that they do not wait for one another.
  float tops[2][4];
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float pair = fmaxf(s[n][2 * row], s[n][2 * row + 1]);
      tops[row][n % 4] = n < 4 ? pair : fmaxf(tops[row][n % 4], pair);
    }
  }
  float top[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    top[row] = fmaxf(fmaxf(tops[row][0], tops[row][1]), fmaxf(tops[row][2], tops[row][3]));
  }
  const bool grew =
      __any_sync(kFullWarp, top[0] * factor_of > running.m[0] + kSlack || top[1] * factor_of > running.m[1] + kSlack);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    factor[row] = 1.0f;
    if (grew) {
      const float all = fmaxf(running.m[row], WarpMax<4>(top[row]) * factor_of);
      factor[row] = running.m[row] == -INFINITY ? 0.0f : Exp2(running.m[row] - all);
      running.m[row] = all;
      running.memory[row] *= factor[row];
      running.rest[row] *= factor[row];
    }
    const float base = running.m[row] == -INFINITY ? 0.0f : running.m[row];  // nothing seen: weights are 2^−inf
    float totals[kN / 8][2] = {};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      s[n][2 * row] = Exp2(fmaf(s[n][2 * row], factor_of, -base));
      s[n][2 * row + 1] = Exp2(fmaf(s[n][2 * row + 1], factor_of, -base));
      totals[n / 8][n % 2] += s[n][2 * row] + s[n][2 * row + 1];
    }
#pragma unroll
    for (int half = 0; half < kN / 8; ++half) {
      const float total = totals[half][0] + totals[half][1];
      const bool memory = flags & kMemory << (first + half);
      running.memory[row] += memory ? total : 0.0f;
      running.rest[row] += memory ? 0.0f : total;
    }
  }
  return grew;
}

template <int kN>
__device__ __forceinline__ void Pack(const float (&s)[kN][4], uint32_t (&p)[kN / 2][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    p[n / 2][n % 2 * 2] = PackBf16(s[n][0], s[n][1]);
    p[n / 2][n % 2 * 2 + 1] = PackBf16(s[n][2], s[n][3]);
  }
}

// Of a step, or of a half of it.
template <int kN>
__device__ __forceinline__ void Scores(float (&s)[kN][4], uint64_t q, const char* k_tile) {
  const uint64_t k = MatrixDescriptor(k_tile, kBlockBytes);
#pragma unroll
  for (int d = 0; d < kWidth / 16; ++d) {
    const int at = d / 4 * kBlockBytes + d % 4 * 32;
    if constexpr (kN == 16) {
      WarpgroupDot(s, Advance(q, at), Advance(k, at), d > 0);
    } else {
      WarpgroupMultiplyAdd<false>(s, Advance(q, at), Advance(k, at), d > 0);
    }
  }
}

template <int kSteps>
__device__ __forceinline__ void Values(float (&o)[16][4], const uint32_t (&p)[kSteps][4], const char* v_tile) {
  const uint64_t v = MatrixDescriptor(v_tile, kBlockBytes);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) WarpgroupAccumulate(o, p[j], Advance(v, j * 2048));
}

__device__ __forceinline__ void Scale(float (&o)[16][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= factor[e / 2];
  }
}

// True, for sums are never negative. But asking orders the weights before what follows: they are made while the values'
// products run, not after the wait for them.
__device__ __forceinline__ bool AreMade(const Running& of) {
  return !(of.memory[0] + of.memory[1] + of.rest[0] + of.rest[1] < 0.0f);
}

// Turns of the two computing warpgroups: while one weighs, the other's products run.
__device__ __forceinline__ void TakeTurn(int half) { NamedBarrierWait<2 * kGroup>(3 + half); }
__device__ __forceinline__ void GiveTurn(int half) { NamedBarrierArrive<2 * kGroup>(3 + (half ^ 1)); }

// A warp's 16 queries' sums, rows g and g + 8 of it per lane: to partial rows, or normalised to the output. `q`: the
// warp's rows of the queries, which are done with, serve to turn bf16 results into rows.
__device__ __forceinline__ void Finish(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                                       int kv, int first, char* q, const float (&o)[16][4], const Running& running) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, g = lane / 4, two = 2 * (lane % 4);
  const bool through_shared = item.partial < 0 && t.out_bf16;
  Queries<8> of_lane(t, item, rows, kv, first + g);
#pragma unroll
  for (int half = 0; half < 2; ++half, of_lane.Next()) {
    const float memory = WarpSum<4>(running.memory[half]), rest = WarpSum<4>(running.rest[half]);
    const SoftmaxState<float> all{running.m[half] * kLn2, memory + rest};
    const float inverse = item.partial < 0 ? InverseSum(all) : 1.0f;
    if (through_shared) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<uint32_t*>(q + TileByte(first + g + 8 * half, n) + 2 * two) =
            PackBf16(o[n][2 * half] * inverse, o[n][2 * half + 1] * inverse);
      }
    }
    if (!of_lane.there()) continue;
    const int64_t row = of_lane.row(), head = of_lane.head();
    const int64_t place = static_cast<int64_t>(item.partial + of_lane.i()) * t.heads + head;
    if (!through_shared) {
      float* const out = item.partial < 0 ? static_cast<float*>(t.out) + row * t.out_row + head * t.out_head
                                          : t.partial_o + place * kWidth;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<float2*>(out + 8 * n + two) =
            make_float2(o[n][2 * half] * inverse, o[n][2 * half + 1] * inverse);
      }
    }
    if (two != 0) continue;
    if (item.partial >= 0) {
      float* const state = t.partial_state + place * 3;
      state[0] = all.m;
      state[1] = memory;
      state[2] = rest;
    } else {
      if (t.lse) t.lse[row * t.lse_row + head * t.lse_head] = LogSumExp(all);
      if (t.mass) t.mass[row * t.heads + head] = memory * inverse;
    }
  }
  if (!through_shared) return;
  __syncwarp();
  const int c = lane % 16;
  Queries<2> queries(t, item, rows, kv, first + lane / 16);
#pragma unroll
  for (int i = 0; i < 8; ++i, queries.Next()) {
    const int at = first + 2 * i + lane / 16;
    if (!queries.there()) continue;
    *reinterpret_cast<uint4*>(static_cast<Bf16*>(t.out) + queries.row() * t.out_row + queries.head() * t.out_head +
                              8 * c) = *reinterpret_cast<const uint4*>(q + TileByte(at, c));
  }
}

// A half of a step.
struct Half {
  Place step;
  int half = 0;
  __device__ void Next(bool ends) {
    half ^= 1;
    if (!ends) return;
    half = 0;
    step.Next();
  }
};

// Scores of a step and values of the step before are under way together. A block's only tile: one text for all steps,
// for code that runs once is fetched as it runs, where the first has no values to add yet. In whole steps (kN = 16), or
// a half at a time, so that a short share takes little longer than its slots do. `read()`: the keys are done with.
template <int kN, typename Read>
__device__ __forceinline__ void Attend(Shared& shared, uint64_t q, int half, float scale, const int (&tile_row)[2],
                                       float (&o)[16][4], Running& running, const Read& read) {
  constexpr bool kHalves = kN * 8 == kHalf;
  static_assert(kHalves || kN * 8 == kSlots);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, two = 2 * (lane % 4);
  float s[kN][4] = {}, factor[2];
  uint32_t p[kN / 2][4];
  Half k, v;
  int flags = 0;
  bool v_ends = false;
#pragma unroll 1
  for (bool begins = true, more = true; more; begins = false) {
    const int stage = k.step.stage;
    const Step& step = shared.step[stage];
    TakeTurn(half);
    WaitPhase(&shared.k_full[stage], k.step.parity);
    const bool copied = flags & kCopied;
    flags = step.flags;
    if (k.half == 0 && flags & kCopied) FenceForTensorCores();
    WarpgroupBegin();
    Scores(s, q, shared.k[stage] + k.half * kHalf * 128);
    WarpgroupCommit();
    if (!begins) {
      WaitPhase(&shared.v_full[v.step.stage], v.step.parity);
      if (v.half == 0 && copied) FenceForTensorCores();
      Values(o, p, shared.v[v.step.stage] + v.half * kHalf * 128);
    }
    WarpgroupCommit();
    GiveTurn(half);
    WarpgroupWait<1>();
    HoldSums(s);
    const bool grew = Weigh(s, running, step, k.half, flags, shared.beta[stage], scale, tile_row, two, factor);
    const bool ends = !kHalves || k.half == 1 || step.slots[1] == 0;
    more = !ends || !(flags & kLast);
    __syncwarp();  // every lane has read its biases
    if (ends && lane == 0 && AreMade(running)) Arrive(&shared.k_empty[stage]);
    WarpgroupWait<0>();
    HoldSums(o);
    if (v_ends && lane == 0) Arrive(&shared.v_empty[v.step.stage]);
    v = k;
    v_ends = ends;
    k.Next(ends);
    if (grew) Scale(o, factor);
    Pack(s, p);
  }
  read();
  WaitPhase(&shared.v_full[v.step.stage], v.step.parity);
  if (v.half == 0 && flags & kCopied) FenceForTensorCores();
  WarpgroupBegin();
  Values(o, p, shared.v[v.step.stage] + v.half * kHalf * 128);
  WarpgroupCommit();
  WarpgroupWait<0>();
  HoldSums(o);
}

// One tile of several, in whole steps. `k` and `v`: the next stages.
__device__ __forceinline__ void Attend(Shared& shared, uint64_t q, int half, float scale, const int (&tile_row)[2],
                                       float (&o)[16][4], Running& running, Place& k, Place& v) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, two = 2 * (lane % 4);
  float s[16][4] = {}, factor[2];
  uint32_t p[8][4];
  TakeTurn(half);
  WaitPhase(&shared.k_full[k.stage], k.parity);
  int flags = shared.step[k.stage].flags;
  if (flags & kCopied) FenceForTensorCores();
  WarpgroupBegin();
  Scores(s, q, shared.k[k.stage]);
  WarpgroupCommit();
  GiveTurn(half);
  WarpgroupWait<0>();
  HoldSums(s);
  Weigh(s, running, shared.step[k.stage], 0, flags, shared.beta[k.stage], scale, tile_row, two, factor);
  __syncwarp();  // every lane has read its biases
  if (lane == 0) Arrive(&shared.k_empty[k.stage]);
  k.Next();
  Pack(s, p);
  while (!(flags & kLast)) {
    TakeTurn(half);
    WaitPhase(&shared.k_full[k.stage], k.parity);
    const bool copied = flags & kCopied;
    flags = shared.step[k.stage].flags;
    if (flags & kCopied) FenceForTensorCores();
    WarpgroupBegin();
    Scores(s, q, shared.k[k.stage]);
    WarpgroupCommit();
    WaitPhase(&shared.v_full[v.stage], v.parity);
    if (copied) FenceForTensorCores();
    Values(o, p, shared.v[v.stage]);
    WarpgroupCommit();
    GiveTurn(half);
    WarpgroupWait<1>();
    HoldSums(s);
    const bool grew =
        Weigh(s, running, shared.step[k.stage], 0, flags, shared.beta[k.stage], scale, tile_row, two, factor);
    __syncwarp();  // every lane has read its biases
    if (lane == 0 && AreMade(running)) Arrive(&shared.k_empty[k.stage]);
    k.Next();
    WarpgroupWait<0>();
    HoldSums(o);
    if (lane == 0) Arrive(&shared.v_empty[v.stage]);
    v.Next();
    if (grew) Scale(o, factor);
    Pack(s, p);
  }
  WaitPhase(&shared.v_full[v.stage], v.parity);
  if (flags & kCopied) FenceForTensorCores();
  WarpgroupBegin();
  Values(o, p, shared.v[v.stage]);
  WarpgroupCommit();
  WarpgroupWait<0>();
  HoldSums(o);
  if (lane == 0) Arrive(&shared.v_empty[v.stage]);
  v.Next();
}

// A warpgroup that computes: 64 queries. kOnly: the block has no other tile, so that nothing is made ready for more.
template <bool kOnly>
__device__ __forceinline__ void Consume(Shared& shared, const AttentionTensors& t, const int32_t* rows,
                                        const AttentionMerging& merging, int half, TileWalk<kOnly> walk) {
  const int tid = static_cast<int>(threadIdx.x) % kGroup, lane = tid % kWarp;
  const int g = lane / 4, first_query = 64 * half + 16 * (tid / kWarp);
  const float scale = t.scale * kLog2E;
  const uint64_t q = MatrixDescriptor(shared.q + half * 64 * 128, kBlockBytes);
  if (half == 1) GiveTurn(1);
  [[maybe_unused]] Place k, v;
  for (bool first = true; walk.there(); walk.Next(), first = false) {
    const AttentionItem item = walk.item();
    const int tile_row[2] = {(first_query + g) / item.head_count, (first_query + g + 8) / item.head_count};
    float o[16][4] = {};
    if constexpr (kOnly) HoldSums(o);  // made while the kernel in front runs
    LoadQueries(
        t, item, rows, walk.kv(), first_query, shared.q,
        [&] {
          if (first) WaitForPreviousKernel();
        },
        [&] {
          if (!kOnly && first) NamedBarrierArrive<kThreads>(kQueriesAsked);
        });
    FenceForTensorCores();
    WarpgroupBarrier(1 + half);

    Running running;
    const int slots = ShareSlots<kHalf>(item);
    if constexpr (kOnly) {
      const bool lands = Lands(item);
      const Landing landing(shared, t, item, rows, merging, walk.kv(), half * kGroup + tid);
      const auto read = [&] {
        if (lands) landing.Open();
      };
      if (slots > kBrief) {
        Attend<kSlots / 8>(shared, q, half, scale, tile_row, o, running, read);
      } else if (slots > 0) {
        Attend<kHalf / 8>(shared, q, half, scale, tile_row, o, running, read);
      } else {
        read();
      }
      if (lands) {
        NamedBarrierArrive<kThreads>(kValuesRead);
        WarpState state;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          state.m[row] = running.m[row] * kLn2;
          state.memory[row] = WarpSum<4>(running.memory[row]);
          state.rest[row] = WarpSum<4>(running.rest[row]);
        }
        landing.Push(first_query, o, state);
        landing.Finish();
        continue;
      }
    } else if (slots > 0) {
      Attend(shared, q, half, scale, tile_row, o, running, k, v);
    }
    Finish(t, item, rows, walk.kv(), first_query, shared.q, o, running);
    __syncwarp();  // the warp's rows of q are free
  }
  if (half == 0) TakeTurn(0);
}

template <int kInline, bool kOnly>
__global__ void __launch_bounds__(kThreads, 1)
    AttentionWgmma(const AttentionTensors t, const AttentionItems where, const AttentionMerging where_merged,
                   const __grid_constant__ AttentionMaps maps, const __grid_constant__ InlineTables<kInline> tables) {
  // Of a thread: half steps need fewer sums, the rows' own sequences need some.
  constexpr int kCopyRegisters = kOnly ? 104 : 40, kComputeRegisters = kOnly ? 200 : 232;
  extern __shared__ char attention_shared[];
  LetNextKernelStart();
  Shared& shared = *reinterpret_cast<Shared*>(attention_shared + (-SharedAddress(attention_shared) & 1023));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(&shared.k_full[s], kGroup + 1);
      InitBarrier(&shared.v_full[s], kGroup + 1);
      InitBarrier(&shared.k_empty[s], 2 * kGroup / kWarp);
      InitBarrier(&shared.v_empty[s], 2 * kGroup / kWarp);
    }
    InitBarrier(&shared.landed, kLandings);
    FenceBarrierInit();
  }
  const AttentionItems items = Resolve(where, tables);
  const AttentionMerging merging = Resolve(where_merged, tables);
  const TileWalk<kOnly> walk(t, items);
  __syncthreads();
  if (threadIdx.x < kGroup) {
    GiveRegisters<kCopyRegisters>();
    Producer producer(shared, items, maps);
    producer.template Run<kOnly>(walk);
    if constexpr (kOnly) {
      if (walk.there() && Lands(walk.item())) {
        ClusterArriveRelaxed();
        WaitForPreviousKernel();
        Landing(shared, t, walk.item(), items.rows, merging, walk.kv(), static_cast<int>(threadIdx.x)).AddOwn();
        ClusterWait();
      }
    }
    producer.Drain();
  } else {
    TakeRegisters<kComputeRegisters>();
    // The compiler sees that warps agree on it.
    const int half = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroup - 1, 0);
    Consume<kOnly>(shared, t, items.rows, merging, half, walk);
  }
}

template <int kInline, bool kOnly>
void Launch(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging, int blocks,
            cudaStream_t stream) {
  PreferShared(AttentionWgmma<kInline, kOnly>);
  LaunchClustersEarly(AttentionWgmma<kInline, kOnly>, static_cast<unsigned>(blocks),
                      dim3(static_cast<unsigned>(items.cluster)), kThreads, kBytes, stream, tensors, items, merging,
                      items.maps ? *items.maps : AttentionMaps{}, TablesOf<kInline>(items.inline_tables));
}

}  // namespace
}  // namespace tall

void LaunchAttentionTall(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                         bool merges, int multiprocessors, cudaStream_t stream) {
  if (items.count == 0) return;
  const int tiles = items.count * tensors.kv_heads;
  // Blocks go from tile to tile where each ends what it begins.
  const int blocks = merges || items.cluster > 1 ? tiles * items.cluster : std::min(tiles, multiprocessors);
  const bool only = blocks == tiles * items.cluster;
  const auto launch =
      items.inline_tables
          ? (only ? tall::Launch<kAttentionInlineBytes, true> : tall::Launch<kAttentionInlineBytes, false>)
          : (only ? tall::Launch<0, true> : tall::Launch<0, false>);
  launch(tensors, items, merging, blocks, stream);
}

AttentionCapacity AttentionCapacityTall() {
  static const AttentionCapacity capacity = [] {
    AttentionCapacity of = CapacityOf(tall::AttentionWgmma<0, true>, tall::kThreads, tall::kBytes);
    for (size_t i = 0; i < std::size(kAttentionClusters); ++i) {
      if (kAttentionClusters[i] > tall::kMostBlocks) of.blocks[i] = 0;
    }
    return of;
  }();
  return capacity;
}

}  // namespace stillhouse::cuda
