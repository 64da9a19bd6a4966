// How the attention kernels that hold results as pairs of columns write them.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_EMIT_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_EMIT_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {

// Two neighbouring columns of a query's result: a partial row's, or the output's.
__device__ __forceinline__ void Emit(const AttentionTensors& t, const AttentionItem& item, const int32_t* rows, int kv,
                                     int query, int column, float a, float b, const SoftmaxState<float>& memory,
                                     float rest_sum) {
  const int i = query / item.head_count;
  const int64_t head = kv * (t.heads / t.kv_heads) + item.head_begin + query % item.head_count;
  if (item.partial >= 0) {
    const int64_t place = static_cast<int64_t>(item.partial + i) * t.heads + head;
    float* const o = t.partial_o + place * t.width + column;
    if (t.width % 2 == 0) {
      if (column < t.width) *reinterpret_cast<float2*>(o) = make_float2(a, b);
    } else {
      if (column < t.width) o[0] = a;
      if (column + 1 < t.width) o[1] = b;
    }
    if (column == 0) {
      float* const state = t.partial_state + place * 3;
      state[0] = memory.m;
      state[1] = memory.l;
      state[2] = rest_sum;
    }
    return;
  }
  const int64_t row = RowOf(rows, item.rows, i);
  const SoftmaxState<float> all{memory.m, memory.l + rest_sum};
  const float inverse = InverseSum(all);
  a *= inverse;
  b *= inverse;
  const int64_t at = row * t.out_row + head * t.out_head + column;
  if (t.out_bf16) {
    __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(t.out) + at;
    if (t.out_vector) {
      if (column < t.width) *reinterpret_cast<uint32_t*>(out) = PackBf16(a, b);
    } else {
      if (column < t.width) out[0] = FromFloat<__nv_bfloat16>(a);
      if (column + 1 < t.width) out[1] = FromFloat<__nv_bfloat16>(b);
    }
  } else {
    float* const out = static_cast<float*>(t.out) + at;
    if (t.out_vector) {
      if (column < t.width) *reinterpret_cast<float2*>(out) = make_float2(a, b);
    } else {
      if (column < t.width) out[0] = a;
      if (column + 1 < t.width) out[1] = b;
    }
  }
  if (column == 0) {
    if (t.lse) t.lse[row * t.lse_row + head * t.lse_head] = LogSumExp(all);
    if (t.mass) t.mass[row * t.heads + head] = memory.l * inverse;
  }
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_EMIT_CUH_
