// How a row's result comes together, by a warp for each head: from the sums of a tile's blocks, from partial rows, and
// from the row's few own rows. At the end of a tile, or as a kernel of its own.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {

template <int kBytes>
__device__ __forceinline__ AttentionMerging Resolve(const AttentionMerging& merging,
                                                    const InlineTables<kBytes>& tables) {
  if constexpr (kBytes == 0) return merging;
  AttentionMerging resolved = merging;
  resolved.merges = reinterpret_cast<const AttentionMerge*>(tables.bytes + reinterpret_cast<uintptr_t>(merging.merges));
  resolved.partials = reinterpret_cast<const int32_t*>(tables.bytes + reinterpret_cast<uintptr_t>(merging.partials));
  return resolved;
}

// m, and ℓ on memories and on the rest: three floats wherever sums lie.
struct RowState {
  float m = -INFINITY, memory = 0.0f, rest = 0.0f;
};

// Columns [column, column + 4) of a row that begins `at` elements from the base; 0 beyond the width. `vector`: they may
// be read at once.
__device__ __forceinline__ float4 ReadColumns(const void* base, bool bf16, bool vector, int64_t at, int column,
                                              int width) {
  if (vector && column < width) {
    if (!bf16) return *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at + column);
    const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + at + column);
    return make_float4(__uint_as_float(pairs.x << 16), __uint_as_float(pairs.x & 0xffff0000u),
                       __uint_as_float(pairs.y << 16), __uint_as_float(pairs.y & 0xffff0000u));
  }
  float value[4] = {};
#pragma unroll 1
  for (int e = 0; e < min(4, width - column); ++e) {
    const float x = bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(base)[at + column + e])
                         : static_cast<const float*>(base)[at + column + e];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = i == e ? x : value[i];
  }
  return make_float4(value[0], value[1], value[2], value[3]);
}

// Writes such columns.
__device__ __forceinline__ void StoreColumns(void* base, bool bf16, bool vector, int64_t at, int column, int width,
                                             const float4& value) {
  if (column >= width) return;
  if (bf16) {
    auto* const out = static_cast<__nv_bfloat16*>(base) + at + column;
    if (vector) {
      *reinterpret_cast<uint2*>(out) = make_uint2(PackBf16(value.x, value.y), PackBf16(value.z, value.w));
      return;
    }
    out[0] = FromFloat<__nv_bfloat16>(value.x);
    if (column + 1 < width) out[1] = FromFloat<__nv_bfloat16>(value.y);
    if (column + 2 < width) out[2] = FromFloat<__nv_bfloat16>(value.z);
    if (column + 3 < width) out[3] = FromFloat<__nv_bfloat16>(value.w);
    return;
  }
  float* const out = static_cast<float*>(base) + at + column;
  if (vector) {
    *reinterpret_cast<float4*>(out) = value;
    return;
  }
  out[0] = value.x;
  if (column + 1 < width) out[1] = value.y;
  if (column + 2 < width) out[2] = value.z;
  if (column + 3 < width) out[3] = value.w;
}

// Partial rows of a head, as a table lists them. They come from earlier launches, through the L2 cache.
class PartialRows {
 public:
  __device__ PartialRows(const AttentionTensors& t, const int32_t* partials, int head)
      : o_(t.partial_o),
        state_(t.partial_state),
        partials_(partials),
        heads_(t.heads),
        head_(head),
        width_(t.width),
        vector_(t.width % 4 == 0) {}

  __device__ int64_t Place(int i) const { return static_cast<int64_t>(partials_[i]) * heads_ + head_; }
  __device__ RowState State(int64_t place) const {
    const float* const state = state_ + place * 3;
    return {__ldcg(state), __ldcg(state + 1), __ldcg(state + 2)};
  }
  // Columns [column, column + 4); 0 beyond the width.
  __device__ float4 Columns(int64_t place, int column) const {
    const float* const at = o_ + place * width_ + column;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column >= width_) return value;
    if (vector_) return __ldcg(reinterpret_cast<const float4*>(at));
    value.x = __ldcg(at);
    if (column + 1 < width_) value.y = __ldcg(at + 1);
    if (column + 2 < width_) value.z = __ldcg(at + 2);
    if (column + 3 < width_) value.w = __ldcg(at + 3);
    return value;
  }

 private:
  const float* const o_;
  const float* const state_;
  const int32_t* const partials_;
  const int heads_, head_, width_;
  const bool vector_;
};

