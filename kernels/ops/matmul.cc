#include "kernels/ops/matmul.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

Tensor Linear(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  Tensor out = ctx.EmptyF32({x.dim(0), weight.dim(0)});
  ctx.kernels().Linear(*ctx.backend, {x, weight, bias, out});
  if (ctx.Wants(x) || ctx.Wants(weight) || ctx.Wants(bias)) {
    ctx.tape->Record("Linear", {out}, [ctx, x, weight, bias, out](Tape& tape) {
      ctx.kernels().LinearGrad(*ctx.backend,
                               {x, weight, tape.Grad(out), tape.Grad(x), tape.Grad(weight), tape.Grad(bias)});
    });
  }
  return out;
}

void MatMul(const Context& ctx, const MatMulArgs& args) { ctx.kernels().MatMul(*ctx.backend, args); }

Tensor PrepareWeight(const Context& ctx, const Tensor& weight) {
  Tensor out;
  ctx.kernels().PrepareWeight(*ctx.backend, {weight, &out});
  return out;
}

}  // namespace stillhouse
