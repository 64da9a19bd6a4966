#include "kernels/ops/matmul.h"

#include "kernels/cuda/cuda_kernels.h"

namespace stillhouse::cuda {

void PrepareWeight(Backend& backend, const PrepareWeightArgs& args) {
  if (args.weight.device() == DeviceType::kCuda) {
    *args.out = args.weight;
    return;
  }
  *args.out = Tensor::Empty(backend.pool(), args.weight.dtype(), args.weight.shape());
  backend.Upload(args.weight.raw(), *args.out);
}

}  // namespace stillhouse::cuda
