// Attention backward in fp32: weights are recomputed tile by tile from q, k and the saved log-sums (Dao et al. 2022),
// all products on tensor cores (mma_f32.cuh). Every gradient has one writer, and partial sums are added in order: the
// same inputs give the same bits.
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma_f32.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tile.cuh"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// A block has kTile rows of its products (queries, or slots) and goes through the others kStep at a time: small blocks,
// so that a short batch has some for every multiprocessor and one computes while another waits for its rows. A warp has
// 16 rows: kScores tiles of eight columns of the scores, kOuts of a result as wide as a head.
template <int kWidth>
struct Layout {
  static constexpr int kTile = 32, kStep = kWidth > 128 ? 32 : 64;
  static constexpr int kGroups = kTile / 16;        // of rows
  static constexpr int kAcross = kWarps / kGroups;  // warps along the columns
  static constexpr int kScores = kStep / 8 / kAcross;
  static constexpr int kOuts = kWidth / 8 / kAcross;
  static constexpr int kStride = TileStride(kWidth);
  static constexpr int kScoreStride = kStep + 8;
  // Shared memory: q, dout, k, v; a tile of scores; lse and δ. Or two tiles of scores, and the warps' sums of β's
  // gradient.
  static constexpr int kBytesQ = (2 * (kTile + kStep) * kStride + kTile * kScoreStride + 2 * kTile) * 4;
  static constexpr int kBytesKv =
      (2 * (kTile + kStep) * kStride + 2 * kTile * kScoreStride + 2 * kStep + kAcross * kTile) * 4;
};

template <int kWidth>
using Lane = TileLane<Layout<kWidth>::kGroups, Layout<kWidth>::kScores, Layout<kWidth>::kOuts>;

// Adds two columns of a row of `width` floats to what is there, or writes them.
__device__ __forceinline__ void AddPair(float* row, int column, int width, float x, float y) {
  if (column < width) row[column] += x;
  if (column + 1 < width) row[column + 1] += y;
}
__device__ __forceinline__ void StorePair(float* row, int column, int width, float x, float y) {
  if (column < width) row[column] = x;
  if (column + 1 < width) row[column + 1] = y;
}

