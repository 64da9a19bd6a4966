// A ring of pinned host memory through which small arrays travel to the device without a wait and without a race.
#ifndef STILLHOUSE_KERNELS_CUDA_STAGING_H_
#define STILLHOUSE_KERNELS_CUDA_STAGING_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>

namespace stillhouse::cuda {

// The ring is used half by half. When a half is full an event is recorded behind its copies, and it is used again only
// once that event has passed: by then the device is rarely behind, so the wait is free. Any thread.
class PinnedRing {
 public:
  // `bytes` of pinned memory, allocated at first use, for copies on `stream`.
  PinnedRing(cudaStream_t stream, size_t bytes) : stream_(stream), half_bytes_(bytes / 2) {}
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // Copies host bytes to device memory in stream order; the host bytes may change once this returns. Arrays larger than
  // half the ring are copied straight from where they lie, and waited for. The device must be current.
  void Copy(void* device, const void* host, size_t bytes);

 private:
  cudaStream_t stream_;
  size_t half_bytes_;
  std::mutex mutex_;
  char* base_ = nullptr;
  cudaEvent_t passed_[2] = {nullptr, nullptr};
  bool pending_[2] = {false, false};  // an event was recorded and not yet waited for
  int half_ = 0;
  size_t used_ = 0;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_STAGING_H_