// Sums of a tile's queries in shared memory, unnormalised: `parts` times `queries` rows of `stride` floats (columns
// from the width on are 0), and their states: kSumState floats each, the last of no meaning.
inline constexpr int kSumState = 4;
struct TileSums {
  float* o;
  float* state;
  int queries, stride, parts;
};

// One query's sums: the parts in this block, or the first ones of all blocks of the cluster.
class QuerySums {
 public:
  __device__ QuerySums(const TileSums& sums, int query, bool of_cluster)
      : o_(sums.o + query * sums.stride),
        state_(sums.state + query * kSumState),
        part_(sums.queries),
        stride_(sums.stride),
        of_cluster_(of_cluster) {}

  // m, ℓ on memories, ℓ on the rest.
  __device__ float4 State(int i) const { return At(state_, i, kSumState); }
  __device__ float4 Columns(int i, int column) const { return At(o_ + column, i, stride_); }

 private:
  __device__ float4 At(const float* of_first, int i, int stride) const {
    return of_cluster_ ? LoadOfBlock(of_first, i) : *reinterpret_cast<const float4*>(of_first + i * part_ * stride);
  }

  const float* const o_;
  const float* const state_;
  const int part_, stride_;
  const bool of_cluster_;
};

// The state of one (row, head) in a warp. Lanes hold four columns each, of kChunks times kLanes · 4; where a row needs
// half a warp, the two halves sum different sources, and Fold adds them.
template <int kWidth>
class MergedRow {
 public:
  static constexpr int kLanes = kWidth <= 64 ? 16 : kWarp;
  static constexpr int kHalves = kWarp / kLanes;
  static constexpr int kChunks = kWidth <= 128 ? 1 : kWidth / 128;

  // Which of the warp's halves the lane is in.
  __device__ int half() const { return half_; }

  __device__ explicit MergedRow(int width)
      : width_(width),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        half_(lane_ / kLanes),
        column_(lane_ % kLanes * 4) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) o_[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // The sums of a query of a tile; not after AddOwn. Few, so that every lane reads the states itself.
  __device__ void AddSums(const QuerySums& from, int count) {
    constexpr int kBatch = 8 / kChunks, kEach = kBatch / kHalves;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kBatch) {
      float4 state[kBatch], value[kEach][kChunks];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        state[b] = begin + b < count ? from.State(begin + b) : make_float4(-INFINITY, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        const int i = begin + b * kHalves + half_;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          value[b][c] = i < count ? from.Columns(i, column_ + c * 4 * kLanes) : make_float4(0, 0, 0, 0);
        }
      }
      float top = memory_.m;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) top = fmaxf(top, state[b].x);
      Shrink(top);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        state[b].x = SoftmaxWeight(state[b].x, top);
        memory_.l = fmaf(state[b].x, state[b].y, memory_.l);
        rest_.l = fmaf(state[b].x, state[b].z, rest_.l);
      }
