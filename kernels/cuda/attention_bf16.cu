// Attention forward of several queries on bf16 keys and values: tensor-core products with fp32 sums. Logits, maxima and
// sums are fp32; queries and weights are rounded to bf16 where they enter a product.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/attention_rows.cuh"
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

// 64 queries, 16 to a warp.
template <int kWidth>
struct Layout {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kQueries = kAttentionWide;
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kStep * kWidth * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + kStep * 4;  // k, v, beta
  static constexpr int kSumStride = kWidth + 4, kSumBytes = kQueries * (kSumStride + kSumState) * 4;
  static constexpr int kBytes = std::max(kStages * kStageBytes + kQueries * kWidth * 2, kSumBytes);
};

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
  for (int r = first; r < kStep; r += kRowsAtOnce) LoadChunk<kWidth>(tile, from, row, slots, width, false, r, c);
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

template <int kWidth, int kInline>
__global__ void __launch_bounds__(kThreads)
    AttentionBf16(const AttentionTensors t, const AttentionItems where, const AttentionMerging where_merged,
                  const __grid_constant__ InlineTables<kInline> tables) {
  using L = Layout<kWidth>;
  constexpr int kScoreTiles = kStep / 8, kWidthTiles = kWidth / 8, kDepth = kWidth / 16;
  extern __shared__ float4 attention_shared[];
  LetNextKernelStart();
  char* const shared = reinterpret_cast<char*>(attention_shared);

  const AttentionItems items = Resolve(where, tables);
  const AttentionMerging merging = Resolve(where_merged, tables);
  const int unit = static_cast<int>(blockIdx.x) / ClusterBlocks(), kv = unit / items.count;
  const AttentionItem item = items.items[unit % items.count];
  if (item.row_count == 0) return;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int g = lane / 4, two = 2 * (lane % 4);  // of the fragments: row (and row + 8), column pair
  const int first_query = 16 * warp;

  SlotCursor<Bf16, kStep> loads(items, item, kv);
  SlotCursor<Bf16, kStep> cursor = loads;
  TileFinisher<kWidth, kWarps> finisher(t, item, items.rows, merging, kv, warp);
  finisher.ReadMerge();
  if (!items.settled) WaitForPreviousKernel();
#pragma unroll 1  // code that runs once is fetched once: short is fast
  for (int s = 0; s < L::kStages - 1; ++s) LoadStage<kWidth>(shared + s * L::kStageBytes, loads.Next(), t.width);
  if (items.settled) WaitForPreviousKernel();

  // Queries, as the left operand.
  char* const query_tile = shared + L::kStages * L::kStageBytes;
  LoadQueries<kWidth, L::kQueries, kThreads>(query_tile, t, item, items.rows, kv);
  finisher.Prepare();
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
    const char* const k = stage;
    const char* const v = stage + L::kTileBytes;
    const float* const beta = reinterpret_cast<const float*>(stage + 2 * L::kTileBytes);

    float s[kScoreTiles][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        uint32_t b[4];
        const int row = 8 * n + lane / 16 * 8 + lane % 8;
        LoadMatrices(b, k + TileByte<kWidth>(row, 2 * d + lane / 8 % 2));
        MultiplyAdd(s[n], q[d], b[0], b[1]);
        MultiplyAdd(s[n + 1], q[d], b[2], b[3]);
      }
    }
    const bool masked = tile.slots < kStep || tile.limit < tile.slots;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const int slot = 8 * n + two;
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
        const int row = 16 * j + lane / 8 % 2 * 8 + lane % 8;
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
  __syncthreads();  // the stages are free
  float* const sums = reinterpret_cast<float*>(attention_shared);
  float* const states = sums + L::kQueries * L::kSumStride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = first_query + g + 8 * half;
#pragma unroll
    for (int n = 0; n < kWidthTiles; ++n) {
      *reinterpret_cast<float2*>(sums + at * L::kSumStride + 8 * n + two) =
          make_float2(o[n][2 * half], o[n][2 * half + 1]);
    }
    if (two == 0) {
      states[kSumState * at] = m[half];
      states[kSumState * at + 1] = memory_sum[half];
      states[kSumState * at + 2] = rest_sum[half];
    }
  }
  static_assert(L::kQueries == 16 * kWarps);
  finisher.Finish({sums, states, L::kQueries, L::kSumStride, 1});
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
  template <int kWidth, int kInline>
  static auto Entry() {
    return &AttentionBf16<kWidth, kInline>;
  }
  template <int kWidth>
  using LayoutOf = Layout<kWidth>;
};

}  // namespace

void LaunchAttentionBf16Wide(const AttentionTensors& tensors, const AttentionItems& items,
                             const AttentionMerging& merging, cudaStream_t stream) {
  LaunchTiles<Kernel>(tensors, items, merging, stream);
}

AttentionCapacity AttentionCapacityBf16Wide(int width) { return TilesCapacity<Kernel>(width); }

void LaunchAttentionToBf16(const float* from, int64_t row, int64_t head, int64_t rows, int heads, int width, void* to,
                           cudaStream_t stream) {
  const int64_t count = rows * heads * width;
  if (count == 0) return;
  LaunchKernel(RowsToBf16, GridFor(count, 256), 256, 0, stream, from, row, head, rows, heads, width,
               static_cast<Bf16*>(to));
}

}  // namespace stillhouse::cuda
