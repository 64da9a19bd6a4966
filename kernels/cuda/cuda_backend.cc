#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/copy_launch.h"
#include "kernels/cuda/copy_streams.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/recording.h"
#include "kernels/tensor/bounded_memory.h"

namespace stillhouse {
namespace {

constexpr size_t kGrain = size_t{2} << 20, kAlignment = 512;

// Raw device memory of one GPU. The pool above it keeps freed blocks, so that a step allocates nothing. Every user of
// the backend works on its one stream, so a block may be lent again while its last reader is still queued.
class DeviceMemory final : public RawMemory {
 public:
  explicit DeviceMemory(int ordinal) : ordinal_(ordinal) {}

  DeviceType device() const override { return DeviceType::kCuda; }

  // The driver maps whole grains; blocks of one size share one, as many as there is room for.
  size_t Granted(size_t bytes) const override {
    if (bytes > kGrain / 2) return (bytes + kGrain - 1) / kGrain * kGrain;
    const size_t aligned = std::max<size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
    return kGrain / (kGrain / aligned) / kAlignment * kAlignment;
  }

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

// Destroyed after everything that uses it.
class OwnedStream {
 public:
  explicit OwnedStream(cudaStream_t stream) : stream_(stream) {}
  ~OwnedStream() { STILLHOUSE_CUDA_CHECK(cudaStreamDestroy(stream_)); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaBackendOptions& options, const cudaDeviceProp& properties, cudaStream_t stream, int threads)
      : name_(absl::StrCat("cuda ", properties.name, options.storage == CudaStorage::kBf16 ? " bf16" : "")),
        stream_(stream),
        threads_(threads),
        memory_(std::make_shared<BoundedMemory>(std::make_shared<DeviceMemory>(options.device))),
        pinned_(std::make_shared<cuda::PinnedMemory>(options.device)),
        pool_(memory_, properties.totalGlobalMem / 2, /*keeps=*/false, pinned_),
        recording_pool_(memory_, SIZE_MAX, /*keeps=*/true, pinned_),
        device_(options.device, stream, options.storage, properties, &pool_),
        copies_(device_) {
    recording_pool_.SetReclaimer([this](size_t bytes) { return pool_.Reclaim(bytes); });
  }

  // Buffers may outlive the backend: the pool's state gives them back to the driver, which needs no stream.
  ~CudaBackend() override {
    device_.Use();
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

  DeviceType device() const override { return DeviceType::kCuda; }
  const char* name() const override { return name_.c_str(); }
  const KernelTable& kernels() const override { return cuda::Kernels(); }
  const FusedKernels& fused() const override { return cuda::Fused(); }
  BufferPool& pool() override {
    const cuda::Recording* recording = cuda::CurrentRecording(&device_);
    return recording ? *recording->pool : pool_;
  }
  ThreadPool& threads() override { return threads_; }
  void* stream() override { return static_cast<cudaStream_t>(stream_); }
  std::unique_ptr<RecordedWork> Record(const std::function<void()>& work) override {
    return cuda::RecordWork(device_, recording_pool_, work);
  }

  // The host bytes are taken over before this returns; kernels that follow on the stream see them on the device.
  void Upload(const void* host, const Tensor& tensor) override {
    STILLHOUSE_CHECK(tensor.contiguous()) << tensor.DebugString();
    device_.Use();
    device_.staging().Copy(tensor.raw(), host, static_cast<size_t>(tensor.bytes()));
    if (cuda::Recording* recording = cuda::CurrentRecording(&device_)) recording->constants.push_back(tensor.buffer());
  }

  void Download(const Tensor& tensor, void* host) override {
    STILLHOUSE_CHECK(tensor.contiguous()) << tensor.DebugString();
    if (tensor.bytes() == 0) return;
    STILLHOUSE_CHECK(!cuda::CurrentRecording(&device_)) << "a recording returns nothing to the host";
    const cudaStream_t stream = device_.Use();
    STILLHOUSE_CUDA_CHECK(
        cudaMemcpyAsync(host, tensor.raw(), static_cast<size_t>(tensor.bytes()), cudaMemcpyDeviceToHost, stream));
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

  void Copy(const Tensor& from, const Tensor& to) override {
    STILLHOUSE_CHECK(from.shape() == to.shape() && from.dtype() == to.dtype())
        << from.DebugString() << " -> " << to.DebugString();
    STILLHOUSE_CHECK(from.device() == DeviceType::kCuda && to.device() == DeviceType::kCuda);
    if (from.elements() == 0) return;
    const cudaStream_t stream = device_.Use();
    if (from.contiguous() && to.contiguous()) {
      STILLHOUSE_CUDA_CHECK(
          cudaMemcpyAsync(to.raw(), from.raw(), static_cast<size_t>(from.bytes()), cudaMemcpyDeviceToDevice, stream));
      return;
    }
    STILLHOUSE_CHECK(!IsQuantized(from.dtype()) && from.rank() <= cuda::kMaxCopyRank) << from.DebugString();
    cuda::CopyParams params;
    params.from = from.raw();
    params.to = to.raw();
    params.elements = from.elements();
    params.element_bytes = static_cast<int>(BlockBytes(from.dtype()));
    params.rank = from.rank();
    for (int i = 0; i < from.rank(); ++i) {
      params.dims[i] = from.dim(i);
      params.from_strides[i] = from.stride(i);
      params.to_strides[i] = to.stride(i);
    }
    cuda::LaunchCopy(params, stream);
  }

  void Zero(const Tensor& tensor) override {
    const cudaStream_t stream = device_.Use();
    STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(tensor.buffer()->data(), 0, tensor.buffer()->bytes(), stream));
  }

  std::shared_ptr<RawMemory> copy_memory() override { return pinned_; }
  std::unique_ptr<PendingCopy> StartCopy(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to,
                                         size_t bytes) override {
    return copies_.Start(std::move(from), std::move(to), bytes);
  }

  void LimitMemory(int64_t bytes) override { memory_->SetLimit(bytes); }
  MemoryUse memory() override {
    device_.Use();
    size_t free = 0, total = 0;
    STILLHOUSE_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    MemoryUse use;
    use.used = static_cast<int64_t>(total - free);
    use.free = static_cast<int64_t>(free);
    use.taken = memory_->taken();
    use.cached = static_cast<int64_t>(pool_.cached_bytes() + recording_pool_.cached_bytes());
    use.overflowed = static_cast<int64_t>(pool_.overflowed_bytes() + recording_pool_.overflowed_bytes());
    if (memory_->limit() != BoundedMemory::kNoLimit) use.limit = memory_->limit();
    return use;
  }

  void Synchronize() override { STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(device_.Use())); }

  cuda::Device& cuda_device() { return device_; }

 private:
  std::string name_;
  OwnedStream stream_;
  ThreadPool threads_;
  const std::shared_ptr<BoundedMemory> memory_;
  const std::shared_ptr<cuda::PinnedMemory> pinned_;
  BufferPool pool_;
  BufferPool recording_pool_;  // never gives a block back while the backend lives: recorded launches name its addresses
  cuda::Device device_;
  cuda::CopyStreams copies_;
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
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(options, properties, stream, threads));
}

namespace cuda {

Device& DeviceOf(Backend& backend) {
  auto* cuda = dynamic_cast<CudaBackend*>(&backend);
  STILLHOUSE_CHECK(cuda != nullptr) << "a CUDA kernel ran on " << backend.name();
  return cuda->cuda_device();
}

}  // namespace cuda

}  // namespace stillhouse
