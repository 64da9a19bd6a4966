#include "kernels/ops/elementwise.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

Tensor SwiGlu(const Context& ctx, const Tensor& gate, const Tensor& up) {
  Tensor out = ctx.EmptyF32(gate.shape());
  ctx.kernels().SwiGlu(*ctx.backend, {gate, up, out});
  if (ctx.Wants(gate) || ctx.Wants(up)) {
    ctx.tape->Record("SwiGlu", {out}, [ctx, gate, up, out](Tape& tape) {
      ctx.kernels().SwiGluGrad(*ctx.backend, {gate, up, tape.Grad(out), tape.Grad(gate), tape.Grad(up)});
    });
  }
  return out;
}

Tensor Add(const Context& ctx, const Tensor& a, const Tensor& b) {
  Tensor out = ctx.EmptyF32(a.shape());
  ctx.kernels().Add(*ctx.backend, {a, b, out});
  if (ctx.Wants(a) || ctx.Wants(b)) {
    ctx.tape->Record("Add", {out}, [ctx, a, b, out](Tape& tape) {
      ctx.kernels().AddGrad(*ctx.backend, {tape.Grad(out), tape.Grad(a), tape.Grad(b)});
    });
  }
  return out;
}

void CopyRows(const Context& ctx, const CopyRowsArgs& args) { ctx.kernels().CopyRows(*ctx.backend, args); }

}  // namespace stillhouse
