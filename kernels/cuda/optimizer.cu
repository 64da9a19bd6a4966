#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/optimizer_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) AdamWKernel(AdamWParams p) {
  const int64_t elements = p.rows * p.width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / p.width, c = i - r * p.width;
    const float grad = p.grad_scale * p.grad.at(r)[c];
    float& m = p.m.at(r)[c];
    float& v = p.v.at(r)[c];
    float& param = p.param.at(r)[c];
    const float mean = p.beta1 * m + (1.0f - p.beta1) * grad;
    const float square = p.beta2 * v + (1.0f - p.beta2) * grad * grad;
    m = mean;
    v = square;
    param = p.decay * param - p.step_size * mean / (sqrtf(square) * p.inverse_root + p.eps);
  }
}

__global__ void __launch_bounds__(kThreads) SumSquaresPartials(Rows x, int64_t rows, int64_t width, double* partials) {
  const int64_t elements = rows * width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  double sum = 0.0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / width;
    const double value = static_cast<double>(x.at(r)[i - r * width]);
    sum += value * value;
  }
  sum = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) SumPartials(const double* partials, int count, float* out) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  sum = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) out[0] += static_cast<float>(sum);
}

}  // namespace

void LaunchAdamW(const AdamWParams& params, cudaStream_t stream) {
  const int64_t elements = params.rows * params.width;
  if (elements == 0) return;
  AdamWKernel<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchSumSquares(const Rows& x, int64_t rows, int64_t width, double* partials, float* out, cudaStream_t stream) {
  const int64_t elements = rows * width;
  if (elements == 0) return;
  const unsigned blocks = GridFor(elements, 8 * kThreads, kSumSquaresBlocks);
  SumSquaresPartials<<<blocks, kThreads, 0, stream>>>(x, rows, width, partials);
  STILLHOUSE_CUDA_LAUNCHED();
  SumPartials<<<1, kThreads, 0, stream>>>(partials, static_cast<int>(blocks), out);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
