// Attention forward on bf16 keys and values: tensor-core products with fp32 sums. Logits, maxima and sums are fp32;
// queries and weights are rounded to bf16 where they enter a product.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_emit.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kStep = kAttentionStep;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Wide: 64 queries, 16 to a warp, each warp on all slots of a step. Narrow: 16 queries, the warps share the slots.
template <int kWidth, bool kWide>
struct Layout {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kQueries = kWide ? kAttentionWide : kAttentionNarrowBf16;
  static constexpr int kWarpSlots = kWide ? kStep : kStep / kWarps;
  static constexpr int kStages = kWide || kWidth == 256 ? 2 : 3;
  static constexpr int kTileBytes = kStep * kWidth * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + kStep * 4;  // k, v, beta
  static constexpr int kStateFloats = 3;
  static constexpr int kMergeBytes = kWide ? 0 : kWarps * kAttentionNarrowBf16 * (kWidth + kStateFloats) * 4;
  static constexpr int kBytes = std::max(kStages * kStageBytes + kQueries * kWidth * 2, kMergeBytes);
};

// Where the 16 bytes of columns [8·chunk, 8·chunk + 8) of a row lie in a tile: rotated by the row, so that the eight
// rows of a matrix fall on different banks.
template <int kWidth>
__device__ __forceinline__ int TileByte(int row, int chunk) {
  return row * kWidth * 2 + ((chunk ^ (row & 7)) << 4);
}

template <int kWidth>
__device__ __forceinline__ void LoadRows(char* tile, const Bf16* from, int64_t row, int slots, int width, bool vector) {
  constexpr int kChunks = kWidth / 8, kRowsAtOnce = kThreads / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
  if (vector) {
    const Bf16* at = from + first * row + 8 * c;
    const int64_t step = kRowsAtOnce * row;
    const int rows = 8 * c < width ? slots : 0;
#pragma unroll
    for (int r = first; r < kStep; r += kRowsAtOnce) {
      CopyAsync16(tile + TileByte<kWidth>(r, c), r < rows ? at : from, r < rows);
      at += step;
    }
    return;
  }
#pragma unroll 1
  for (int r = first; r < kStep; r += kRowsAtOnce) {
    Vec16<Bf16> value;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      value.at[e] = r < slots && 8 * c + e < width ? from[r * row + 8 * c + e] : FromFloat<Bf16>(0.0f);
    }
    StoreVec16(reinterpret_cast<Bf16*>(tile + TileByte<kWidth>(r, c)), value);
  }
}

template <int kWidth>
__device__ __forceinline__ void LoadStage(char* stage, const SlotTile<Bf16>& tile, int width) {
  if (tile.slots > 0) {
    LoadRows<kWidth>(stage, tile.k, tile.k_row, tile.slots, width, tile.vector);
    LoadRows<kWidth>(stage + kStep * kWidth * 2, tile.v, tile.v_row, tile.slots, width, tile.vector);
    float* const beta = reinterpret_cast<float*>(stage + 2 * kStep * kWidth * 2);
    for (int i = static_cast<int>(threadIdx.x); i < kStep; i += kThreads) {
      if (tile.beta && i < tile.slots) {
        CopyAsync4(beta + i, tile.beta + i);
      } else {
        beta[i] = 0.0f;
      }
    }
  }
  CopyAsyncCommit();
}

// The tile's queries as bf16, 16 bytes of a row at a time; those that are not there are zero.
template <int kWidth, int kQueries>
__device__ __forceinline__ void LoadQueries(char* tile, const AttentionTensors& t, const AttentionItem& item,
                                            const int32_t* rows, int kv) {
  constexpr int kChunks = kWidth / 8;
  const int queries = item.row_count * item.head_count, first_head = kv * (t.heads / t.kv_heads) + item.head_begin;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * kChunks; i += kThreads) {
    const int query = i / kChunks, column = i % kChunks * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (query < queries && column < t.width) {
      const int64_t at = RowOf(rows, item.rows, query / item.head_count) * t.q_row +
                         (first_head + query % item.head_count) * t.q_head + column;
      if (t.q_vector && t.q_bf16) {
        value = *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(t.q) + at);
      } else if (t.q_vector && column + 8 <= t.width) {
        const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(t.q) + at);
        const float4 a = from[0], b = from[1];
        value = make_uint4(PackBf16(a.x, a.y), PackBf16(a.z, a.w), PackBf16(b.x, b.y), PackBf16(b.z, b.w));
      } else {
        uint32_t pairs[4] = {};
        for (int e = 0; e < 8; ++e) {
          if (column + e >= t.width) break;
          const float x =
              t.q_bf16 ? ToFloat(static_cast<const Bf16*>(t.q)[at + e]) : static_cast<const float*>(t.q)[at + e];
          pairs[e / 2] |= PackBf16(x, 0.0f) << (e % 2 * 16);
        }
        value = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    *reinterpret_cast<uint4*>(tile + TileByte<kWidth>(query, i % kChunks)) = value;
  }
}

