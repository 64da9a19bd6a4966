// Attention forward of few queries on bf16 keys and values: bound by reading these. Tensor-core products with the slots
// (then the columns of values) as rows, so that eight queries fill a product. Sums, logits and maxima are fp32; queries
// and weights are rounded to bf16 where they enter a product.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_columns.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_rows.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kStep = kAttentionStep;
constexpr int kWarps = 4;
constexpr int kQueries = kAttentionNarrow;
constexpr int kSlots = kStep / kWarps;  // of a step, of a warp: it copies them, and nobody else reads them
static_assert(kQueries == 8 && kSlots == 16);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Weights may grow to 2^kSlack before the maximum follows and earlier sums shrink.
constexpr float kSlack = 8.0f;

// What blocks are for. kBrief: many items of few slots, which wait for each other less where more blocks share a
// multiprocessor. kSplit: items that the blocks of clusters share, a few steps for each; all blocks of the next launch
// find room beside them, and have read their slots when these end.
enum class Use { kLong, kBrief, kSplit };

template <int kWidth, Use kUse>
struct Layout {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kBlocks =  // of a multiprocessor
      kWidth > 128 || kUse == Use::kLong ? 2
      : kUse == Use::kBrief              ? 4
                                         : 3;
  static constexpr int kStages = kUse == Use::kBrief ? 1 : kUse == Use::kSplit || kWidth == 256 ? 2 : 3;
  static constexpr int kTileBytes = kSlots * kWidth * 2;
  static constexpr int kStageBytes = 2 * kTileBytes + 128;  // of a warp: k, v, beta
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSumStride = kWidth + 4;
  static constexpr int kSumBytes = kWarps * kQueries * (kSumStride + kSumState) * 4;
  static constexpr int kLanding = std::max(kWarps * kRingBytes + kQueries * kWidth * 2, kSumBytes);
  using Finisher = ColumnFinisher<kWidth, kQueries, kWarps, kWarps, kUse == Use::kSplit>;
  static constexpr int kBytes = kLanding + Finisher::kLandingBytes;
};

// What a warp has to know of its slots of a step when they have come.
struct Meta {
  int slots = 0;  // of the warp; of 0 and less there is nothing to do
  int limit = 0;  // row i of the tile sees the first limit + i of them
  bool beta = false, memory = false, last = false;
};

// A warp's rows of a tile.
template <int kWidth>
__device__ __forceinline__ void LoadRows(char* tile, const Bf16* from, int64_t row, int slots, int width, bool vector) {
  constexpr int kChunks = kWidth / 8, kRowsAtOnce = kWarp / kChunks;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, c = lane % kChunks, first = lane / kChunks;
  if (vector && slots >= kSlots) {
    const bool there = 8 * c < width;
    const Bf16* at = there ? from + first * row + 8 * c : from;
    const int to = TileByte<kWidth>(first, c);  // the rotation of row first + r is that of row `first`, turned by r
#pragma unroll
    for (int r = 0; r < kSlots; r += kRowsAtOnce) {
      CopyAsync16(tile + (to ^ ((r & 7) << 4)) + r * kWidth * 2, at, there);
      at += kRowsAtOnce * row;
    }
    return;
  }
#pragma unroll 1
  for (int r = first; r < kSlots; r += kRowsAtOnce) {
    LoadChunk<kWidth>(tile, from, row, slots, width, vector, r, c);
  }
}

template <int kWidth>
__device__ __forceinline__ Meta LoadStage(char* stage, const SlotTile<Bf16>& tile, int width) {
  using L = Layout<kWidth, Use::kLong>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(threadIdx.x) / kWarp * kSlots;
  Meta meta;
  meta.slots = min(tile.slots - first, kSlots);
  meta.limit = tile.limit - first;
  meta.beta = tile.beta != nullptr;
  meta.memory = tile.memory;
  if (meta.slots > 0) {
    LoadRows<kWidth>(stage, tile.k + first * tile.k_row, tile.k_row, meta.slots, width, tile.vector);
    LoadRows<kWidth>(stage + L::kTileBytes, tile.v + first * tile.v_row, tile.v_row, meta.slots, width, tile.vector);
    if (meta.beta && lane < meta.slots) {
      CopyAsync4(reinterpret_cast<float*>(stage + 2 * L::kTileBytes) + lane, tile.beta + first + lane);
    }
  }
  CopyAsyncCommit();
  return meta;
}

