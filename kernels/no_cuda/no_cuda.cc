#include "absl/status/status.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/plan/tune.h"

namespace stillhouse {

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions&) {
  return absl::UnimplementedError("this build has no CUDA: configure with -DSTILLHOUSE_CUDA=ON, or run on the CPU");
}

absl::StatusOr<PlanBook> TunePlans(int, const std::vector<TuneProduct>&,
                                   const std::function<void(const std::string&)>&) {
  return absl::UnimplementedError(
      "plans are found by timing kernels on an NVIDIA GPU, and this build has no CUDA: configure with "
      "-DSTILLHOUSE_CUDA=ON on a machine with the CUDA toolkit");
}

}  // namespace stillhouse
