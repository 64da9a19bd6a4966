// Launches recorded as a CUDA graph.
#ifndef STILLHOUSE_KERNELS_CUDA_RECORDING_H_
#define STILLHOUSE_KERNELS_CUDA_RECORDING_H_

#include <functional>
#include <memory>

#include "kernels/cuda/cuda_device.h"

namespace stillhouse::cuda {

// Backend::Record. The graph runs on the device's stream; its buffers come from `pool`, which gives nothing back before
// the last graph is gone: graphs run one after the other, so that they may share it.
std::unique_ptr<RecordedWork> RecordWork(Device& device, BufferPool& pool, const std::function<void()>& work);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_RECORDING_H_
