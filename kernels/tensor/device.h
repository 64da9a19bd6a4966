// What tensors need of the device that their memory is on.
#ifndef STILLHOUSE_KERNELS_TENSOR_DEVICE_H_
#define STILLHOUSE_KERNELS_TENSOR_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/tensor/buffer.h"
#include "kernels/tensor/tensor.h"

namespace stillhouse {

// A copy between host and device that goes on beside the device's other work. It holds both blocks; its destruction
// waits for it.
class PendingCopy {
 public:
  virtual ~PendingCopy() = default;
  // Returns when the bytes are there: whatever is asked of the device or read on the host after that sees them.
  virtual void Wait() = 0;
};

// A device's memory and its copies. Work on the device happens in the order of the calls that asked for it: an upload
// is seen by what follows, a download waits for what came before.
class TensorDevice {
 public:
  virtual ~TensorDevice() = default;
  virtual DeviceType device() const = 0;
  virtual BufferPool& pool() = 0;
  // Host <-> device copies of contiguous tensors (a plain copy on the CPU). The host bytes may change, or are there,
  // when the call returns.
  virtual void Upload(const void* host, const Tensor& device) = 0;
  virtual void Download(const Tensor& device, void* host) = 0;
  // Copies between tensors of this device, of one shape and dtype, any strides, not overlapping.
  virtual void Copy(const Tensor& from, const Tensor& to) = 0;
  virtual void Zero(const Tensor& tensor) = 0;  // clears the tensor's whole buffer
  virtual void Synchronize() {}                 // waits for everything asked for so far

  // Host memory that StartCopy reads and writes without a detour (page-locked for a GPU). May have none to give.
  virtual std::shared_ptr<RawMemory> copy_memory() { return HostMemory(); }
  // Starts copying the first `bytes` between a block of the device and one of copy_memory(), either way, after
  // everything that was asked of the device so far; nothing that is asked later waits for it. Destroyed before the
  // device. On the CPU it is done at once.
  virtual std::unique_ptr<PendingCopy> StartCopy(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to,
                                                 size_t bytes);

  // Bounds what the device's pools take of it, cached blocks included: an allocation beyond that finds no memory.
  virtual void LimitMemory(int64_t bytes) = 0;
  // Bytes in use and free on the device as its driver counts them; on the host what the pool holds, and −1.
  struct MemoryUse {
    int64_t used = 0;
    int64_t free = -1;
    int64_t taken = 0;       // by the pools of this process, in the device's grains
    int64_t cached = 0;      // of that: kept for reuse
    int64_t limit = -1;      // LimitMemory's; −1: none
    int64_t overflowed = 0;  // what work has taken of the host's memory so far, where the device had none left
  };
  virtual MemoryUse memory();
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_DEVICE_H_