template <int kWidth, Use kUse, int kInline>
__global__ void __launch_bounds__(kWarps* kWarp, Layout<kWidth, kUse>::kBlocks)
    AttentionNarrow(const AttentionTensors t, const AttentionItems where, const AttentionMerging where_merged,
                    const __grid_constant__ InlineTables<kInline> tables) {
  using L = Layout<kWidth, kUse>;
  constexpr int kDepth = kWidth / 16;
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

  SlotCursor<Bf16, kStep> cursor(items, item, kv);
  typename L::Finisher finisher(t, item, items.rows, merging, kv, warp, shared + L::kLanding);
  finisher.Open();
  finisher.ReadMerges();
  if (!items.settled) WaitForPreviousKernel();
  char* const ring = shared + warp * L::kRingBytes;
  Meta pending[L::kStages];
  int stage = 0, free = 0;  // of the ring: to read, to fill
  const auto load_next = [&] {
#pragma unroll
    for (int s = 0; s + 1 < L::kStages; ++s) pending[s] = pending[s + 1];
    Meta& last = pending[L::kStages - 1];
    if (cursor.left() <= 0) {  // an empty group
      last = {};
      last.last = true;
      return CopyAsyncCommit();
    }
    last = LoadStage<kWidth>(ring + free, cursor.Next(), t.width);
    free += L::kStageBytes;
    if (free == L::kRingBytes) free = 0;
  };
#pragma unroll 1  // code that runs once is fetched once: short is fast
  for (int s = 0; s < L::kStages; ++s) load_next();
  if (items.settled) WaitForPreviousKernel();

  // Queries, as the right operand.
  char* const query_tile = shared + kWarps * L::kRingBytes;
  LoadQueries<kWidth, kQueries, L::kThreads>(query_tile, t, item, items.rows, kv);
  __syncthreads();
  uint32_t q[kDepth / 2][4];
#pragma unroll
  for (int d = 0; d < kDepth / 2; ++d) {
    LoadMatrices(q[d], query_tile + TileByte<kWidth>(lane % 8, 4 * d + lane / 8));
  }
  finisher.Prepare();

  // Running softmax of queries `two` and `two` + 1, in base 2; the sums are of the lane's own slots until the end.
  const float scale = t.scale * kLog2E;
  float m[2] = {-INFINITY, -INFINITY}, memory_sum[2] = {}, rest_sum[2] = {};
  float o[kDepth][4] = {};  // columns g and g + 8 of 16, of the two queries
  const int tile_row[2] = {two / item.head_count, (two + 1) / item.head_count};  // for the causal limit
  const int k_lane = TileByte<kWidth>(lane % 16, lane / 16);
  const int v_lane = L::kTileBytes + TileByte<kWidth>(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  const auto attend = [&](const Meta& meta, const char* at) {
    float s[2][4] = {};  // two sums: half as long a chain
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      uint32_t a[4];
      LoadMatrices(a, at + (k_lane ^ ((2 * d & 7) << 4)) + d / 4 * 128);
      MultiplyAdd(s[d % 2], a, q[d / 2][d % 2 * 2], q[d / 2][d % 2 * 2 + 1]);
    }
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = (s[0][e] + s[1][e]) * scale;
    if (meta.beta) {
      const float* const beta = reinterpret_cast<const float*>(at + 2 * L::kTileBytes);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = fmaf(beta[min(g + e / 2 * 8, meta.slots - 1)], kLog2E, x[e]);
    }
    if (meta.slots < kSlots || meta.limit < kSlots) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (g + e / 2 * 8 >= min(meta.limit + tile_row[e % 2], meta.slots)) x[e] = -INFINITY;
      }
    }
    if (__any_sync(kFullWarp, fmaxf(x[0], x[2]) > m[0] + kSlack || fmaxf(x[1], x[3]) > m[1] + kSlack)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(x[e], x[e + 2]);
#pragma unroll
        for (int offset = 4; offset < kWarp; offset *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
        top = fmaxf(m[e], top);
        const float factor = m[e] == -INFINITY ? 0.0f : Exp2(m[e] - top);
        m[e] = top;
        memory_sum[e] *= factor;
        rest_sum[e] *= factor;
#pragma unroll
        for (int j = 0; j < kDepth; ++j) {
          o[j][e] *= factor;
          o[j][e + 2] *= factor;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = Exp2(x[e] - (m[e % 2] == -INFINITY ? 0.0f : m[e % 2]));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float total = x[e] + x[e + 2];
      memory_sum[e] += meta.memory ? total : 0.0f;
      rest_sum[e] += meta.memory ? 0.0f : total;
    }
    const uint32_t p0 = TransposeMatrix(PackBf16(x[0], x[1])), p1 = TransposeMatrix(PackBf16(x[2], x[3]));
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      uint32_t a[4];
      LoadMatricesTransposed(a, at + (v_lane ^ ((2 * j & 7) << 4)) + j / 4 * 128);
      MultiplyAdd(o[j], a, p0, p1);
    }
  };
