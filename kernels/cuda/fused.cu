#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/fused_launch.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256;

// Rows of up to kThreads · 4 · kKept floats stay in registers between the two passes.
constexpr int kKept = 8;

__global__ void __launch_bounds__(kThreads) NormToBf16Kernel(const NormToBf16Params p) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t vectors = p.width / 4;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const float* const x = p.x + r * p.x_stride;
    Bf16* const out = static_cast<Bf16*>(p.out) + r * p.width;
    Vec16<float> kept[kKept];
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < kKept; ++e) {
      const int64_t i = threadIdx.x + e * kThreads;
      if (i >= vectors) break;
      kept[e] = LoadVec16(x + 4 * i);
      sum += kept[e].at[0] * kept[e].at[0] + kept[e].at[1] * kept[e].at[1] +
             (kept[e].at[2] * kept[e].at[2] + kept[e].at[3] * kept[e].at[3]);
    }
    for (int64_t i = threadIdx.x + kKept * kThreads; i < vectors; i += kThreads) {
      const Vec16<float> v = LoadVec16(x + 4 * i);
      sum += v.at[0] * v.at[0] + v.at[1] * v.at[1] + (v.at[2] * v.at[2] + v.at[3] * v.at[3]);
    }
    sum = BlockSum<kThreads>(sum);
    const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
    const auto store = [&](int64_t i, const Vec16<float>& v) {
      const Vec16<float> w = LoadVec16(p.weight + 4 * i);
      *reinterpret_cast<uint2*>(out + 4 * i) = make_uint2(PackBf16(v.at[0] * rstd * w.at[0], v.at[1] * rstd * w.at[1]),
                                                          PackBf16(v.at[2] * rstd * w.at[2], v.at[3] * rstd * w.at[3]));
    };
#pragma unroll
    for (int e = 0; e < kKept; ++e) {
      const int64_t i = threadIdx.x + e * kThreads;
      if (i >= vectors) break;
      store(i, kept[e]);
    }
    for (int64_t i = threadIdx.x + kKept * kThreads; i < vectors; i += kThreads) store(i, LoadVec16(x + 4 * i));
  }
}

// A row of blocks takes a row of x.
template <typename X>
__global__ void __launch_bounds__(kThreads) SwiGluToBf16Kernel(const X* x, int64_t rows, int64_t width, Bf16* out) {
  constexpr int kCount = Vec16<X>::kCount;
  struct alignas(2 * kCount) Rounded {
    uint32_t pairs[kCount / 2];
  };
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t c = kCount * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (c >= width) return;
  for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
    const Vec16<X> gates = LoadVec16(x + r * 2 * width + c), ups = LoadVec16(x + r * 2 * width + width + c);
    const auto gated = [&](int e) {
      const float gate = ToFloat(gates.at[e]);
      return __fdividef(gate, 1.0f + __expf(-gate)) * ToFloat(ups.at[e]);
    };
    Rounded y;
#pragma unroll
    for (int e = 0; e < kCount; e += 2) y.pairs[e / 2] = PackBf16(gated(e), gated(e + 1));
    *reinterpret_cast<Rounded*>(out + r * width + c) = y;
  }
}

__global__ void RopeAnglesKernel(const __grid_constant__ RopeAnglesParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * p.pairs) return;
  const int64_t r = i / p.pairs;
  const int j = static_cast<int>(i - r * p.pairs);
  double s, c;
  sincos(static_cast<double>(p.positions[r]) * p.inv_freq[j], &s, &c);
  p.out[r * 2 * p.pairs + j] = p.scale * static_cast<float>(c);
  p.out[r * 2 * p.pairs + p.pairs + j] = p.scale * static_cast<float>(s);
}

constexpr int kHeadWarps = 4;

