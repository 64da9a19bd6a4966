// Attention forward in fp32: tiles of queries over ranges of slots, each with its running softmax (Dao et al. 2022),
// and the merge of the ranges (Dao et al. 2023).
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/attention_cursor.cuh"
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
  static constexpr int kQueries = kWide ? kAttentionWide : kAttentionNarrowF32;
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
    AttentionF32(const AttentionTensors t, const AttentionItems where,
                 const __grid_constant__ InlineTables<kInline> tables) {
  using L = Layout<kWidth, kWide>;
  extern __shared__ float4 attention_shared[];
  float* const q = reinterpret_cast<float*>(attention_shared);
  float* const k = q + L::kQueries * L::kStride;
  float* const v = k + kStep * L::kStride;
  float* const scores = v + kStep * L::kStride;
  float* const max_of = scores + L::kQueries * L::kScoreStride;
  float* const memory_sum = max_of + L::kQueries;
  float* const rest_sum = memory_sum + L::kQueries;
  float* const factor_of = rest_sum + L::kQueries;

  LetNextKernelStart();
  const AttentionItems items = Resolve(where, tables);
  const int kv = static_cast<int>(blockIdx.x) / items.count;
  const AttentionItem item = items.items[static_cast<int>(blockIdx.x) % items.count];
  const int group = t.heads / t.kv_heads;
  const int queries = item.row_count * item.head_count;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  constexpr int kWarps = L::kThreads / kWarp;

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

  SlotCursor<float, kStep> cursor(items.runs, item.run, item.slot, item.slots, item.causal_limit, kv);
  SlotTile<float> tile = cursor.Next();
  if (tile.slots > 0) {
    LoadTile<L::kThreads, kStep, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
  }
  CopyAsyncCommit();
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
    if (part > 0) return;
#pragma unroll
    for (int m = 0; m < L::kRows; ++m) {
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
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
    const int query = row_group + m;
    if (query >= queries) continue;
    const int i = query / item.head_count;
    const int64_t head = kv * group + item.head_begin + query % item.head_count;
    if (item.partial >= 0) {
      const int64_t place = static_cast<int64_t>(item.partial + i) * t.heads + head;
      float* const o = t.partial_o + place * t.width;
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        StoreColumns(o, 4 * (chunk + c * L::kChunkThreads), t.width, sum[m][c], t.width % 4 == 0);
      }
      if (chunk == 0) {
        float* const state = t.partial_state + place * 3;
        state[0] = max_of[query];
        state[1] = memory_sum[query];
        state[2] = rest_sum[query];
      }
      continue;
    }
    const int64_t row = RowOf(items.rows, item.rows, i);
    const SoftmaxState<float> state{max_of[query], memory_sum[query] + rest_sum[query]};
    const float inverse = InverseSum(state);
    float* const out = static_cast<float*>(t.out) + row * t.out_row + head * t.out_head;
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) {
      const float4 s = sum[m][c];
      StoreColumns(out, 4 * (chunk + c * L::kChunkThreads), t.width,
                   make_float4(s.x * inverse, s.y * inverse, s.z * inverse, s.w * inverse), t.out_vector);
    }
    if (chunk == 0) {
      if (t.lse) t.lse[row * t.lse_row + head * t.lse_head] = LogSumExp(state);
      if (t.mass) t.mass[row * t.heads + head] = memory_sum[query] * inverse;
    }
  }
}

constexpr int kMergeWarps = 4;
// From so many partial rows on, the warps of a block merge one head together.
constexpr int kManyPartials = 8;
constexpr int kLaneColumns = kAttentionMaxWidth / kWarp;

template <int kBytes>
__device__ __forceinline__ AttentionMerging Resolve(const AttentionMerging& merging,
                                                    const InlineTables<kBytes>& tables) {
  if constexpr (kBytes == 0) return merging;
  AttentionMerging resolved = merging;
  resolved.merges = reinterpret_cast<const AttentionMerge*>(tables.bytes + reinterpret_cast<uintptr_t>(merging.merges));
  resolved.partials = reinterpret_cast<const int32_t*>(tables.bytes + reinterpret_cast<uintptr_t>(merging.partials));
  return resolved;
}

__device__ __forceinline__ float OwnAt(const void* base, bool bf16, int64_t at) {
  return bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(base)[at]) : static_cast<const float*>(base)[at];
}