#pragma unroll 1
  for (;;) {
    const Meta meta = pending[0];
    if (meta.last) break;
    CopyAsyncWait<L::kStages - 1>();
    __syncwarp();  // this step's slots are there
    if (meta.slots > 0) attend(meta, ring + stage);
    stage += L::kStageBytes;
    if (stage == L::kRingBytes) stage = 0;
    __syncwarp();  // every lane is done with them
    load_next();
  }
  CopyAsyncWait<0>();
  __syncthreads();  // the rings are free

  // The warps' sums, one part each.
  float* const sums = reinterpret_cast<float*>(attention_shared);
  float* const states = sums + kWarps * kQueries * L::kSumStride;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int at = warp * kQueries + two + e;
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      sums[at * L::kSumStride + 16 * j + g] = o[j][e];
      sums[at * L::kSumStride + 16 * j + g + 8] = o[j][e + 2];
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      memory_sum[e] += __shfl_xor_sync(kFullWarp, memory_sum[e], offset);
      rest_sum[e] += __shfl_xor_sync(kFullWarp, rest_sum[e], offset);
    }
    if (g == 0) {
      states[kSumState * at] = m[e] * kLn2;
      states[kSumState * at + 1] = memory_sum[e];
      states[kSumState * at + 2] = rest_sum[e];
    }
  }
  finisher.Finish({sums, states, kQueries, L::kSumStride, kWarps});
}

template <Use kUse>
struct Kernel {
  template <int kWidth, int kInline>
  static auto Entry() {
    return &AttentionNarrow<kWidth, kUse, kInline>;
  }
  template <int kWidth>
  using LayoutOf = Layout<kWidth, kUse>;
};

}  // namespace

void LaunchAttentionBf16Narrow(const AttentionTensors& tensors, const AttentionItems& items,
                               const AttentionMerging& merging, cudaStream_t stream) {
  if (items.cluster > 1) return LaunchTiles<Kernel<Use::kSplit>>(tensors, items, merging, stream);
  items.brief ? LaunchTiles<Kernel<Use::kBrief>>(tensors, items, merging, stream)
              : LaunchTiles<Kernel<Use::kLong>>(tensors, items, merging, stream);
}

AttentionCapacity AttentionCapacityBf16Narrow(int width) {
  AttentionCapacity capacity = TilesCapacity<Kernel<Use::kSplit>>(width);
  static_assert(kAttentionClusters[0] == 1);
  capacity.blocks[0] = TilesCapacity<Kernel<Use::kLong>>(width).blocks[0];
  return capacity;
}

}  // namespace stillhouse::cuda
