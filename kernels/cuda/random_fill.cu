#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/random_fill_launch.h"
#include "kernels/ops/random_unit.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) RandomFillKernel(T* out, int64_t elements, float factor, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    out[i] = FromFloat<T>(factor * RandomUnit(seed, static_cast<uint64_t>(i)));
  }
}

}  // namespace

void LaunchRandomFill(void* out, bool bf16, int64_t elements, float factor, uint64_t seed, cudaStream_t stream) {
  if (elements == 0) return;
  const unsigned blocks = GridFor(elements, kThreads);
  if (bf16) {
    RandomFillKernel<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(out), elements, factor, seed);
  } else {
    RandomFillKernel<<<blocks, kThreads, 0, stream>>>(static_cast<float*>(out), elements, factor, seed);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
