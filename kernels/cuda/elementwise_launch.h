// Launches of the elementwise kernels.
#ifndef STILLHOUSE_KERNELS_CUDA_ELEMENTWISE_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_ELEMENTWISE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// Rows `stride` elements apart; the last dimension is contiguous.
struct Matrix {
  float* data = nullptr;
  int64_t stride = 0;
};

struct SwiGluParams {
  Matrix gate, up, out;
  int64_t rows = 0, width = 0;
};
void LaunchSwiGlu(const SwiGluParams& params, cudaStream_t stream);

struct SwiGluGradParams {
  Matrix gate, up, dout, dgate, dup;  // dgate, dup may be absent
  int64_t rows = 0, width = 0;
};
void LaunchSwiGluGrad(const SwiGluGradParams& params, cudaStream_t stream);

// out = a + b; out may be a or b.
void LaunchAdd(const float* a, const float* b, float* out, int64_t elements, cudaStream_t stream);

// to[h, i, :] = from[i, h, :] for `rows` rows.
struct CopyRowsParams {
  const void* from = nullptr;  // f32, or bf16 where …_bf16
  void* to = nullptr;
  bool from_bf16 = false, to_bf16 = false;
  int64_t rows = 0, heads = 0, width = 0;
  int64_t from_row = 0, from_head = 0, to_head = 0, to_slot = 0;  // strides
};
void LaunchCopyRows(const CopyRowsParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ELEMENTWISE_LAUNCH_H_
