#include "kernels/cuda/cuda_device.h"

#include "kernels/cuda/attention_state.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/skinny_launch.h"
#include "kernels/plan/plans_in_use.h"

namespace stillhouse::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{4} << 20;
// What cuBLAS asks for on Hopper.
constexpr size_t kCublasWorkspace = size_t{32} << 20;

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

Device::Device(int ordinal, cudaStream_t stream, CudaStorage storage, const cudaDeviceProp& properties,
               BufferPool* pool)
    : ordinal_(ordinal),
      stream_(stream),
      storage_(storage),
      multiprocessors_(properties.multiProcessorCount),
      shared_bytes_per_block_(static_cast<int>(properties.sharedMemPerBlockOptin)),
      name_(properties.name),
      plans_(PlansInUse().TableFor(name_)),
      staging_(stream, kStagingBytes),
      attention_(std::make_unique<AttentionState>()),
      library_tiles_(std::make_unique<LibraryTiles>()),
      pool_(pool) {
  Use();
  STILLHOUSE_CHECK(multiprocessors_ * kSkinnyPartials <= kExchangeBytes) << multiprocessors_;
  exchange_ = pool_->Allocate(kExchangeBytes);
  STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(exchange_->data(), 0xff, kExchangeBytes, stream_));
}

Device::~Device() {
  Use();
  STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (const CublasState& state : {cublas_, recording_cublas_}) {
    if (state.handle) STILLHOUSE_CUBLAS_CHECK(cublasDestroy(state.handle));
  }
}

cudaStream_t Device::Use() {
  STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
  if (const Recording* recording = CurrentRecording(this)) return recording->stream;
  return stream_;
}

cublasHandle_t Device::Cublas(CublasState* state, cudaStream_t stream) {
  if (!state->handle) {
    STILLHOUSE_CUBLAS_CHECK(cublasCreate(&state->handle));
    // Plain fp32 for fp32 operands (no TF32), and fp32 sums for bf16 ones even where a product is split.
    STILLHOUSE_CUBLAS_CHECK(cublasSetMathMode(
        state->handle,
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    state->workspace = pool_->Allocate(kCublasWorkspace);
  }
  // Set anew for each recording: another stream may have an earlier one's address.
  if (state->stream == stream && stream == stream_) return state->handle;
  state->stream = stream;
  // A new stream forgets the workspace.
  STILLHOUSE_CUBLAS_CHECK(cublasSetStream(state->handle, stream));
  STILLHOUSE_CUBLAS_CHECK(cublasSetWorkspace(state->handle, state->workspace->data(), kCublasWorkspace));
  return state->handle;
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
