#include "absl/status/status.h"
#include "kernels/cuda/cuda_backend.h"

namespace stillhouse {

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions&) {
  return absl::UnimplementedError("this build has no CUDA: configure with -DSTILLHOUSE_CUDA=ON, or run on the CPU");
}

}  // namespace stillhouse
