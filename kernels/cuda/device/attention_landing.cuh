// How the results of a tall tile come together (attention_wgmma.cu): the blocks of its cluster push their sums to where
// each query ends, and the rows' own sequences are one part more. Eight threads to a query. Code that runs once is
// fetched as it runs, so there is little of it.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_LANDING_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_LANDING_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/attention_stages.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda::tall {

// The softmax of rows g and g + 8 of a warp: maxima (natural logarithms), and ℓ on memories and on the rest.
struct WarpState {
  float m[2], memory[2], rest[2];
};

// A query's sums, and its state behind them.
inline constexpr int kSumStride = kWidth + kSumState;
// Blocks of a cluster: whose sums fit where the keys were.
inline constexpr int kMostBlocks = 8;
static_assert((kAttentionTall + kMostBlocks - 1) * kSumStride * 4 <= kStages * kTileBytes);

// Query i of the tile ends in block i % blocks, as its i / blocks-th.
class Landing {
 public:
  // `thread`: of the two warpgroups that compute. Both are done with keys and values.
  __device__ Landing(Shared& shared, const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                     const AttentionMerging& merging, int kv, int thread)
      : t_(t),
        item_(item),
        rows_(rows),
        merging_(merging),
        first_head_(kv * (t.heads / t.kv_heads) + item.head_begin),
        thread_(thread),
        rank_(ClusterRank()),
        blocks_(ClusterBlocks()),
        queries_(item.row_count * item.head_count),
        places_((kAttentionTall + blocks_ - 1) / blocks_),
        mine_((queries_ - rank_ + blocks_ - 1) / blocks_),
        landed_(&shared.landed),
        sums_(reinterpret_cast<float*>(shared.k[0])),
        own_sums_(reinterpret_cast<float*>(shared.v[0])) {}

