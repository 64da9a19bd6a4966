// The small kernels between the products of a layer (kernels/ops/fused.h).
#ifndef STILLHOUSE_KERNELS_CUDA_FUSED_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_FUSED_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/attention_launch.h"

namespace stillhouse::cuda {

// bf16 rows, contiguous: x · rsqrt(mean(x²) + eps) · weight. Where there are slices of a product, they are added to x
// first, in their order.
struct NormToBf16Params {
  float* x = nullptr;
  int64_t x_stride = 0;
  const float* weight = nullptr;
  float eps = 0.0f;
  int64_t rows = 0, width = 0;
  void* out = nullptr;
  const float* slices = nullptr;  // [splits, rows, width]; or null
  int splits = 0;
  int multiprocessors = 0;
};
void LaunchNormToBf16(const NormToBf16Params& params, cudaStream_t stream);

// out[r, c] = silu(x[r, c]) · x[r, width + c], x [rows, 2·width] contiguous; bf16. `width` is a multiple of 4, of 8
// where x is bf16 too.
void LaunchSwiGluToBf16(const void* x, bool x_bf16, int64_t rows, int64_t width, void* out, cudaStream_t stream);

// out[r] = cos of all pairs' angles, then sin, times scale.
inline constexpr int kMaxAnglePairs = 256;
struct RopeAnglesParams {
  const int32_t* positions = nullptr;
  float* out = nullptr;
  int64_t rows = 0;
  int pairs = 0;
  float scale = 1.0f;
  double inv_freq[kMaxAnglePairs] = {};
};
void LaunchRopeAngles(const RopeAnglesParams& params, cudaStream_t stream);

// One row of qkv [rows, heads + 2·kv_heads, width] after the other, in place; keys and values to their places.
struct QkvRopeParams {
  float* qkv = nullptr;
  const float* slices = nullptr;  // [splits, …]: what adds up, in their order, to the rows of `qkv` before; or null
  int splits = 0;
  void* qkv_bf16 = nullptr;  // the rows instead of `qkv`: CanTurnBf16, to pages of bf16; all multiples of 16 bytes
  int64_t rows = 0;
  int heads = 0, kv_heads = 0, width = 0;
  const float* q_norm = nullptr;  // or null
  const float* k_norm = nullptr;
  float eps = 0.0f;
  const float* angles = nullptr;
  int pairs = 0;
  bool interleaved = false;
  const int64_t* places = nullptr;            // [rows, 2] addresses; or null
  int64_t layer_offset = 0, head_stride = 0;  // elements
  bool kv_bf16 = false;
};
void LaunchQkvRope(const QkvRopeParams& params, cudaStream_t stream);

// Distances of a run's layers, in elements.
struct AttentionRunLayers {
  int64_t k = 0, v = 0, beta = 0;
};
// to[l · runs + i] = base[i], moved on by l layers.
void LaunchLayRuns(const AttentionRun* base, const AttentionRunLayers* layers, int64_t runs, int64_t layer_count,
                   int element_bytes, AttentionRun* to, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_FUSED_LAUNCH_H_
