// How the results of a tile of few queries come together: every block of its cluster has some of the columns, of all
// queries, a warp for each query. Blocks push their sums to where they end, so that none waits for more than those.
// Little code that every lane runs at once: it runs once, and is fetched as it runs.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {

// As TileFinisher, for a tile of up to kQueries whose sums lie in kParts parts in every block, and for all kWarps warps
// of the block. kSplit: it is of a cluster of several.
template <int kWidth, int kQueries, int kWarps, int kParts, bool kSplit>
class ColumnFinisher {
  static constexpr int kChunks = kWidth / 4;  // of four columns
  static constexpr int kMostBlocks = 16;
  static_assert(kAttentionClusters[std::size(kAttentionClusters) - 1] == kMostBlocks);

 public:
  // Shared memory that other blocks write to, from Open on: a barrier, states, sums. A block's chunks are
  // `own_chunks_`, times all blocks less than kChunks + kMostBlocks.
  static constexpr int kLandingBytes =
      kSplit ? 16 + kQueries * 4 * (kMostBlocks * kSumState + 4 * (kChunks + kMostBlocks - 1)) : 0;

  __device__ ColumnFinisher(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                            const AttentionMerging& merging, int kv, int warp, char* landing)
      : t_(t),
        item_(item),
        rows_(rows),
        merging_(merging),
        kv_(kv),
        queries_(item.row_count * item.head_count),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        blocks_(kSplit ? ClusterBlocks() : 1),
        rank_(kSplit ? ClusterRank() : 0),
        own_chunks_((kChunks + blocks_ - 1) / blocks_),
        landed_(reinterpret_cast<uint64_t*>(landing)),
        landed_states_(reinterpret_cast<float*>(landing + 16)),
        landed_sums_(landed_states_ + blocks_ * kQueries * kSumState) {
    while (kWarp >> lane_bits_ < blocks_) --lane_bits_;
    Take(warp);
  }

  // Lets the other blocks push to this one. All threads of the block take part.
  __device__ void Open() {
    if constexpr (kSplit) {
      if (threadIdx.x == 0) {
        InitBarrier(landed_, 1);
        FenceBarrierInit();
        const int chunks = min(max(kChunks - rank_ * own_chunks_, 0), own_chunks_);
        ArriveAndExpect(landed_, static_cast<uint32_t>(blocks_ * queries_ * (kSumState + 4 * chunks) * 4));
      }
      ClusterArriveRelaxed();
      const int at = rank_ * kQueries, block = min(lane_, blocks_ - 1);
      state_ = {AddressInBlock(landed_states_ + at * kSumState, block), AddressInBlock(landed_, block)};
#pragma unroll
      for (int c = 0; c < kLaneChunks; ++c) {
        const int chunk = lane_ + c * kWarp, to = min(chunk / own_chunks_, blocks_ - 1);
        sums_[c] = {AddressInBlock(landed_sums_ + 4 * (at * own_chunks_ + chunk - to * own_chunks_), to),
                    AddressInBlock(landed_, to)};
      }
    }
  }

  // Looks up the merge of the warp's first query.
  __device__ void ReadMerges() {
    if (item_.merge >= 0 && warp_ < queries_) merge_ = merging_.merges[item_.merge + row_];
  }

  // Asks for the row's own row; after ReadMerges and WaitForPreviousKernel.
  __device__ void Prepare() {
    if (merge_.own_begin > merge_.row) return;
    own_ = ReadOwn(merge_.row, merge_.own_begin);
    own_v_ = Value(merge_.own_begin, 4 * Chunk(0));
  }

  // All threads of the block take part; `sums` are written.
  __device__ void Finish(const TileSums& sums) {
    __syncthreads();
    if constexpr (kSplit) {
      ClusterWait();  // all are open
      Push(sums);
    }
    float logit = -INFINITY;
    if (merge_.own_begin <= merge_.row) logit = Logit(own_);
    TileSums all = sums;
    if constexpr (kSplit) {
      WaitPhase(landed_, 0);
      all = {landed_sums_, landed_states_, kQueries, 4 * own_chunks_, blocks_};
    }
#pragma unroll 1
    for (int query = warp_; query < queries_; query += kWarps) {
      if (query != warp_) {
        Take(query);
        logit = -INFINITY;
        if (item_.merge >= 0) merge_ = merging_.merges[item_.merge + row_];
        if (merge_.own_begin <= merge_.row) {
          Prepare();
          logit = Logit(own_);
        }
      }
      End(all, query, logit);
    }
  }

 private:
  static constexpr int kLaneChunks = std::max(1, kChunks / kWarp);  // of a whole row