// Loads queries [begin, begin + kCount) of a tile of rows (a row's heads next to each other), their output gradients,
// δ, and lse: +inf where there is no query, or it saw nothing, so that its weights are 0. The caller commits and waits.
template <int kWidth, int kCount>
__device__ __forceinline__ void LoadQueries(const AttentionGradTensors& t, const int32_t* table, int rows, int begin,
                                            int queries, int64_t first_head, int heads, float* q, float* dout,
                                            float* lse, float* delta) {
  using L = Layout<kWidth>;
  constexpr int kChunks = kWidth / 4;
  // A thread goes down one column; rows and heads are counted on, not divided anew.
  constexpr int kDown = kThreads / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks * 4, first = static_cast<int>(threadIdx.x) / kChunks;
  const int rows_down = kDown / heads, heads_down = kDown % heads;
  int at_row = (begin + first) / heads, at_head = (begin + first) % heads;
  for (int at = first; at < kCount && c < t.width; at += kDown) {
    const bool there = begin + at < queries;
    const int64_t row = there ? RowOf(table, rows, at_row) : 0;
    const int64_t head = first_head + at_head;
    at_row += rows_down;
    at_head += heads_down;
    if (at_head >= heads) {
      at_head -= heads;
      ++at_row;
    }
    const float* const from_q = there ? t.q + row * t.q_row + head * t.q_head + c : t.q;
    const float* const from_dout = there ? t.dout + row * t.dout_row + head * t.dout_head + c : t.dout;
    float* const to_q = q + at * L::kStride + c;
    float* const to_dout = dout + at * L::kStride + c;
    if (t.vector) {
      CopyAsync16(to_q, from_q, there);
      CopyAsync16(to_dout, from_dout, there);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to_q[e] = there && c + e < t.width ? from_q[e] : 0.0f;
      to_dout[e] = there && c + e < t.width ? from_dout[e] : 0.0f;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < kCount; i += kThreads) {
    const int query = begin + i;
    float log_sum = INFINITY, d = 0.0f;
    if (query < queries) {
      const int64_t row = RowOf(table, rows, query / heads), head = first_head + query % heads;
      const float value = t.lse[row * t.lse_row + head * t.lse_head];
      if (value > -INFINITY) {
        log_sum = value;
        d = t.delta[row * t.heads + head];
      }
    }
    lse[i] = log_sum;
    delta[i] = d;
  }
}

// δ[r, h] = ⟨dout, out⟩, one warp each.
__global__ void AttentionDelta(const AttentionGradTensors t) {
  const int64_t place = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (place >= t.rows * t.heads) return;
  const int64_t row = place / t.heads, head = place % t.heads;
  const float* const out = t.out + row * t.out_row + head * t.out_head;
  const float* const dout = t.dout + row * t.dout_row + head * t.dout_head;
  float sum = 0.0f;
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < t.width; c += kWarp) sum = fmaf(out[c], dout[c], sum);
  sum = WarpSum(sum);
  if (threadIdx.x % kWarp == 0) t.delta[place] = sum;
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads) AttentionGradQ(const AttentionGradTensors t, const AttentionItems items) {
  using L = Layout<kWidth>;
  extern __shared__ float4 attention_shared[];
  float* const q = reinterpret_cast<float*>(attention_shared);
  float* const dout = q + L::kTile * L::kStride;
  float* const k = dout + L::kTile * L::kStride;
  float* const v = k + L::kStep * L::kStride;
  float* const scores = v + L::kStep * L::kStride;
  float* const lse = scores + L::kTile * L::kScoreStride;
  float* const delta = lse + L::kTile;

  const int kv = static_cast<int>(blockIdx.x) / items.count;
  const AttentionItem item = items.items[static_cast<int>(blockIdx.x) % items.count];
  const int64_t first_head = kv * (t.heads / t.kv_heads) + item.head_begin;
  const int queries = item.row_count * item.head_count;
  const int depth = (t.width + 3) / 4 * 4;
  const Lane<kWidth> lane(t.width);
  LoadQueries<kWidth, L::kTile>(t, items.rows, item.rows, 0, queries, first_head, item.head_count, q, dout, lse, delta);
  float sum[L::kOuts][4] = {};

  SlotCursor<float, L::kStep> cursor(items.runs, item.run, item.slot, item.slots, item.causal_limit, kv);
  for (SlotTile<float> tile = cursor.Next(); tile.slots > 0; tile = cursor.Next()) {
    LoadTile<kThreads, L::kStep, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
    LoadTile<kThreads, L::kStep, L::kStride>(v, tile.v, tile.v_row, tile.slots, t.width, tile.vector);
    CopyAsyncCommit();
    float beta[L::kScores][2];
#pragma unroll
    for (int n = 0; n < L::kScores; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int slot = lane.score + 8 * n + e;
        beta[n][e] = tile.beta && slot < tile.slots ? tile.beta[slot] : 0.0f;
      }
    }
    CopyAsyncWait<0>();
    __syncthreads();  // keys and values are there
    float s[L::kScores][4] = {}, dp[L::kScores][4] = {};
    WarpDot<L::kScores, L::kStride>(q + lane.first_row * L::kStride, k + lane.first_score * L::kStride, depth, s);
    WarpDot<L::kScores, L::kStride>(dout + lane.first_row * L::kStride, v + lane.first_score * L::kStride, depth, dp);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane.row + 8 * half;
      const int limit = min(tile.limit < tile.slots ? tile.limit + row / item.head_count : tile.slots, tile.slots);
#pragma unroll
      for (int n = 0; n < L::kScores; ++n) {
        float ds[2] = {};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (lane.score + 8 * n + e >= limit) continue;
          ds[e] = expf(s[n][2 * half + e] * t.scale + beta[n][e] - lse[row]) * (dp[n][2 * half + e] - delta[row]);
        }
        *reinterpret_cast<float2*>(scores + row * L::kScoreStride + lane.score + 8 * n) = make_float2(ds[0], ds[1]);
      }
    }
    __syncthreads();  // scores are there
    WarpAccumulate<L::kOuts, L::kScoreStride, L::kStride>(scores + lane.first_row * L::kScoreStride, k + lane.first_out,
                                                          tile.slots, lane.outs, sum);
    __syncthreads();  // keys, values and scores are free
  }
  CopyAsyncWait<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = lane.row + 8 * half;
    if (query >= queries) continue;
    const int64_t at = RowOf(items.rows, item.rows, query / item.head_count);
    float* const dq = t.dq + at * t.dq_row + (first_head + query % item.head_count) * t.dq_head;