#pragma unroll
      for (int b = 0; b < kEach; ++b) {
        const float w = half_ == 0 ? state[b * kHalves].x : state[b * kHalves + kHalves - 1].x;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) Add(o_[c], w, value[b][c]);
      }
    }
  }

  // Partial rows `begin`, `begin` + stride, … below `end`; not after AddOwn. 32 at a time: their states are read by one
  // lane each, then the sums, several under way together. `first`: the lane's first place, where it is known.
  __device__ void AddPartials(const PartialRows& from, int begin, int end, int stride, int64_t first = -1) {
    constexpr int kBatch = 8 / kChunks;
#pragma unroll 1
    for (; begin < end; begin += stride * kWarp) {
      const int mine = begin + lane_ * stride;
      const bool there = mine < end;
      const int64_t place = !there ? 0 : first >= 0 ? first : from.Place(mine);
      first = -1;
      RowState own;
      if (there) own = from.State(place);
      const float top = fmaxf(memory_.m, WarpMax(own.m));
      const float weight = SoftmaxWeight(own.m, top);
      Shrink(top);
      memory_.l += WarpSum(weight * own.memory);
      rest_.l += WarpSum(weight * own.rest);
      const int count = min(kWarp, (end - begin + stride - 1) / stride);
      for (int batch = 0; batch < count; batch += kBatch * kHalves) {
        float w[kBatch];
        float4 value[kBatch][kChunks];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = batch + b * kHalves + half_;
          w[b] = __shfl_sync(kFullWarp, weight, i % kWarp);
          const int64_t other = __shfl_sync(kFullWarp, place, i % kWarp);
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            value[b][c] = i < count ? from.Columns(other, column_ + c * 4 * kLanes) : make_float4(0, 0, 0, 0);
          }
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) Add(o_[c], w[b], value[b][c]);
        }
      }
    }
  }

  // One own row of a head, as it is read: the lane's columns of it and of the query. Halves may take different ones.
  struct OwnColumns {
    float4 q[kChunks] = {}, k[kChunks] = {}, v[kChunks] = {};
    bool there = false;
  };
  // The same with the logit.
  struct OwnRow {
    float logit = -INFINITY;
    float4 v[kChunks] = {};
  };

  // Row `own` of the step, seen by row `row`; nothing where it is not `there`.
  __device__ OwnColumns ReadOwn(const AttentionTensors& t, const AttentionMerging& merging, int64_t row, int64_t own,
                                int head, bool there) const {
    OwnColumns columns;
    columns.there = there;
    if (!there) return columns;
    const int64_t kv = head / (t.heads / t.kv_heads);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = column_ + c * 4 * kLanes;
      columns.q[c] = ReadColumns(t.q, t.q_bf16, t.q_vector, row * t.q_row + head * t.q_head, column, width_);
      const int64_t k = own * merging.k_row + kv * merging.k_head, v = own * merging.v_row + kv * merging.v_head;
      columns.k[c] = ReadColumns(merging.k, merging.own_bf16, merging.own_vector, k, column, width_);
      columns.v[c] = ReadColumns(merging.v, merging.own_bf16, merging.own_vector, v, column, width_);
    }
    return columns;
  }

  // −inf and 0 where it is not there. The whole warp takes part.
  __device__ OwnRow Weigh(const AttentionTensors& t, const OwnColumns& own) const {
    OwnRow result;
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4 q = own.q[c], k = own.k[c];
      dot = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dot))));
      result.v[c] = own.v[c];
    }
    dot = WarpSum<kLanes>(dot);
    if (own.there) result.logit = dot * t.scale;
    return result;
  }

  // In place of AddOwn for a row that the first half has read: before everything else.
  __device__ void Begin(const OwnRow& own) {
    const float logit = __shfl_sync(kFullWarp, own.logit, 0);
    memory_ = {logit, 0.0f};
    rest_ = {logit, logit == -INFINITY ? 0.0f : 1.0f};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) o_[c] = own.v[c];
  }

  __device__ void AddOwn(const OwnRow& own) {
    if (!counted_apart_ && half_ > 0) memory_.l = rest_.l = 0.0f;  // counted by the first half
    counted_apart_ = true;
    const MergeWeights<float> w = MergeSoftmax(rest_, {own.logit, own.logit == -INFINITY ? 0.0f : 1.0f});
    MergeSoftmax(memory_, {own.logit, 0.0f});
    Scale(w.first);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) Add(o_[c], w.second, own.v[c]);
  }

  // Own rows [merge.own_begin, merge.row].
  __device__ void AddOwn(const AttentionTensors& t, const AttentionMerging& merging, const AttentionMerge& merge,
                         int head) {
    for (int first = merge.own_begin; first <= merge.row; first += kHalves) {
      AddOwn(Weigh(t, ReadOwn(t, merging, merge.row, first + half_, head, first + half_ <= merge.row)));
    }
  }

  // Adds the warps' states in order, through shared memory of kWarps · (kWidth + kSumState) floats; true for the first
  // warp, which has the sum. All threads of the block take part.
  template <int kWarps>
  __device__ bool AddWarps(float* shared) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    float* const states = shared + kWarps * kWidth;
    StoreSums(shared + warp * kWidth, states + warp * kSumState, false);
    __syncthreads();
    if (warp > 0) return false;
    AddSums(QuerySums({shared + kWidth, states + kSumState, 1, kWidth, kWarps - 1}, 0, false), kWarps - 1);
    return true;
  }

  // The sums as they are: to shared memory in rows of kWidth floats, or to a partial row.
  __device__ void StoreSums(float* o, float* state, bool partial) {
    Fold();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = column_ + c * 4 * kLanes;
      if (half_ > 0) continue;
      StoreColumns(o, false, !partial || width_ % 4 == 0, 0, column, partial ? width_ : kWidth, o_[c]);
    }
    if (lane_ == 0) state[0] = memory_.m, state[1] = memory_.l, state[2] = rest_.l;
  }

  __device__ void Store(const AttentionTensors& t, int64_t row, int head) {
    Fold();
    const SoftmaxState<float> state{memory_.m, memory_.l + rest_.l};
    const float inverse = InverseSum(state);
    Scale(inverse);
    const int64_t at = row * t.out_row + head * t.out_head;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = column_ + c * 4 * kLanes;
      if (half_ == 0) StoreColumns(t.out, t.out_bf16, t.out_vector, at, column, width_, o_[c]);
    }
    if (lane_ == 0) {
      if (t.lse) t.lse[row * t.lse_row + head * t.lse_head] = LogSumExp(state);
      if (t.mass) t.mass[row * t.heads + head] = memory_.l * inverse;
    }
  }

 private:
  __device__ void Scale(float factor) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      o_[c].x *= factor;
      o_[c].y *= factor;
      o_[c].z *= factor;
      o_[c].w *= factor;
    }
  }

  __device__ static void Add(float4& sum, float w, const float4& value) {
    sum.x = fmaf(w, value.x, sum.x);
    sum.y = fmaf(w, value.y, sum.y);
    sum.z = fmaf(w, value.z, sum.z);
    sum.w = fmaf(w, value.w, sum.w);
  }

  // All that is there, for a larger maximum.
  __device__ void Shrink(float top) {
    const float factor = SoftmaxWeight(memory_.m, top);
    memory_ = {top, factor * memory_.l};
    rest_ = {top, factor * rest_.l};
    Scale(factor);
  }

  // The two halves' sums, to the first; both then have the state of the whole.
  __device__ void Fold() {
    if constexpr (kHalves > 1) {
      const float m = __shfl_xor_sync(kFullWarp, memory_.m, kLanes);
      const float l = __shfl_xor_sync(kFullWarp, memory_.l, kLanes), r = __shfl_xor_sync(kFullWarp, rest_.l, kLanes);
      // Without own rows both halves have the same state, and each its part of the sums.
      const float top = fmaxf(memory_.m, m);
      const float mine = SoftmaxWeight(memory_.m, top), theirs = SoftmaxWeight(m, top);
      if (counted_apart_) {
        memory_.l = mine * memory_.l + theirs * l;
        rest_.l = mine * rest_.l + theirs * r;
      }
      memory_.m = rest_.m = top;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float4 other =
            make_float4(__shfl_xor_sync(kFullWarp, o_[c].x, kLanes), __shfl_xor_sync(kFullWarp, o_[c].y, kLanes),
                        __shfl_xor_sync(kFullWarp, o_[c].z, kLanes), __shfl_xor_sync(kFullWarp, o_[c].w, kLanes));
        o_[c] = make_float4(mine * o_[c].x, mine * o_[c].y, mine * o_[c].z, mine * o_[c].w);
        Add(o_[c], theirs, other);
        if (half_ > 0) o_[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      counted_apart_ = false;
    }
  }

  const int width_, lane_, half_, column_;
  SoftmaxState<float> memory_, rest_;  // one m, two ℓ
  float4 o_[kChunks];
  bool counted_apart_ = false;  // the halves' ℓ add up
};

