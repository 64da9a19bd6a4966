// Launch of RandomFill (kernels/ops/random_fill.h).
#ifndef STILLHOUSE_KERNELS_CUDA_RANDOM_FILL_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_RANDOM_FILL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// out[i] = factor · RandomUnit(seed, i), f32 or bf16.
void LaunchRandomFill(void* out, bool bf16, int64_t elements, float factor, uint64_t seed, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_RANDOM_FILL_LAUNCH_H_
