// Matrix products: a linear layer with dense or quantised weights, and a plain product for solvers.
#ifndef STILLHOUSE_KERNELS_OPS_MATMUL_H_
#define STILLHOUSE_KERNELS_OPS_MATMUL_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// out[r, n] = Σ_k x[r, k] · weight[n, k] + bias[n]. x f32 [R, K] (rows may be strided), weight [N, K] of any dtype,
// contiguous, bias f32 [N] or empty, out f32 [R, N]. Products and sums in fp32 with the weight's exact decoded values;
// quantised weights are decoded on the fly, never unpacked as a whole.
struct LinearArgs {
  Tensor x, weight, bias, out;
};
// dx += dout · weight; dweight += doutᵀ · x (f32 weights only); dbias += Σ_r dout.
struct LinearGradArgs {
  Tensor x, weight, dout, dx, dweight, dbias;
};
Tensor Linear(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias = Tensor());

// out[b] (+)= alpha · A[b] · B[b], f32. a is [B, M, K] or [M, K], b is [B, K, N] or [K, N]; any strides (transpose with
// Tensor::Transpose). Not differentiated.
struct MatMulArgs {
  Tensor a, b, out;
  float alpha = 1.0f;
  bool accumulate = false;
};
void MatMul(const Context& ctx, const MatMulArgs& args);

// Gives a backend the chance to lay a weight out for its kernels (once, at load). `*out` may be the input itself, or a
// tensor that only this backend's Linear, LinearGrad, Embedding and fused losses understand; dim(0), dim(1) stay [N,
// K].
struct PrepareWeightArgs {
  Tensor weight;
  Tensor* out = nullptr;
};
Tensor PrepareWeight(const Context& ctx, const Tensor& weight);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_MATMUL_H_
