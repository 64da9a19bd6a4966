#include "kernels/ops/random_fill.h"

#include <cmath>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/random_fill_launch.h"

namespace stillhouse::cuda {

void RandomFill(Backend& backend, const RandomFillArgs& args) {
  LaunchRandomFill(args.out.raw(), args.out.dtype() == DType::kBF16, args.out.elements(), args.scale * std::sqrt(3.0f),
                   args.seed, StreamOf(backend));
}

}  // namespace stillhouse::cuda
