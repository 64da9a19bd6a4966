// How the results of a tile of few queries come together: every block of its cluster has some of the columns, of all
// queries, a warp for each query. Little code that every lane runs at once: it runs once, and is fetched as it runs.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {

// As TileFinisher, for a tile whose sums lie in kParts parts in every block, and for all kWarps warps of the block.
template <int kWidth, int kWarps, int kParts>
class ColumnFinisher {
 public:
  __device__ ColumnFinisher(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                            const AttentionMerging& merging, int kv, int warp)
      : t_(t),
        item_(item),
        rows_(rows),
        merging_(merging),
        kv_(kv),
        queries_(item.row_count * item.head_count),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        blocks_(ClusterBlocks()),
        own_chunks_((kChunks + blocks_ - 1) / blocks_) {
    while (kWarp >> lane_bits_ < blocks_) --lane_bits_;
    Take(warp);
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
    if (blocks_ > 1) {
      ClusterArrive();
    } else {
      __syncthreads();
    }
    float logit = -INFINITY;
    if (merge_.own_begin <= merge_.row) logit = Logit(own_);
    if (blocks_ > 1) ClusterWait();
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
      End(sums, query, logit);
    }
    if (blocks_ > 1) {  // others may still read this block's sums
      ClusterArrive();
      ClusterWait();
    }
  }

 private:
  static constexpr int kChunks = kWidth / 4;                           // of four columns
  static constexpr int kLaneChunks = std::max(1, kWidth / 4 / kWarp);  // of a whole row

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
  // A block's chunks are dealt to so many lanes at a time; as many lanes as there are blocks read the same one.
  __device__ int lanes() const { return 1 << lane_bits_; }
  __device__ int Chunk(int pass) const { return ClusterRank() * own_chunks_ + pass + (lane_ & (lanes() - 1)); }

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

  // Over the lanes that read the same chunk in other blocks.
  template <typename Fold>
  __device__ float OverBlocks(float x, const Fold& fold) const {
#pragma unroll 1
    for (int other = lanes(); other < kWarp; other *= 2) x = fold(x, __shfl_xor_sync(kFullWarp, x, other));
    return x;
  }

  // `logit`: of the first own row, whose values are own_v_; −inf: there is none.
  __device__ void End(const TileSums& sums, int query, float logit) {
    const auto sum = [](float a, float b) { return a + b; };
    const int block = lane_ >> lane_bits_;
    float4 state[kParts];
    float top = logit;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      state[p] = block < blocks_ ? LoadOfBlock(sums.state + (p * sums.queries + query) * kSumState, block)
                                 : make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
      top = fmaxf(top, state[p].x);
    }
    top = OverBlocks(top, [](float a, float b) { return fmaxf(a, b); });
    float memory = 0.0f, rest = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      state[p].x = SoftmaxWeight(state[p].x, top);
      memory = fmaf(state[p].x, state[p].y, memory);
      rest = fmaf(state[p].x, state[p].z, rest);
    }
    const float own = SoftmaxWeight(logit, top);
    memory = OverBlocks(memory, sum);
    rest = OverBlocks(rest, sum) + own;
#pragma unroll 1
    for (int pass = 0; pass < own_chunks_; pass += lanes()) {
      const int chunk = Chunk(pass), column = 4 * chunk;
      const bool there = pass + (lane_ & (lanes() - 1)) < own_chunks_ && chunk < kChunks;
      Sums all{top, memory, rest, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        if (!there || block >= blocks_) continue;
        const float4 value = LoadOfBlock(sums.o + (p * sums.queries + query) * sums.stride + column, block);
        all.o.x = fmaf(state[p].x, value.x, all.o.x);
        all.o.y = fmaf(state[p].x, value.y, all.o.y);
        all.o.z = fmaf(state[p].x, value.z, all.o.z);
        all.o.w = fmaf(state[p].x, value.w, all.o.w);
      }
      all.o.x = OverBlocks(all.o.x, sum);
      all.o.y = OverBlocks(all.o.y, sum);
      all.o.z = OverBlocks(all.o.z, sum);
      all.o.w = OverBlocks(all.o.w, sum);
      if (item_.merge >= 0) AddOthers(column, own, pass, &all);
      if (there && block == 0) Store(column, all);
    }
  }

  // What the row sees beside the tile's slots.
  __device__ void AddOthers(int column, float own, int pass, Sums* all) const {
    if (own > 0.0f) {
      const float4 v = pass == 0 ? own_v_ : Value(merge_.own_begin, column);
      all->o = make_float4(fmaf(own, v.x, all->o.x), fmaf(own, v.y, all->o.y), fmaf(own, v.z, all->o.z),
                           fmaf(own, v.w, all->o.w));
    }
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
  const int kv_, queries_, warp_, lane_, blocks_, own_chunks_;
  int lane_bits_ = 5;
  int row_, head_;                       // of the query
  AttentionMerge merge_ = {0, 1, 0, 0};  // of the query; at first without own rows
  OwnRow own_;
  float4 own_v_ = {};
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_COLUMNS_CUH_
