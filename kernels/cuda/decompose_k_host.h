// What decompose-K's op shares with the other products of bf16 operands, and with the tuner.
#ifndef STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_
#define STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/ops/context.h"
#include "kernels/plan/plan_book.h"

namespace stillhouse::cuda {

// What plans for this product are kept under, whatever the GPU.
DecomposeKKey KeyOf(const DecomposeKShape& shape, PlanEpilogue epilogue);

// The way of rows times a weight (bf16, B by columns) for Linear and the fused ops: the kept plan where it can run the
// product; else skinny.cu for few rows, wide_product.cu for tens of rows and a large weight, else cuBLAS.
// Otherwise than by skinny.cu an ending takes launches of its own, but for wide_product.cu's gates; those of
// kScaledRows and kTurn add slices up.
DecomposeKPlan WayOfLinear(Backend& backend, const DecomposeKShape& shape, PlanEpilogue ending);

// Whether the plan's first launch leaves slices that are still to be added up; and that launch: f32 [splits, m, n].
bool LeavesSlices(const DecomposeKPlan& plan);
Tensor RunSlices(Backend& backend, const DecomposeKShape& shape, const DecomposeKPlan& plan);

// Any way but skinny.cu. `rows` is null for the epilogues of single elements.
void RunDecomposeK(Backend& backend, const DecomposeKShape& shape, const DecomposeKPlan& plan,
                   const DecomposeKRows* rows);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_HOST_H_
