// Checked CUDA calls. Includable from .cu files: no Abseil.
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_CHECK_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include "kernels/base/logging.h"

// A failed call after start-up is our bug or a broken device, and errors are sticky: the process ends with a clear log.
#define STILLHOUSE_CUDA_CHECK(call)                                          \
  do {                                                                       \
    const cudaError_t stillhouse_cuda_error_ = (call);                       \
    STILLHOUSE_CHECK(stillhouse_cuda_error_ == cudaSuccess)                  \
        << #call << ": " << cudaGetErrorName(stillhouse_cuda_error_) << ", " \
        << cudaGetErrorString(stillhouse_cuda_error_);                       \
  } while (false)

// After every kernel launch: a wrong grid, too much shared memory, or an error of earlier work that surfaces here.
#define STILLHOUSE_CUDA_LAUNCHED() STILLHOUSE_CUDA_CHECK(cudaGetLastError())

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_CHECK_H_
