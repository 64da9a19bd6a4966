// Launches of the optimizer kernels.
#ifndef STILLHOUSE_KERNELS_CUDA_OPTIMIZER_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_OPTIMIZER_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/device/strided.h"

namespace stillhouse::cuda {

struct AdamWParams {
  Rows param, grad, m, v;
  int64_t rows = 0, width = 0;
  float beta1 = 0.0f, beta2 = 0.0f, eps = 0.0f;
  float grad_scale = 1.0f;
  float step_size = 0.0f;     // lr / (1 − β1^t)
  float inverse_root = 1.0f;  // 1 / √(1 − β2^t)
  float decay = 1.0f;         // 1 − lr·weight_decay
};
void LaunchAdamW(const AdamWParams& params, cudaStream_t stream);

// out[0] += Σ x², sums in fp64 in a fixed order; `partials` holds kSumSquaresBlocks doubles.
inline constexpr int kSumSquaresBlocks = 512;
void LaunchSumSquares(const Rows& x, int64_t rows, int64_t width, double* partials, float* out, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_OPTIMIZER_LAUNCH_H_