#pragma unroll
    for (int n = 0; n < L::kOuts; ++n) {
      AddPair(dq, lane.out + 8 * n, t.width, sum[n][2 * half] * t.scale, sum[n][2 * half + 1] * t.scale);
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    AttentionGradKv(const AttentionGradTensors t, const AttentionRun* runs, const AttentionRunGrad* grads,
                    const int32_t* rows, const AttentionSlotItem* items, int count, float* partials) {
  using L = Layout<kWidth>;
  extern __shared__ float4 attention_shared[];
  float* const q = reinterpret_cast<float*>(attention_shared);
  float* const dout = q + L::kStep * L::kStride;
  float* const k = dout + L::kStep * L::kStride;
  float* const v = k + L::kTile * L::kStride;
  float* const weights = v + L::kTile * L::kStride;  // [slot, query]
  float* const scores = weights + L::kTile * L::kScoreStride;
  float* const lse = scores + L::kTile * L::kScoreStride;
  float* const delta = lse + L::kStep;
  float* const dbetas = delta + L::kStep;  // [kAcross, slot]

  const int kv = static_cast<int>(blockIdx.x) / count;
  const AttentionSlotItem item = items[static_cast<int>(blockIdx.x) % count];
  const int group = t.heads / t.kv_heads;
  const int queries = item.row_count * group;
  const int depth = (t.width + 3) / 4 * 4;
  const Lane<kWidth> lane(t.width);

  SlotCursor<float, L::kTile> cursor(runs, item.run, item.slot, L::kTile, item.causal_limit, kv);
  // The range may reach into the next run; the first step of the walk stays within this one.
  const SlotTile<float> tile = cursor.Next();
  LoadTile<kThreads, L::kTile, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
  LoadTile<kThreads, L::kTile, L::kStride>(v, tile.v, tile.v_row, tile.slots, t.width, tile.vector);
  float beta[2], dbeta[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int slot = lane.row + 8 * half;
    beta[half] = tile.beta && slot < tile.slots ? tile.beta[slot] : 0.0f;
  }
  float dk[L::kOuts][4] = {}, dv[L::kOuts][4] = {};

  for (int begin = 0; begin < queries; begin += L::kStep) {
    LoadQueries<kWidth, L::kStep>(t, rows, item.rows, begin, queries, kv * group, group, q, dout, lse, delta);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();  // queries are there
    float s[L::kScores][4] = {}, dp[L::kScores][4] = {};
    WarpDot<L::kScores, L::kStride>(k + lane.first_row * L::kStride, q + lane.first_score * L::kStride, depth, s);
    WarpDot<L::kScores, L::kStride>(v + lane.first_row * L::kStride, dout + lane.first_score * L::kStride, depth, dp);
#pragma unroll
    for (int n = 0; n < L::kScores; ++n) {
      float p[2][2] = {}, ds[2][2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = lane.score + 8 * n + e;
        const int limit = min(tile.limit < tile.slots ? tile.limit + (begin + query) / group : tile.slots, tile.slots);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (lane.row + 8 * half >= limit) continue;
          p[half][e] = expf(s[n][2 * half + e] * t.scale + beta[half] - lse[query]);
          ds[half][e] = p[half][e] * (dp[n][2 * half + e] - delta[query]);
          dbeta[half] += ds[half][e];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (lane.row + 8 * half) * L::kScoreStride + lane.score + 8 * n;
        *reinterpret_cast<float2*>(weights + at) = make_float2(p[half][0], p[half][1]);
        *reinterpret_cast<float2*>(scores + at) = make_float2(ds[half][0], ds[half][1]);
      }
    }
    __syncthreads();  // weights and scores are there
    WarpAccumulate<L::kOuts, L::kScoreStride, L::kStride>(weights + lane.first_row * L::kScoreStride,
                                                          dout + lane.first_out, L::kStep, lane.outs, dv);
    WarpAccumulate<L::kOuts, L::kScoreStride, L::kStride>(scores + lane.first_row * L::kScoreStride, q + lane.first_out,
                                                          L::kStep, lane.outs, dk);
    __syncthreads();  // queries, weights and scores are free
  }
  CopyAsyncWait<0>();

  const AttentionRunGrad grad = grads[item.run];
  float* const block = item.partial < 0 ? nullptr
                                        : partials + (static_cast<int64_t>(item.partial) * t.kv_heads + kv) * L::kTile *
                                                         (2 * t.width + 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane.row + 8 * half;
    const float sum = WarpSum<4>(dbeta[half]);  // over the lanes of one row
    if (threadIdx.x % 4 == 0) dbetas[lane.across * L::kTile + row] = sum;
    if (row >= tile.slots) continue;
    const int64_t slot = item.slot + row;
#pragma unroll
    for (int n = 0; n < L::kOuts; ++n) {
      const int column = lane.out + 8 * n;
      const float x = dk[n][2 * half] * t.scale, y = dk[n][2 * half + 1] * t.scale;
      if (block) {
        StorePair(block + row * t.width, column, t.width, x, y);
        StorePair(block + (L::kTile + row) * t.width, column, t.width, dv[n][2 * half], dv[n][2 * half + 1]);
        continue;
      }
      if (grad.dk) AddPair(grad.dk + kv * grad.dk_head + slot * grad.dk_row, column, t.width, x, y);
      if (grad.dv) {
        AddPair(grad.dv + kv * grad.dv_head + slot * grad.dv_row, column, t.width, dv[n][2 * half],
                dv[n][2 * half + 1]);
      }
    }
  }
  __syncthreads();  // all warps' sums are there
  const int row = static_cast<int>(threadIdx.x);
  if (row >= tile.slots) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < L::kAcross; ++w) sum += dbetas[w * L::kTile + row];
  if (block) {
    block[2 * L::kTile * t.width + row] = sum;
  } else if (grad.dbeta) {
    grad.dbeta[kv * grad.dbeta_head + item.slot + row] += sum;
  }
}