template <int kWidth, bool kWide, int kInline>
__global__ void __launch_bounds__(kThreads)
    AttentionBf16(const AttentionTensors t, const AttentionItems where, const AttentionMerging where_merged,
                  const __grid_constant__ InlineTables<kInline> tables) {
  using L = Layout<kWidth, kWide>;
  constexpr int kScoreTiles = L::kWarpSlots / 8, kWidthTiles = kWidth / 8, kDepth = kWidth / 16;
  extern __shared__ float4 attention_shared[];
  char* const shared = reinterpret_cast<char*>(attention_shared);

  const AttentionItems items = Resolve(where, tables);
  const int kv = static_cast<int>(blockIdx.x) / items.count;
  const AttentionItem item = items.items[static_cast<int>(blockIdx.x) % items.count];
  if (item.row_count == 0) return;
  const int group = t.heads / t.kv_heads;
  const int queries = item.row_count * item.head_count;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int g = lane / 4, two = 2 * (lane % 4);  // of the fragments: row (and row + 8), column pair
  const int first_query = kWide ? 16 * warp : 0, first_slot = kWide ? 0 : L::kWarpSlots * warp;

  SlotCursor<Bf16, kStep> loads(items.runs, item.run, item.slot, item.slots, item.causal_limit, kv);
  SlotCursor<Bf16, kStep> cursor = loads;
  WaitForPreviousKernel();
  LetNextKernelStart();
#pragma unroll 1  // code that runs once is fetched once: short is fast
  for (int s = 0; s < L::kStages - 1; ++s) LoadStage<kWidth>(shared + s * L::kStageBytes, loads.Next(), t.width);

  // Queries, as the left operand.
  char* const query_tile = shared + L::kStages * L::kStageBytes;
  LoadQueries<kWidth, L::kQueries>(query_tile, t, item, items.rows, kv);
  const bool finishes = !kWide && item.partial >= 0 && where_merged.arrived != nullptr;
  const AttentionMerging merging = Resolve(where_merged, tables);
  RowFinisher<kWidth, kThreads, kAttentionNarrowBf16> finisher(t, item, items.rows, merging, kv, finishes);
  __syncthreads();
  uint32_t q[kDepth][4];
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    LoadMatrices(q[d], query_tile + TileByte<kWidth>(first_query + lane % 16, 2 * d + lane / 16));
  }

  // Running softmax of rows g and g + 8, in base 2. A lane's ℓ are of its own columns until the end.
  const float scale = t.scale * kLog2E;
  float m[2] = {-INFINITY, -INFINITY}, memory_sum[2] = {}, rest_sum[2] = {};
  float o[kWidthTiles][4] = {};
  // Rows of the tile of queries, for the causal limit.
  const int tile_row[2] = {(first_query + g) / item.head_count, (first_query + g + 8) / item.head_count};

  for (int step = 0;; ++step) {
    const SlotTile<Bf16> tile = cursor.Next();
    if (tile.slots == 0) break;
    CopyAsyncWait<L::kStages - 2>();
    __syncthreads();  // this step's stage is there, and the previous one is free
    LoadStage<kWidth>(shared + (step + L::kStages - 1) % L::kStages * L::kStageBytes, loads.Next(), t.width);
    const char* const stage = shared + step % L::kStages * L::kStageBytes;
    if (first_slot >= tile.slots) continue;
    const char* const k = stage;
    const char* const v = stage + L::kTileBytes;
    const float* const beta = reinterpret_cast<const float*>(stage + 2 * L::kTileBytes);

    float s[kScoreTiles][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        uint32_t b[4];
        const int row = first_slot + 8 * n + lane / 16 * 8 + lane % 8;
        LoadMatrices(b, k + TileByte<kWidth>(row, 2 * d + lane / 8 % 2));
        MultiplyAdd(s[n], q[d], b[0], b[1]);
        MultiplyAdd(s[n + 1], q[d], b[2], b[3]);
      }
    }
    const bool masked = tile.slots < kStep || tile.limit < tile.slots;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const int slot = first_slot + 8 * n + two;
      const float2 bias = *reinterpret_cast<const float2*>(beta + slot);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = fmaf(s[n][e], scale, (e % 2 ? bias.y : bias.x) * kLog2E);
        if (masked) {
          const int limit = tile.limit < tile.slots ? min(tile.limit + tile_row[e / 2], tile.slots) : tile.slots;
          if (slot + e % 2 >= limit) s[n][e] = -INFINITY;
        }
        top[e / 2] = fmaxf(top[e / 2], s[n][e]);
      }
    }
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(m[half], WarpMax<4>(top[half]));
      base[half] = top[half] == -INFINITY ? 0.0f : top[half];  // nothing seen so far: all weights are 2^−inf
      const float factor = Exp2(m[half] - base[half]);
      m[half] = top[half];
      memory_sum[half] *= factor;
      rest_sum[half] *= factor;