// Ends a tile of queries, by kWarps warps of each block of its cluster: brings the blocks' sums together, and leaves
// them as partial rows; or adds what else the rows see, and writes the result. A warp's first query is prepared.
template <int kWidth, int kWarps>
class TileFinisher {
 public:
  // `warp`: of the kWarps.
  __device__ TileFinisher(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                          const AttentionMerging& merging, int kv, int warp)
      : t_(t),
        item_(item),
        rows_(rows),
        merging_(merging),
        first_head_(kv * (t.heads / t.kv_heads) + item.head_begin),
        queries_(item.row_count * item.head_count),
        first_(ClusterRank() + ClusterBlocks() * warp) {}

  // Looks up the first query's merge.
  __device__ void ReadMerge() {
    if (item_.merge >= 0 && first_ < queries_) ahead_.merge = merging_.merges[item_.merge + first_ / item_.head_count];
  }

  // Asks for what it is merged with; after ReadMerge and WaitForPreviousKernel.
  __device__ void Prepare() {
    if (item_.merge < 0 || first_ >= queries_) return;
    const MergedRow<kWidth> of(t_.width);
    const int head = first_head_ + first_ % item_.head_count;
    const AttentionMerge& merge = ahead_.merge;
    const int mine = merge.partial_begin + static_cast<int>(threadIdx.x) % kWarp;
    if (mine < merge.partial_end) ahead_.partial = PartialRows(t_, merging_.partials, head).Place(mine);
    ahead_.own =
        of.ReadOwn(t_, merging_, merge.row, merge.own_begin, head, of.half() == 0 && merge.own_begin <= merge.row);
  }

