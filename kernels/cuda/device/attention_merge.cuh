// The merge of a row's partial rows and of its few own rows: by one warp, or several, for each head; as a kernel of its
// own, or by the block that leaves the last of them.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
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
  if (!merging.in_order) {
    resolved.merge_of = reinterpret_cast<const int32_t*>(tables.bytes + reinterpret_cast<uintptr_t>(merging.merge_of));
  }
  return resolved;
}

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

  // Partial rows partials[begin], [begin + stride], … below `end`; once, and before AddOwn. 32 at a time: their states
  // are read by one lane each, then their sums, several under way together. Others may have written them in this
  // launch.
  // `first`: what the lane's first entry of the list is, where it is known.
  __device__ void AddPartials(const AttentionTensors& t, const int32_t* partials, int begin, int end, int stride,
                              int head, int32_t first = -1) {
    constexpr int kBatch = 8 / kChunks;
    const bool vector = width_ % 4 == 0;
    for (; begin < end; begin += stride * kWarp) {
      const int mine = begin + lane_ * stride;
      const bool there = mine < end;
      const int64_t place = there ? static_cast<int64_t>(first >= 0 ? first : partials[mine]) * t.heads + head : 0;
      first = -1;
      SoftmaxState<float> own;
      float own_rest = 0.0f;
      if (there) {
        const float* const state = t.partial_state + place * 3;
        own = {__ldcg(state), __ldcg(state + 1)};
        own_rest = __ldcg(state + 2);
      }
      const float top = fmaxf(memory_.m, WarpMax(own.m));
      const float weight = SoftmaxWeight(own.m, top), shrink = SoftmaxWeight(memory_.m, top);
      memory_ = {top, shrink * memory_.l + WarpSum(weight * own.l)};
      rest_ = {top, shrink * rest_.l + WarpSum(weight * own_rest)};
      Scale(shrink);
      const int count = min(kWarp, (end - begin + stride - 1) / stride);
      for (int batch = 0; batch < count; batch += kBatch * kHalves) {
        float w[kBatch];
        float4 value[kBatch][kChunks];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int i = batch + b * kHalves + half_;
          w[b] = __shfl_sync(kFullWarp, weight, i % kWarp);
          const float* const other = t.partial_o + __shfl_sync(kFullWarp, place, i % kWarp) * width_;
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            value[b][c] = i < count ? Columns(other, column_ + c * 4 * kLanes, vector) : make_float4(0, 0, 0, 0);
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

  // One own row of a head: its logit, and the lane's columns of its value. Halves may take different ones.
  struct OwnRow {
    float logit = -INFINITY;
    float4 v[kChunks] = {};
  };

  // Row `own` of the step, seen by row `row`; −inf and 0 where it is not `there`. The whole warp takes part.
  __device__ OwnRow ReadOwn(const AttentionTensors& t, const AttentionMerging& merging, int64_t row, int64_t own,
                            int head, bool there) const {
    const int64_t kv = head / (t.heads / t.kv_heads);
    OwnRow result;
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (!there) continue;
      const int column = column_ + c * 4 * kLanes;
      const float4 q = Own(t.q, t.q_bf16, row * t.q_row + head * t.q_head, column);
      const float4 k = Own(merging.k, merging.own_bf16, own * merging.k_row + kv * merging.k_head, column);
      result.v[c] = Own(merging.v, merging.own_bf16, own * merging.v_row + kv * merging.v_head, column);
      dot = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, dot))));
    }
    dot = WarpSum<kLanes>(dot);
    if (there) result.logit = dot * t.scale;
    return result;
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
      AddOwn(ReadOwn(t, merging, merge.row, first + half_, head, first + half_ <= merge.row));
    }
  }

  // Adds the warps' states in order, through shared memory of kWarps · (kWidth + 3) floats; true for the first warp,
  // which has the sum. All threads of the block take part.
  template <int kWarps>
  __device__ bool AddWarps(float* shared) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    Fold();
    float* const mine = shared + warp * (kWidth + 3);
    if (half_ == 0) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float* const at = mine + column_ + c * 4 * kLanes;
        at[0] = o_[c].x, at[1] = o_[c].y, at[2] = o_[c].z, at[3] = o_[c].w;
      }
    }
    if (lane_ == 0) mine[kWidth] = memory_.m, mine[kWidth + 1] = memory_.l, mine[kWidth + 2] = rest_.l;
    __syncthreads();
    if (warp > 0) return false;
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      const float* const from = shared + other * (kWidth + 3);
      const MergeWeights<float> w = MergeSoftmax(memory_, {from[kWidth], from[kWidth + 1]});
      MergeSoftmax(rest_, {from[kWidth], from[kWidth + 2]});
      Scale(w.first);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float* const at = from + column_ + c * 4 * kLanes;
        Add(o_[c], w.second, make_float4(at[0], at[1], at[2], at[3]));
      }
    }
    return true;
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
      if (half_ > 0 || column >= width_) continue;
      const float value[4] = {o_[c].x, o_[c].y, o_[c].z, o_[c].w};
      if (t.out_bf16) {
        auto* const out = static_cast<__nv_bfloat16*>(t.out) + at + column;
        if (t.out_vector) {
          *reinterpret_cast<uint2*>(out) = make_uint2(PackBf16(value[0], value[1]), PackBf16(value[2], value[3]));
          continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < width_) out[e] = FromFloat<__nv_bfloat16>(value[e]);
        }
      } else if (t.out_vector) {
        *reinterpret_cast<float4*>(static_cast<float*>(t.out) + at + column) = o_[c];
      } else {
        float* const out = static_cast<float*>(t.out) + at + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < width_) out[e] = value[e];
        }
      }
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

  __device__ float4 Columns(const float* row, int column, bool vector) const {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column >= width_) return value;
    if (vector) return __ldcg(reinterpret_cast<const float4*>(row + column));
    value.x = __ldcg(row + column);
    if (column + 1 < width_) value.y = __ldcg(row + column + 1);
    if (column + 2 < width_) value.z = __ldcg(row + column + 2);
    if (column + 3 < width_) value.w = __ldcg(row + column + 3);
    return value;
  }

  __device__ float4 Own(const void* base, bool bf16, int64_t at, int column) const {
    float value[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      value[e] = column + e >= width_ ? 0.0f
                 : bf16               ? ToFloat(static_cast<const __nv_bfloat16*>(base)[at + column + e])
                                      : static_cast<const float*>(base)[at + column + e];
    }
    return make_float4(value[0], value[1], value[2], value[3]);
  }

  // The two halves' sums, to both.
  __device__ void Fold() {
    if constexpr (kHalves > 1) {
      if (folded_) return;
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
      }
      folded_ = true;
    }
  }

  const int width_, lane_, half_, column_;
  SoftmaxState<float> memory_, rest_;  // one m, two ℓ
  float4 o_[kChunks];
  bool counted_apart_ = false;  // the halves' ℓ add up
  bool folded_ = false;
};

