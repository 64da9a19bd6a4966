// Attention forward on bf16 keys and values for long sequences: warpgroup products (wgmma), one warpgroup copying keys
// and values ahead of two that compute (Shah et al. 2024). Heads 128 wide.
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_emit.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kWidth = kAttentionTallWidth;
static_assert(kAttentionTall == 128);  // queries: 64 to a warpgroup
constexpr int kSlots = 128;            // of a step
constexpr int kGroup = 128;            // threads of a warpgroup
constexpr int kStages = 2;
constexpr int kBlockBytes = 128 * 128;                 // 128 rows of 64 columns
constexpr int kTileBytes = kWidth / 64 * kBlockBytes;  // of 128 queries, keys or values
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct Shared {
  alignas(1024) char q[kTileBytes];
  alignas(1024) char k[kStages][kTileBytes];
  alignas(1024) char v[kStages][kTileBytes];
  float beta[kStages][kSlots];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};
constexpr int kBytes = static_cast<int>(sizeof(Shared)) + 1024;  // room to begin at a multiple of 1024

// Where the 16 bytes of columns [8·chunk, 8·chunk + 8) of a row lie in a tile.
__device__ __forceinline__ int TileByte(int row, int chunk) {
  return chunk / 8 * kBlockBytes + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

__device__ __forceinline__ void LoadRows(char* tile, const Bf16* from, int64_t row, int slots) {
  constexpr int kChunks = kWidth / 8, kRowsAtOnce = kGroup / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) % kGroup / kChunks;
  const Bf16* at = from + first * row + 8 * c;
  const int64_t step = kRowsAtOnce * row;
  char* to = tile + TileByte(first, c);  // the rotation repeats every 8 rows
  static_assert(kRowsAtOnce == 8);
#pragma unroll
  for (int r = 0; r < kSlots; r += kRowsAtOnce) {
    CopyAsync16(to + r * 128, first + r < slots ? at : from, first + r < slots);
    at += step;
  }
}

// The warpgroup that copies: keys one step ahead of values.
__device__ __forceinline__ void Produce(Shared& shared, SlotCursor<Bf16, kSlots> cursor) {
  auto load_keys = [&](const SlotTile<Bf16>& tile, int step) {
    const int stage = step % kStages;
    WaitPhase(&shared.k_empty[stage], step / kStages % 2 ^ 1);
    LoadRows(shared.k[stage], tile.k, tile.k_row, tile.slots);
    if (tile.beta) {
      const int i = static_cast<int>(threadIdx.x) % kGroup;
      if (i < tile.slots) CopyAsync4(&shared.beta[stage][i], tile.beta + i);
    }
    ArriveAfterCopies(&shared.k_full[stage]);
  };
  SlotTile<Bf16> tile = cursor.Next();
  load_keys(tile, 0);
  for (int step = 0; tile.slots > 0; ++step) {
    const SlotTile<Bf16> next = cursor.Next();
    if (next.slots > 0) load_keys(next, step + 1);
    const int stage = step % kStages;
    WaitPhase(&shared.v_empty[stage], step / kStages % 2 ^ 1);
    LoadRows(shared.v[stage], tile.v, tile.v_row, tile.slots);
    ArriveAfterCopies(&shared.v_full[stage]);
    tile = next;
  }
  CopyAsyncCommit();
  CopyAsyncWait<0>();
}

// A warpgroup's queries of the tile, to its half of q.
__device__ __forceinline__ void LoadQueries(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                                            int kv, int half, char* q) {
  constexpr int kChunks = kWidth / 8;
  const int queries = item.row_count * item.head_count;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x) % kGroup; i < 64 * kChunks; i += kGroup) {
    const int query = 64 * half + i / kChunks, c = i % kChunks;
    const bool there = query < queries;
    const int64_t row = there ? RowOf(rows, item.rows, query / item.head_count) : 0;
    const int64_t head = kv * (t.heads / t.kv_heads) + item.head_begin + query % item.head_count;
    const int64_t at = there ? row * t.q_row + head * t.q_head + 8 * c : 0;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (t.q_bf16) {
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(t.q) + at);
      if (there) value = *from;
    } else if (there) {
      const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(t.q) + at);
      const float4 a = from[0], b = from[1];
      value = make_uint4(PackBf16(a.x, a.y), PackBf16(a.z, a.w), PackBf16(b.x, b.y), PackBf16(b.z, b.w));
    }
    *reinterpret_cast<uint4*>(q + TileByte(query, c)) = value;
  }
}

