// Attention forward in fp32: tiles of queries over ranges of slots, each with its running softmax (Dao et al. 2022);
// the ranges are merged (Dao et al. 2023).
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tile.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {
namespace {

constexpr int kStep = kAttentionStep;

// How the threads of a block share the scores [queries, slots] and the sums [queries, width] of a tile.
template <int kWidth, bool kWide>
struct Layout {
  static constexpr int kQueries = kWide ? kAttentionWide : kAttentionNarrow;
  static constexpr int kThreads = kWide ? 256 : 128;
  static constexpr int kRows = 4;  // of a thread, in both
  static constexpr int kRowGroups = kQueries / kRows;
  static constexpr int kScoreThreads = kThreads / kRowGroups;                // along the slots
  static constexpr int kScores = kStep / kScoreThreads;                      // a thread's slots
  static constexpr int kChunkThreads = std::min(kWidth / 4, kScoreThreads);  // along the columns
  static constexpr int kChunks = kWidth / 4 / kChunkThreads;                 // a thread's chunks of four columns
  static constexpr int kSlotParts = kScoreThreads / kChunkThreads;  // threads that share a chunk, each with its slots
  static constexpr int kStride = TileStride(kWidth);
  static constexpr int kScoreStride = TileStride(kStep);
  // Floats of shared memory: q, k, v, scores, and (m, ℓ memory, ℓ rest, factor) of each query.
  static constexpr int kFloats = (kQueries + 2 * kStep) * kStride + kQueries * kScoreStride + 4 * kQueries;
  static constexpr int kBytes = kFloats * 4;
  static_assert(kSlotParts == 1 || kSlotParts * kQueries * kWidth <= 2 * kStep * kStride,
                "parts are summed in k and v");
};

template <int kWidth, bool kWide, int kInline>
__global__ void __launch_bounds__(Layout<kWidth, kWide>::kThreads)
    AttentionF32(const AttentionTensors t, const AttentionItems where, const AttentionMerging where_merged,
                 const __grid_constant__ InlineTables<kInline> tables) {
  using L = Layout<kWidth, kWide>;
  extern __shared__ float4 attention_shared[];
  LetNextKernelStart();
  float* const q = reinterpret_cast<float*>(attention_shared);
  float* const k = q + L::kQueries * L::kStride;
  float* const v = k + kStep * L::kStride;
  float* const scores = v + kStep * L::kStride;
  float* const max_of = scores + L::kQueries * L::kScoreStride;
  float* const memory_sum = max_of + L::kQueries;
  float* const rest_sum = memory_sum + L::kQueries;
  float* const factor_of = rest_sum + L::kQueries;

  const AttentionItems items = Resolve(where, tables);
  const AttentionMerging merging = Resolve(where_merged, tables);
  const int unit = static_cast<int>(blockIdx.x) / ClusterBlocks(), kv = unit / items.count;
  const AttentionItem item = items.items[unit % items.count];
  if (item.row_count == 0) return;
  SlotCursor<float, kStep> cursor(items, item, kv);
  SlotTile<float> tile = cursor.Next();
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  constexpr int kWarps = L::kThreads / kWarp;
  TileFinisher<kWidth, kWarps> finisher(t, item, items.rows, merging, kv, warp);
  finisher.ReadMerge();
  if (!items.settled) WaitForPreviousKernel();
  if (tile.slots > 0) {
    LoadTile<L::kThreads, kStep, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
  }
  CopyAsyncCommit();
  if (items.settled) WaitForPreviousKernel();
  const int group = t.heads / t.kv_heads;
  const int queries = item.row_count * item.head_count;

  // Queries, scaled.
  for (int i = tid; i < L::kQueries * (kWidth / 4); i += L::kThreads) {
    const int query = i / (kWidth / 4), c = i % (kWidth / 4) * 4;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (query < queries) {
      const int64_t row = RowOf(items.rows, item.rows, query / item.head_count);
      const int64_t head = kv * group + item.head_begin + query % item.head_count;
      const float* from = static_cast<const float*>(t.q) + row * t.q_row + head * t.q_head;
      if (t.q_vector) {
        if (c < t.width) value = Float4At(from + c);
      } else {
        if (c < t.width) value.x = from[c];
        if (c + 1 < t.width) value.y = from[c + 1];
        if (c + 2 < t.width) value.z = from[c + 2];
        if (c + 3 < t.width) value.w = from[c + 3];
      }
      value = make_float4(value.x * t.scale, value.y * t.scale, value.z * t.scale, value.w * t.scale);
    }
    *reinterpret_cast<float4*>(q + query * L::kStride + c) = value;
  }
  for (int i = tid; i < L::kQueries; i += L::kThreads) {
    max_of[i] = -INFINITY;
    memory_sum[i] = 0.0f;
    rest_sum[i] = 0.0f;
  }
  finisher.Prepare();

  const int depth = (t.width + 3) / 4 * 4;
  const int score_row = tid / L::kScoreThreads * L::kRows, score_column = tid % L::kScoreThreads;
  const int chunk = tid % L::kChunkThreads, part = tid / L::kChunkThreads % L::kSlotParts;
  const int chunks = (t.width - 4 * chunk + 4 * L::kChunkThreads - 1) / (4 * L::kChunkThreads);  // of this thread
  float4 sum[L::kRows][L::kChunks];
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) sum[m][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  while (tile.slots > 0) {
    LoadTile<L::kThreads, kStep, L::kStride>(v, tile.v, tile.v_row, tile.slots, t.width, tile.vector);
    CopyAsyncCommit();
    float beta[L::kScores];
#pragma unroll
    for (int n = 0; n < L::kScores; ++n) {
      const int slot = score_column + n * L::kScoreThreads;
      beta[n] = tile.beta && slot < tile.slots ? tile.beta[slot] : 0.0f;
    }
    CopyAsyncWait<1>();
    __syncthreads();  // k is there
    {
      float s[L::kRows][L::kScores] = {};
      DotTile<L::kRows, L::kScores, L::kScoreThreads, L::kStride>(q + score_row * L::kStride,
                                                                  k + score_column * L::kStride, depth, s);
      const bool causal = tile.limit < tile.slots;
#pragma unroll
      for (int m = 0; m < L::kRows; ++m) {
        const int seen = causal ? tile.limit + (score_row + m) / item.head_count : tile.slots;
        const int limit = min(seen, tile.slots);
#pragma unroll
        for (int n = 0; n < L::kScores; ++n) {
          const int slot = score_column + n * L::kScoreThreads;
          scores[(score_row + m) * L::kScoreStride + slot] = slot < limit ? s[m][n] + beta[n] : -INFINITY;
        }
      }
    }
    __syncthreads();  // scores are there; k is free
    const SlotTile<float> next = cursor.Next();
    if (next.slots > 0) {
      LoadTile<L::kThreads, kStep, L::kStride>(k, next.k, next.k_row, next.slots, t.width, next.vector);
    }
    CopyAsyncCommit();
#pragma unroll
    for (int i = warp; i < L::kQueries; i += kWarps) {
      float* const s = scores + i * L::kScoreStride;
      const float a = s[lane], b = s[lane + kWarp];
      const float old = max_of[i];
      const float m = fmaxf(old, WarpMax(fmaxf(a, b)));
      const float pa = SoftmaxWeight(a, m), pb = SoftmaxWeight(b, m);
      s[lane] = pa;
      s[lane + kWarp] = pb;
      const float total = WarpSum(pa + pb);
      __syncwarp();  // every lane has read max_of[i]
      if (lane == 0) {
        const float factor = SoftmaxWeight(old, m);
        max_of[i] = m;
        factor_of[i] = factor;
        memory_sum[i] = factor * memory_sum[i] + (tile.memory ? total : 0.0f);
        rest_sum[i] = factor * rest_sum[i] + (tile.memory ? 0.0f : total);
      }
    }
    CopyAsyncWait<1>();
    __syncthreads();  // weights and v are there
    const int row_group = tid / (L::kChunkThreads * L::kSlotParts) * L::kRows;
#pragma unroll
    for (int m = 0; m < L::kRows; ++m) {
      const float factor = factor_of[row_group + m];
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        sum[m][c].x *= factor;
        sum[m][c].y *= factor;
        sum[m][c].z *= factor;
        sum[m][c].w *= factor;
      }
    }
    AccumulateTile<L::kRows, L::kChunks, L::kChunkThreads, L::kScoreStride, L::kStride>(
        scores + row_group * L::kScoreStride, v + 4 * chunk, 4 * part, 4 * L::kSlotParts, tile.slots, chunks, sum);
    __syncthreads();  // v and scores are free
    tile = next;
  }
  CopyAsyncWait<0>();
  __syncthreads();

  const int row_group = tid / (L::kChunkThreads * L::kSlotParts) * L::kRows;
  if constexpr (L::kSlotParts > 1) {
    // Sums of the parts, in order; k and v are free.
    float4* const parts = reinterpret_cast<float4*>(k);
#pragma unroll
    for (int m = 0; m < L::kRows; ++m) {
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        const int at = (row_group + m) * (kWidth / 4) + chunk + c * L::kChunkThreads;
        parts[part * (L::kQueries * kWidth / 4) + at] = sum[m][c];
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < L::kRows && part == 0; ++m) {
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        const int at = (row_group + m) * (kWidth / 4) + chunk + c * L::kChunkThreads;
#pragma unroll
        for (int other = 1; other < L::kSlotParts; ++other) {
          const float4 more = parts[other * (L::kQueries * kWidth / 4) + at];
          sum[m][c].x += more.x;
          sum[m][c].y += more.y;
          sum[m][c].z += more.z;
          sum[m][c].w += more.w;
        }
      }
    }
  }
  // The queries are done with: the sums take their place, and the states that of the scores.
  float* const states = scores;
#pragma unroll
  for (int m = 0; m < L::kRows && part == 0; ++m) {
    const int query = row_group + m;
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) {
      *reinterpret_cast<float4*>(q + query * L::kStride + 4 * (chunk + c * L::kChunkThreads)) = sum[m][c];
    }
    if (chunk == 0) {
      states[kSumState * query] = max_of[query];
      states[kSumState * query + 1] = memory_sum[query];
      states[kSumState * query + 2] = rest_sum[query];
    }
  }
  finisher.Finish({q, states, L::kQueries, L::kStride, 1});
}

template <bool kWide>
struct Kernel {
  template <int kWidth, int kInline>
  static auto Entry() {
    return &AttentionF32<kWidth, kWide, kInline>;
  }
  template <int kWidth>
  using LayoutOf = Layout<kWidth, kWide>;
};

}  // namespace

void LaunchAttentionF32(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                        bool wide, cudaStream_t stream) {
  wide ? LaunchTiles<Kernel<true>>(tensors, items, merging, stream)
       : LaunchTiles<Kernel<false>>(tensors, items, merging, stream);
}

AttentionCapacity AttentionCapacityF32(int width, bool wide) {
  return wide ? TilesCapacity<Kernel<true>>(width) : TilesCapacity<Kernel<false>>(width);
}

}  // namespace stillhouse::cuda
