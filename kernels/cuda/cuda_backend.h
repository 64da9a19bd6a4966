// The CUDA backend. Built with the toolkit (kernels/cuda) or, without it, as a stub that says so (kernels/no_cuda).
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/ops/context.h"

namespace stillhouse {

// What quantised weights are decoded to when they are prepared (once, at load). Weights that are f32 or half-precision
// in the file stay as they are.
enum class CudaStorage : uint8_t {
  kF32,   // the exact decoded values; products in fp32 (no TF32), as on the CPU
  kBf16,  // rounded to bf16, and the rows they meet too; sums in fp32
};

struct CudaBackendOptions {
  int device = 0;
  int threads = 0;  // host threads
  CudaStorage storage = CudaStorage::kF32;
};

// UNIMPLEMENTED in a build without CUDA; NOT_FOUND, naming what is missing, where there is no usable GPU or driver.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_BACKEND_H_
