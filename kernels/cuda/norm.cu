#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/norm_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;
// Rows up to this width (heads) are given to a warp each, wider ones to a block.
constexpr int64_t kWarpWidth = 256;
constexpr int64_t kChunkRows = 64;

// Sum over the threads that share a row.
template <int kPerRow>
__device__ __forceinline__ float RowSum(float value) {
  if constexpr (kPerRow == kWarp) return WarpSum(value);
  return BlockSum<kPerRow>(value);
}

template <int kPerRow>
__device__ __forceinline__ float Rstd(const float* x, int64_t width, float eps) {
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += kPerRow) sum += x[i] * x[i];
  return 1.0f / sqrtf(RowSum<kPerRow>(sum) / static_cast<float>(width) + eps);
}

// kPerRow threads in x work on one row; blockDim.y rows a block. Threads of one row leave the loop together.
template <int kPerRow>
__global__ void __launch_bounds__(kThreads) RmsNormKernel(RmsNormParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < p.rows; r += step) {
    const float* x = p.x.at(r);
    float* out = p.out.at(r);
    const float rstd = Rstd<kPerRow>(x, p.width, p.eps);
    for (int64_t i = threadIdx.x; i < p.width; i += kPerRow) {
      out[i] = x[i] * rstd * (p.weight ? p.weight[i] : 1.0f);
    }
  }
}

// With g = dout ⊙ weight and x̂ = x·rstd: dx = rstd·(g − x̂·mean(g ⊙ x̂)).
template <int kPerRow>
__global__ void __launch_bounds__(kThreads) RmsNormGradKernel(RmsNormGradParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < p.rows; r += step) {
    const float* x = p.x.at(r);
    const float* dout = p.dout.at(r);
    const float rstd = Rstd<kPerRow>(x, p.width, p.eps);
    if (p.rstd && threadIdx.x == 0) p.rstd[r] = rstd;
    if (!p.dx.data) continue;
    float* dx = p.dx.at(r);
    float dot = 0.0f;
    for (int64_t i = threadIdx.x; i < p.width; i += kPerRow) {
      dot += (p.weight ? dout[i] * p.weight[i] : dout[i]) * x[i];
    }
    const float shift = RowSum<kPerRow>(dot) / static_cast<float>(p.width) * rstd * rstd;
    for (int64_t i = threadIdx.x; i < p.width; i += kPerRow) {
      const float g = p.weight ? dout[i] * p.weight[i] : dout[i];
      dx[i] += rstd * (g - x[i] * shift);
    }
  }
}

__global__ void __launch_bounds__(kThreads) WeightGradChunk(RmsNormGradParams p, float* partials) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.width) return;
  for (int64_t chunk = blockIdx.y; chunk * kChunkRows < p.rows; chunk += gridDim.y) {
    const int64_t begin = chunk * kChunkRows;
    const int64_t end = begin + kChunkRows < p.rows ? begin + kChunkRows : p.rows;
    float sum = 0.0f;
    for (int64_t r = begin; r < end; ++r) sum += p.dout.at(r)[i] * p.x.at(r)[i] * p.rstd[r];
    partials[chunk * p.width + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    WeightGradSum(const float* partials, int64_t chunks, int64_t width, float* dweight) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= width) return;
  float sum = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * width + i];
  dweight[i] += sum;
}

}  // namespace

void LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  if (params.width <= kWarpWidth) {
    const dim3 block(kWarp, kThreads / kWarp);
    RmsNormKernel<kWarp><<<GridFor(params.rows, block.y), block, 0, stream>>>(params);
  } else {
    RmsNormKernel<kThreads><<<GridFor(params.rows, 1), dim3(kThreads, 1), 0, stream>>>(params);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchRmsNormGrad(const RmsNormGradParams& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  if (params.width <= kWarpWidth) {
    const dim3 block(kWarp, kThreads / kWarp);
    RmsNormGradKernel<kWarp><<<GridFor(params.rows, block.y), block, 0, stream>>>(params);
  } else {
    RmsNormGradKernel<kThreads><<<GridFor(params.rows, 1), dim3(kThreads, 1), 0, stream>>>(params);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

int64_t RmsNormGradChunks(int64_t rows) { return CeilDiv(rows, kChunkRows); }

void LaunchRmsNormWeightGrad(const RmsNormGradParams& params, float* partials, float* dweight, cudaStream_t stream) {
  if (params.rows == 0) return;
  const int64_t chunks = RmsNormGradChunks(params.rows);
  const unsigned columns = static_cast<unsigned>(CeilDiv(params.width, kThreads));
  const dim3 grid(columns, static_cast<unsigned>(chunks < 32768 ? chunks : 32768));
  WeightGradChunk<<<grid, kThreads, 0, stream>>>(params, partials);
  STILLHOUSE_CUDA_LAUNCHED();
  WeightGradSum<<<columns, kThreads, 0, stream>>>(partials, chunks, params.width, dweight);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
