#include "kernels/cuda/cuda_device.h"

#include "kernels/cuda/attention_state.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/skinny_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{4} << 20;
// What cuBLAS asks for on Hopper.
constexpr size_t kRecordingWorkspace = size_t{32} << 20;

thread_local Recording* current_recording = nullptr;

}  // namespace

Recording* CurrentRecording(const Device* device) {
  return current_recording != nullptr && current_recording->device == device ? current_recording : nullptr;
}

RecordingScope::RecordingScope(Recording* recording) {
  STILLHOUSE_CHECK(current_recording == nullptr) << "a recording within a recording";
  current_recording = recording;
}

RecordingScope::~RecordingScope() { current_recording = nullptr; }

Device::Device(int ordinal, cudaStream_t stream, CudaStorage storage, const cudaDeviceProp& properties)
    : ordinal_(ordinal),
      stream_(stream),
      storage_(storage),
      multiprocessors_(properties.multiProcessorCount),
      shared_bytes_per_block_(static_cast<int>(properties.sharedMemPerBlockOptin)),
      staging_(stream, kStagingBytes) {
  Use();
  attention_ = std::make_unique<AttentionState>(stream);
  const size_t bytes = static_cast<size_t>(multiprocessors_ * kSkinnyPartials);
  STILLHOUSE_CUDA_CHECK(cudaMalloc(&skinny_partials_, bytes));
  STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(skinny_partials_, 0xff, bytes, stream_));
}

Device::~Device() {
  Use();
  STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (cublasHandle_t handle : {cublas_, recording_cublas_}) {
    if (handle) STILLHOUSE_CUBLAS_CHECK(cublasDestroy(handle));
  }
  STILLHOUSE_CUDA_CHECK(cudaFree(skinny_partials_));
  if (recording_workspace_) STILLHOUSE_CUDA_CHECK(cudaFree(recording_workspace_));
}

cudaStream_t Device::Use() {
  STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
  if (const Recording* recording = CurrentRecording(this)) return recording->stream;
  return stream_;
}

cublasHandle_t Device::CublasForRecording(cudaStream_t stream) {
  if (!recording_cublas_) {
    STILLHOUSE_CUBLAS_CHECK(cublasCreate(&recording_cublas_));
    STILLHOUSE_CUBLAS_CHECK(cublasSetMathMode(
        recording_cublas_,
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    STILLHOUSE_CUDA_CHECK(cudaMalloc(&recording_workspace_, kRecordingWorkspace));
  }
  // A new stream forgets the workspace.
  STILLHOUSE_CUBLAS_CHECK(cublasSetStream(recording_cublas_, stream));
  STILLHOUSE_CUBLAS_CHECK(cublasSetWorkspace(recording_cublas_, recording_workspace_, kRecordingWorkspace));
  return recording_cublas_;
}

cublasHandle_t Device::Cublas() {
  if (!cublas_) {
    STILLHOUSE_CUBLAS_CHECK(cublasCreate(&cublas_));
    STILLHOUSE_CUBLAS_CHECK(cublasSetStream(cublas_, stream_));
    // Plain fp32 for fp32 operands (no TF32), and fp32 sums for bf16 ones even where a product is split.
    STILLHOUSE_CUBLAS_CHECK(cublasSetMathMode(
        cublas_, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  }
  return cublas_;
}

std::shared_ptr<Buffer> UploadAsync(Backend& backend, const void* bytes, size_t size) {
  Device& device = DeviceOf(backend);
  device.Use();
  std::shared_ptr<Buffer> buffer = backend.pool().Allocate(size);
  device.staging().Copy(buffer->data(), bytes, size);
  if (Recording* recording = CurrentRecording(&device)) recording->constants.push_back(buffer);
  return buffer;
}

}  // namespace stillhouse::cuda
