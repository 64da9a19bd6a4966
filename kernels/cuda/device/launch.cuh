// Checked kernel launches, with as much dynamic shared memory as the kernel needs.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {

// Above 48 KiB, of which kernels declare up to 24 themselves, a kernel must be allowed its shared memory first, once per
// device; the call is cheap, so it is made every time.
template <typename... Params>
void AllowShared(void (*kernel)(Params...), int shared_bytes) {
  if (shared_bytes <= 24 * 1024) return;
  STILLHOUSE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
}

template <typename... Params, typename... Args>
void LaunchKernel(void (*kernel)(Params...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                  const Args&... args) {
  AllowShared(kernel, shared_bytes);
  kernel<<<blocks, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), stream>>>(args...);
  STILLHOUSE_CUDA_LAUNCHED();
}

// The same for a kernel that begins with WaitForPreviousKernel (device/async_copy.cuh), in clusters of blocks: it is
// set up while the kernel before it drains.
template <typename... Params, typename... Args>
void LaunchClustersEarly(void (*kernel)(Params...), dim3 blocks, dim3 cluster, int threads, int shared_bytes,
                         cudaStream_t stream, const Args&... args) {
  AllowShared(kernel, shared_bytes);
  const unsigned size = cluster.x * cluster.y * cluster.z;
  if (size > 8) {
    STILLHOUSE_CUDA_CHECK(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = size > 1 ? 2 : 1;
  STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}
template <typename... Params, typename... Args>
void LaunchKernelEarly(void (*kernel)(Params...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                       const Args&... args) {
  LaunchClustersEarly(kernel, blocks, dim3(1), threads, shared_bytes, stream, args...);
}

// Blocks of a kernel that one multiprocessor of the current device holds at once; at least 1.
template <typename... Params>
int BlocksPerMultiprocessor(void (*kernel)(Params...), int threads, int shared_bytes) {
  AllowShared(kernel, shared_bytes);
  int blocks = 0;
  STILLHOUSE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void*>(kernel),
                                                                      threads, static_cast<size_t>(shared_bytes)));
  return blocks > 0 ? blocks : 1;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_