// A warp takes one head of one row; a lane owns pairs, so that they are turned in place.
template <typename Kv>
__global__ void __launch_bounds__(kHeadWarps* kWarp) QkvRopeKernel(const QkvRopeParams p) {
  LetNextKernelStart();
  const int all = p.heads + 2 * p.kv_heads;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  WaitForPreviousKernel();
  if (unit >= p.rows * all) return;
  const int64_t r = unit / all;
  const int head = static_cast<int>(unit - r * all);
  float* const x = p.qkv + unit * p.width;
  const int kind = head < p.heads ? 0 : head < p.heads + p.kv_heads ? 1 : 2;  // q, k, v
  Kv* to = nullptr;
  if (kind > 0 && p.places) {
    const int64_t place = p.places[2 * r + kind - 1];
    const int kv = head - p.heads - (kind - 1) * p.kv_heads;
    if (place != 0) to = reinterpret_cast<Kv*>(place) + p.layer_offset + kv * p.head_stride;
  }
  if (kind == 2) {
    for (int i = lane; to && i < p.width; i += kWarp) to[i] = FromFloat<Kv>(x[i]);
    return;
  }
  const float* const norm = kind == 0 ? p.q_norm : p.k_norm;
  float rstd = 1.0f;
  if (norm) {
    float sum = 0.0f;
    for (int i = lane; i < p.width; i += kWarp) sum += x[i] * x[i];
    rstd = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(p.width) + p.eps);
  }
  const auto value = [&](int i) { return norm ? x[i] * rstd * norm[i] : x[i]; };
  const float* const cosine = p.angles + r * 2 * p.pairs;
  const float* const sine = cosine + p.pairs;
  for (int j = lane; j < p.pairs; j += kWarp) {
    const int first = p.interleaved ? 2 * j : j, second = p.interleaved ? 2 * j + 1 : j + p.pairs;
    const float a = value(first), b = value(second);
    const float turned_a = a * cosine[j] - b * sine[j], turned_b = b * cosine[j] + a * sine[j];
    x[first] = turned_a;
    x[second] = turned_b;
    if (to) {
      to[first] = FromFloat<Kv>(turned_a);
      to[second] = FromFloat<Kv>(turned_b);
    }
  }
  for (int i = 2 * p.pairs + lane; i < p.width; i += kWarp) {
    const float kept = value(i);
    x[i] = kept;
    if (to) to[i] = FromFloat<Kv>(kept);
  }
}

__device__ __forceinline__ int KindOf(const QkvRopeParams& p, int head) {  // q, k, v
  return head < p.heads ? 0 : head < p.heads + p.kv_heads ? 1 : 2;
}

// Where a head of row r is kept; null: nowhere.
template <typename Kv>
__device__ __forceinline__ Kv* KeptAt(const QkvRopeParams& p, int64_t r, int head) {
  const int kind = KindOf(p, head);
  if (kind == 0 || !p.places) return nullptr;
  const int64_t place = p.places[2 * r + kind - 1];
  if (place == 0) return nullptr;
  return reinterpret_cast<Kv*>(place) + p.layer_offset + (head - p.heads - (kind - 1) * p.kv_heads) * p.head_stride;
}

constexpr int kRowThreads = 128;

// bf16 rows of heads kLanes · 16 wide, turned whole. A block takes a row, kLanes lanes a head after the other, each
// always the same eight pairs.
template <int kLanes, bool kInterleaved>
__global__ void __launch_bounds__(kRowThreads) QkvRopeBf16(const QkvRopeParams p) {
  constexpr int kWidth = 16 * kLanes, kHeads = kRowThreads / kLanes;  // at once
  using Vec = Vec16<Bf16>;
  LetNextKernelStart();
  const int64_t r = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, all = p.heads + 2 * p.kv_heads;
  const int first = kInterleaved ? 16 * lane : 8 * lane, second = first + (kInterleaved ? 8 : kWidth / 2);
  Bf16* const row = static_cast<Bf16*>(p.qkv_bf16) + r * all * kWidth;
  WaitForPreviousKernel();
  const float* const angles = p.angles + r * kWidth + 8 * lane;
  const Vec16<float> cosines[2] = {LoadVec16(angles), LoadVec16(angles + 4)};
  const Vec16<float> sines[2] = {LoadVec16(angles + kWidth / 2), LoadVec16(angles + kWidth / 2 + 4)};
  for (int begin = 0; begin < all; begin += kHeads) {
    const int head = begin + static_cast<int>(threadIdx.x) / kLanes;
    const bool there = head < all;  // the warp's lanes stay together, for its sums
    const int kind = KindOf(p, head);
    Bf16* const x = row + head * kWidth;
    Vec a = {}, b = {};
    if (there) {
      a = LoadVec16(x + first);
      b = LoadVec16(x + second);
    }
    float value[16];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      value[e] = ToFloat(a.at[e]);
      value[8 + e] = ToFloat(b.at[e]);
    }
    if (p.q_norm || p.k_norm) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < 16; ++e) sum += value[e] * value[e];
      const float rstd = 1.0f / sqrtf(WarpSum<kLanes>(sum) / static_cast<float>(kWidth) + p.eps);
      const float* const norm = kind == 0 ? p.q_norm : p.k_norm;
      if (norm && kind < 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          value[e] *= rstd * norm[first + e];
          value[8 + e] *= rstd * norm[second + e];
        }
      }
    }
    if (!there) break;
    if (kind < 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // A pair is two neighbours, or columns half a head apart.
        float& from = value[kInterleaved ? 2 * j : j];
        float& to = value[kInterleaved ? 2 * j + 1 : 8 + j];
        const float cosine = cosines[j / 4].at[j % 4], sine = sines[j / 4].at[j % 4],
                    turned = from * cosine - to * sine;
        to = to * cosine + from * sine;
        from = turned;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        a.at[e] = FromFloat<Bf16>(value[e]);
        b.at[e] = FromFloat<Bf16>(value[8 + e]);
      }
      StoreVec16(x + first, a);
      StoreVec16(x + second, b);
    }
    if (Bf16* const kept = KeptAt<Bf16>(p, r, head)) {
      StoreVec16(kept + first, a);
      StoreVec16(kept + second, b);
    }
  }
}

