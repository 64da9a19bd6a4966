// The CUDA backend. Built with the toolkit (kernels/cuda) or, without it, as a stub that says so (kernels/no_cuda).
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/ops/context.h"

namespace stillhouse {

struct CudaBackendOptions {
  int device = 0;
  int threads = 0;  // host threads
};

// UNIMPLEMENTED in a build without CUDA; NOT_FOUND, naming what is missing, where there is no usable GPU or driver.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_
