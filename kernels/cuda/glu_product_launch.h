// Gates of many rows: the product with gate_up, which is never written, and SwiGLU of its halves, in one launch.
#ifndef STILLHOUSE_KERNELS_CUDA_GLU_PRODUCT_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_GLU_PRODUCT_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// out[r, c] = silu(x[r] · weight[c]) · (x[r] · weight[width + c]), all bf16 and contiguous: x [rows, k], weight
// [2·width, k], out [rows, width]; sums in fp32.
struct GluProductParams {
  const void* x = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
  int64_t rows = 0, width = 0, k = 0;
};
bool CanGluProduct(const GluProductParams& params);
void LaunchGluProduct(const GluProductParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_GLU_PRODUCT_LAUNCH_H_