template <int kLanes>
void LaunchQkvRopeBf16(const QkvRopeParams& params, cudaStream_t stream) {
  const auto kernel = params.interleaved ? QkvRopeBf16<kLanes, true> : QkvRopeBf16<kLanes, false>;
  LaunchKernelEarly(kernel, static_cast<unsigned>(params.rows), kRowThreads, 0, stream, params);
}

__global__ void LayRunsKernel(const AttentionRun* base, const AttentionRunLayers* layers, int64_t runs,
                              int64_t layer_count, int element_bytes, AttentionRun* to) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= runs * layer_count) return;
  const int64_t layer = at / runs, i = at - layer * runs;
  AttentionRun run = base[i];
  const AttentionRunLayers on = layers[i];
  if (run.slots > 0) {
    run.k = static_cast<const char*>(run.k) + layer * on.k * element_bytes;
    run.v = static_cast<const char*>(run.v) + layer * on.v * element_bytes;
    if (run.beta) run.beta += layer * on.beta;
  }
  to[at] = run;
}

}  // namespace

void LaunchNormToBf16(const NormToBf16Params& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  LaunchKernelEarly(NormToBf16Kernel, GridFor(params.rows, 1), kThreads, 0, stream, params);
}

void LaunchSwiGluToBf16(const void* x, bool x_bf16, int64_t rows, int64_t width, void* out, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const auto launch = [&](auto* from) {
    constexpr int kCount = Vec16<std::decay_t<decltype(*from)>>::kCount;
    const dim3 grid(static_cast<unsigned>(CeilDiv(width, kCount * kThreads)), GridFor(rows, 1, 32768));
    LaunchKernelEarly(SwiGluToBf16Kernel<std::decay_t<decltype(*from)>>, grid, kThreads, 0, stream, from, rows, width,
                      static_cast<Bf16*>(out));
  };
  x_bf16 ? launch(static_cast<const Bf16*>(x)) : launch(static_cast<const float*>(x));
}

void LaunchRopeAngles(const RopeAnglesParams& params, cudaStream_t stream) {
  const int64_t angles = params.rows * params.pairs;
  if (angles == 0) return;
  LaunchKernel(RopeAnglesKernel, static_cast<unsigned>(CeilDiv(angles, 64)), 64, 0, stream, params);
}

void LaunchQkvRope(const QkvRopeParams& params, cudaStream_t stream) {
  const int64_t units = params.rows * (params.heads + 2 * params.kv_heads);
  if (units == 0) return;
  if (params.qkv_bf16) {
    return params.width == 64    ? LaunchQkvRopeBf16<4>(params, stream)
           : params.width == 128 ? LaunchQkvRopeBf16<8>(params, stream)
                                 : LaunchQkvRopeBf16<16>(params, stream);
  }
  const unsigned blocks = static_cast<unsigned>(CeilDiv(units, kHeadWarps));
  if (params.kv_bf16) {
    LaunchKernelEarly(QkvRopeKernel<Bf16>, blocks, kHeadWarps * kWarp, 0, stream, params);
  } else {
    LaunchKernelEarly(QkvRopeKernel<float>, blocks, kHeadWarps * kWarp, 0, stream, params);
  }
}

void LaunchLayRuns(const AttentionRun* base, const AttentionRunLayers* layers, int64_t runs, int64_t layer_count,
                   int element_bytes, AttentionRun* to, cudaStream_t stream) {
  if (runs * layer_count == 0) return;
  LaunchKernel(LayRunsKernel, static_cast<unsigned>(CeilDiv(runs * layer_count, 128)), 128, 0, stream, base, layers,
               runs, layer_count, element_bytes, to);
}

}  // namespace stillhouse::cuda