// The running softmax of rows g and g + 8 of a warp, in base 2. ℓ are of the lane's own columns until the end.
struct Running {
  float m[2] = {-INFINITY, -INFINITY};
  float memory[2] = {}, rest[2] = {};
};

// Turns a step's products into weights (in place), and returns the factors by which earlier sums shrink. `scale` is
// that of the products in base 2, and positive.
__device__ __forceinline__ float2 Weigh(float (&s)[16][4], Running& running, const SlotTile<Bf16>& tile,
                                        const float* beta, float scale, const int (&tile_row)[2], int two) {
  float factor_of = scale;
  if (tile.beta) {
    factor_of = 1.0f;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 bias = *reinterpret_cast<const float2*>(beta + 8 * n + two);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(s[n][e], scale, (e % 2 ? bias.y : bias.x) * kLog2E);
    }
  }
  if (tile.slots < kSlots || tile.limit < tile.slots) {
    const bool causal = tile.limit < tile.slots;
    const int limit[2] = {causal ? min(tile.limit + tile_row[0], tile.slots) : tile.slots,
                          causal ? min(tile.limit + tile_row[1], tile.slots) : tile.slots};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (8 * n + two + e % 2 >= limit[e / 2]) s[n][e] = -INFINITY;
      }
    }
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < 16; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    top = fmaxf(running.m[half], WarpMax<4>(top) * factor_of);
    const float base = top == -INFINITY ? 0.0f : top;  // nothing seen so far: all weights are 2^−inf
    factor[half] = Exp2(running.m[half] - base);
    running.m[half] = top;
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      s[n][2 * half] = Exp2(fmaf(s[n][2 * half], factor_of, -base));
      s[n][2 * half + 1] = Exp2(fmaf(s[n][2 * half + 1], factor_of, -base));
      total += s[n][2 * half] + s[n][2 * half + 1];
    }
    running.memory[half] = factor[half] * running.memory[half] + (tile.memory ? total : 0.0f);
    running.rest[half] = factor[half] * running.rest[half] + (tile.memory ? 0.0f : total);
  }
  return make_float2(factor[0], factor[1]);
}

__device__ __forceinline__ void Pack(const float (&s)[16][4], uint32_t (&p)[8][4]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    p[n / 2][n % 2 * 2] = PackBf16(s[n][0], s[n][1]);
    p[n / 2][n % 2 * 2 + 1] = PackBf16(s[n][2], s[n][3]);
  }
}

__device__ __forceinline__ void Scores(float (&s)[16][4], const char* q, const char* k) {
#pragma unroll
  for (int d = 0; d < kWidth / 16; ++d) {
    const int at = d / 4 * kBlockBytes + d % 4 * 32;
    WarpgroupDot(s, MatrixDescriptor(q + at, kBlockBytes), MatrixDescriptor(k + at, kBlockBytes), d > 0);
  }
}

__device__ __forceinline__ void Values(float (&o)[16][4], const uint32_t (&p)[8][4], const char* v) {
#pragma unroll
  for (int j = 0; j < kSlots / 16; ++j) WarpgroupAccumulate(o, p[j], MatrixDescriptor(v + j * 2048, kBlockBytes));
}

