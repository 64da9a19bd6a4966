#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/trap.cuh"
#include "kernels/cuda/gather_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) GatherKernel(GatherParams p) {
  for (int64_t i = blockIdx.x; i < p.count; i += gridDim.x) {
    const float* from = p.table + CheckedIndex(p.ids[i], p.table_rows) * p.table_stride;
    float* out = p.out + i * p.out_stride;
    for (int64_t c = threadIdx.x; c < p.width; c += kThreads) out[c] = from[c];
  }
}

// A block owns the row that ids[i] names if no earlier entry names it, and adds all entries of that row in order. A
// thread owns columns, so that no two add to one element.
__global__ void __launch_bounds__(kThreads) ScatterAddKernel(ScatterParams p) {
  __shared__ unsigned hits[kThreads / 32];
  for (int64_t i = blockIdx.x; i < p.count; i += gridDim.x) {
    const int32_t id = p.ids[i];
    bool earlier = false;
    for (int64_t j = threadIdx.x; j < i && !earlier; j += kThreads) earlier = p.ids[j] == id;
    if (__syncthreads_or(earlier)) continue;
    float* to = p.to + id * p.to_stride;
    for (int64_t begin = i; begin < p.count; begin += kThreads) {
      const int64_t j = begin + threadIdx.x;
      const unsigned hit = __ballot_sync(0xffffffffu, j < p.count && p.ids[j] == id);
      if (threadIdx.x % 32 == 0) hits[threadIdx.x / 32] = hit;
      __syncthreads();
      for (int warp = 0; warp < kThreads / 32; ++warp) {
        for (unsigned bits = hits[warp]; bits != 0; bits &= bits - 1) {
          const float* from = p.dout + (begin + 32 * warp + __ffs(static_cast<int>(bits)) - 1) * p.dout_stride;
          for (int64_t c = threadIdx.x; c < p.width; c += kThreads) to[c] += from[c];
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace

void LaunchGather(const GatherParams& params, cudaStream_t stream) {
  if (params.count == 0 || params.width == 0) return;
  GatherKernel<<<GridFor(params.count, 1), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchScatterAdd(const ScatterParams& params, cudaStream_t stream) {
  if (params.count == 0 || params.width == 0) return;
  ScatterAddKernel<<<GridFor(params.count, 1), kThreads, 0, stream>>>(params);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
