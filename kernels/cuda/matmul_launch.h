// The kernels around cuBLAS products.
#ifndef STILLHOUSE_KERNELS_CUDA_MATMUL_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_MATMUL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// out[r, :] = bias, or 0 where it is absent.
void LaunchFillRows(float* out, int64_t out_stride, const float* bias, int64_t rows, int64_t width,
                    cudaStream_t stream);

// sums[c] += Σ_r x[r, c], in a fixed order.
void LaunchColumnSums(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* sums, cudaStream_t stream);

// Rows of floats rounded to bf16 (to nearest even), contiguous.
void LaunchRoundRows(const float* x, int64_t x_stride, int64_t rows, int64_t width, void* bf16, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_MATMUL_LAUNCH_H_
