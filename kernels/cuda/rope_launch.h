// Launch of the rotary embedding.
#ifndef STILLHOUSE_KERNELS_CUDA_ROPE_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_ROPE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// Kernel parameters carry the frequencies: no table to upload, to keep, or to race for.
inline constexpr int kMaxRopePairs = 256;

struct RopeParams {
  const float* from = nullptr;
  int64_t from_row = 0, from_head = 0;  // strides
  float* to = nullptr;                  // may be `from`
  int64_t to_row = 0, to_head = 0;
  const int32_t* positions = nullptr;  // [rows]
  int64_t rows = 0, heads = 0, width = 0;
  int pairs = 0;
  bool interleaved = false;
  bool add = false;    // to += …
  float sign = 1.0f;   // of the sine
  float scale = 1.0f;  // of sine and cosine
  double inv_freq[kMaxRopePairs] = {};
};
void LaunchRope(const RopeParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ROPE_LAUNCH_H_
