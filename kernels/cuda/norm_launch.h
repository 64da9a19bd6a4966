// Launches of the normalisation kernels.
#ifndef STILLHOUSE_KERNELS_CUDA_NORM_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_NORM_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/device/strided.h"

namespace stillhouse::cuda {

struct RmsNormParams {
  Rows x, out;
  const float* weight = nullptr;  // [width] or absent
  int64_t rows = 0, width = 0;
  float eps = 0.0f;
};
void LaunchRmsNorm(const RmsNormParams& params, cudaStream_t stream);

struct RmsNormGradParams {
  Rows x, dout, dx;  // dx may be absent
  const float* weight = nullptr;
  float* rstd = nullptr;  // scratch [rows]; only where dweight is wanted
  int64_t rows = 0, width = 0;
  float eps = 0.0f;
};
// dx += …, and rstd if it is given.
void LaunchRmsNormGrad(const RmsNormGradParams& params, cudaStream_t stream);

// Row chunks of the weight gradient; the scratch holds that many rows of width floats.
int64_t RmsNormGradChunks(int64_t rows);
// dweight += Σ_rows dout·x·rstd: sums of chunks of rows in order, then of the chunks in order.
void LaunchRmsNormWeightGrad(const RmsNormGradParams& params, float* partials, float* dweight, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_NORM_LAUNCH_H_
