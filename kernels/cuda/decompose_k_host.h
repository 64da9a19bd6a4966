// What decompose-K's op shares with its tuner.
#ifndef STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_
#define STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/ops/context.h"
#include "kernels/plan/plan_book.h"

namespace stillhouse::cuda {

// The product of bf16 operands by cuBLAS, with fp32 sums, to [m, n].
void ProductByLibrary(Backend& backend, const DecomposeKShape& shape, float* to);
// What plans for this product are kept under.
DecomposeKKey KeyOf(Backend& backend, const DecomposeKShape& shape, bool rows);
// The kept plan where there is one that can run it, else the one that its shape suggests.
DecomposeKPlan PlanFor(Backend& backend, const DecomposeKShape& shape, bool rows);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_