// Merges the rows for which a narrow item's partial rows are the last. What does not depend on these is read at the
// block's start, beside its keys and values: of the rows, and of each warp's first (row, head). All threads of the
// block take part; who is last decides neither what is summed nor in which order.
template <int kWidth, int kThreads, int kMaxRows>
class RowFinisher {
 public:
  // After WaitForPreviousKernel. `on`: there is something to merge.
  __device__ RowFinisher(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows,
                         const AttentionMerging& merging, int kv, bool on)
      : group_(t.heads / t.kv_heads) {
    if (!on) return;
    const int tid = static_cast<int>(threadIdx.x), unit = tid / kWarp;
    if (tid < item.row_count) {
      row_merge_ = MergeOf(merging, RowOf(rows, item.rows, tid));
      arrivals_ = merging.merges[row_merge_].arrivals;
    }
    if (unit >= item.row_count * group_) return;
    merge_ = merging.merges[MergeOf(merging, RowOf(rows, item.rows, unit / group_))];
    const int mine = merge_.partial_begin + tid % kWarp;
    if (mine < merge_.partial_end) partial_ = merging.partials[mine];
    const MergedRow<kWidth> of(t.width);
    own_ = of.ReadOwn(t, merging, merge_.row, merge_.own_begin, kv * group_ + unit % group_,
                      of.half() == 0 && merge_.own_begin <= merge_.row);
  }

  // After the block's partial rows were written.
  __device__ void Finish(const AttentionTensors& t, const AttentionItem& item, const AttentionMerging& merging,
                         int kv) {
    __shared__ int finished[kMaxRows];  // the row's merge, or −1
    const int tid = static_cast<int>(threadIdx.x);
    __syncthreads();  // the block's partial rows are written
    if (tid < item.row_count) {
      bool last = true;
      if (arrivals_ > 1) {
        uint32_t* const arrived = merging.arrived + static_cast<int64_t>(row_merge_) * t.kv_heads + kv;
        __threadfence();
        last = atomicAdd(arrived, 1u) + 1 == static_cast<uint32_t>(arrivals_);
        if (last) *arrived = 0;  // for the next call
        __threadfence();
      }
      finished[tid] = last ? row_merge_ : -1;
    }
    __syncthreads();
    for (int unit = tid / kWarp; unit < item.row_count * group_; unit += kThreads / kWarp) {
      const int head = kv * group_ + unit % group_;
      if (finished[unit / group_] >= 0) {
        if (unit >= kThreads / kWarp) merge_ = merging.merges[finished[unit / group_]];
        MergedRow<kWidth> sum(t.width);
        sum.AddPartials(t, merging.partials, merge_.partial_begin, merge_.partial_end, 1, head, partial_);
        if (unit < kThreads / kWarp && merge_.own_begin <= merge_.row) {
          sum.AddOwn(own_);
          ++merge_.own_begin;
        }
        sum.AddOwn(t, merging, merge_, head);
        sum.Store(t, merge_.row, head);
      }
      partial_ = -1;
    }
  }

 private:
  static __device__ int MergeOf(const AttentionMerging& merging, int64_t row) {
    return merging.in_order ? static_cast<int>(row) : merging.merge_of[row];
  }

  const int group_;
  int row_merge_ = -1, arrivals_ = 0;  // of row threadIdx.x of the item
  AttentionMerge merge_;               // of the warp's first (row, head); then of the next ones
  int32_t partial_ = -1;               // the lane's first partial row of that
  typename MergedRow<kWidth>::OwnRow own_;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_MERGE_CUH_