// Adds a tile's blocks of partial sums, in order: a thread has one place of the block.
__global__ void AttentionGradSum(const AttentionGradTensors t, const AttentionRun* runs, const AttentionRunGrad* grads,
                                 const AttentionSlotSum* sums, int count, int tile, const float* partials) {
  const int kv = static_cast<int>(blockIdx.x) / count;
  const AttentionSlotSum sum = sums[static_cast<int>(blockIdx.x) % count];
  const AttentionRunGrad grad = grads[sum.run];
  const int slots = min(tile, runs[sum.run].slots - sum.slot), floats = tile * (2 * t.width + 1);
  const int place = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (place >= floats) return;
  // Keys, values, β.
  const int part = place < 2 * tile * t.width ? place / (tile * t.width) : 2;
  const int at = place - part * tile * t.width, width = part < 2 ? t.width : 1;
  const int row = at / width, column = at % width;
  float* const to = part == 0 ? grad.dk : part == 1 ? grad.dv : grad.dbeta;
  if (row >= slots || !to) return;
  const int64_t head = part == 0 ? grad.dk_head : part == 1 ? grad.dv_head : grad.dbeta_head;
  const int64_t stride = part == 0 ? grad.dk_row : part == 1 ? grad.dv_row : 1;
  const int64_t step = static_cast<int64_t>(floats) * t.kv_heads;
  const float* from = partials + (static_cast<int64_t>(sum.partial_begin) * t.kv_heads + kv) * floats + place;
  float x = 0.0f;
#pragma unroll 4
  for (int p = 0; p < sum.partial_count; ++p, from += step) x += *from;
  to[kv * head + (sum.slot + row) * stride + column] += x;
}

