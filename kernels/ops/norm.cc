#include "kernels/ops/norm.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

Tensor RmsNorm(const Context& ctx, const Tensor& x, const Tensor& weight, float eps) {
  STILLHOUSE_CHECK(x.dtype() == DType::kF32 && x.rank() >= 1 && x.dim(-1) > 0) << x.DebugString();
  STILLHOUSE_CHECK(x.dim(-1) == 1 || x.stride(-1) == 1) << x.DebugString();
  if (weight) {
    STILLHOUSE_CHECK(weight.dtype() == DType::kF32 && weight.rank() == 1 && weight.contiguous());
    STILLHOUSE_CHECK_EQ(weight.dim(0), x.dim(-1));
  }
  Tensor out = ctx.EmptyF32(x.shape());
  ctx.kernels().RmsNorm(*ctx.backend, {x, weight, out, eps});
  if (ctx.Wants(x) || ctx.Wants(weight)) {
    ctx.tape->Record("RmsNorm", {out}, [backend = ctx.backend, x, weight, out, eps](Tape& tape) {
      RmsNormGradArgs args{x, weight, tape.Grad(out), tape.Grad(x), tape.Grad(weight), eps};
      backend->kernels().RmsNormGrad(*backend, args);
    });
  }
  return out;
}

}  // namespace stillhouse