  // After Prepare; all threads of the block take part. `sums` of the block are one part.
  __device__ void Finish(const TileSums& sums) {
    __syncthreads();
    const int blocks = ClusterBlocks();
    if (blocks > 1) ClusterArrive();
    const auto own = MergedRow<kWidth>(t_.width).Weigh(t_, ahead_.own);
    if (blocks > 1) ClusterWait();
#pragma unroll 1  // code that runs seldom is fetched once: short is fast
    for (int query = first_; query < queries_; query += blocks * kWarps) {
      if (item_.merge >= 0 && !ahead_.known) {
        ahead_.merge = merging_.merges[item_.merge + query / item_.head_count];
      }
      End(sums, query, ahead_, own);
      ahead_.known = false;
      ahead_.partial = -1;
    }
    if (blocks > 1) {  // others may still read this block's sums
      ClusterArrive();
      ClusterWait();
    }
  }

 private:
  struct Ahead {
    AttentionMerge merge;
    int64_t partial = -1;  // the lane's first partial row
    typename MergedRow<kWidth>::OwnColumns own;
    bool known = true;  // what Prepare reads is there
  };

  __device__ void End(const TileSums& sums, int query, const Ahead& ahead,
                      const typename MergedRow<kWidth>::OwnRow& own) {
    const int blocks = ClusterBlocks();
    const int i = query / item_.head_count, head = first_head_ + query % item_.head_count;
    MergedRow<kWidth> sum(t_.width);
    const bool begins = ahead.known && item_.merge >= 0 && ahead.merge.own_begin <= ahead.merge.row;
    if (begins) sum.Begin(own);
    sum.AddSums(QuerySums(sums, query, blocks > 1), blocks > 1 ? blocks : 1);
    if (item_.partial >= 0) {
      const int64_t place = static_cast<int64_t>(item_.partial + i) * t_.heads + head;
      sum.StoreSums(t_.partial_o + place * t_.width, t_.partial_state + place * 3, true);
      return;
    }
    if (item_.merge >= 0) {
      AttentionMerge merge = ahead.merge;
      sum.AddPartials(PartialRows(t_, merging_.partials, head), merge.partial_begin, merge.partial_end, 1,
                      ahead.partial);
      merge.own_begin += begins;
      sum.AddOwn(t_, merging_, merge, head);
    }
    sum.Store(t_, RowOf(rows_, item_.rows, i), head);
  }

  const AttentionTensors& t_;
  const AttentionItem& item_;
  const int32_t* const rows_;
  const AttentionMerging& merging_;
  const int first_head_, queries_, first_;
  Ahead ahead_;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_
