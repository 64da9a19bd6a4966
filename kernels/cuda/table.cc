#include "kernels/cuda/cuda_kernels.h"

namespace stillhouse::cuda {

const KernelTable& Kernels() {
  static const KernelTable table = [] {
    KernelTable t;
    t.PrepareWeight = PrepareWeight;
    return t;
  }();
  return table;
}

}  // namespace stillhouse::cuda
