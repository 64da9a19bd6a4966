#include <cuda_bf16.h>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/tune_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void RandomKernel(T* to, int64_t count, float scale, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    // A mix of the index (splitmix64).
    uint64_t x = static_cast<uint64_t>(i) + seed * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    to[i] = FromFloat<T>((static_cast<float>(x >> 40) * 0x1p-23f - 1.0f) * scale);
  }
}

__device__ double Element(const Operand& x, int64_t at) {
  return x.bf16 ? static_cast<double>(ToFloat(static_cast<const __nv_bfloat16*>(x.data)[at]))
                : static_cast<double>(static_cast<const float*>(x.data)[at]);
}

__global__ void ReferenceKernel(DecomposeKShape s, int64_t step, int64_t count, double* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i * step / s.n, column = i * step % s.n;
  double sum = 0.0;
  for (int64_t k = 0; k < s.k; ++k) {
    sum += Element(s.a, row * s.a.stride_outer + k * s.a.stride_k) *
           Element(s.b, column * s.b.stride_outer + k * s.b.stride_k);
  }
  out[i] = sum;
}

template <typename T>
__global__ void ErrorsKernel(const double* want, const T* got, int64_t step, int64_t count, double* sums) {
  double difference = 0.0, norm = 0.0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const double d = static_cast<double>(ToFloat(got[i * step])) - want[i];
    difference += d * d;
    norm += want[i] * want[i];
  }
  difference = BlockSum<kThreads>(difference);
  norm = BlockSum<kThreads>(norm);
  if (threadIdx.x > 0) return;
  sums[2 * blockIdx.x] = difference;
  sums[2 * blockIdx.x + 1] = norm;
}

}  // namespace

void LaunchRandom(void* to, bool bf16, int64_t count, float scale, uint32_t seed, cudaStream_t stream) {
  const unsigned grid = GridFor(count, kThreads);
  if (bf16) {
    RandomKernel<<<grid, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(to), count, scale, seed);
  } else {
    RandomKernel<<<grid, kThreads, 0, stream>>>(static_cast<float*>(to), count, scale, seed);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchReferenceProduct(const DecomposeKShape& s, int64_t step, int64_t count, double* out, cudaStream_t stream) {
  ReferenceKernel<<<static_cast<unsigned>(CeilDiv(count, kThreads)), kThreads, 0, stream>>>(s, step, count, out);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchErrors(const double* want, const void* got, bool bf16, int64_t step, int64_t count, double* sums,
                  cudaStream_t stream) {
  if (bf16) {
    ErrorsKernel<<<kErrorSums / 2, kThreads, 0, stream>>>(want, static_cast<const __nv_bfloat16*>(got), step, count,
                                                          sums);
  } else {
    ErrorsKernel<<<kErrorSums / 2, kThreads, 0, stream>>>(want, static_cast<const float*>(got), step, count, sums);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
