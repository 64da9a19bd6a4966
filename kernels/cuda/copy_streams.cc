#include "kernels/cuda/copy_streams.h"

#include <utility>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {
namespace {

class StreamCopy final : public PendingCopy {
 public:
  StreamCopy(Device& device, cudaStream_t stream, std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to)
      : device_(device), from_(std::move(from)), to_(std::move(to)) {
    // Those who wait sleep: a query's thread has no business on a processor meanwhile.
    STILLHOUSE_CUDA_CHECK(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming | cudaEventBlockingSync));
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(done_, stream));
  }

  ~StreamCopy() override {
    Wait();
    STILLHOUSE_CUDA_CHECK(cudaEventDestroy(done_));
  }

  void Wait() override {
    device_.Use();
    STILLHOUSE_CUDA_CHECK(cudaEventSynchronize(done_));
  }

 private:
  Device& device_;
  const std::shared_ptr<Buffer> from_, to_;
  cudaEvent_t done_ = nullptr;
};

}  // namespace

void* PinnedMemory::Allocate(size_t bytes) {
  STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
  void* data = nullptr;
  if (cudaMallocHost(&data, bytes) == cudaSuccess) return data;
  cudaGetLastError();  // not sticky: the caller does without
  return nullptr;
}

void PinnedMemory::Free(void* data, size_t) {
  STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
  STILLHOUSE_CUDA_CHECK(cudaFreeHost(data));
}

CopyStreams::~CopyStreams() {
  device_.Use();
  for (cudaStream_t stream : {up_, down_}) {
    if (!stream) continue;
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
    STILLHOUSE_CUDA_CHECK(cudaStreamDestroy(stream));
  }
}

std::unique_ptr<PendingCopy> CopyStreams::Start(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to,
                                                size_t bytes) {
  STILLHOUSE_CHECK(from->device() != to->device()) << "a copy between host and device";
  STILLHOUSE_CHECK(bytes <= from->bytes() && bytes <= to->bytes()) << bytes;
  STILLHOUSE_CHECK(!CurrentRecording(&device_)) << "a copy beside a recording";
  device_.Use();
  const bool up = to->device() == DeviceType::kCuda;
  cudaEvent_t asked_for = nullptr;
  STILLHOUSE_CUDA_CHECK(cudaEventCreateWithFlags(&asked_for, cudaEventDisableTiming));
  std::unique_ptr<PendingCopy> copy;
  {
    // Together, so that a copy's event is right behind it.
    std::lock_guard<std::mutex> lock(mutex_);
    cudaStream_t& stream = up ? up_ : down_;
    if (!stream) STILLHOUSE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(asked_for, device_.stream()));
    STILLHOUSE_CUDA_CHECK(cudaStreamWaitEvent(stream, asked_for, 0));
    STILLHOUSE_CUDA_CHECK(
        cudaMemcpyAsync(to->data(), from->data(), bytes, up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
    copy = std::make_unique<StreamCopy>(device_, stream, std::move(from), std::move(to));
  }
  STILLHOUSE_CUDA_CHECK(cudaEventDestroy(asked_for));  // freed by the driver once it passed
  return copy;
}

}  // namespace stillhouse::cuda
