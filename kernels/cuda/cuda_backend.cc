#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_kernels.h"

namespace stillhouse {
namespace {

// Raw device memory of one GPU. The pool above it keeps freed blocks, so that a step allocates nothing. Every user of
// the backend works on its one stream, so a block may be lent again while its last reader is still queued.
class DeviceMemory final : public RawMemory {
 public:
  explicit DeviceMemory(int ordinal) : ordinal_(ordinal) {}

  DeviceType device() const override { return DeviceType::kCuda; }

  void* Allocate(size_t bytes) override {
    STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) == cudaSuccess) return data;
    cudaGetLastError();  // running out of memory is not sticky: the pool trims itself and asks again
    return nullptr;
  }

  void Free(void* data, size_t) override {
    STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_));
    STILLHOUSE_CUDA_CHECK(cudaFree(data));
  }

 private:
  int ordinal_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int ordinal, std::string name, cudaStream_t stream, int threads)
      : ordinal_(ordinal),
        name_(std::move(name)),
        stream_(stream),
        threads_(threads),
        pool_(std::make_shared<DeviceMemory>(ordinal)) {}

  ~CudaBackend() override {
    SetDevice();
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
    STILLHOUSE_CUDA_CHECK(cudaStreamDestroy(stream_));
  }

  DeviceType device() const override { return DeviceType::kCuda; }
  const char* name() const override { return name_.c_str(); }
  const KernelTable& kernels() const override { return cuda::Kernels(); }
  BufferPool& pool() override { return pool_; }
  ThreadPool& threads() override { return threads_; }
  void* stream() override { return stream_; }

  void Upload(const void* host, const Tensor& device) override {
    Copy(device.raw(), host, device, cudaMemcpyHostToDevice);
  }

  void Download(const Tensor& device, void* host) override { Copy(host, device.raw(), device, cudaMemcpyDeviceToHost); }

  void Zero(const Tensor& tensor) override {
    SetDevice();
    STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(tensor.buffer()->data(), 0, tensor.buffer()->bytes(), stream_));
  }

  void Synchronize() override {
    SetDevice();
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

 private:
  // The current device is a property of the calling thread.
  void SetDevice() { STILLHOUSE_CUDA_CHECK(cudaSetDevice(ordinal_)); }

  void Copy(void* to, const void* from, const Tensor& device, cudaMemcpyKind kind) {
    STILLHOUSE_CHECK(device.contiguous()) << device.DebugString();
    if (device.bytes() == 0) return;
    SetDevice();
    STILLHOUSE_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(device.bytes()), kind, stream_));
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  int ordinal_;
  std::string name_;
  cudaStream_t stream_;
  ThreadPool threads_;
  BufferPool pool_;
};

absl::Status NoGpu(const std::string& what, cudaError_t error) {
  return absl::NotFoundError(absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return NoGpu("no usable GPU or driver; run on the CPU, or install the NVIDIA driver", error);
  }
  if (options.device < 0 || options.device >= count) {
    return absl::NotFoundError(absl::StrCat("there is no GPU ", options.device, ": this machine has ", count));
  }
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, options.device); error != cudaSuccess) {
    return NoGpu(absl::StrCat("GPU ", options.device, " cannot be read"), error);
  }
  if (const cudaError_t error = cudaSetDevice(options.device); error != cudaSuccess) {
    return NoGpu(absl::StrCat("GPU ", options.device, " cannot be used"), error);
  }
  cudaStream_t stream = nullptr;
  if (const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); error != cudaSuccess) {
    return NoGpu(absl::StrCat("GPU ", options.device, " (", properties.name, ") gives no stream"), error);
  }
  const int threads =
      options.threads > 0 ? options.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return std::unique_ptr<Backend>(
      std::make_unique<CudaBackend>(options.device, absl::StrCat("cuda ", properties.name), stream, threads));
}

}  // namespace stillhouse