  // Brings together the sums of a warp's 16 queries from `first` on, rows g and g + 8 of them per lane. The rows' own
  // sequences are read meanwhile.
  __device__ void Gather(int first, const float (&o)[16][4], const WarpState& state) {
    if (thread_ == 0) ArriveAndExpect(landed_, static_cast<uint32_t>(blocks_ * mine_ * (kWidth + kSumState) * 4));
    ClusterArriveRelaxed();
    int i = thread_ / kLanes;
    bool pushed = false;
#pragma unroll 1
    do {
      AttentionMerge merge = {0, 1, 0, 0};  // without own rows
      int64_t q_at = 0, kv_head = 0;
      if (item_.merge >= 0 && i < mine_) {
        const int query = Query(i), head = first_head_ + query % item_.head_count;
        merge = merging_.merges[item_.merge + query / item_.head_count];
        q_at = merge.row * t_.q_row + head * t_.q_head;
        kv_head = head / (t_.heads / t_.kv_heads);
      }
      SoftmaxState<float> own;
      float4 sum[kChunks] = {};
#pragma unroll 1
      do {
        const bool seen = merge.own_begin <= merge.row;
        float4 q[kChunks] = {}, k[kChunks] = {}, v[kChunks] = {};
        if (seen) {
          ReadRow(t_.q, t_.q_bf16, true, q_at, q);
          ReadRow(merging_.k, merging_.own_bf16, merging_.own_vector,
                  merge.own_begin * merging_.k_row + kv_head * merging_.k_head, k);
          ReadRow(merging_.v, merging_.own_bf16, merging_.own_vector,
                  merge.own_begin * merging_.v_row + kv_head * merging_.v_head, v);
        }
        if (!pushed) Push(first, o, state);
        pushed = true;
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          dot = fmaf(q[c].x, k[c].x, fmaf(q[c].y, k[c].y, fmaf(q[c].z, k[c].z, fmaf(q[c].w, k[c].w, dot))));
        }
        dot = t_.scale * WarpSum<kLanes>(dot);
        const MergeWeights<float> w = MergeSoftmax(own, {seen ? dot : -INFINITY, seen ? 1.0f : 0.0f});
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          sum[c] = make_float4(w.first * sum[c].x, w.first * sum[c].y, w.first * sum[c].z, w.first * sum[c].w);
          AddScaled(w.second, v[c], &sum[c]);
        }
        ++merge.own_begin;
      } while (__any_sync(kFullWarp, merge.own_begin <= merge.row));
      if (i < mine_) {
        float* const to = own_sums_ + i * kSumStride;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) *reinterpret_cast<float4*>(to + Column(c)) = sum[c];
        if (thread_ % kLanes == 0) *reinterpret_cast<float4*>(to + kWidth) = make_float4(own.m, 0.0f, own.l, 0.0f);
      }
      i += kTogether;
    } while (item_.merge >= 0 && __any_sync(kFullWarp, i < mine_));
  }

  // Writes the block's queries' results, or partial rows.
  __device__ void Finish() {
    __syncwarp();  // the own rows' states
    WaitPhase(landed_, 0);
    const int parts = blocks_ + (item_.merge >= 0);
#pragma unroll 1
    for (int i = thread_ / kLanes; i < mine_; i += kTogether) {
      float m = -INFINITY;
#pragma unroll 4
      for (int p = 0; p < parts; ++p) m = fmaxf(m, Part(p, i)[kWidth]);
      float memory = 0.0f, rest = 0.0f;
      float4 o[kChunks] = {};
#pragma unroll 4
      for (int p = 0; p < parts; ++p) {
        const float* const part = Part(p, i);
        const float4 state = *reinterpret_cast<const float4*>(part + kWidth);
        const float w = SoftmaxWeight(state.x, m);
        memory = fmaf(w, state.y, memory);
        rest = fmaf(w, state.z, rest);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) AddScaled(w, *reinterpret_cast<const float4*>(part + Column(c)), &o[c]);
      }
      Store(i, m, memory, rest, o);
    }
  }

 private:
  static constexpr int kLanes = 8;                     // of a query
  static constexpr int kChunks = kWidth / 4 / kLanes;  // of four columns, of a lane
  static constexpr int kTogether = 2 * kGroup / kLanes;

  __device__ int Place(int part, int i) const { return part * places_ + i; }
  // A row's sums, and its state behind them. The last part is of the own rows.
  __device__ const float* Part(int p, int i) const {
    return p < blocks_ ? sums_ + Place(p, i) * kSumStride : own_sums_ + i * kSumStride;
  }
  // First of the lane's `c`-th four columns.
  __device__ int Column(int c) const { return 4 * (c * kLanes + thread_ % kLanes); }
  __device__ int Query(int i) const { return i * blocks_ + rank_; }

  static __device__ void AddScaled(float w, const float4& value, float4* sum) {
    sum->x = fmaf(w, value.x, sum->x);
    sum->y = fmaf(w, value.y, sum->y);
    sum->z = fmaf(w, value.z, sum->z);
    sum->w = fmaf(w, value.w, sum->w);
  }

  // Once all blocks of the cluster have come here.
  __device__ void Push(int first, const float (&o)[16][4], const WarpState& state) const {
    ClusterWait();
    const int lane = thread_ % kWarp, g = lane / 4, two = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first + g + 8 * half, rank = query % blocks_, place = Place(rank_, query / blocks_);
      if (query >= queries_) continue;
      const uint32_t barrier = AddressInBlock(landed_, rank);
      const uint32_t to = AddressInBlock(sums_ + place * kSumStride + two, rank);
#pragma unroll
      for (int n = 0; n < 16; ++n) PushToBlock(to + 32 * n, barrier, make_float2(o[n][2 * half], o[n][2 * half + 1]));
      if (two != 0) continue;
      PushToBlock(to + kWidth * 4, barrier, make_float4(state.m[half], state.memory[half], state.rest[half], 0.0f));
    }
  }

  // The lane's columns of a row that begins `at` elements from the base.
  __device__ void ReadRow(const void* base, bool bf16, bool vector, int64_t at, float4 (&row)[kChunks]) const {
    if (vector && !bf16) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) row[c] = ReadColumns(base, false, true, at, Column(c), kWidth);
    } else if (vector) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) row[c] = ReadColumns(base, true, true, at, Column(c), kWidth);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) row[c] = ReadColumns(base, bf16, false, at, Column(c), kWidth);
    }
  }

  __device__ void Store(int i, float m, float memory, float rest, const float4 (&o)[kChunks]) const {
    const int query = Query(i), of_tile = query / item_.head_count, head = first_head_ + query % item_.head_count;
    const bool first = thread_ % kLanes == 0;
    if (item_.partial >= 0) {
      const int64_t place = static_cast<int64_t>(item_.partial + of_tile) * t_.heads + head;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        *reinterpret_cast<float4*>(t_.partial_o + place * kWidth + Column(c)) = o[c];
      }
      float* const state = t_.partial_state + place * 3;
      if (first) state[0] = m, state[1] = memory, state[2] = rest;
      return;
    }
    const int64_t row = RowOf(rows_, item_.rows, of_tile);
    const SoftmaxState<float> all{m, memory + rest};
    const float inverse = InverseSum(all);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      StoreColumns(t_.out, t_.out_bf16, true, row * t_.out_row + head * t_.out_head, Column(c), kWidth,
                   make_float4(o[c].x * inverse, o[c].y * inverse, o[c].z * inverse, o[c].w * inverse));
    }
    if (!first) return;
    if (t_.lse) t_.lse[row * t_.lse_row + head * t_.lse_head] = LogSumExp(all);
    if (t_.mass) t_.mass[row * t_.heads + head] = memory * inverse;
  }

  const AttentionTensors& t_;
  const AttentionItem& item_;
  const int32_t* const rows_;
  const AttentionMerging& merging_;
  const int first_head_, thread_, rank_, blocks_, queries_;
  const int places_, mine_;  // queries that a block may have, and that this one has
  uint64_t* const landed_;
  float* const sums_;
  float* const own_sums_;
};

}  // namespace stillhouse::cuda::tall

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_LANDING_CUH_
