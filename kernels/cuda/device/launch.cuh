// Checked kernel launches, with as much dynamic shared memory as the kernel needs.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {

// Above 48 KiB, of which kernels declare up to 24 themselves, a kernel must be allowed its shared memory first, once
// per device; the call is cheap, so it is made every time.
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

// How kernels that begin with WaitForPreviousKernel (device/async_copy.cuh) are launched: set up while the kernel
// before them drains. `cluster` blocks run together; more than 8 must be allowed first, as shared memory must.
class EarlyLaunch {
 public:
  EarlyLaunch(dim3 blocks, dim3 cluster, int threads, int shared_bytes, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim.x = cluster.x;
    attributes_[1].val.clusterDim.y = cluster.y;
    attributes_[1].val.clusterDim.z = cluster.z;
    config_.gridDim = blocks;
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = attributes_;
    config_.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;

  // As the function below, for this launch.
  void PreferShared() {
    cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
    attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }

  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  cudaLaunchAttribute attributes_[3];
  cudaLaunchConfig_t config_ = {};
};

template <typename... Params>
cudaError_t AllowCluster(void (*kernel)(Params...), dim3 cluster) {
  if (cluster.x * cluster.y * cluster.z <= 8) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// A multiprocessor changes how much of its memory is shared memory only when it is idle: kernels that are to lie beside
// those before and after them ask for the most.
template <typename... Params>
void PreferShared(void (*kernel)(Params...)) {
  STILLHOUSE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                             cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared));
}

template <typename... Params, typename... Args>
void LaunchClustersEarly(void (*kernel)(Params...), dim3 blocks, dim3 cluster, int threads, int shared_bytes,
                         cudaStream_t stream, const Args&... args) {
  AllowShared(kernel, shared_bytes);
  STILLHOUSE_CUDA_CHECK(AllowCluster(kernel, cluster));
  const EarlyLaunch launch(blocks, cluster, threads, shared_bytes, stream);
  STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&launch.config(), kernel, Params(args)...));
}

template <typename... Params, typename... Args>
void LaunchKernelEarly(void (*kernel)(Params...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                       const Args&... args) {
  LaunchClustersEarly(kernel, blocks, dim3(1), threads, shared_bytes, stream, args...);
}

// Blocks of a kernel that the current device holds at once in clusters of this size; 0: it has no such clusters.
template <typename... Params>
int BlocksAtOnce(void (*kernel)(Params...), int threads, int shared_bytes, int cluster) {
  AllowShared(kernel, shared_bytes);
  if (cluster == 1) {
    int device = 0, multiprocessors = 0, blocks = 0;
    STILLHOUSE_CUDA_CHECK(cudaGetDevice(&device));
    STILLHOUSE_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    STILLHOUSE_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void*>(kernel),
                                                                        threads, static_cast<size_t>(shared_bytes)));
    return blocks * multiprocessors;
  }
  const dim3 size(static_cast<unsigned>(cluster));
  const EarlyLaunch launch(size, size, threads, shared_bytes, nullptr);
  int clusters = 0;
  if (AllowCluster(kernel, size) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config()) != cudaSuccess) {
    cudaGetLastError();  // an answer, not an error
    return 0;
  }
  return clusters * cluster;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_LAUNCH_CUH_
