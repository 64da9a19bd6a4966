// Launches of the gather kernels. Tables of quantised blocks are decoded by quant_launch.h.
#ifndef STILLHOUSE_KERNELS_CUDA_GATHER_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_GATHER_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

struct GatherParams {
  const float* table = nullptr;
  int64_t table_rows = 0, table_stride = 0;
  const int32_t* ids = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  int64_t count = 0, width = 0;
};
// out[i] = table[ids[i]]. An id outside of the table stops the kernel (and with it the process).
void LaunchGather(const GatherParams& params, cudaStream_t stream);

struct ScatterParams {
  const int32_t* ids = nullptr;
  const float* dout = nullptr;
  int64_t dout_stride = 0;
  float* to = nullptr;
  int64_t to_stride = 0;
  int64_t count = 0, width = 0;
};
// to[ids[i]] += dout[i], those of one id in order of i.
void LaunchScatterAdd(const ScatterParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_GATHER_LAUNCH_H_
