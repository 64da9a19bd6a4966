// What the CUDA kernels' host side needs of its backend, beside the pool: the stream, small uploads, cuBLAS.
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_DEVICE_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_DEVICE_H_

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/staging.h"
#include "kernels/ops/context.h"
#include "kernels/plan/plan_book.h"

#define STILLHOUSE_CUBLAS_CHECK(call)                                       \
  do {                                                                      \
    const cublasStatus_t stillhouse_cublas_status_ = (call);                \
    STILLHOUSE_CHECK(stillhouse_cublas_status_ == CUBLAS_STATUS_SUCCESS)    \
        << #call << ": " << cublasGetStatusName(stillhouse_cublas_status_); \
  } while (false)

namespace stillhouse::cuda {

class AttentionState;
class LibraryTiles;
class Device;

// What a thread records its launches into (Backend::Record): its launches go to the recording's stream, its buffers
// come from the recording's pool, and uploads are the recording's constants.
struct Recording {
  Device* device = nullptr;
  cudaStream_t stream = nullptr;
  BufferPool* pool = nullptr;
  std::vector<std::shared_ptr<Buffer>> constants;
};
// The recording that the calling thread makes on this device; null: none.
Recording* CurrentRecording(const Device* device);

// For the length of a scope.
class RecordingScope {
 public:
  explicit RecordingScope(Recording* recording);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;
};

// One GPU and its one stream. Owned by the CUDA backend. Any thread: everything that is enqueued here is ordered by the
// stream, so a block of the pool may be lent again while its last reader is still queued.
class Device {
 public:
  // The stream stays the caller's, who destroys it after this. cuBLAS works in blocks of `pool`, which outlives this.
  Device(int ordinal, cudaStream_t stream, CudaStorage storage, const cudaDeviceProp& properties, BufferPool* pool);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Makes this GPU the calling thread's current one (a property of the thread) and returns the stream: a thread that
  // records has its own.
  cudaStream_t Use();
  // The stream that recordings run on.
  cudaStream_t stream() const { return stream_; }

  int ordinal() const { return ordinal_; }
  CudaStorage storage() const { return storage_; }
  int multiprocessors() const { return multiprocessors_; }
  // Shared memory that one block may ask for (cudaFuncAttributeMaxDynamicSharedMemorySize).
  int shared_bytes_per_block() const { return shared_bytes_per_block_; }
  // As the driver names it.
  const std::string& name() const { return name_; }
  // The plans for this GPU that were in use when the backend was made.
  PlanTable& plans() { return plans_; }
  PinnedRing& staging() { return staging_; }
  AttentionState& attention() { return *attention_; }
  LibraryTiles& library_tiles() { return *library_tiles_; }
  // What blocks of one launch at a time leave for each other (device/exchange.cuh): kExchangeBytes.
  void* exchange() const { return exchange_->data(); }

  // Runs body(handle) with the cuBLAS handle on the stream; a handle serves one thread at a time. Recordings have a
  // handle of their own, whose workspace stays where it is.
  template <typename Body>
  void WithCublas(const Body& body) {
    const cudaStream_t stream = Use();
    std::lock_guard<std::mutex> lock(cublas_mutex_);
    body(Cublas(CurrentRecording(this) ? &recording_cublas_ : &cublas_, stream));
  }

 private:
  // Made at first use. A workspace of our own counts as memory that was taken, and stays where it is.
  struct CublasState {
    cublasHandle_t handle = nullptr;
    cudaStream_t stream = nullptr;
    std::shared_ptr<Buffer> workspace;
  };
  cublasHandle_t Cublas(CublasState* state, cudaStream_t stream);

  int ordinal_;
  cudaStream_t stream_;
  CudaStorage storage_;
  int multiprocessors_;
  int shared_bytes_per_block_;
  std::string name_;
  PlanTable plans_;
  PinnedRing staging_;
  std::unique_ptr<AttentionState> attention_;
  std::unique_ptr<LibraryTiles> library_tiles_;
  BufferPool* pool_;
  std::shared_ptr<Buffer> exchange_;
  std::mutex cublas_mutex_;
  CublasState cublas_, recording_cublas_;
};

// The device behind a backend; a CHECK failure for any other backend.
Device& DeviceOf(Backend& backend);
inline cudaStream_t StreamOf(Backend& backend) { return DeviceOf(backend).Use(); }

// A device copy of host bytes, in stream order and without waiting for the device: the bytes go through the pinned ring
// and may change as soon as the call returns. For the small tables that ops carry (segments, sequences, targets).
std::shared_ptr<Buffer> UploadAsync(Backend& backend, const void* bytes, size_t size);
template <typename T>
std::shared_ptr<Buffer> UploadAsync(Backend& backend, const std::vector<T>& values) {
  return UploadAsync(backend, values.data(), values.size() * sizeof(T));
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_DEVICE_H_
