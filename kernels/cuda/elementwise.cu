#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/elementwise_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

// 1 / (1 + e^−x); e^−x may overflow to infinity, which gives 0.
__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x·σ(x) without ∞·0: where σ underflows the product is 0 (or −0).
__device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }

__global__ void __launch_bounds__(kThreads) SwiGluKernel(SwiGluParams p) {
  const int64_t elements = p.rows * p.width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / p.width, c = i - r * p.width;
    p.out.data[r * p.out.stride + c] = Silu(p.gate.data[r * p.gate.stride + c]) * p.up.data[r * p.up.stride + c];
  }
}

// silu'(x) = σ(x)·(1 + x·(1 − σ(x))).
__global__ void __launch_bounds__(kThreads) SwiGluGradKernel(SwiGluGradParams p) {
  const int64_t elements = p.rows * p.width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / p.width, c = i - r * p.width;
    const float gate = p.gate.data[r * p.gate.stride + c], dout = p.dout.data[r * p.dout.stride + c];
    const float sigmoid = Sigmoid(gate);
    if (p.dgate.data) {
      p.dgate.data[r * p.dgate.stride + c] +=
          dout * p.up.data[r * p.up.stride + c] * sigmoid * (1.0f + gate * (1.0f - sigmoid));
    }
    if (p.dup.data) p.dup.data[r * p.dup.stride + c] += dout * gate * sigmoid;
  }
}

__global__ void __launch_bounds__(kThreads) AddVectors(const float* a, const float* b, float* out, int64_t elements) {
  const int64_t vectors = elements / 4, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < vectors; i += step) {
    const Vec16<float> x = LoadVec16(a + 4 * i), y = LoadVec16(b + 4 * i);
    Vec16<float> sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.at[j] = x.at[j] + y.at[j];
    StoreVec16(out + 4 * i, sum);
  }
  for (int64_t i = 4 * vectors + first; i < elements; i += step) out[i] = a[i] + b[i];
}

__global__ void __launch_bounds__(kThreads) AddScalars(const float* a, const float* b, float* out, int64_t elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    out[i] = a[i] + b[i];
  }
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) CopyRowsKernel(CopyRowsParams p) {
  const From* const from = static_cast<const From*>(p.from);
  To* const to = static_cast<To*>(p.to);
  const int64_t elements = p.rows * p.heads * p.width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t c = i % p.width, h = i / p.width % p.heads, r = i / p.width / p.heads;
    to[h * p.to_head + r * p.to_slot + c] = FromFloat<To>(ToFloat(from[r * p.from_row + h * p.from_head + c]));
  }
}

}  // namespace

void LaunchSwiGlu(const SwiGluParams& params, cudaStream_t stream) {
  const int64_t elements = params.rows * params.width;
  if (elements == 0) return;
  SwiGluKernel<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchSwiGluGrad(const SwiGluGradParams& params, cudaStream_t stream) {
  const int64_t elements = params.rows * params.width;
  if (elements == 0) return;
  SwiGluGradKernel<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchAdd(const float* a, const float* b, float* out, int64_t elements, cudaStream_t stream) {
  if (elements == 0) return;
  if (Aligned16(a) && Aligned16(b) && Aligned16(out)) {
    AddVectors<<<GridFor(CeilDiv(elements, 4), kThreads), kThreads, 0, stream>>>(a, b, out, elements);
  } else {
    AddScalars<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(a, b, out, elements);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream) {
  const int64_t elements = params.rows * params.heads * params.width;
  if (elements == 0) return;
  const auto kernel = params.from_bf16 ? params.to_bf16 ? CopyRowsKernel<__nv_bfloat16, __nv_bfloat16>
                                                        : CopyRowsKernel<__nv_bfloat16, float>
                      : params.to_bf16 ? CopyRowsKernel<float, __nv_bfloat16>
                                       : CopyRowsKernel<float, float>;
  kernel<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
