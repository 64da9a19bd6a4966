// How the results of a tall tile come together (attention_wgmma.cu): the blocks of its cluster push their sums to where
// each query ends. The rows' own sequences are one part more, of the warpgroup that copies, which sums it while the
// others compute. Code that runs once is fetched as it runs, so there is little of it.
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

// Blocks of a cluster: whose sums and states fit where the keys were.
inline constexpr int kMostBlocks = 8;
inline constexpr int kMostPlaces = kAttentionTall + kMostBlocks - 1;
static_assert(kMostPlaces * (kWidth + kSumState) * 4 <= kStages * kTileBytes);
// Arrivals at Shared::landed: of the thread that knows how much other blocks push, and of the block's warps.
inline constexpr int kLandings = 1 + kThreads / kWarp;
// Named barrier: the values are done with; the rows' own sequences go where they were.
inline constexpr int kValuesRead = 5;

// Whether a block's tile ends here rather than by itself. It is the block's only one then.
__device__ __forceinline__ bool Lands(const AttentionItem& item) { return item.merge >= 0 || ClusterBlocks() > 1; }

// Each block ends a stretch of the tile's queries, all but the last as many.
class Landing {
 public:
  // `thread`: of the two warpgroups that compute, or of the one that copies.
  __device__ Landing(Shared& shared, const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                     const AttentionMerging& merging, int kv, int thread)
      : t_(t),
        item_(item),
        rows_(rows),
        merging_(merging),
        kv_(kv),
        first_head_(kv * (t.heads / t.kv_heads) + item.head_begin),
        thread_(thread),
        rank_(ClusterRank()),
        blocks_(ClusterBlocks()),
        queries_(item.row_count * item.head_count),
        places_((queries_ + blocks_ - 1) / blocks_),
        mine_(min(max(queries_ - rank_ * places_, 0), places_)),
        landed_(&shared.landed),
        q_(shared.q),
        sums_(reinterpret_cast<float*>(shared.k[0])),
        own_sums_(reinterpret_cast<float*>(shared.v[0])) {}

  // By all threads that compute: they are done with keys.
  __device__ void Open() const {
    if (thread_ == 0) ArriveAndExpect(landed_, static_cast<uint32_t>((blocks_ - 1) * mine_ * (kWidth + kSumState) * 4));
    ClusterArriveRelaxed();
  }

