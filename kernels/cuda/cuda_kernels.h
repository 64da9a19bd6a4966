// The CUDA kernels that exist, as named in ops/op_list.inc. What the table lacks, MissingOps names, and a model that
// needs it does not load on this backend.
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_

#include "kernels/ops/kernel_table.h"

namespace stillhouse::cuda {

// Copies a host weight to the device, as it is.
void PrepareWeight(Backend& backend, const PrepareWeightArgs& args);

const KernelTable& Kernels();

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_