  struct OwnRow {
    float4 q[kLaneChunks], k[kLaneChunks];
  };
  // A query's sums: of the lane's columns, and of the weights.
  struct Sums {
    float m, memory, rest;
    float4 o;
    __device__ void Add(float other, float memory_of, float rest_of, const float4& value) {
      const float top = fmaxf(m, other), mine = SoftmaxWeight(m, top), theirs = SoftmaxWeight(other, top);
      m = top;
      memory = mine * memory + theirs * memory_of;
      rest = mine * rest + theirs * rest_of;
      o = make_float4(mine * o.x + theirs * value.x, mine * o.y + theirs * value.y, mine * o.z + theirs * value.z,
                      mine * o.w + theirs * value.w);
    }
  };

  // A query, as a row of the tile and a head.
  __device__ void Take(int query) {
    row_ = query / item_.head_count;
    head_ = kv_ * (t_.heads / t_.kv_heads) + item_.head_begin + query - row_ * item_.head_count;
  }
  // A block's chunks are dealt to so many lanes at a time; as many lanes as there are blocks, or more, have the same
  // one.
  __device__ int lanes() const { return 1 << lane_bits_; }
  __device__ int Chunk(int pass) const { return rank_ * own_chunks_ + pass + (lane_ & (lanes() - 1)); }