  // The sums of a warp's 16 queries from `first` on, rows g and g + 8 of them per lane, to where they end. They go by
  // way of the warp's rows of q, which are done with: whole rows at a time, which is how the way to other blocks is
  // wide.
  __device__ void Push(int first, const float (&o)[16][4], const WarpState& state) const {
    const int lane = thread_ % kWarp, g = lane / 4, quarter = lane % 4;
    int rank = first / places_, place = first - rank * places_;
    ClusterWait();  // all blocks are open
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first + 8 * half + g;
      __syncwarp();
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        *reinterpret_cast<float2*>(Staged(first, g, n) + 8 * quarter) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (first + 8 * half + r >= queries_) break;
        Put(Sums(rank_, place) + 4 * lane, rank,
            *reinterpret_cast<const float4*>(Staged(first, r, lane / 2) + 16 * (lane % 2)));
        if (++place < places_) continue;
        place = 0;
        ++rank;
      }
      if (quarter != 0 || query >= queries_) continue;
      const int to = query / places_;
      Put(State(rank_, query - to * places_), to,
          make_float4(state.m[half], state.memory[half], state.rest[half], 0.0f));
    }
    __syncwarp();
    if (lane == 0) Arrive(landed_);  // for what stays here
  }

  // The part of the rows' own sequences, by the warpgroup that copies. What queries a block has beyond those of a round
  // comes when the values are done with.
  __device__ void AddOwn() const {
    constexpr int kTogether = kGroup / kOwnLanes;
    const int lane = thread_ % kOwnLanes;
    int i = thread_ / kOwnLanes;
    bool free = false;
#pragma unroll 1
    do {
      AttentionMerge merge = {0, 1, 0, 0};  // without own rows
      int64_t q_at = 0;
      if (item_.merge >= 0 && i < mine_) {
        const int query = rank_ * places_ + i, row = query / item_.head_count;
        merge = merging_.merges[item_.merge + row];
        q_at = merge.row * t_.q_row + (first_head_ + query - row * item_.head_count) * t_.q_head;
      }
      SoftmaxState<float> own;
      float4 sum[kOwnChunks] = {};
#pragma unroll 1
      for (; __any_sync(kFullWarp, merge.own_begin <= merge.row); ++merge.own_begin) {
        const bool seen = merge.own_begin <= merge.row;
        float4 q[kOwnChunks] = {}, k[kOwnChunks] = {}, v[kOwnChunks] = {};
        if (seen) {
          const int64_t k_at = merge.own_begin * merging_.k_row + kv_ * merging_.k_head;
          const int64_t v_at = merge.own_begin * merging_.v_row + kv_ * merging_.v_head;
          ReadRow(t_.q, t_.q_bf16, true, q_at, q);
          ReadRow(merging_.k, merging_.own_bf16, merging_.own_vector, k_at, k);
          ReadRow(merging_.v, merging_.own_bf16, merging_.own_vector, v_at, v);
        }
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < kOwnChunks; ++c) {
          dot = fmaf(q[c].x, k[c].x, fmaf(q[c].y, k[c].y, fmaf(q[c].z, k[c].z, fmaf(q[c].w, k[c].w, dot))));
        }
        dot = t_.scale * WarpSum<kOwnLanes>(dot);
        const MergeWeights<float> w = MergeSoftmax(own, {seen ? dot : -INFINITY, seen ? 1.0f : 0.0f});
#pragma unroll
        for (int c = 0; c < kOwnChunks; ++c) {
          sum[c] = make_float4(w.first * sum[c].x, w.first * sum[c].y, w.first * sum[c].z, w.first * sum[c].w);
          AddScaled(w.second, v[c], &sum[c]);
        }
      }
      if (!free) NamedBarrierWait<kThreads>(kValuesRead);
      free = true;
      if (i < mine_) {
        float* const to = Sums(blocks_, i);
#pragma unroll
        for (int c = 0; c < kOwnChunks; ++c) *reinterpret_cast<float4*>(to + OwnColumn(c)) = sum[c];
        if (lane == 0) *reinterpret_cast<float4*>(State(blocks_, i)) = make_float4(own.m, 0.0f, own.l, 0.0f);
      }
      i += kTogether;
    } while (item_.merge >= 0 && __any_sync(kFullWarp, i < mine_));
    __syncwarp();
    if (thread_ % kWarp == 0) Arrive(landed_);
  }

  // Writes the block's queries' results, or partial rows.
  __device__ void Finish() const {
    const int lane = thread_ % kLanes, parts = blocks_ + (item_.merge >= 0);
    constexpr int kOfWarp = kWarp / kLanes;
#pragma unroll 1
    for (int first = thread_ / kWarp * kOfWarp; first < mine_; first += 2 * kGroup / kLanes) {
      const int i = min(first + thread_ % kWarp / kLanes, mine_ - 1);
      const Ending ending = Ends(i);
      WaitPhase(landed_, 0);
      // A lane has the states of a part or two.
      float4 state[2];
      float m = -INFINITY;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state[j] = make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
        if (lane + j * kLanes < parts) state[j] = *reinterpret_cast<const float4*>(State(lane + j * kLanes, i));
        m = fmaxf(m, state[j].x);
      }
      m = WarpMax<kLanes>(m);
      float memory = 0.0f, rest = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state[j].x = SoftmaxWeight(state[j].x, m);
        memory = fmaf(state[j].x, state[j].y, memory);
        rest = fmaf(state[j].x, state[j].z, rest);
      }
      memory = WarpSum<kLanes>(memory);
      rest = WarpSum<kLanes>(rest);
      float4 o[kChunks] = {};
