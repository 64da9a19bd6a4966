#include <cmath>

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

__global__ void __launch_bounds__(kThreads) SwiGluToBf16Kernel(const float* x, int64_t rows, int64_t width, Bf16* out) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t per_row = width / 4, vectors = rows * per_row, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += step) {
    const int64_t r = i / per_row, c = 4 * (i - r * per_row);
    const Vec16<float> gate = LoadVec16(x + r * 2 * width + c), up = LoadVec16(x + r * 2 * width + width + c);
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = gate.at[e] / (1.0f + __expf(-gate.at[e])) * up.at[e];
    *reinterpret_cast<uint2*>(out + r * width + c) = make_uint2(PackBf16(y[0], y[1]), PackBf16(y[2], y[3]));
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

void LaunchSwiGluToBf16(const float* x, int64_t rows, int64_t width, void* out, cudaStream_t stream) {
  if (rows == 0) return;
  LaunchKernelEarly(SwiGluToBf16Kernel, GridFor(rows * width / 4, kThreads), kThreads, 0, stream, x, rows, width,
                    static_cast<Bf16*>(out));
}

void LaunchRopeAngles(const RopeAnglesParams& params, cudaStream_t stream) {
  const int64_t angles = params.rows * params.pairs;
  if (angles == 0) return;
  LaunchKernel(RopeAnglesKernel, static_cast<unsigned>(CeilDiv(angles, 64)), 64, 0, stream, params);
}

void LaunchQkvRope(const QkvRopeParams& params, cudaStream_t stream) {
  const int64_t units = params.rows * (params.heads + 2 * params.kv_heads);
  if (units == 0) return;
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