#pragma unroll
      for (int n = 0; n < kWidthTiles; ++n) {
        o[n][2 * half] *= factor;
        o[n][2 * half + 1] *= factor;
      }
    }
    float total[2] = {};
    uint32_t p[kScoreTiles / 2][4];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = Exp2(s[n][2 * half] - base[half]), b = Exp2(s[n][2 * half + 1] - base[half]);
        total[half] += a + b;
        p[n / 2][n % 2 * 2 + half] = PackBf16(a, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      memory_sum[half] += tile.memory ? total[half] : 0.0f;
      rest_sum[half] += tile.memory ? 0.0f : total[half];
    }
#pragma unroll
    for (int j = 0; j < kScoreTiles / 2; ++j) {
#pragma unroll
      for (int n = 0; n < kWidthTiles; n += 2) {
        uint32_t b[4];
        const int row = first_slot + 16 * j + lane / 8 % 2 * 8 + lane % 8;
        LoadMatricesTransposed(b, v + TileByte<kWidth>(row, n + lane / 16));
        MultiplyAdd(o[n], p[j], b[0], b[1]);
        MultiplyAdd(o[n + 1], p[j], b[2], b[3]);
      }
    }
  }
  CopyAsyncWait<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    memory_sum[half] = WarpSum<4>(memory_sum[half]);
    rest_sum[half] = WarpSum<4>(rest_sum[half]);
    m[half] *= kLn2;
  }
  if constexpr (kWide) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + g + 8 * half;
      if (query >= queries) continue;
#pragma unroll
      for (int n = 0; n < kWidthTiles; ++n) {
        Emit(t, item, items.rows, kv, query, 8 * n + two, o[n][2 * half], o[n][2 * half + 1],
             {m[half], memory_sum[half]}, rest_sum[half]);
      }
    }
  } else {
    // The warps' parts of the slots are merged in order.
    __syncthreads();  // the stages are free
    float* const parts = reinterpret_cast<float*>(attention_shared);
    float* const states = parts + kWarps * kAttentionNarrowBf16 * kWidth;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = warp * kAttentionNarrowBf16 + g + 8 * half;
#pragma unroll
      for (int n = 0; n < kWidthTiles; ++n) {
        *reinterpret_cast<float2*>(parts + at * kWidth + 8 * n + two) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
      }
      if (two == 0) {
        states[3 * at] = m[half];
        states[3 * at + 1] = memory_sum[half];
        states[3 * at + 2] = rest_sum[half];
      }
    }
    __syncthreads();
    for (int i = tid; i < queries * (kWidth / 2); i += kThreads) {
      const int query = i / (kWidth / 2), column = i % (kWidth / 2) * 2;
      SoftmaxState<float> memory, rest;
      float a = 0.0f, b = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int at = w * kAttentionNarrowBf16 + query;
        const MergeWeights<float> weights = MergeSoftmax(memory, {states[3 * at], states[3 * at + 1]});
        MergeSoftmax(rest, {states[3 * at], states[3 * at + 2]});
        const float2 other = *reinterpret_cast<const float2*>(parts + at * kWidth + column);
        a = weights.first * a + weights.second * other.x;
        b = weights.first * b + weights.second * other.y;
      }
      Emit(t, item, items.rows, kv, query, column, a, b, memory, rest.l);
    }
    if (finishes) finisher.Finish(t, item, merging, kv);
  }
}

__global__ void RowsToBf16(const float* from, int64_t row, int64_t head, int64_t rows, int heads, int width, Bf16* to) {
  const int64_t count = rows * heads * width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t place = i / width;
    to[i] = FromFloat<Bf16>(from[place / heads * row + place % heads * head + i % width]);
  }
}

struct Kernel {
  template <int kWidth, bool kWide, int kInline>
  static auto Entry() {
    return &AttentionBf16<kWidth, kWide, kInline>;
  }
  template <int kWidth, bool kWide>
  using LayoutOf = Layout<kWidth, kWide>;
};

}  // namespace

void LaunchAttentionBf16(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                         bool wide, cudaStream_t stream) {
  LaunchTiles<Kernel>(tensors, items, merging, wide, stream);
}

int AttentionBlocksBf16(int width, bool wide) { return TileBlocks<Kernel>(width, wide); }

void LaunchAttentionToBf16(const float* from, int64_t row, int64_t head, int64_t rows, int heads, int width, void* to,
                           cudaStream_t stream) {
  const int64_t count = rows * heads * width;
  if (count == 0) return;
  LaunchKernel(RowsToBf16, GridFor(count, 256), 256, 0, stream, from, row, head, rows, heads, width,
               static_cast<Bf16*>(to));
}

}  // namespace stillhouse::cuda
