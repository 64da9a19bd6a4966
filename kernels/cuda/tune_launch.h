// What the tuner needs on the device: operands, and the product to check against.
#ifndef STILLHOUSE_KERNELS_CUDA_TUNE_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_TUNE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/decompose_k_launch.h"

namespace stillhouse::cuda {

// Values of [−scale, scale) that the dtype holds exactly; different for different seeds.
void LaunchRandom(void* to, bool bf16, int64_t count, float scale, uint32_t seed, cudaStream_t stream);
// out[i] = element i · step of A · B [m, n], flat; sums in fp64, one thread an element.
void LaunchReferenceProduct(const DecomposeKShape& shape, int64_t step, int64_t count, double* out,
                            cudaStream_t stream);
// Pairs of sums, to be added up: Σ (got[i · step] − want[i])² and Σ want[i]². got: f32, or bf16.
inline constexpr int kErrorSums = 2 * 256;
void LaunchErrors(const double* want, const void* got, bool bf16, int64_t step, int64_t count, double* sums,
                  cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_TUNE_LAUNCH_H_
