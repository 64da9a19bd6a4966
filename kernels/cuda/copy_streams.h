// Copies between the device and page-locked host memory that go on beside the kernels.
#ifndef STILLHOUSE_KERNELS_CUDA_COPY_STREAMS_H_
#define STILLHOUSE_KERNELS_CUDA_COPY_STREAMS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

#include "kernels/cuda/cuda_device.h"
#include "kernels/tensor/device.h"

namespace stillhouse::cuda {

// Host memory that the device's copy engines reach by themselves.
class PinnedMemory final : public RawMemory {
 public:
  explicit PinnedMemory(int ordinal) : ordinal_(ordinal) {}
  DeviceType device() const override { return DeviceType::kCpu; }
  void* Allocate(size_t bytes) override;  // null where the host will not lock as much
  void Free(void* data, size_t bytes) override;

 private:
  const int ordinal_;
};

// A stream for each direction, made at first use: GPUs have a copy engine for each. Owned by the backend, which
// outlives every copy. Any thread.
class CopyStreams {
 public:
  explicit CopyStreams(Device& device) : device_(device) {}
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  // TensorDevice::StartCopy. The copy waits for what the device's stream has been asked for: a block that the pool
  // lends again may have readers there. The device's stream never waits for the copy.
  std::unique_ptr<PendingCopy> Start(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to, size_t bytes);

 private:
  Device& device_;
  std::mutex mutex_;
  cudaStream_t up_ = nullptr, down_ = nullptr;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_COPY_STREAMS_H_
