#include "kernels/cuda/copy_launch.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) CopyKernel(CopyParams p) {
  const T* from = static_cast<const T*>(p.from);
  T* to = static_cast<T*>(p.to);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.elements; i += step) {
    int64_t rest = i, a = 0, b = 0;
#pragma unroll
    for (int d = kMaxCopyRank - 1; d >= 0; --d) {
      if (d >= p.rank) continue;
      const int64_t index = rest % p.dims[d];
      rest /= p.dims[d];
      a += index * p.from_strides[d];
      b += index * p.to_strides[d];
    }
    to[b] = from[a];
  }
}

template <typename T>
void Launch(const CopyParams& params, cudaStream_t stream) {
  CopyKernel<T><<<GridFor(params.elements, kThreads), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace

void LaunchCopy(const CopyParams& params, cudaStream_t stream) {
  if (params.elements == 0) return;
  switch (params.element_bytes) {
    case 1:
      return Launch<uint8_t>(params, stream);
    case 2:
      return Launch<uint16_t>(params, stream);
    case 4:
      return Launch<uint32_t>(params, stream);
    case 8:
      return Launch<uint64_t>(params, stream);
    default:
      STILLHOUSE_CHECK(false) << params.element_bytes << " bytes an element";
  }
}

}  // namespace stillhouse::cuda
