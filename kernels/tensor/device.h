// What tensors need of the device that their memory is on.
#ifndef STILLHOUSE_KERNELS_TENSOR_DEVICE_H_
#define STILLHOUSE_KERNELS_TENSOR_DEVICE_H_

#include "kernels/tensor/buffer.h"
#include "kernels/tensor/tensor.h"

namespace stillhouse {

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
  // Bytes in use and free on the device as its driver counts them; on the host what the pool holds, and −1.
  struct MemoryUse {
    int64_t used = 0;
    int64_t free = -1;
  };
  virtual MemoryUse memory() { return {static_cast<int64_t>(pool().lent_bytes() + pool().cached_bytes()), -1}; }
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_DEVICE_H_