template <int kWidth>
void LaunchQ(const AttentionGradTensors& tensors, const AttentionItems& items, cudaStream_t stream) {
  LaunchKernel(AttentionGradQ<kWidth>, static_cast<unsigned>(items.count * tensors.kv_heads), kThreads,
               Layout<kWidth>::kBytesQ, stream, tensors, items);
}

template <int kWidth>
void LaunchKv(const AttentionGradTensors& tensors, const AttentionRun* runs, const AttentionRunGrad* grads,
              const int32_t* rows, const AttentionSlotItem* items, int count, float* partials, cudaStream_t stream) {
  LaunchKernel(AttentionGradKv<kWidth>, static_cast<unsigned>(count * tensors.kv_heads), kThreads,
               Layout<kWidth>::kBytesKv, stream, tensors, runs, grads, rows, items, count, partials);
}

}  // namespace

int AttentionGradTile() { return Layout<64>::kTile; }
int AttentionGradStep(int width) { return width > 128 ? Layout<256>::kStep : Layout<128>::kStep; }

int64_t AttentionGradBlock(int width) { return static_cast<int64_t>(AttentionGradTile()) * (2 * width + 1); }

void LaunchAttentionDelta(const AttentionGradTensors& tensors, cudaStream_t stream) {
  const int64_t places = tensors.rows * tensors.heads;
  if (places == 0) return;
  LaunchKernel(AttentionDelta, static_cast<unsigned>(CeilDiv(places, 256 / kWarp)), 256, 0, stream, tensors);
}

void LaunchAttentionGradQ(const AttentionGradTensors& tensors, const AttentionItems& items, cudaStream_t stream) {
  if (items.count == 0) return;
  if (tensors.width <= 64) return LaunchQ<64>(tensors, items, stream);
  if (tensors.width <= 128) return LaunchQ<128>(tensors, items, stream);
  LaunchQ<256>(tensors, items, stream);
}

void LaunchAttentionGradKv(const AttentionGradTensors& tensors, const AttentionRun* runs, const AttentionRunGrad* grads,
                           const int32_t* rows, const AttentionSlotItem* items, int32_t count, float* partials,
                           cudaStream_t stream) {
  if (count == 0) return;
  const auto launch = tensors.width <= 64 ? LaunchKv<64> : tensors.width <= 128 ? LaunchKv<128> : LaunchKv<256>;
  launch(tensors, runs, grads, rows, items, count, partials, stream);
}

void LaunchAttentionGradSum(const AttentionGradTensors& tensors, const AttentionRun* runs,
                            const AttentionRunGrad* grads, const AttentionSlotSum* sums, int32_t count,
                            const float* partials, cudaStream_t stream) {
  if (count == 0) return;
  const dim3 grid(static_cast<unsigned>(count * tensors.kv_heads),
                  static_cast<unsigned>(CeilDiv(AttentionGradBlock(tensors.width), kThreads)));
  LaunchKernel(AttentionGradSum, grid, kThreads, 0, stream, tensors, runs, grads, sums, count, AttentionGradTile(),
               partials);
}

}  // namespace stillhouse::cuda
