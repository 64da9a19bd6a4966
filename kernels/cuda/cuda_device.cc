#include "kernels/cuda/cuda_device.h"

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {
namespace {

constexpr size_t kStagingBytes = size_t{4} << 20;

}  // namespace

Device::Device(int ordinal, cudaStream_t stream, CudaStorage storage, const cudaDeviceProp& properties)
    : ordinal_(ordinal),
      stream_(stream),
      storage_(storage),
      multiprocessors_(properties.multiProcessorCount),
      shared_bytes_per_block_(static_cast<int>(properties.sharedMemPerBlockOptin)),
      staging_(stream, kStagingBytes) {}

Device::~Device() {
  Use();
  STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  if (cublas_) STILLHOUSE_CUBLAS_CHECK(cublasDestroy(cublas_));
}

cudaStream_t Device::Use() {
  STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
  return stream_;
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
  return buffer;
}

}  // namespace stillhouse::cuda
