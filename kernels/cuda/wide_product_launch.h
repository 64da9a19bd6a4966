// Products of tens of rows with a large bf16 weight, bound by reading the weight once.
#ifndef STILLHOUSE_KERNELS_CUDA_WIDE_PRODUCT_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_WIDE_PRODUCT_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/decompose_k_launch.h"

namespace stillhouse::cuda {

inline constexpr int kWideRows = 128;  // of x, at most
// Of the weight's rows, in a tile.
inline constexpr int kLeastWideTile = 64, kMostWideTile = 256, kWideTileStep = 32;

// kWide, of a weight (DecomposeKShape::constant_b) that lies by columns: whether it can run it, and the launch. Without
// partials the one slice finishes elements.
bool CanWide(const DecomposeKShape& shape, const DecomposeKPlan& plan);
void LaunchWide(const DecomposeKShape& shape, const DecomposeKPlan& plan, float* partials, cudaStream_t stream);

// The same to gates, K as a whole: out[r, c] = bf16(silu(y[r, c]) · y[r, n / 2 + c]) of the product y, `out`
// contiguous; n is a multiple of 4.
void LaunchWideGates(const DecomposeKShape& shape, const DecomposeKPlan& plan, void* out, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_WIDE_PRODUCT_LAUNCH_H_
