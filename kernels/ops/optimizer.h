// Adam with decoupled weight decay (Loshchilov & Hutter 2019).
#ifndef STILLHOUSE_KERNELS_OPS_OPTIMIZER_H_
#define STILLHOUSE_KERNELS_OPS_OPTIMIZER_H_

#include "kernels/ops/context.h"

namespace stillhouse {

struct AdamWOptions {
  float lr = 1e-3f;
  float beta1 = 0.9f;
  float beta2 = 0.99f;
  float eps = 1e-8f;
  float weight_decay = 0.0f;
};

// In place: m = β1 m + (1−β1) g, v = β2 v + (1−β2) g², p −= lr·(m̂/(√v̂ + eps) + decay·p), with g = grad_scale·grad and
// bias correction for `step` (1 for the first). All f32 of one shape; any strides with the last dimension contiguous,
// so frozen slots are left out by passing slices.
struct AdamWArgs {
  Tensor param, grad, m, v;
  AdamWOptions options;
  int64_t step = 1;
  float grad_scale = 1.0f;  // gradient clipping by global norm
};
void AdamW(const Context& ctx, const AdamWArgs& args);

// out[0] += Σ x², in fp64 on the host side of the sum; x f32 strided, out f32 [1].
struct SumSquaresArgs {
  Tensor x, out;
};
void SumSquares(const Context& ctx, const SumSquaresArgs& args);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_OPTIMIZER_H_