  __device__ OwnRow ReadOwn(int64_t row, int64_t own) const {
    OwnRow of;
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
      const int column = 4 * (lane_ + c * kWarp);
      of.q[c] = ReadColumns(t_.q, t_.q_bf16, t_.q_vector, row * t_.q_row + head_ * t_.q_head, column, t_.width);
      of.k[c] = ReadColumns(merging_.k, merging_.own_bf16, merging_.own_vector,
                            own * merging_.k_row + kv_ * merging_.k_head, column, t_.width);
    }
    return of;
  }
  __device__ float4 Value(int64_t own, int column) const {
    return ReadColumns(merging_.v, merging_.own_bf16, merging_.own_vector, own * merging_.v_row + kv_ * merging_.v_head,
                       column, t_.width);
  }
  // The whole warp takes part.
  __device__ float Logit(const OwnRow& own) const {
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
      const float4 q = own.q[c], k = own.k[c];
      dot = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dot))));
    }
    return t_.scale * WarpSum(dot);
  }

  // Over the lanes that have the same chunk of other blocks.
  template <int kCount, typename Fold>
  __device__ void OverBlocks(float (&x)[kCount], const Fold& fold) const {
    if constexpr (kSplit) {
#pragma unroll 1
      for (int other = lanes(); other < kWarp; other *= 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = fold(x[i], __shfl_xor_sync(kFullWarp, x[i], other));
      }
    }
  }

  // The block's sums, each chunk to the block that has it, and the states to all.
  __device__ void Push(const TileSums& sums) const {
#pragma unroll 1
    for (int query = warp_; query < queries_; query += kWarps) {
      float4 state[kParts], value[kLaneChunks] = {};
      float top = -INFINITY;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        state[p] = *reinterpret_cast<const float4*>(sums.state + (p * sums.queries + query) * kSumState);
        top = fmaxf(top, state[p].x);
      }
      float4 all = make_float4(top, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float weight = SoftmaxWeight(state[p].x, top);
        all.y = fmaf(weight, state[p].y, all.y);
        all.z = fmaf(weight, state[p].z, all.z);
#pragma unroll
        for (int c = 0; c < kLaneChunks; ++c) {
          const int chunk = min(lane_ + c * kWarp, kChunks - 1);
          Add(weight, sums.o + (p * sums.queries + query) * sums.stride + 4 * chunk, &value[c]);
        }
      }
      if (lane_ < blocks_) PushToBlock(state_.to + query * kSumState * 4, state_.barrier, all);
#pragma unroll
      for (int c = 0; c < kLaneChunks; ++c) {
        if (lane_ + c * kWarp < kChunks)
          PushToBlock(sums_[c].to + query * own_chunks_ * 16, sums_[c].barrier, value[c]);
      }
    }
  }

  static __device__ void Add(float weight, const float* from, float4* sum) {
    const float4 value = *reinterpret_cast<const float4*>(from);
    sum->x = fmaf(weight, value.x, sum->x);
    sum->y = fmaf(weight, value.y, sum->y);
    sum->z = fmaf(weight, value.z, sum->z);
    sum->w = fmaf(weight, value.w, sum->w);
  }

  // `sums` hold the block's columns. `logit`: of the first own row, whose values are own_v_; −inf: there is none.
  __device__ void End(const TileSums& sums, int query, float logit) {
    constexpr int kMine = kSplit ? 1 : kParts;  // parts, of a lane
    const int first = lane_ >> lane_bits_;
    float4 state[kMine];
    float top[1] = {logit};
#pragma unroll
    for (int p = 0; p < kMine; ++p) {
      state[p] = make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
      if (first + p < sums.parts) {
        state[p] = *reinterpret_cast<const float4*>(sums.state + ((first + p) * sums.queries + query) * kSumState);
      }
      top[0] = fmaxf(top[0], state[p].x);
    }
    OverBlocks(top, MaxOf());
    float memory = 0.0f, rest = 0.0f;
#pragma unroll
    for (int p = 0; p < kMine; ++p) {
      state[p].x = SoftmaxWeight(state[p].x, top[0]);
      memory = fmaf(state[p].x, state[p].y, memory);
      rest = fmaf(state[p].x, state[p].z, rest);
    }
    const float own = SoftmaxWeight(logit, top[0]);
#pragma unroll 1
    for (int pass = 0; pass < own_chunks_; pass += lanes()) {
      const int chunk = Chunk(pass), column = 4 * chunk;
      const bool there = pass + (lane_ & (lanes() - 1)) < own_chunks_ && chunk < kChunks;
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int p = 0; p < kMine; ++p) {
        if (!there || first + p >= sums.parts) continue;
        const int at = ((first + p) * sums.queries + query) * sums.stride + column - 4 * rank_ * own_chunks_;
        Add(state[p].x, sums.o + at, &value);
      }
      float x[6] = {memory, rest, value.x, value.y, value.z, value.w};
      OverBlocks(x, SumOf());
      Sums all{top[0], x[0], x[1] + own, make_float4(x[2], x[3], x[4], x[5])};
      if (own > 0.0f) {
        const float4 v = pass == 0 ? own_v_ : Value(merge_.own_begin, column);
        all.o = make_float4(fmaf(own, v.x, all.o.x), fmaf(own, v.y, all.o.y), fmaf(own, v.z, all.o.z),
                            fmaf(own, v.w, all.o.w));
      }
      if (merge_.partial_begin < merge_.partial_end || merge_.own_begin < merge_.row) AddOthers(column, &all);
      if (there && first == 0) Store(column, all);
    }
  }

  // What the row sees beside the tile's slots and its first own row.
  __device__ void AddOthers(int column, Sums* all) const {
    const PartialRows partials(t_, merging_.partials, head_);
    constexpr int kBatch = 4;  // under way together
#pragma unroll 1
    for (int first = merge_.partial_begin; first < merge_.partial_end; first += kBatch) {
      RowState state[kBatch];
      float4 value[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= merge_.partial_end) continue;
        const int64_t place = partials.Place(first + i);
        state[i] = partials.State(place);
        value[i] = partials.Columns(place, column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) all->Add(state[i].m, state[i].memory, state[i].rest, value[i]);
    }
#pragma unroll 1
    for (int row = merge_.own_begin + 1; row <= merge_.row; ++row) {
      all->Add(Logit(ReadOwn(merge_.row, row)), 0.0f, 1.0f, Value(row, column));
    }
  }

  __device__ void Store(int column, const Sums& all) const {
    const bool first = column == 0;
    if (item_.partial >= 0) {
      const int64_t place = static_cast<int64_t>(item_.partial + row_) * t_.heads + head_;
      StoreColumns(t_.partial_o, false, t_.width % 4 == 0, place * t_.width, column, t_.width, all.o);
      float* const state = t_.partial_state + place * 3;
      if (first) state[0] = all.m, state[1] = all.memory, state[2] = all.rest;
      return;
    }
    const int64_t row = RowOf(rows_, item_.rows, row_);
    const SoftmaxState<float> state{all.m, all.memory + all.rest};
    const float inverse = InverseSum(state);
    StoreColumns(t_.out, t_.out_bf16, t_.out_vector, row * t_.out_row + head_ * t_.out_head, column, t_.width,
                 make_float4(all.o.x * inverse, all.o.y * inverse, all.o.z * inverse, all.o.w * inverse));
    if (!first) return;
    if (t_.lse) t_.lse[row * t_.lse_row + head_ * t_.lse_head] = LogSumExp(state);
    if (t_.mass) t_.mass[row * t_.heads + head_] = all.memory * inverse;
  }

  const AttentionTensors& t_;
  const AttentionItem& item_;
  const int32_t* const rows_;
  const AttentionMerging& merging_;
  const int kv_, queries_, warp_, lane_, blocks_, rank_, own_chunks_;
  uint64_t* const landed_;  // of the states and sums below, by block and query
  float* const landed_states_;
  float* const landed_sums_;
  // Where the lane's state and chunks of the tile's first query go to.
  struct Target {
    uint32_t to, barrier;
  };
  Target state_, sums_[kLaneChunks];
  int lane_bits_ = 5;
  int row_, head_;                       // of the query
  AttentionMerge merge_ = {0, 1, 0, 0};  // of the query; at first without own rows
  OwnRow own_;
  float4 own_v_ = {};
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_
