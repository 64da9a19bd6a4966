#include "kernels/cuda/staging.h"

#include <cstring>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {

PinnedRing::~PinnedRing() {
  if (!base_) return;
  for (cudaEvent_t event : passed_) STILLHOUSE_CUDA_CHECK(cudaEventDestroy(event));
  STILLHOUSE_CUDA_CHECK(cudaFreeHost(base_));
}

void PinnedRing::Copy(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  const size_t room = (bytes + 63) / 64 * 64;
  if (room > half_bytes_) {
    STILLHOUSE_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!base_) {
    void* base = nullptr;
    STILLHOUSE_CUDA_CHECK(cudaMallocHost(&base, 2 * half_bytes_));
    base_ = static_cast<char*>(base);
    for (cudaEvent_t& event : passed_) {
      STILLHOUSE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  if (used_ + room > half_bytes_) {
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(passed_[half_], stream_));
    pending_[half_] = true;
    half_ = 1 - half_;
    used_ = 0;
    if (pending_[half_]) {
      STILLHOUSE_CUDA_CHECK(cudaEventSynchronize(passed_[half_]));
      pending_[half_] = false;
    }
  }
  char* slot = base_ + static_cast<size_t>(half_) * half_bytes_ + used_;
  used_ += room;
  std::memcpy(slot, host, bytes);
  STILLHOUSE_CUDA_CHECK(cudaMemcpyAsync(device, slot, bytes, cudaMemcpyHostToDevice, stream_));
}

}  // namespace stillhouse::cuda