// kParts warps merge one (row, head): the first its own rows, each its share of the partial rows.
template <int kParts, int kInline>
__global__ void __launch_bounds__(kMergeWarps* kWarp)
    AttentionMergeRows(const AttentionTensors t, const AttentionMerging where,
                       const __grid_constant__ InlineTables<kInline> tables) {
  constexpr int kHeads = kMergeWarps / kParts;  // of a block
  __shared__ float shared_o[kParts > 1 ? kMergeWarps : 1][kAttentionMaxWidth];
  __shared__ float shared_state[kParts > 1 ? kMergeWarps : 1][3];
  const AttentionMerging merging = Resolve(where, tables);
  const int head_blocks = (t.heads + kHeads - 1) / kHeads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int part = warp % kParts, head = static_cast<int>(blockIdx.x % head_blocks) * kHeads + warp / kParts;
  // The rows themselves were there before the kernels that leave partial rows began.
  if (where.most_partials == 0) WaitForPreviousKernel();
  if (head >= t.heads) return;  // a whole block, where its warps work together
  const AttentionMerge merge = merging.merges[blockIdx.x / head_blocks];
  SoftmaxState<float> memory, rest;  // one m, two ℓ
  float o[kLaneColumns] = {};
  if (part == 0 && merge.own_begin <= merge.row) {
    const int64_t kv = head / (t.heads / t.kv_heads);
    float q[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int column = lane + c * kWarp;
      q[c] = column < t.width ? OwnAt(t.q, t.q_bf16, merge.row * t.q_row + head * t.q_head + column) * t.scale : 0.0f;
    }
    for (int own = merge.own_begin; own <= merge.row; ++own) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int column = lane + c * kWarp;
        if (column < t.width) {
          dot = fmaf(q[c], OwnAt(merging.k, merging.own_bf16, own * merging.k_row + kv * merging.k_head + column), dot);
        }
      }
      dot = WarpSum(dot);
      const MergeWeights<float> w = MergeSoftmax(rest, {dot, 1.0f});
      MergeSoftmax(memory, {dot, 0.0f});
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int column = lane + c * kWarp;
        if (column < t.width) {
          const float value = OwnAt(merging.v, merging.own_bf16, own * merging.v_row + kv * merging.v_head + column);
          o[c] = w.first * o[c] + w.second * value;
        }
      }
    }
  }
  if (where.most_partials > 0) WaitForPreviousKernel();
  // 32 at a time: their states are read by one lane each, then their sums without waiting for one another.
  for (int begin = merge.partial_begin + part; begin < merge.partial_end; begin += kParts * kWarp) {
    const int mine = begin + lane * kParts;
    const bool there = mine < merge.partial_end;
    const int64_t place = there ? static_cast<int64_t>(merging.partials[mine]) * t.heads + head : 0;
    SoftmaxState<float> own;
    float own_rest = 0.0f;
    if (there) {
      const float* const state = t.partial_state + place * 3;
      own = {state[0], state[1]};
      own_rest = state[2];
    }
    const float top = fmaxf(memory.m, WarpMax(own.m));
    const float weight = SoftmaxWeight(own.m, top), shrink = SoftmaxWeight(memory.m, top);
    memory = {top, shrink * memory.l + WarpSum(weight * own.l)};
    rest = {top, shrink * rest.l + WarpSum(weight * own_rest)};
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) o[c] *= shrink;
    const int count = min(kWarp, (merge.partial_end - begin + kParts - 1) / kParts);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float w = __shfl_sync(kFullWarp, weight, i);
      const float* const other = t.partial_o + __shfl_sync(kFullWarp, place, i) * t.width;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int column = lane + c * kWarp;
        if (column < t.width) o[c] = fmaf(w, other[column], o[c]);
      }
    }
  }
  if constexpr (kParts > 1) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) shared_o[warp][lane + c * kWarp] = o[c];
    if (lane == 0) {
      shared_state[warp][0] = memory.m;
      shared_state[warp][1] = memory.l;
      shared_state[warp][2] = rest.l;
    }
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int other = 1; other < kParts; ++other) {
      const float m = shared_state[warp + other][0];
      const MergeWeights<float> w = MergeSoftmax(memory, {m, shared_state[warp + other][1]});
      MergeSoftmax(rest, {m, shared_state[warp + other][2]});
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        o[c] = w.first * o[c] + w.second * shared_o[warp + other][lane + c * kWarp];
      }
    }
  }
  const SoftmaxState<float> state{memory.m, memory.l + rest.l};
  const float inverse = InverseSum(state);
  const int64_t out = merge.row * t.out_row + head * t.out_head;
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    const int column = lane + c * kWarp;
    if (column >= t.width) continue;
    if (t.out_bf16) {
      static_cast<__nv_bfloat16*>(t.out)[out + column] = FromFloat<__nv_bfloat16>(o[c] * inverse);
    } else {
      static_cast<float*>(t.out)[out + column] = o[c] * inverse;
    }
  }
  if (lane == 0) {
    if (t.lse) t.lse[merge.row * t.lse_row + head * t.lse_head] = LogSumExp(state);
    if (t.mass) t.mass[static_cast<int64_t>(merge.row) * t.heads + head] = memory.l * inverse;
  }
}

