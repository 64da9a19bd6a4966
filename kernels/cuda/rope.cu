#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/rope_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 128;

// A block turns one row: its angles once, in fp64, for all heads.
__global__ void __launch_bounds__(kThreads) RopeKernel(const __grid_constant__ RopeParams p) {
  __shared__ float cosine[kMaxRopePairs], sine[kMaxRopePairs];
  const int64_t rest = p.width - 2 * p.pairs;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    for (int j = threadIdx.x; j < p.pairs; j += kThreads) {
      double s, c;
      sincos(static_cast<double>(p.positions[r]) * p.inv_freq[j], &s, &c);
      cosine[j] = p.scale * static_cast<float>(c);
      sine[j] = p.scale * p.sign * static_cast<float>(s);
    }
    __syncthreads();
    const float* from_row = p.from + r * p.from_row;
    float* to_row = p.to + r * p.to_row;
    for (int64_t i = threadIdx.x; i < p.heads * p.pairs; i += kThreads) {
      const int64_t h = i / p.pairs;
      const int j = static_cast<int>(i - h * p.pairs);
      const int first = p.interleaved ? 2 * j : j, second = p.interleaved ? 2 * j + 1 : j + p.pairs;
      const float* from = from_row + h * p.from_head;
      float* to = to_row + h * p.to_head;
      const float a = from[first], b = from[second];
      const float x = a * cosine[j] - b * sine[j], y = b * cosine[j] + a * sine[j];
      to[first] = p.add ? to[first] + x : x;
      to[second] = p.add ? to[second] + y : y;
    }
    for (int64_t i = threadIdx.x; i < p.heads * rest; i += kThreads) {
      const int64_t h = i / rest, c = 2 * p.pairs + (i - h * rest);
      const float value = from_row[h * p.from_head + c];
      float& to = to_row[h * p.to_head + c];
      to = p.add ? to + value : value;
    }
    __syncthreads();
  }
}

}  // namespace

void LaunchRope(const RopeParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.heads == 0) return;
  RopeKernel<<<GridFor(params.rows, 1), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
