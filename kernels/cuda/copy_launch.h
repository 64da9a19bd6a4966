// Copies between strided tensors of one GPU.
#ifndef STILLHOUSE_KERNELS_CUDA_COPY_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_COPY_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

inline constexpr int kMaxCopyRank = 6;

struct CopyParams {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t elements = 0;
  int element_bytes = 4;  // 1, 2, 4 or 8
  int rank = 0;
  int64_t dims[kMaxCopyRank] = {};
  int64_t from_strides[kMaxCopyRank] = {};  // elements
  int64_t to_strides[kMaxCopyRank] = {};
};

void LaunchCopy(const CopyParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_COPY_LAUNCH_H_
