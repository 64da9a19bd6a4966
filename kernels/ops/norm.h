// Root-mean-square normalisation (Zhang & Sennrich 2019), over the last dimension: of the model width, or of each head.
#ifndef STILLHOUSE_KERNELS_OPS_NORM_H_
#define STILLHOUSE_KERNELS_OPS_NORM_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// out = x · rsqrt(mean(x²) + eps) · weight. x, out f32 [..., D] with D contiguous (rows may be strided); weight f32
// [D], or empty for none. fp32 inside (sums in fp32 of at most 8 partials).
struct RmsNormArgs {
  Tensor x, weight, out;
  float eps = 1e-5f;
};
// Recomputes the row's rsqrt. dx += …, dweight += Σ_rows dout·x·rstd; an empty output is not wanted.
struct RmsNormGradArgs {
  Tensor x, weight, dout, dx, dweight;
  float eps = 1e-5f;
};
Tensor RmsNorm(const Context& ctx, const Tensor& x, const Tensor& weight, float eps);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_NORM_H_
