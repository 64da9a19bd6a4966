// Launches of decompose-K (kernels/ops/decompose_k.h).
#ifndef STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

enum class ElementOp : uint8_t { kNone, kRelu, kSilu, kSigmoid, kScaleBias };
enum class RowOp : uint8_t { kSoftmax, kTopK, kSinkhorn };

struct Operand {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t stride_outer = 0;  // from row to row of A, from column to column of B
  int64_t stride_k = 0;
};

struct DecomposeKShape {
  Operand a, b;
  int64_t m = 0, n = 0, k = 0;
  ElementOp op = ElementOp::kNone;
  float scale = 1.0f;
  const float* bias = nullptr;  // [n] or null
  float* out = nullptr;         // [m, n]
};

struct DecomposeKRows {
  RowOp op = RowOp::kSoftmax;
  int32_t top_k = 0;
  float* top_values = nullptr;  // [m, top_k]
  int32_t* top_ids = nullptr;
  int32_t sinkhorn_n = 0, sinkhorn_rounds = 0;
  float sinkhorn_eps = 0.0f;
};

// A way to run a product: the output's tile of a block, and the slices of K. Tensor cores and clusters want bf16
// operands on both sides.
struct DecomposeKPlan {
  int tile_m = 16, tile_n = 16;
  int splits = 1;
  bool cluster = false;  // splits ≤ 16, a power of two
  bool library = false;  // the product itself is cuBLAS's
};
// Whether cuBLAS can read the operands as they lie.
bool CanUseLibrary(const DecomposeKShape& shape);
DecomposeKPlan ChooseDecomposeKPlan(const DecomposeKShape& shape, int multiprocessors, bool rows, int splits,
                                    int design);  // design: 0 any, 1 two launches, 2 a cluster
bool TakesTensorCores(const DecomposeKShape& shape);

// Partials are floats [splits, m, n]; none for a cluster.
int64_t DecomposeKScratch(const DecomposeKShape& shape, const DecomposeKPlan& plan);
// With `library`, `partials` hold the product already. `rows` is null for the epilogues of single elements.
void LaunchDecomposeK(const DecomposeKShape& shape, const DecomposeKPlan& plan, const DecomposeKRows* rows,
                      float* partials, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_