#pragma unroll 2
      for (int p = 0; p < parts; ++p) {
        const float w = __shfl_sync(kFullWarp, p < kLanes ? state[0].x : state[1].x, p % kLanes, kLanes);
        const float* const part = Sums(p, i);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) AddScaled(w, *reinterpret_cast<const float4*>(part + Column(c)), &o[c]);
      }
      if (i == first + thread_ % kWarp / kLanes) Store(ending, m, memory, rest, o);
    }
  }

 private:
  static constexpr int kLanes = 8;                     // of a query that ends
  static constexpr int kChunks = kWidth / 4 / kLanes;  // of four columns, of a lane
  static_assert(kMostBlocks + 1 <= 2 * kLanes);

  static constexpr int kOwnLanes = 8;  // of a query, for its own sequence's rows
  static constexpr int kOwnChunks = kWidth / 4 / kOwnLanes;

  // Where a query's results go.
  struct Ending {
    int64_t row;
    int head, of_tile;
  };

  // The sums and the state of a query's part. The last part is of the own rows.
  __device__ float* Sums(int part, int i) const {
    return part < blocks_ ? sums_ + (part * places_ + i) * kWidth : own_sums_ + i * kWidth;
  }
  __device__ float* State(int part, int i) const {
    return part < blocks_ ? sums_ + kMostPlaces * kWidth + (part * places_ + i) * kSumState
                          : own_sums_ + kAttentionTall * kWidth + i * kSumState;
  }
  // To where `at` lies in a block.
  __device__ void Put(float* at, int rank, const float4& value) const {
    if (rank == rank_) {
      *reinterpret_cast<float4*>(at) = value;
    } else {
      PushToBlock(AddressInBlock(at, rank), AddressInBlock(landed_, rank), value);
    }
  }
  // Columns [8·n, 8·n + 8) of row r of eight, where the warp's rows of q from `first` on lie. Rotated by the row, so
  // that the rows' columns fall on different banks.
  __device__ char* Staged(int first, int r, int n) const {
    return q_ + r / 4 * kBlockBytes + first * 128 + r % 4 * kWidth * 4 + ((n ^ r) << 5);
  }
  // First of the lane's `c`-th four columns.
  __device__ int Column(int c) const { return 4 * (c * kLanes + thread_ % kLanes); }

  __device__ int OwnColumn(int c) const { return 4 * (c * kOwnLanes + thread_ % kOwnLanes); }

  // The lane's columns of a row that begins `at` elements from the base.
  __device__ void ReadRow(const void* base, bool bf16, bool vector, int64_t at, float4 (&row)[kOwnChunks]) const {
    if (vector && !bf16) {
#pragma unroll
      for (int c = 0; c < kOwnChunks; ++c) row[c] = ReadColumns(base, false, true, at, OwnColumn(c), kWidth);
    } else if (vector) {
#pragma unroll
      for (int c = 0; c < kOwnChunks; ++c) row[c] = ReadColumns(base, true, true, at, OwnColumn(c), kWidth);
    } else {
#pragma unroll
      for (int c = 0; c < kOwnChunks; ++c) row[c] = ReadColumns(base, bf16, false, at, OwnColumn(c), kWidth);
    }
  }

  __device__ Ending Ends(int i) const {
    const int query = rank_ * places_ + i, of_tile = query / item_.head_count;
    return {item_.partial >= 0 ? 0 : RowOf(rows_, item_.rows, of_tile),
            first_head_ + query - of_tile * item_.head_count, of_tile};
  }

  static __device__ void AddScaled(float w, const float4& value, float4* sum) {
    sum->x = fmaf(w, value.x, sum->x);
    sum->y = fmaf(w, value.y, sum->y);
    sum->z = fmaf(w, value.z, sum->z);
    sum->w = fmaf(w, value.w, sum->w);
  }

  __device__ void Store(const Ending& at, float m, float memory, float rest, const float4 (&o)[kChunks]) const {
    const bool first = thread_ % kLanes == 0;
    if (item_.partial >= 0) {
      const int64_t place = static_cast<int64_t>(item_.partial + at.of_tile) * t_.heads + at.head;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        *reinterpret_cast<float4*>(t_.partial_o + place * kWidth + Column(c)) = o[c];
      }
      float* const state = t_.partial_state + place * 3;
      if (first) state[0] = m, state[1] = memory, state[2] = rest;
      return;
    }
    const SoftmaxState<float> all{m, memory + rest};
    const float inverse = InverseSum(all);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      StoreColumns(t_.out, t_.out_bf16, true, at.row * t_.out_row + at.head * t_.out_head, Column(c), kWidth,
                   make_float4(o[c].x * inverse, o[c].y * inverse, o[c].z * inverse, o[c].w * inverse));
    }
    if (!first) return;
    if (t_.lse) t_.lse[at.row * t_.lse_row + at.head * t_.lse_head] = LogSumExp(all);
    if (t_.mass) t_.mass[at.row * t_.heads + at.head] = memory * inverse;
  }

  const AttentionTensors& t_;
  const AttentionItem& item_;
  const int32_t* const rows_;
  const AttentionMerging& merging_;
  const int kv_, first_head_, thread_, rank_, blocks_, queries_;
  const int places_, mine_;  // queries that a block may have, and that this one has
  uint64_t* const landed_;
  char* const q_;
  float* const sums_;
  float* const own_sums_;
};

}  // namespace stillhouse::cuda::tall

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_LANDING_CUH_
