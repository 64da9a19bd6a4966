// Products of few rows with bf16 weights, for the ops that end in one (skinny_launch.h).
#ifndef STILLHOUSE_KERNELS_CUDA_SKINNY_H_
#define STILLHOUSE_KERNELS_CUDA_SKINNY_H_

#include "kernels/cuda/skinny_launch.h"
#include "kernels/ops/fused.h"

namespace stillhouse::cuda {

// Rows (bf16) times a weight; what becomes of the product is left to be said.
SkinnyParams SkinnyOf(Backend& backend, const Tensor& x, const Tensor& weight);
// The same of rows that are still to be divided.
SkinnyParams SkinnyOf(Backend& backend, const ScaledRows& x, float eps, const Tensor& weight);
// False where the kernel does not suit.
bool RunSkinny(Backend& backend, const SkinnyParams& params);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SKINNY_H_
