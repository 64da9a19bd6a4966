// Attention backward in fp32: weights are recomputed tile by tile from q, k and the saved log-sums (Dao et al. 2022).
// Every gradient has one writer, and partial sums are added in order: the same inputs give the same bits.
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/tile.cuh"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAcross = 16;  // threads along the columns of a product; the others go down its rows

// Tiles of kTile queries and kTile slots; a thread has kRows × kRows of their scores.
template <int kWidth>
struct Layout {
  static constexpr int kTile = kWidth > 128 ? 32 : 64;
  static constexpr int kRows = kTile / kAcross;
  static constexpr int kChunks = kWidth / 4 / kAcross;  // a thread's chunks of four columns
  static constexpr int kStride = TileStride(kWidth);
  static constexpr int kScoreStride = TileStride(kTile);
  // Floats of shared memory: q, dout, k, v; one or two tiles of scores; lse and δ.
  static constexpr int kBytesQ = (4 * kTile * kStride + kTile * kScoreStride + 2 * kTile) * 4;
  static constexpr int kBytesKv = (4 * kTile * kStride + 2 * kTile * kScoreStride + 2 * kTile) * 4;
};

// Loads queries [begin, begin + kTile) of a tile of rows (a row's heads next to each other), their output gradients,
// lse
// (+inf where there is no query, or it saw nothing: its weights are 0) and δ. The caller commits and waits.
template <int kWidth>
__device__ __forceinline__ void LoadQueries(const AttentionGradTensors& t, const int32_t* table, int rows, int begin,
                                            int queries, int64_t first_head, int heads, float* q, float* dout,
                                            float* lse, float* delta) {
  using L = Layout<kWidth>;
  constexpr int kChunks = kWidth / 4;
  for (int i = static_cast<int>(threadIdx.x); i < L::kTile * kChunks; i += kThreads) {
    const int at = i / kChunks, c = i % kChunks * 4, query = begin + at;
    if (c >= t.width) continue;
    const bool there = query < queries;
    const int64_t row = there ? RowOf(table, rows, query / heads) : 0;
    const int64_t head = first_head + query % heads;
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
  for (int i = static_cast<int>(threadIdx.x); i < L::kTile; i += kThreads) {
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
  float* const v = k + L::kTile * L::kStride;
  float* const scores = v + L::kTile * L::kStride;
  float* const lse = scores + L::kTile * L::kScoreStride;
  float* const delta = lse + L::kTile;

  const int kv = static_cast<int>(blockIdx.x) / items.count;
  const AttentionItem item = items.items[static_cast<int>(blockIdx.x) % items.count];
  const int64_t first_head = kv * (t.heads / t.kv_heads) + item.head_begin;
  const int queries = item.row_count * item.head_count;
  const int tid = static_cast<int>(threadIdx.x);
  const int depth = (t.width + 3) / 4 * 4;
  const int row = tid / kAcross * L::kRows, across = tid % kAcross;
  const int chunks = (t.width - 4 * across + 4 * kAcross - 1) / (4 * kAcross);
  LoadQueries<kWidth>(t, items.rows, item.rows, 0, queries, first_head, item.head_count, q, dout, lse, delta);
  float4 sum[L::kRows][L::kChunks];
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) sum[m][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  SlotCursor<float, L::kTile> cursor(items.runs, item.run, item.slot, item.slots, item.causal_limit, kv);
  for (SlotTile<float> tile = cursor.Next(); tile.slots > 0; tile = cursor.Next()) {
    LoadTile<kThreads, L::kTile, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
    LoadTile<kThreads, L::kTile, L::kStride>(v, tile.v, tile.v_row, tile.slots, t.width, tile.vector);
    CopyAsyncCommit();
    float beta[L::kRows];
#pragma unroll
    for (int n = 0; n < L::kRows; ++n) {
      const int slot = across + n * kAcross;
      beta[n] = tile.beta && slot < tile.slots ? tile.beta[slot] : 0.0f;
    }
    CopyAsyncWait<0>();
    __syncthreads();  // keys and values are there
    float s[L::kRows][L::kRows] = {}, dp[L::kRows][L::kRows] = {};
    DotTile<L::kRows, L::kRows, kAcross, L::kStride>(q + row * L::kStride, k + across * L::kStride, depth, s);
    DotTile<L::kRows, L::kRows, kAcross, L::kStride>(dout + row * L::kStride, v + across * L::kStride, depth, dp);
#pragma unroll
    for (int m = 0; m < L::kRows; ++m) {
      const int limit = tile.limit < tile.slots ? tile.limit + (row + m) / item.head_count : tile.slots;
#pragma unroll
      for (int n = 0; n < L::kRows; ++n) {
        const int slot = across + n * kAcross;
        float ds = 0.0f;
        if (slot < min(limit, tile.slots)) {
          ds = expf(s[m][n] * t.scale + beta[n] - lse[row + m]) * (dp[m][n] - delta[row + m]);
        }
        scores[(row + m) * L::kScoreStride + slot] = ds;
      }
    }
    __syncthreads();  // scores are there
    AccumulateTile<L::kRows, L::kChunks, kAcross, L::kScoreStride, L::kStride>(
        scores + row * L::kScoreStride, k + 4 * across, 0, 4, tile.slots, chunks, sum);
    __syncthreads();  // keys, values and scores are free
  }
  CopyAsyncWait<0>();

#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
    const int query = row + m;
    if (query >= queries) continue;
    const int64_t at = RowOf(items.rows, item.rows, query / item.head_count);
    float* const dq = t.dq + at * t.dq_row + (first_head + query % item.head_count) * t.dq_head;
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) {
      const float4 x = sum[m][c];
      AddColumns(dq, 4 * (across + c * kAcross), t.width,
                 make_float4(x.x * t.scale, x.y * t.scale, x.z * t.scale, x.w * t.scale));
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
  float* const dout = q + L::kTile * L::kStride;
  float* const k = dout + L::kTile * L::kStride;
  float* const v = k + L::kTile * L::kStride;
  float* const weights = v + L::kTile * L::kStride;  // [slot, query]
  float* const scores = weights + L::kTile * L::kScoreStride;
  float* const lse = scores + L::kTile * L::kScoreStride;
  float* const delta = lse + L::kTile;

  const int kv = static_cast<int>(blockIdx.x) / count;
  const AttentionSlotItem item = items[static_cast<int>(blockIdx.x) % count];
  const int group = t.heads / t.kv_heads;
  const int queries = item.row_count * group;
  const int tid = static_cast<int>(threadIdx.x);
  const int depth = (t.width + 3) / 4 * 4;
  const int row = tid / kAcross * L::kRows, across = tid % kAcross;
  const int chunks = (t.width - 4 * across + 4 * kAcross - 1) / (4 * kAcross);

  SlotCursor<float, L::kTile> cursor(runs, item.run, item.slot, L::kTile, item.causal_limit, kv);
  // The range may reach into the next run; the first step of the walk stays within this one.
  const SlotTile<float> tile = cursor.Next();
  LoadTile<kThreads, L::kTile, L::kStride>(k, tile.k, tile.k_row, tile.slots, t.width, tile.vector);
  LoadTile<kThreads, L::kTile, L::kStride>(v, tile.v, tile.v_row, tile.slots, t.width, tile.vector);
  float beta[L::kRows];
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) beta[m] = tile.beta && row + m < tile.slots ? tile.beta[row + m] : 0.0f;
  float4 dk[L::kRows][L::kChunks], dv[L::kRows][L::kChunks];
  float dbeta[L::kRows] = {};
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) dk[m][c] = dv[m][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  for (int begin = 0; begin < queries; begin += L::kTile) {
    LoadQueries<kWidth>(t, rows, item.rows, begin, queries, kv * group, group, q, dout, lse, delta);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();  // queries are there
    float s[L::kRows][L::kRows] = {}, dp[L::kRows][L::kRows] = {};
    DotTile<L::kRows, L::kRows, kAcross, L::kStride>(k + row * L::kStride, q + across * L::kStride, depth, s);
    DotTile<L::kRows, L::kRows, kAcross, L::kStride>(v + row * L::kStride, dout + across * L::kStride, depth, dp);
#pragma unroll
    for (int n = 0; n < L::kRows; ++n) {
      const int query = across + n * kAcross;
      const int limit = tile.limit < tile.slots ? tile.limit + (begin + query) / group : tile.slots;
#pragma unroll
      for (int m = 0; m < L::kRows; ++m) {
        float p = 0.0f, ds = 0.0f;
        if (row + m < min(limit, tile.slots)) {
          p = expf(s[m][n] * t.scale + beta[m] - lse[query]);
          ds = p * (dp[m][n] - delta[query]);
        }
        weights[(row + m) * L::kScoreStride + query] = p;
        scores[(row + m) * L::kScoreStride + query] = ds;
        dbeta[m] += ds;
      }
    }
    __syncthreads();  // weights and scores are there
    AccumulateTile<L::kRows, L::kChunks, kAcross, L::kScoreStride, L::kStride>(
        weights + row * L::kScoreStride, dout + 4 * across, 0, 4, L::kTile, chunks, dv);
    AccumulateTile<L::kRows, L::kChunks, kAcross, L::kScoreStride, L::kStride>(
        scores + row * L::kScoreStride, q + 4 * across, 0, 4, L::kTile, chunks, dk);
    __syncthreads();  // queries, weights and scores are free
  }
  CopyAsyncWait<0>();

  const AttentionRunGrad grad = grads[item.run];
  float* const block = item.partial < 0 ? nullptr
                                        : partials + (static_cast<int64_t>(item.partial) * t.kv_heads + kv) * L::kTile *
                                                         (2 * t.width + 1);
#pragma unroll
  for (int m = 0; m < L::kRows; ++m) {
    const float db = WarpSum<kAcross>(dbeta[m]);
    if (row + m >= tile.slots) continue;
    const int64_t slot = item.slot + row + m;
#pragma unroll
    for (int c = 0; c < L::kChunks; ++c) {
      const int column = 4 * (across + c * kAcross);
      const float4 x =
          make_float4(dk[m][c].x * t.scale, dk[m][c].y * t.scale, dk[m][c].z * t.scale, dk[m][c].w * t.scale);
      if (block) {
        StoreColumns(block + (row + m) * t.width, column, t.width, x, false);
        StoreColumns(block + (L::kTile + row + m) * t.width, column, t.width, dv[m][c], false);
        continue;
      }
      if (grad.dk) AddColumns(grad.dk + kv * grad.dk_head + slot * grad.dk_row, column, t.width, x);
      if (grad.dv) AddColumns(grad.dv + kv * grad.dv_head + slot * grad.dv_row, column, t.width, dv[m][c]);
    }
    if (across > 0) continue;
    if (block) {
      block[2 * L::kTile * t.width + row + m] = db;
    } else if (grad.dbeta) {
      grad.dbeta[kv * grad.dbeta_head + slot] += db;
    }
  }
}

// Adds a tile's blocks of partial sums, in order.
__global__ void AttentionGradSum(const AttentionGradTensors t, const AttentionRun* runs, const AttentionRunGrad* grads,
                                 const AttentionSlotSum* sums, int count, int tile, const float* partials) {
  const int kv = static_cast<int>(blockIdx.x) / count;
  const AttentionSlotSum sum = sums[static_cast<int>(blockIdx.x) % count];
  const AttentionRunGrad grad = grads[sum.run];
  const int slots = min(tile, runs[sum.run].slots - sum.slot);
  const int64_t floats = static_cast<int64_t>(tile) * (2 * t.width + 1), step = floats * t.kv_heads;
  const float* const first = partials + (static_cast<int64_t>(sum.partial_begin) * t.kv_heads + kv) * floats;
  auto total = [&](int place) {
    float x = 0.0f;
    for (int p = 0; p < sum.partial_count; ++p) x += first[p * step + place];
    return x;
  };
  for (int i = static_cast<int>(threadIdx.x); i < slots * t.width; i += static_cast<int>(blockDim.x)) {
    const int64_t slot = sum.slot + i / t.width, column = i % t.width;
    if (grad.dk) grad.dk[kv * grad.dk_head + slot * grad.dk_row + column] += total(i);
    if (grad.dv) grad.dv[kv * grad.dv_head + slot * grad.dv_row + column] += total(tile * t.width + i);
  }
  for (int i = static_cast<int>(threadIdx.x); i < slots && grad.dbeta; i += static_cast<int>(blockDim.x)) {
    grad.dbeta[kv * grad.dbeta_head + sum.slot + i] += total(2 * tile * t.width + i);
  }
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

int AttentionGradTile(int width) { return width > 128 ? 32 : 64; }

int64_t AttentionGradBlock(int width) { return static_cast<int64_t>(AttentionGradTile(width)) * (2 * width + 1); }

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
  LaunchKernel(AttentionGradSum, static_cast<unsigned>(count * tensors.kv_heads), kThreads, 0, stream, tensors, runs,
               grads, sums, count, AttentionGradTile(tensors.width), partials);
}

}  // namespace stillhouse::cuda