__global__ void AttentionMassMean(const float* mass, float* stored_mass, int64_t rows, int heads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int h = 0; h < heads; ++h) sum += mass[row * heads + h];
  stored_mass[row] = sum / static_cast<float>(heads);
}

template <int kWidth, bool kWide, int kInline>
void LaunchWith(const AttentionTensors& tensors, const AttentionItems& items, cudaStream_t stream) {
  using L = Layout<kWidth, kWide>;
  LaunchKernel(AttentionF32<kWidth, kWide, kInline>, static_cast<unsigned>(items.count * tensors.kv_heads), L::kThreads,
               L::kBytes, stream, tensors, items, TablesOf<kInline>(items.inline_tables));
}

template <int kWidth, bool kWide>
void Launch(const AttentionTensors& tensors, const AttentionItems& items, cudaStream_t stream) {
  if constexpr (kWidth <= kAttentionInlineWidth) {
    if (items.inline_tables) return LaunchWith<kWidth, kWide, kAttentionInlineBytes>(tensors, items, stream);
  }
  LaunchWith<kWidth, kWide, 0>(tensors, items, stream);
}

template <int kWidth, bool kWide>
int Blocks() {
  static const int blocks = BlocksPerMultiprocessor(AttentionF32<kWidth, kWide, 0>, Layout<kWidth, kWide>::kThreads,
                                                    Layout<kWidth, kWide>::kBytes);
  return blocks;
}

template <int kParts, int kInline>
void LaunchMerge(const AttentionTensors& tensors, const AttentionMerging& merging, cudaStream_t stream) {
  const int64_t blocks = merging.count * CeilDiv(tensors.heads, kMergeWarps / kParts);
  LaunchKernelEarly(AttentionMergeRows<kParts, kInline>, static_cast<unsigned>(blocks), kMergeWarps * kWarp, 0, stream,
                    tensors, merging, TablesOf<kInline>(merging.inline_tables));
}

}  // namespace

void LaunchAttentionF32(const AttentionTensors& tensors, const AttentionItems& items, bool wide, cudaStream_t stream) {
  if (items.count == 0) return;
  if (tensors.width <= 64) {
    wide ? Launch<64, true>(tensors, items, stream) : Launch<64, false>(tensors, items, stream);
  } else if (tensors.width <= 128) {
    wide ? Launch<128, true>(tensors, items, stream) : Launch<128, false>(tensors, items, stream);
  } else {
    wide ? Launch<256, true>(tensors, items, stream) : Launch<256, false>(tensors, items, stream);
  }
}

int AttentionBlocksF32(int width, bool wide) {
  if (width <= 64) return wide ? Blocks<64, true>() : Blocks<64, false>();
  if (width <= 128) return wide ? Blocks<128, true>() : Blocks<128, false>();
  return wide ? Blocks<256, true>() : Blocks<256, false>();
}

void LaunchAttentionMerge(const AttentionTensors& tensors, const AttentionMerging& merging, cudaStream_t stream) {
  if (merging.count == 0) return;
  const bool many = merging.most_partials >= kManyPartials;
  if (many) {
    merging.inline_tables ? LaunchMerge<kMergeWarps, kAttentionInlineBytes>(tensors, merging, stream)
                          : LaunchMerge<kMergeWarps, 0>(tensors, merging, stream);
  } else {
    merging.inline_tables ? LaunchMerge<1, kAttentionInlineBytes>(tensors, merging, stream)
                          : LaunchMerge<1, 0>(tensors, merging, stream);
  }
}

void LaunchAttentionMass(const float* mass, float* stored_mass, int64_t rows, int heads, cudaStream_t stream) {
  if (rows == 0) return;
  LaunchKernel(AttentionMassMean, static_cast<unsigned>(CeilDiv(rows, 128)), 128, 0, stream, mass, stored_mass, rows,
               heads);
}

}  // namespace stillhouse::cuda