// A warpgroup that computes: 64 queries. Scores of a step and values of the step before are under way together.
__device__ __forceinline__ void Consume(Shared& shared, const AttentionTensors& t, const AttentionItem& item,
                                        const int32_t* rows, int kv, int half, SlotCursor<Bf16, kSlots> cursor) {
  const int tid = static_cast<int>(threadIdx.x) % kGroup, lane = tid % kWarp;
  const int g = lane / 4, two = 2 * (lane % 4), first_query = 64 * half + 16 * (tid / kWarp);
  const int tile_row[2] = {(first_query + g) / item.head_count, (first_query + g + 8) / item.head_count};
  const float scale = t.scale * kLog2E;
  const char* const q = shared.q + half * 64 * 128;
  LoadQueries(t, item, rows, kv, half, shared.q);
  FenceForTensorCores();
  WarpgroupBarrier(1 + half);

  float s[16][4], o[16][4];
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = o[n][e] = 0.0f;
  }
  uint32_t p[8][4];
  Running running;
  SlotTile<Bf16> tile = cursor.Next();
  WaitPhase(&shared.k_full[0], 0);
  FenceForTensorCores();
  WarpgroupBegin();
  Scores(s, q, shared.k[0]);
  WarpgroupCommit();
  WarpgroupWait<0>();
  HoldSums(s);
  Weigh(s, running, tile, shared.beta[0], scale, tile_row, two);
  if (lane == 0) Arrive(&shared.k_empty[0]);
  Pack(s, p);
  int step = 1;
  for (tile = cursor.Next(); tile.slots > 0; tile = cursor.Next(), ++step) {
    const int stage = step % kStages, before = (step - 1) % kStages;
    WaitPhase(&shared.k_full[stage], step / kStages % 2);
    FenceForTensorCores();
    WarpgroupBegin();
    Scores(s, q, shared.k[stage]);
    WarpgroupCommit();
    WaitPhase(&shared.v_full[before], (step - 1) / kStages % 2);
    FenceForTensorCores();
    Values(o, p, shared.v[before]);
    WarpgroupCommit();
    WarpgroupWait<1>();
    HoldSums(s);
    const float2 factor = Weigh(s, running, tile, shared.beta[stage], scale, tile_row, two);
    if (lane == 0) Arrive(&shared.k_empty[stage]);
    WarpgroupWait<0>();
    HoldSums(o);
    if (lane == 0) Arrive(&shared.v_empty[before]);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      o[n][0] *= factor.x;
      o[n][1] *= factor.x;
      o[n][2] *= factor.y;
      o[n][3] *= factor.y;
    }
    Pack(s, p);
  }
  WaitPhase(&shared.v_full[(step - 1) % kStages], (step - 1) / kStages % 2);
  FenceForTensorCores();
  WarpgroupBegin();
  Values(o, p, shared.v[(step - 1) % kStages]);
  WarpgroupCommit();
  WarpgroupWait<0>();
  HoldSums(o);

#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float memory = WarpSum<4>(running.memory[row]), rest = WarpSum<4>(running.rest[row]);
    const int query = first_query + g + 8 * row;
    if (query >= item.row_count * item.head_count) continue;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      Emit(t, item, rows, kv, query, 8 * n + two, o[n][2 * row], o[n][2 * row + 1], {running.m[row] * kLn2, memory},
           rest);
    }
  }
}

__global__ void __launch_bounds__(3 * kGroup, 1) AttentionWgmma(const AttentionTensors t, const AttentionItems items) {
  extern __shared__ float4 attention_shared[];
  const uintptr_t base = (reinterpret_cast<uintptr_t>(attention_shared) + 1023) / 1024 * 1024;
  Shared& shared = *reinterpret_cast<Shared*>(base);
  const int kv = static_cast<int>(blockIdx.x) / items.count;
  const AttentionItem item = items.items[static_cast<int>(blockIdx.x) % items.count];
  const SlotCursor<Bf16, kSlots> cursor(items.runs, item.run, item.slot, item.slots, item.causal_limit, kv);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      InitBarrier(&shared.k_full[s], kGroup);
      InitBarrier(&shared.v_full[s], kGroup);
      InitBarrier(&shared.k_empty[s], 2 * kGroup / kWarp);
      InitBarrier(&shared.v_empty[s], 2 * kGroup / kWarp);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    GiveRegisters<40>();
    Produce(shared, cursor);
  } else {
    TakeRegisters<232>();
    Consume(shared, t, item, items.rows, kv, static_cast<int>(threadIdx.x) / kGroup - 1, cursor);
  }
}

}  // namespace

void LaunchAttentionTall(const AttentionTensors& tensors, const AttentionItems& items, cudaStream_t stream) {
  if (items.count == 0) return;
  LaunchKernel(AttentionWgmma, static_cast<unsigned>(items.count * tensors.kv_heads), 3 * kGroup, kBytes, stream,
               tensors, items);
}

}  // namespace stillhouse::cuda
