// One block (or one warp) on one row of floats: walks in 16-byte steps wherever the row starts, and the row's softmax.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ROW_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/device/reduce.cuh"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cuda {

// Elements before the first address that is a multiple of 16.
__device__ __forceinline__ int64_t RowHead(const float* row, int64_t n) {
  const int64_t head = ((16 - (reinterpret_cast<uintptr_t>(row) & 15)) & 15) / sizeof(float);
  return head < n ? head : n;
}

// f(i, row[i]) for every element, each by one thread of kThreads (threadIdx.x); a thread sees its own in rising order.
template <int kThreads, typename F>
__device__ __forceinline__ void ForEachInRow(const float* row, int64_t n, const F& f) {
  constexpr int kAhead = 4;  // loads in flight
  const int t = static_cast<int>(threadIdx.x);
  const int64_t head = RowHead(row, n), vectors = (n - head) / 4, tail = head + 4 * vectors;
  if (t < head) f(static_cast<int64_t>(t), row[t]);
  const float4* body = reinterpret_cast<const float4*>(row + head);
  int64_t v = t;
  for (; v + (kAhead - 1) * kThreads < vectors; v += kAhead * kThreads) {
    float4 x[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) x[a] = body[v + a * kThreads];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t i = head + 4 * (v + a * kThreads);
      f(i, x[a].x);
      f(i + 1, x[a].y);
      f(i + 2, x[a].z);
      f(i + 3, x[a].w);
    }
  }
  for (; v < vectors; v += kThreads) {
    const float4 x = body[v];
    const int64_t i = head + 4 * v;
    f(i, x.x);
    f(i + 1, x.y);
    f(i + 2, x.z);
    f(i + 3, x.w);
  }
  if (tail + t < n) f(tail + t, row[tail + t]);
}

// out[i] = f(i, in[i]); `out` may be `in`.
template <int kThreads, typename F>
__device__ __forceinline__ void MapRow(const float* in, float* out, int64_t n, const F& f) {
  const int t = static_cast<int>(threadIdx.x);
  if ((reinterpret_cast<uintptr_t>(in) & 15) != (reinterpret_cast<uintptr_t>(out) & 15)) {
    for (int64_t i = t; i < n; i += kThreads) out[i] = f(i, in[i]);
    return;
  }
  const int64_t head = RowHead(in, n), vectors = (n - head) / 4, tail = head + 4 * vectors;
  if (t < head) out[t] = f(static_cast<int64_t>(t), in[t]);
  const float4* from = reinterpret_cast<const float4*>(in + head);
  float4* to = reinterpret_cast<float4*>(out + head);
  const auto map = [&](int64_t v, float4 x) {
    const int64_t i = head + 4 * v;
    to[v] = make_float4(f(i, x.x), f(i + 1, x.y), f(i + 2, x.z), f(i + 3, x.w));
  };
  int64_t v = t;
  for (; v + kThreads < vectors; v += 2 * kThreads) {
    const float4 x = from[v], y = from[v + kThreads];
    map(v, x);
    map(v + kThreads, y);
  }
  if (v < vectors) map(v, from[v]);
  if (tail + t < n) out[tail + t] = f(tail + t, in[tail + t]);
}

// One more logit for a running (m, l).
__device__ __forceinline__ void PushLogit(SoftmaxState<float>& state, float x) {
  if (x > state.m) {
    state.l *= SoftmaxWeight(state.m, x);
    state.m = x;
  }
  state.l += SoftmaxWeight(x, state.m);
}

// Merges the states of kThreads threads, in a fixed order; every thread gets the bits of the first one's result.
template <int kThreads>
__device__ __forceinline__ SoftmaxState<float> FoldStates(SoftmaxState<float> state) {
  const auto fold_warp = [](SoftmaxState<float> s) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      SoftmaxState<float> other;
      other.m = __shfl_xor_sync(kFullWarp, s.m, offset);
      other.l = __shfl_xor_sync(kFullWarp, s.l, offset);
      MergeSoftmax(s, other);
    }
    s.m = __shfl_sync(kFullWarp, s.m, 0);
    s.l = __shfl_sync(kFullWarp, s.l, 0);
    return s;
  };
  state = fold_warp(state);
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ float m[kWarps], l[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane == 0) {
      m[threadIdx.x / kWarp] = state.m;
      l[threadIdx.x / kWarp] = state.l;
    }
    __syncthreads();
    SoftmaxState<float> mine;
    if (lane < kWarps) {
      mine.m = m[lane];
      mine.l = l[lane];
    }
    state = fold_warp(mine);
    __syncthreads();
  }
  return state;
}

template <int kThreads>
__device__ __forceinline__ SoftmaxState<float> RowState(const float* row, int64_t n) {
  SoftmaxState<float> state;
  ForEachInRow<kThreads>(row, n, [&](int64_t, float x) { PushLogit(state, x); });
  return FoldStates<kThreads>(state);
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ROW_CUH_
